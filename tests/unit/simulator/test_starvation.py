"""Nothing starves: every operation starts within a stated bound, on one device or several.

A *round* is the time that all jobs which share nodes, directly or through other jobs, need for one
cycle each: their longest operations, and for each of these a switch, a quantum, and the longest
time for which a device is kept for a holder with nothing ready. The bounds:

- First come, first served: each of the others is older than a waiting operation at most once, so it
  is the oldest on its devices after one round. If it needs several, it may claim them after two
  quanta, which is less than a round. Its claim is served after what runs, what has waited longer,
  and the claims before it, each at most once: another round. Policies that serve the jobs in turns
  have each job's turn once in a round. Together at most three rounds.
- Response ratios: an operation of s seconds that has waited for t is overtaken by one of x seconds
  only if that has waited for at least t x/s. Between t and 2t such a job has at most 1 + s/x turns,
  each of one operation or a quantum. If t is longer than all of these turns together, nothing
  overtakes any more, so the wait is at most twice their sum, and one round for the claim.
- `hold`: the same. A turn with gaps may last for four switches instead of a quantum, and ends if
  another job has waited for a cycle of each job, which adds a round.
"""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.policies.ordering.hold import LEAST_TURN
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placed, Placement
from phaseloom.scheduler.core.validate import validate
from phaseloom.simulator.agenda import Agenda
from phaseloom.simulator.engine import Engine
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob
from phaseloom.simulator.metering import Meter
from phaseloom.simulator.nodes import PoolSpec
from phaseloom.simulator.world import World
from tests.unit.simulator.builders import config

pytestmark = pytest.mark.long

QUANTUM_S = 2.0
HOLD_S = 1.0
IN_TURNS = ["fcfs", "fifo_lock", "lrs", "round_robin"]
BY_RATIO = ["hold", "hrrn", "hrrs", "hrrs_literal"]


class Mix:
    """Endless jobs that are pinned to nodes of two pools.

    Args: nodes: job → pool → its nodes. num_devices: devices of each node.
    """

    def __init__(
        self, jobs: list[SimJob], nodes: dict[str, dict[str, list[NodeId]]], num_devices: int
    ) -> None:
        self.jobs = jobs
        self.nodes = nodes
        self.num_devices = num_devices

    def place(self, cluster: Cluster, member: Member) -> Decision:
        name = member.job.rpartition(".")[2]
        return Placed(next(iter(cluster.groups), ""), self.nodes[name])

    def round_s(self, job: SimJob) -> float:
        jobs = self._connected(job)
        demands = [demand for other in jobs for demand in other.demands.values()]
        switch_s = max(d.load_s for d in demands) + max(d.offload_s for d in demands)
        turn_s = switch_s + QUANTUM_S + HOLD_S
        return sum(phase.longest_s + turn_s for other in jobs for phase in other.phases)

    def bound_s(self, job: SimJob, ordering: str) -> float:
        round_s = self.round_s(job)
        if ordering in IN_TURNS:
            return 3 * round_s
        jobs = self._connected(job)
        seconds = [phase.longest_s for other in jobs for phase in other.phases]
        switches = [d.load_s + d.offload_s for other in jobs for d in other.demands.values()]
        longest_s = max(seconds) + max(switches)
        is_hold = ordering == "hold"
        turn_s = max(QUANTUM_S, 2 * LEAST_TURN * max(switches)) if is_hold else QUANTUM_S
        turns_s = round_s + len(jobs) * longest_s * (1 + turn_s / min(seconds))
        return 2 * turns_s + round_s * (1 + is_hold)

    def longest_waits_s(self, ordering: str, until_s: float) -> dict[str, float]:
        """Simulate the mix. Return the longest time that each job had an operation ready and
        nothing ran, switches included."""
        agenda, meter = Agenda(), Meter(records_spans=True)
        engine = Engine(agenda, meter, after_step=lambda core: validate(core.state))
        pools = [PoolSpec(pool, 4, num_devices=self.num_devices) for pool in (ROLLOUT, TRAIN)]
        world = World(agenda, engine.append, meter, self.jobs, pools)
        scheduler = config(
            placement="pinned",
            ordering=ordering,
            quantum_s=QUANTUM_S,
            idle_grace_s=0.03,
            phase_hold_s=HOLD_S,
            speculative_switch_in=True,
        )
        with mock.patch.dict(PLACEMENT, pinned=Placement(self.place)):
            engine.run(world, scheduler, until_s)
        ended_s = dict.fromkeys(self.nodes, 0.0)
        longest_s = dict.fromkeys(self.nodes, 0.0)
        spans = [span for span in meter.spans or [] if span.activity != "switch"]
        for span in sorted(spans, key=lambda span: span.start_s):
            name = span.job.rpartition(".")[2]
            longest_s[name] = max(longest_s[name], span.start_s - ended_s[name])
            ended_s[name] = max(ended_s[name], span.end_s)
        return {name: max(longest_s[name], until_s - ended_s[name]) for name in self.nodes}

    def _connected(self, job: SimJob) -> list[SimJob]:
        names, size = {job.name}, 0
        while len(names) > size:
            size = len(names)
            taken = {node for name in names for node in self._nodes_of(name)}
            names |= {name for name in self.nodes if not taken.isdisjoint(self._nodes_of(name))}
        return [other for other in self.jobs if other.name in names]

    def _nodes_of(self, name: str) -> list[NodeId]:
        return [node for nodes in self.nodes[name].values() for node in nodes]


def mix_of(
    jobs: dict[str, tuple[list[Phase], dict[str, list[int]], int]],
    switch_s: float,
    num_devices: int = 1,
) -> Mix:
    """Args: jobs: name → phases, pool → indices of nodes, and devices of each of them."""
    made, nodes = [], {}
    for name, (phases, indices, num_used) in jobs.items():
        nodes[name] = {p: [NodeId(f"{p}-{i}") for i in sorted(on)] for p, on in indices.items()}
        demands = {
            pool: Demand(len(on), load_s=switch_s / 2, offload_s=switch_s / 2, num_devices=num_used)
            for pool, on in indices.items()
        }
        made.append(SimJob(name, 0.0, 10_000, tuple(phases), demands))
    return Mix(made, nodes, num_devices)


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    """Three or four jobs on two train nodes, one on the train node that these share, and perhaps
    any other job. If claims went before older work, the one on the shared node would starve."""
    num_devices = draw(st.integers(1, 2))
    short, long = (
        st.floats(*bounds).map(lambda s: round(s, 2)) for bounds in ((1.5, 2.5), (5.0, 8.0))
    )
    nodes = st.integers(0, 3)
    jobs = {}
    for index in range(draw(st.sampled_from([4, 3]))):
        phases = [Phase(ROLLOUT, draw(short)), Phase(TRAIN, draw(long))]
        on = {ROLLOUT: [index], TRAIN: [0, 1 + index % 2]}
        jobs[f"wide{index}"] = (phases, on, num_devices)
    phases = [Phase(ROLLOUT, draw(short)), Phase(TRAIN, draw(short))]
    if draw(st.booleans()):
        phases.append(Phase(TRAIN, draw(short), kind="forward_backward"))
    jobs["narrow"] = (
        phases,
        {ROLLOUT: [draw(nodes)], TRAIN: [0]},
        draw(st.integers(1, num_devices)),
    )
    if draw(st.booleans()):
        several = st.lists(nodes, min_size=1, max_size=3, unique=True)
        phases = [Phase(ROLLOUT, draw(long)), Phase(TRAIN, draw(short))]
        num_used = draw(st.integers(1, num_devices))
        jobs["other"] = (phases, {ROLLOUT: draw(several), TRAIN: draw(several)}, num_used)
    return mix_of(jobs, draw(st.sampled_from([2.0, 0.3, 0.0])), num_devices)


@pytest.mark.parametrize("ordering", IN_TURNS + BY_RATIO)
@settings(max_examples=9, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mix=mixes())
def test_every_operation_starts_within_its_bound(ordering: str, mix: Mix) -> None:
    bounds_s = {job.name: mix.bound_s(job, ordering) for job in mix.jobs}
    waits_s = mix.longest_waits_s(ordering, 1.2 * max(bounds_s.values()))
    for name, wait_s in waits_s.items():
        assert wait_s <= bounds_s[name], f"{name} waited {wait_s:.1f} of {bounds_s[name]:.1f} s"


@pytest.mark.parametrize("ordering", IN_TURNS + BY_RATIO)
def test_claims_of_jobs_on_several_nodes_let_older_work_on_one_node_go_first(
    ordering: str,
) -> None:
    phases = [Phase(ROLLOUT, 1.0), Phase(TRAIN, 4.0)]
    jobs = {f"wide{i}": (phases, {ROLLOUT: [i % 4], TRAIN: [0, 1 + i % 2]}, 1) for i in range(4)}
    jobs["narrow"] = ([Phase(ROLLOUT, 1.0), Phase(TRAIN, 2.0)], {ROLLOUT: [3], TRAIN: [0]}, 1)
    waits_s = mix_of(jobs, 1.0).longest_waits_s(ordering, 300.0)
    # Training of the others takes 20 s with its switches. Nobody is passed over in a second turn.
    assert max(waits_s.values()) < 40.0, waits_s


@pytest.mark.parametrize("ordering", IN_TURNS + BY_RATIO)
def test_jobs_that_free_two_nodes_at_once_let_older_work_on_one_node_go_first(
    ordering: str,
) -> None:
    """No claim is needed here: whoever is chosen on the first node finds the second one free."""
    phases = [Phase(ROLLOUT, 4.0), Phase(TRAIN, 0.5)]
    jobs = {f"wide{i}": (phases, {ROLLOUT: [0, 1], TRAIN: [i]}, 1) for i in range(3)}
    jobs["narrow"] = (phases, {ROLLOUT: [1], TRAIN: [3]}, 1)
    waits_s = mix_of(jobs, 1.0).longest_waits_s(ordering, 300.0)
    assert max(waits_s.values()) < 40.0, waits_s
