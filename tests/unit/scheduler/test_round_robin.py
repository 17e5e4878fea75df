"""Meta-iterations of WEAVE, through the core: the steady state of strict round robin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from phaseloom.scheduler.core.planning.weave.period import Phases, period_s
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placed, Placement
from phaseloom.simulator.engine import simulate
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob
from phaseloom.simulator.nodes import PoolSpec
from phaseloom.simulator.world import Fault, NodeFault
from tests.support.contention import config_of

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "rr_period.json").read_text())
ITERATIONS, FROM, TO = 60, 20, 40


class Ran(NamedTuple):
    """A phase that ran on one node, or on several at once."""

    start_s: float
    end_s: float
    job: int
    what: str
    nodes: tuple[str, ...] = ()


def pinned(items: list[Any]) -> Placement:
    """Every job in one group, job i on the rollout nodes of item i and on the one train node."""

    def place(cluster: Cluster, member: Member) -> Decision:
        hosts = {
            pool: sorted(h.node for h in cluster.hosts.values() if h.pool == pool)
            for pool in (ROLLOUT, TRAIN)
        }
        _, _, nodes = items[int(member.job.rpartition(".j")[2])]
        group = next(iter(cluster.groups), "")
        return Placed(group, {ROLLOUT: [hosts[ROLLOUT][n] for n in nodes], TRAIN: hosts[TRAIN]})

    return Placement(place)


def ran(
    items: list[Any],
    arrivals_s: list[float],
    monkeypatch: pytest.MonkeyPatch,
    *,
    usual: float = 1.0,
    faults: Sequence[Fault] = (),
) -> list[Ran]:
    """The phases that the jobs ran, in order.

    Args: usual: the share of their worst durations that phases usually take.
    """
    monkeypatch.setitem(PLACEMENT, "pinned", pinned(items))
    sigma = 0.3 if usual < 1.0 else 0.0
    jobs = [
        SimJob(
            name=f"j{index}",
            arrival_s=arrivals_s[index],
            iterations=ITERATIONS,
            phases=(
                Phase(ROLLOUT, usual * rollout_s, rollout_s, sigma),
                Phase(TRAIN, usual * train_s, train_s, sigma),
            ),
            demands={ROLLOUT: Demand(len(nodes)), TRAIN: Demand(1)},
        )
        for index, (rollout_s, train_s, nodes) in enumerate(items)
    ]
    num_nodes = 1 + max(node for _, _, nodes in items for node in nodes)
    pools = [PoolSpec(ROLLOUT, num_nodes, 1.0, 10**12), PoolSpec(TRAIN, 1, 1.0, 10**12)]
    config = config_of("round_robin", placement="pinned", switch_s=0.0)
    result = simulate(jobs, pools, config, faults=faults, records_spans=True)
    nodes_of: dict[Ran, list[str]] = {}
    for span in result.spans:
        phase = Ran(span.start_s, span.end_s, int(span.job[-1]), span.activity)
        nodes_of.setdefault(phase, []).append(span.node)
    return [phase._replace(nodes=tuple(nodes)) for phase, nodes in sorted(nodes_of.items())]


def ends_s(phases: list[Ran]) -> list[list[float]]:
    """When the iterations of each job ended."""
    ended: dict[int, list[float]] = {}
    for phase in phases:
        if phase.what == "optim_step":
            ended.setdefault(phase.job, []).append(phase.end_s)
    return [ended[job] for job in sorted(ended)]


def periods_s(
    items: list[Any], arrivals_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Of each job, once the rounds have settled."""
    return settled_s(ran(items, arrivals_s, monkeypatch))


def settled_s(phases: list[Ran]) -> list[float]:
    return [(of_job[TO] - of_job[FROM]) / (TO - FROM) for of_job in ends_s(phases)]


CASES = pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=[case["name"] for case in GOLDEN["cases"]]
)


@CASES
def test_period_is_that_of_the_recurrence(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlapping sets of rollout nodes make it longer than any node's load."""
    items = case["items"]
    for found_s in periods_s(items, [0.0] * len(items), monkeypatch):
        assert found_s == pytest.approx(case["period"])


@CASES
@pytest.mark.parametrize("apart", [0.3, 0.9])
def test_period_does_not_depend_on_when_the_jobs_joined(
    case: dict[str, Any], apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each joins the round that is running, and is in the same one on every pool.

    A little faster for long, where one pool had got ahead and the other is the slower by little.
    """
    items = case["items"]
    arrivals_s = [apart * case["period"] * index for index in range(len(items))]
    for found_s in periods_s(items, arrivals_s, monkeypatch):
        assert 0.99 * case["period"] < found_s < case["period"] * (1 + 1e-9)


@pytest.mark.parametrize("arrival_s", range(0, 440, 40))
def test_pools_never_serve_two_jobs_out_of_phase(
    arrival_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were turns counted on each device, training could be the first job's turn while its rollout
    waits for the second's, for good: 439 s a round instead of 222."""
    items = [(41.0, 178.0, [0]), (181.0, 39.0, [0])]
    for found_s in periods_s(items, [0.0, float(arrival_s)], monkeypatch):
        assert found_s == pytest.approx(222.0)


# --- What runs is what placement promises by -----------------------------------------------------

OVERLAPPING = [
    (242.0, 106.0, [1]),
    (192.0, 66.0, [0, 1]),
    (95.0, 222.0, [0]),
    (129.0, 224.0, [0]),
    (273.0, 100.0, [0, 1]),
]
OVERLAPPING_MORE = [
    (228.0, 57.0, [1, 2, 3]),
    (154.0, 263.0, [1, 3]),
    (180.0, 148.0, [2]),
    (193.0, 66.0, [0, 2]),
    (143.0, 280.0, [0, 2]),
]


JOINED = [
    (
        [(20, 21, [3]), (21, 150, [0, 2, 3]), (150, 21, [0])],
        [0.0, 0.25, 1.0],
    ),
    (
        [(100, 100, [0, 1, 3]), (150, 100, [0, 2, 3]), (300, 150, [2])],
        [0.0, 0.5, 1.0],
    ),
    (
        [
            (20, 100, [0, 1]),
            (100, 100, [0, 1, 3]),
            (21, 100, [2, 3]),
            (21, 20, [2, 3]),
            (200, 21, [0]),
        ],
        [0.0, 0.25, 0.75, 0.5, 0.25],
    ),
]
"""Groups that ran up to 1.78 times slower than promised: a job that joined in the second round
counted its first rollout for another round than its training, and so ever after."""


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Any], list[float]]:
    """Jobs on random rollout nodes, and the promised periods between their joins."""
    seconds = st.integers(20, 300).map(float)
    nodes = st.sets(st.integers(0, 3), min_size=1, max_size=3).map(sorted)
    items = draw(st.lists(st.tuples(seconds, seconds, nodes), min_size=2, max_size=5))
    apart = st.floats(0.0, 1.0) if draw(st.booleans()) else st.just(0.0)
    return items, [draw(apart) for _ in items]


def promised_s(items: list[Any]) -> float:
    return period_s([Phases(r, t, tuple(str(node) for node in nodes)) for r, t, nodes in items])


def arrivals_of(items: list[Any], apart: list[float]) -> list[float]:
    return [promised_s(items) * sum(apart[: index + 1]) for index in range(len(items))]


def check_group(group: tuple[list[Any], list[float]], usual: float) -> None:
    items, apart = group
    promise_s = promised_s(items)
    with pytest.MonkeyPatch.context() as patch:
        phases = ran(items, arrivals_of(items, apart), patch, usual=usual)
    check_recurrence(phases, len(items))
    found_s = settled_s(phases)
    assert max(found_s) <= promise_s * (1 + 1e-9)
    if usual == 1.0:
        # A little faster for long, where one device had got ahead and another is slower by little.
        assert min(found_s) > 0.98 * promise_s


def check_recurrence(phases: list[Ran], num_jobs: int) -> None:
    """Check that the rounds are those of the recurrence, whatever the phases take.

    Once all jobs have run together for two rounds, every node serves its jobs in one order, and a
    phase begins as soon as what it comes after has ended: its job's phase before it, and those
    before it on its nodes. Such a system is monotone: no phase that ends early makes another one
    late.
    """
    ended = ends_s(phases)
    from_s = max(of_job[1] for of_job in ended)
    until_s = min(of_job[-1] for of_job in ended)
    free_s: dict[str | int, float] = {}
    order: dict[str, list[int]] = {}
    for phase in phases:
        after: list[str | int] = [phase.job, *phase.nodes]
        if from_s <= phase.start_s < until_s:
            begins_s = max(free_s[each] for each in after)
            assert phase.start_s == pytest.approx(begins_s), f"{phase} waits for nothing"
            for node in phase.nodes:
                order.setdefault(node, []).append(phase.job)
        free_s.update(dict.fromkeys(after, phase.end_s))
    assert len(order["train-0"]) > num_jobs
    for node, jobs in order.items():
        count = len(set(jobs))
        assert jobs[count:] == jobs[:-count], f"{node} changes its order"


FEW = settings(max_examples=12, deadline=None, derandomize=True)
MANY = settings(
    max_examples=2000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@example((OVERLAPPING, [0.0] * 5))
@example((OVERLAPPING_MORE, [0.0] * 5))
@example(JOINED[0])
@example(JOINED[1])
@example(JOINED[2])
@given(groups())
@FEW
def test_overlapping_groups_run_as_promised(group: tuple[list[Any], list[float]]) -> None:
    check_group(group, usual=1.0)


@example((OVERLAPPING, [0.0] * 5))
@given(groups())
@FEW
def test_phases_below_the_worst_case_are_never_slower(
    group: tuple[list[Any], list[float]],
) -> None:
    check_group(group, usual=0.7)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("usual", [1.0, 0.7])
def test_thousands_of_overlapping_groups_run_as_promised(usual: float) -> None:
    @given(groups())
    @MANY
    def check(group: tuple[list[Any], list[float]]) -> None:
        check_group(group, usual)

    check()


# --- Nodes that come back ------------------------------------------------------------------------


def check_fault(items: list[Any], node: str, lap: float) -> None:
    """Args: node: lost for ten seconds. lap: when, in promised periods."""
    promise_s = promised_s(items)
    fault = NodeFault(node, lap * promise_s, 10.0)
    with pytest.MonkeyPatch.context() as patch:
        phases = ran(items, [0.0] * len(items), patch, faults=[fault])
    assert max(settled_s(phases)) <= promise_s * (1 + 1e-9)


@st.composite
def faults(draw: st.DrawFn) -> tuple[list[Any], str, float]:
    items, _ = draw(groups())
    used = sorted({f"rollout-{node}" for _, _, nodes in items for node in nodes})
    return items, draw(st.sampled_from([*used, "train-0"])), draw(st.floats(2.0, 5.0))


TWO_OF_ONE_NODE = [(137.0, 33.0, [1]), (99.0, 265.0, [1])]
"""Once the rollout node had been lost, one of them counted rollout and training for different
rounds: the rounds took 1.47 times as long for ever."""


@example((TWO_OF_ONE_NODE, "rollout-1", 4.5))
@given(faults())
@FEW
def test_rounds_are_as_promised_after_a_node_was_lost(case: tuple[list[Any], str, float]) -> None:
    check_fault(*case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_groups_are_as_promised_after_a_node_was_lost() -> None:
    @given(faults())
    @MANY
    def check(case: tuple[list[Any], str, float]) -> None:
        check_fault(*case)

    check()
