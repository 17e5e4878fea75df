"""How long a settled meta-iteration takes, and how fast jobs go round without a barrier."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.scheduler.core.planning.weave.fifo import (
    MAX_LAPS,
    NUM_STARTS,
    RESOLUTION_S,
    SPREAD,
    WARM_LAPS,
    mean_iterations_s,
    worst_iterations_s,
)
from phaseloom.scheduler.core.planning.weave.period import (
    Phases,
    cycle_s,
    load_s,
    period_s,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "rr_period.json").read_text())


def jobs_of(items: list[Any]) -> list[Phases]:
    return [Phases(r, t, tuple(f"n{node}" for node in nodes)) for r, t, nodes in items]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_period_is_that_of_the_golden_case(case: dict[str, Any]) -> None:
    jobs = jobs_of(case["items"])
    assert period_s(jobs) == pytest.approx(case["period"]), case["why"]


def settled_by_simulation(jobs: list[Phases]) -> float:
    """Naive: every phase of very many meta-iterations, one after the other."""
    free: dict[str, float] = {}
    ends: list[float] = []
    for _ in range(400):
        for i, job in enumerate(jobs):
            begins = max([free.get(f"job{i}", 0.0), *(free.get(n, 0.0) for n in job.nodes)])
            for node in job.nodes:
                free[node] = begins + job.rollout_s
            free["train"] = max(free.get("train", 0.0), begins + job.rollout_s) + job.train_s
            free[f"job{i}"] = free["train"] + job.gap_s
        ends.append(free["train"])
    return (ends[399] - ends[159]) / 240


SECONDS = st.integers(1, 60).map(lambda tens: 5.0 * tens)
NODE_SETS = st.sets(st.integers(0, 3), min_size=1, max_size=3).map(
    lambda nodes: tuple(f"n{node}" for node in sorted(nodes))
)
GAPS = st.sampled_from([0.0, 5.0])
JOBS = st.lists(st.builds(Phases, SECONDS, SECONDS, NODE_SETS, GAPS), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(JOBS)
def test_period_equals_a_naive_simulation_with_overlapping_nodes(jobs: list[Phases]) -> None:
    assert period_s(jobs) == pytest.approx(settled_by_simulation(jobs))
    assert period_s(jobs) >= max(load_s(jobs), cycle_s(jobs)) - 1e-9


@settings(max_examples=60, deadline=None)
@given(JOBS)
def test_one_rollout_node_a_job_settles_at_load_or_cycle(jobs: list[Phases]) -> None:
    jobs = [job._replace(nodes=job.nodes[:1]) for job in jobs]
    assert period_s(jobs) == pytest.approx(max(load_s(jobs), cycle_s(jobs)))
    assert settled_by_simulation(jobs) == pytest.approx(period_s(jobs))


@settings(max_examples=60, deadline=None)
@given(JOBS, st.data())
def test_a_departure_never_lengthens_the_period(jobs: list[Phases], data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, len(jobs) - 1))
    rest = [job for i, job in enumerate(jobs) if i != gone]
    assert period_s(rest) <= period_s(jobs) + 1e-9


def test_overlap_can_exceed_load_and_cycle() -> None:
    """Three jobs, each pair of which shares a node: they exclude one another, no node is full."""
    jobs = jobs_of([[100, 1, [0, 1]], [100, 1, [1, 2]], [100, 1, [2, 0]]])
    assert load_s(jobs) == 200
    assert period_s(jobs) == 300


# --- without a barrier ---------------------------------------------------------------------------


class Rollout(NamedTuple):
    """One job, as the simulation sees it."""

    rollout_s: float
    train_s: float
    gap_s: float
    nodes: tuple[int, ...]


def test_a_short_job_goes_round_more_often_than_a_long_one() -> None:
    """A round robin would hold the short one to 500 s."""
    short, long = Rollout(50, 10, 0, (0,)), Rollout(400, 100, 0, (1,))
    short_s, long_s = mean_iterations_s((short, long), 0.0)
    assert long_s == pytest.approx(500, rel=0.05)
    assert short_s < 100


def test_two_jobs_that_weave_perfectly_lose_nothing() -> None:
    job = Rollout(100, 100, 0, (0,))
    assert mean_iterations_s((job, job), 0.0) == pytest.approx((200, 200))


def test_switches_are_charged_on_shared_nodes_only() -> None:
    one, two = Rollout(100, 40, 0, (0,)), Rollout(100, 40, 0, (1,))
    shared = mean_iterations_s((one, two), 5.0)
    assert shared == pytest.approx((145, 145), rel=0.01)
    assert mean_iterations_s((one,), 5.0) == (140,)


def test_orbits_that_depend_on_the_start_are_found() -> None:
    """Met in a workload: the fifth job settles at 175 s, or at 207 s from other starts."""
    times = [(199.35, 38.06), (349.85, 96.32), (342.18, 55.99), (173.23, 28.31), (114.43, 27.34)]
    jobs = tuple(Rollout(r, t, 0.0, (i,)) for i, (r, t) in enumerate(times))
    assert mean_iterations_s(jobs, 5.0)[4] == pytest.approx(175, abs=1)
    assert worst_iterations_s(jobs, 5.0)[4] == pytest.approx(207, abs=1)


ROLLOUTS = st.lists(
    st.builds(Rollout, SECONDS, SECONDS, st.just(0.0), st.integers(0, 2).map(lambda node: (node,))),
    min_size=2,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(ROLLOUTS)
def test_nobody_is_faster_than_alone_and_no_node_busier_than_always(jobs: list[Rollout]) -> None:
    means = mean_iterations_s(tuple(jobs), 0.0)
    for job, mean in zip(jobs, means, strict=True):
        assert mean >= job.rollout_s + job.train_s - 1e-6
    # Counts over whole iterations of the slowest: another's last one may lie half outside.
    assert sum(job.train_s / mean for job, mean in zip(jobs, means, strict=True)) <= 1.1
    assert all(
        worst >= mean - 1e-6
        for worst, mean in zip(worst_iterations_s(tuple(jobs), 0.0), means, strict=True)
    )


def naive_means(
    jobs: tuple[Rollout, ...], switch_s: float, starts_s: Sequence[float]
) -> tuple[float, ...]:
    """Phase after phase, and every start to its end."""
    nodes = {node for job in jobs for node in job.nodes}
    free_s, last = dict.fromkeys([*nodes, "train"], 0.0), dict.fromkeys([*nodes, "train"], -1)
    ready_s, trains, laps = list(starts_s), [False] * len(jobs), [0] * len(jobs)
    pace = max(range(len(jobs)), key=lambda i: sum(jobs[i][:3]))
    seen: dict[object, tuple[float, list[int]]] = {}
    while True:
        now_s = min(ready_s)
        i = ready_s.index(now_s)
        job = jobs[i]
        if i == pace and not trains[i] and laps[i] >= WARM_LAPS:
            state = (
                *(int((at_s - now_s) / RESOLUTION_S) for at_s in ready_s),
                *(int(max(0.0, at_s - now_s) / RESOLUTION_S) for at_s in free_s.values()),
                *trains,
            )
            began_s, before = seen.setdefault(state, (now_s, list(laps)))
            if began_s < now_s or laps[i] >= MAX_LAPS:
                if began_s == now_s:
                    began_s, before = next(iter(seen.values()))
                return tuple(
                    (now_s - began_s) / max(1, b - a) for a, b in zip(before, laps, strict=True)
                )
        takes = ("train",) if trains[i] else job.nodes
        begins_s = max([now_s, *(free_s[node] for node in takes)])
        if any(last[node] != i for node in takes):
            begins_s += switch_s
        ends_s = begins_s + (job.train_s if trains[i] else job.rollout_s)
        free_s.update(dict.fromkeys(takes, ends_s))
        last.update(dict.fromkeys(takes, i))
        laps[i] += trains[i]
        ready_s[i] = ends_s + (job.gap_s if trains[i] else 0.0)
        trains[i] = not trains[i]


ANY_ROLLOUTS = st.lists(
    st.builds(
        Rollout,
        SECONDS,
        SECONDS,
        st.sampled_from([0.0, 1e-14, -1e-14, 7.5, -3.0]),
        st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True).map(tuple),
    ),
    min_size=2,
    max_size=5,
)


@settings(max_examples=100, deadline=None)
@given(ANY_ROLLOUTS, st.sampled_from([0.0, 5.0]))
def test_shortcuts_of_the_simulation_change_nothing(jobs: list[Rollout], switch_s: float) -> None:
    group = tuple(jobs)
    starts = [
        [(k * SPREAD[i]) % 1.0 * sum(job[:3]) for i, job in enumerate(group)]
        for k in range(NUM_STARTS)
    ]
    found = [naive_means(group, switch_s, starts_s) for starts_s in starts]
    assert mean_iterations_s(group, switch_s) == found[0]
    worst = [max(means) for means in zip(*found, strict=True)]
    assert worst_iterations_s(group, switch_s) == pytest.approx(worst, rel=1e-9)
