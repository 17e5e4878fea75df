"""Meta-iterations of WEAVE, through the core: the steady state of strict round robin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placed, Placement
from phaseloom.simulator.engine import simulate
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Phase, SimJob, Take
from phaseloom.simulator.nodes import PoolSpec
from tests.support.contention import config_of

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "rr_period.json").read_text())
ITERATIONS, FROM, TO = 60, 20, 40


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


def periods_s(
    items: list[Any], arrivals_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Of each job, once the rounds have settled."""
    monkeypatch.setitem(PLACEMENT, "pinned", pinned(items))
    jobs = [
        SimJob(
            name=f"j{index}",
            arrival_s=arrivals_s[index],
            iterations=ITERATIONS,
            phases=(Phase(ROLLOUT, rollout_s, rollout_s), Phase(TRAIN, train_s, train_s)),
            takes={ROLLOUT: Take(len(nodes)), TRAIN: Take(1)},
        )
        for index, (rollout_s, train_s, nodes) in enumerate(items)
    ]
    num_nodes = 1 + max(node for _, _, nodes in items for node in nodes)
    pools = [PoolSpec(ROLLOUT, num_nodes, 1.0, 10**12), PoolSpec(TRAIN, 1, 1.0, 10**12)]
    config = config_of("round_robin", placement="pinned", switch_s=0.0)
    result = simulate(jobs, pools, config, records_spans=True)
    found = []
    for job in jobs:
        ends_s = [s.end_s for s in result.spans if s.job == str(job.key) and s.what == "optim_step"]
        assert len(ends_s) == ITERATIONS
        found.append((ends_s[TO] - ends_s[FROM]) / (TO - FROM))
    return found


CASES = pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=[case["name"] for case in GOLDEN["cases"]]
)


@CASES
def test_period_is_that_of_the_recurrence(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlapping sets of rollout nodes make it longer than any node's load."""
    items = case["items"]
    for period_s in periods_s(items, [0.0] * len(items), monkeypatch):
        assert period_s == pytest.approx(case["period"])


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
    for period_s in periods_s(items, arrivals_s, monkeypatch):
        assert 0.99 * case["period"] < period_s < case["period"] * (1 + 1e-9)


@pytest.mark.parametrize("arrival_s", range(0, 440, 40))
def test_pools_never_serve_two_jobs_out_of_phase(
    arrival_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were turns counted on each device, training could be the first job's turn while its rollout
    waits for the second's, for good: 439 s a round instead of 222."""
    items = [(41.0, 178.0, [0]), (181.0, 39.0, [0])]
    for period_s in periods_s(items, [0.0, float(arrival_s)], monkeypatch):
        assert period_s == pytest.approx(222.0)
