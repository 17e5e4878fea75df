"""Jobs come, are measured, drift, move and go while nodes die: under every policy the books stay
consistent (checked after each step), no operation of a job that has a place is lost, and in the end
every node is free again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from phaseloom.common.contract.events import (
    DeploymentCreated,
    DeploymentDeleted,
    JobFinished,
    JobSubmitted,
    NodeDrainRequested,
    NodeLost,
    PhaseTrace,
)
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import Cycle, Durability, JobSpec, Segment
from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import Cluster, Move, Placed, Placement
from phaseloom.scheduler.core.state.transitions import JobState
from tests.support.replay import restored_at_every_step
from tests.support.world import CONFIG, TENANT, World, node_up, spec

NODES = {"r0": "rollout", "r1": "rollout", "t0": "train", "t1": "train", "t2": "train"}
CYCLES = [
    Cycle(10.0, [Segment("rollout", 0, 5.0), Segment("train", 5.0, 3.0)]),
    Cycle(30.0, [Segment("rollout", 0, 26.0), Segment("train", 26.0, 3.0)]),
    Cycle(8.0, [Segment("rollout", 0, 1.0), Segment("train", 1.0, 6.0)]),
]
POOLS = {"sampler": "rollout", "policy": "train"}
DEPLOYMENTS = [("sampler", "policy"), ("sampler", "policy"), ("sampler",), ("policy",)]
"""Those of a job: most are of both pools."""
STEPS = [
    *["submit", "work", "work", "work", "trace", "trace", "finish", "run", "run", "run"],
    *["lose", "lose", "back", "again", "kill", "create", "delete", "drain", "drain", "undo"],
]


def _rotate(cluster: Cluster) -> list[Move]:
    """Every job to nodes that the plan finds free after the moves before it."""
    moves = []
    for job, name in sorted(cluster.placed.items()):
        member = cluster.groups[name].members[job]
        if all(len(cluster.free.get(p, [])) >= n.num_nodes for p, n in member.needs.items()):
            nodes = {p: cluster.free[p][-n.num_nodes :] for p, n in member.needs.items()}
            placed = Placed("", nodes, "round and round")
            groups.leave(cluster, job)
            groups.join(cluster, member, placed)
            moves.append(Move(job, placed))
    return moves


class Mesh:
    """A world, and what was done in it."""

    def __init__(self, policy: str, seed: int) -> None:
        config = replace(CONFIG, placement=policy, seal_every=2, node_grace_s=1.0)
        self.world = World(config=config, seed=seed, node_names=dict(NODES), replan_s=0.3)
        self.world.run()
        self.jobs: list[str] = []
        self.seqs: dict[str, int] = {}
        self.deployments: dict[str, tuple[str, ...]] = {}
        self.down: set[str] = set()
        self.extras: list[str] = []
        """Names of deployments that jobs got while they ran."""

    def submit(
        self,
        cycle: Cycle | None,
        slo: float,
        durability: Durability,
        deployments: tuple[str, ...],
        *,
        may_wait: bool,
    ) -> None:
        name = f"j{len(self.seqs)}"
        self.seqs[name] = 0
        self.deployments[name] = deployments
        specs = [spec(d, POOLS[d], trainable=d == "policy") for d in deployments]
        own = None if cycle is None else self.cycle(name, cycle)
        job = JobSpec(slo, specs, own, may_wait=may_wait, durability=durability)
        self.world.feed(JobSubmitted(JobKey(TENANT, name), job, f"submit-{name}"))
        if self.world.core.state.jobs[f"{TENANT}.{name}"].state is not JobState.REJECTED:
            self.jobs.append(name)

    def cycle(self, name: str, of_both: Cycle) -> Cycle:
        """The part of a cycle that a job has on its pools."""
        pools = {POOLS[deployment] for deployment in self.deployments[name]}
        return replace(of_both, segments=[s for s in of_both.segments if s.pool in pools])

    def work(self, name: str) -> None:
        """An iteration."""
        self.seqs[name] += 1
        seq, deployments = self.seqs[name], self.deployments[name]
        is_both = len(deployments) == len(POOLS)
        if "sampler" in deployments:
            after = (("policy", 2 * seq - 2),) if seq > 1 and is_both else ()
            self.world.queue(name, "sampler", seq, "generate", after=after)
        if "policy" in deployments:
            after = (("sampler", seq),) if is_both else ()
            self.world.queue(name, "policy", 2 * seq - 1, "forward_backward", after=after)
            self.world.queue(name, "policy", 2 * seq, "optim_step")

    def expected(self, name: str) -> list[str]:
        """The operations of a job so far."""
        num_steps = {"sampler": self.seqs[name], "policy": 2 * self.seqs[name]}
        return [
            f"{TENANT}.{name}.{deployment}.{n + 1}"
            for deployment in self.deployments[name]
            for n in range(num_steps[deployment])
        ]

    def create(self, name: str, pool: str) -> None:
        self.extras.append(f"extra{len(self.extras)}")
        extra = spec(self.extras[-1], pool)
        self.world.feed(DeploymentCreated(JobKey(TENANT, name), extra, "create"))

    def finish(self, name: str) -> None:
        self.jobs.remove(name)
        self.world.feed(JobFinished(JobKey(TENANT, name), "finish"))

    def lose(self, node: str) -> None:
        self.down.add(node)
        self.world.lose_node(node)
        revision = self.world.revisions[node]
        self.world.feed(NodeLost(NodeId(node), revision, "unplugged"))

    def tell_again(self, node: str) -> None:
        """That it came; by now it may have gone."""
        revision = self.world.revisions[node]
        self.world.feed(node_up(node, NODES[node], revision=revision))

    def drain(self, node: str, *, undo: bool) -> None:
        self.world.feed(NodeDrainRequested(NodeId(node), "drain", undo=undo))

    def bring_back(self, node: str) -> None:
        self.down.remove(node)
        self.world.bring_back(node)


@pytest.mark.parametrize("policy", [*sorted(PLACEMENT), "rotate"])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_books_stay_consistent_and_nothing_is_lost(policy: str, seed: int) -> None:
    draw = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        place = PLACEMENT["isolated"].place
        patch.setitem(PLACEMENT, "rotate", Placement(place, _rotate, may_overtake=True))
        mesh = Mesh(policy, seed)
        for step in ("submit", "submit", *draw.choices(STEPS, k=60)):
            _take(mesh, step, draw)
        _come_to_rest(mesh)
        _, made = restored_at_every_step(mesh.world.log)
        assert made == mesh.world.outputs, "something is decided on what no snapshot holds"


def _take(mesh: Mesh, step: str, draw: random.Random) -> None:
    world = mesh.world
    if step == "submit":
        cycle = draw.choice([None, *CYCLES])
        slo, durability = draw.choice([0.0, 0.0, 1.2, 2.0]), draw.choice(list(Durability))
        deployments = draw.choice(DEPLOYMENTS)
        mesh.submit(cycle, slo, durability, deployments, may_wait=draw.random() < 0.8)
    elif step == "run":
        world.run(until_s=world.now_s + draw.uniform(0.01, 2.0))
    elif step in ("lose", "back", "again", "drain", "undo"):
        _take_on_a_node(mesh, step, draw)
    elif step == "kill" and world.ranks:
        world.kill(draw.choice(sorted(world.ranks, key=str)))
    elif mesh.jobs:
        name = draw.choice(mesh.jobs)
        if step == "work":
            mesh.work(name)
        elif step == "finish":
            mesh.finish(name)
        elif step == "create":
            mesh.create(name, draw.choice(["rollout", "train"]))
        elif step == "delete" and mesh.extras:
            key = DeploymentKey(TENANT, name, draw.choice(mesh.extras))
            world.feed(DeploymentDeleted(key, "delete"))
        elif step == "trace":
            job, cycle = JobKey(TENANT, name), mesh.cycle(name, draw.choice(CYCLES))
            drift, worst_s = draw.choice([0.0, 0.3]), 1.1 * cycle.period_s
            world.feed(PhaseTrace(job, cycle.period_s, cycle.segments, [], worst_s, drift))


def _take_on_a_node(mesh: Mesh, step: str, draw: random.Random) -> None:
    if step == "lose" and len(mesh.down) < len(NODES):
        mesh.lose(draw.choice(sorted(NODES.keys() - mesh.down)))
    elif step == "back" and mesh.down:
        mesh.bring_back(draw.choice(sorted(mesh.down)))
    elif step == "again":
        mesh.tell_again(draw.choice(sorted(NODES)))
    elif step in ("drain", "undo"):
        mesh.drain(draw.choice(sorted(NODES)), undo=step == "undo")


def _come_to_rest(mesh: Mesh) -> None:
    world = mesh.world
    for node in sorted(NODES):
        mesh.drain(node, undo=True)
    for node in sorted(mesh.down):
        mesh.bring_back(node)
    world.run()
    for name in list(mesh.jobs):
        job = world.core.state.jobs[f"{TENANT}.{name}"]
        if job.state is JobState.SUBMITTED:
            continue
        assert job.state is JobState.ACTIVE, f"{name}: {job.state}, {job.error}"
        expected = mesh.expected(name)
        assert {key: world.done.get(key) for key in expected} == dict.fromkeys(
            expected, Outcome.COMPLETED
        )
    while mesh.jobs:
        mesh.finish(mesh.jobs[0])
        world.run()
    cluster = world.core.state.cluster
    assert cluster.free == {"rollout": ["r0", "r1"], "train": ["t0", "t1", "t2"]}
    assert not cluster.groups
    assert not cluster.waiting
