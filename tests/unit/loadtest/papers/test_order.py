"""Ordering on random mixes and against the optimum, as a mesh runs it."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from loadtest.papers import periodic
from loadtest.papers.command import simulate
from loadtest.papers.scenarios.order_mixes import DEFAULT, WAYS, longest_stall_s, measure
from loadtest.papers.scenarios.order_optimum import over_optimum
from loadtest.papers.scenarios.report import read
from loadtest.papers.workloads.mixes import makespan_bound_s, mix_of
from phaseloom.common.contract.errors import CallerError
from phaseloom.simulator.jobs import ROLLOUT, TRAIN
from phaseloom.simulator.metering import Span

FREE = [seed for seed in range(5000, 5060) if mix_of(seed).ratio == 0.0][:4]
"""Mixes whose switches take no time."""
COSTLY = [seed for seed in range(5000, 5060) if mix_of(seed).ratio >= 0.5][:4]


def test_default_is_no_slower_than_hrrs_where_switches_are_free() -> None:
    ours, theirs = (
        [measure(mix_of(seed), WAYS[name]).over_bound or 0.0 for seed in FREE]
        for name in (DEFAULT, "hrrs")
    )
    assert min(ours) >= 1.0, "no schedule beats the bound"
    assert mean(ours) <= mean(theirs)


def test_default_saves_switches_and_starves_no_job_where_switches_are_costly() -> None:
    ours = [measure(mix_of(seed), WAYS[DEFAULT]) for seed in COSTLY]
    theirs = [measure(mix_of(seed), WAYS["hrrs"]) for seed in COSTLY]
    for our, their in zip(ours, theirs, strict=True):
        assert 1.0 <= (our.over_bound or 0.0) < (their.over_bound or 0.0)
        assert (our.switches or 0) < 0.8 * (their.switches or 0)
        assert our.more["stall"] < 3.0


def test_bound_of_a_mix_counts_the_cheaper_of_a_gap_and_a_switch() -> None:
    mix = next(mix for mix in map(mix_of, range(5000, 5060)) if mix.num_nodes == 1 and mix.ratio)
    work_s = max(
        sum(
            job.iterations * phase.mean_s
            for job in mix.jobs
            for phase in job.phases
            if phase.pool == pool
        )
        for pool in (ROLLOUT, TRAIN)
    )
    assert makespan_bound_s(mix) > 0.7 * work_s
    assert mix_of(mix.seed) == mix, "a seed always gives the same mix"


def test_stall_is_the_longest_time_without_any_operation_of_the_job() -> None:
    rows = [("r", "a", 0, 4), ("t", "a", 2, 5), ("r", "b", 4, 9), ("r", "a", 9, 10)]
    spans = [Span(node, job, "generate", start_s, end_s) for node, job, start_s, end_s in rows]
    spans.append(Span("r", "a", "switch", 6, 9))
    assert longest_stall_s(spans) == 4


@pytest.mark.parametrize(
    ("steps", "switch_s", "slowdown"),
    [
        (((3, 3), (3, 3)), 0.0, 1.0),
        (((4, 2), (2, 4)), 0.0, 1.0),
        (((4, 2), (2, 4)), 1.5, 1.5),
        (((3, 3), (3, 3)), 6.0, 2.0),
    ],
)
def test_best_periodic_schedule_of_two_jobs(
    steps: periodic.Steps, switch_s: float, slowdown: float
) -> None:
    """Free switches fill every gap. If switches are dear, the jobs run one after another."""
    assert periodic.optimum(steps, switch_s).slowdown == pytest.approx(slowdown)


def test_default_is_close_to_the_optimum() -> None:
    for shape, ratio in (("2 x (3, 3)", 0.5), ("(4, 2) (2, 4)", 0.2), ("3 x (4.5, 1.5)", 1.0)):
        over = over_optimum(DEFAULT, periodic.SHAPES[shape], ratio * periodic.PHASE_S)
        assert 0.97 < over < 1.3, (shape, ratio)


def test_number_of_mixes_may_be_chosen(tmp_path: Path) -> None:
    simulate("order-mixes", policy=(DEFAULT,), mixes=1, out=tmp_path, processes=1)
    assert {record.seed for record in read(tmp_path / "order-mixes.json").records} == {5000}
    with pytest.raises(CallerError, match="at least 1, got 0"):
        simulate("order-mixes", mixes=0, out=tmp_path)
    with pytest.raises(CallerError, match="its own yardstick"):
        simulate("weave-micro", mixes=3, out=tmp_path)
