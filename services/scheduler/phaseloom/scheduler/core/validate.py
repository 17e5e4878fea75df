"""Check the invariants of the state; tests call it after every step. Cost: a walk over the
state."""

from __future__ import annotations

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.devices import devices
from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Node, Slot
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.transitions import JOB_ENDED, JobState, OpState, WpgState
from phaseloom.scheduler.core.state.tree import State


def validate(state: State) -> None:
    """Raises: AssertionError: names the invariant and the entity."""
    for node in state.nodes.values():
        for device in node.devices:
            assert len(device.slots) == 1, f"{node.node}: {len(device.slots)} slots"
            _check_slot(state, device.slots[0], device.memory_bytes)
        _check_claims(state, node)
    waiting_jobs = [name for name, job in state.jobs.items() if job.state is JobState.SUBMITTED]
    member_names = [member.job for member in state.cluster.waiting]
    assert sorted(member_names) == sorted(waiting_jobs), (
        "placement does not know exactly the waiting jobs"
    )
    groups.validate(state.cluster)
    _check_hosts(state)
    _check_pins(state)
    for deployment in state.deployments.values():
        _check_deployment(state, deployment)


def _check_hosts(state: State) -> None:
    """Check that placement's view of the cluster agrees with the nodes."""
    drained = {name for name, leave in state.closing.items() if leave.is_drained}
    up = {name: node.is_up and name not in drained for name, node in state.nodes.items()}
    assert up == {name: host.is_up for name, host in state.cluster.hosts.items()}, (
        "nodes and hosts disagree on what is up"
    )
    for name, host in state.cluster.hosts.items():
        leaving = [d.name for d in state.deployments.values() if name in _nodes_left(d)]
        assert sorted(host.leaving) == sorted(leaving), f"{name} waits for {host.leaving} to leave"


def _nodes_left(deployment: Deployment) -> set[NodeId]:
    return set(deployment.nodes) - {assigned.node for assigned in deployment.destination}


def _check_pins(state: State) -> None:
    """Check that each living job that is not waiting is placed, and its deployments are on its
    nodes."""
    living = [n for n, job in state.jobs.items() if job.state not in JOB_ENDED]
    placed = [name for name in living if state.jobs[name].state is not JobState.SUBMITTED]
    assert sorted(placed) == sorted(state.cluster.placed), (
        "jobs and groups disagree on what is placed"
    )
    for deployment in state.deployments.values():
        job = str(deployment.key.job_key)
        if job in state.cluster.placed and deployment.wpg.state is not WpgState.STOPPED:
            pins = groups.group_of(state.cluster, job).members[job].nodes[deployment.spec.pool]
            moving = deployment.move.relocation
            nodes = {assigned.node for assigned in deployment.destination}
            assert nodes <= set(pins), (
                f"{deployment.name}: is on or moves to {nodes}, pinned to {pins}"
            )
            is_known = deployment.name in state.moving
            assert is_known == (moving is not None), f"{deployment.name}: its move is forgotten"


def _check_slot(state: State, slot: Slot, memory_bytes: int) -> None:
    label = f"device {slot.device} of {slot.node}"
    active = [name for name in slot.resident if state.deployments[name].activation.epoch]
    used = sum(state.deployments[name].wpg.state_bytes for name in active)
    assert used <= memory_bytes, f"I3 {label}: {used} of {memory_bytes} bytes claimed"
    assert len(set(slot.resident)) == len(slot.resident), f"{label}: resident twice"
    assert set(slot.resident) <= set(slot.placed), f"{label}: resident but not placed"
    assert set(slot.ready) <= set(slot.placed), f"{label}: ready but not placed"
    jobs = {str(state.deployments[name].key.job_key) for name in slot.placed}
    for seen in (slot.served, slot.rounds):
        assert set(seen) <= jobs, f"{label}: remembers a job that has left"
    for name in slot.runs:
        deployment = state.deployments[name]
        has_turn = deployment.activation.running or deployment.activation.is_opening
        assert has_turn, f"{label}: {name} runs nothing"
        assert deployment.activation.epoch, f"{label}: {name} runs without an activation"
        assert name in slot.resident, f"{label}: {name} is not resident"
    _check_shares(state, slot, label)


def _check_shares(state: State, slot: Slot, label: str) -> None:
    """Check that the shares of a device do not overlap, and that each has at least one unit."""
    if not slot.shares:
        return
    units = [unit for share in slot.shares for unit in share.units]
    every = range(devices.units_of(state, slot))
    assert slot.running == slot.shares[0].deployment, f"{label}: {slot.running} has no share"
    assert len(set(slot.runs)) == len(slot.runs), f"I3 {label}: two shares of one deployment"
    assert len(set(units)) == len(units), f"I3 {label}: shares overlap {slot.shares}"
    assert set(units) <= set(every), f"I3 {label}: shares of units that the device lacks"
    for share in slot.shares:
        assert share.units, f"I3 {label}: {share.deployment} runs with no unit"
        assert set(share.remaining_units) < set(share.units) or not share.remaining_units, (
            f"I3 {label}: {share}"
        )


def _check_claims(state: State, node: Node) -> None:
    assert len(set(node.claims)) == len(node.claims), f"{node.node}: claimed twice"
    for name in node.claims:
        deployment = state.deployments[name]
        assert node.node in deployment.nodes, f"{node.node}: claimed by {name} of another node"
        for node_name in deployment.nodes:
            assert name in state.nodes[node_name].claims, f"I3 {name}: claims a part of its devices"
        assert not deployment.activation.running, f"{name}: runs, and waits for its devices"


def _check_deployment(state: State, deployment: Deployment) -> None:
    name = deployment.name
    deployment.validate()
    _check_running(state, deployment)
    if deployment.activation.epoch:
        for slot in devices.held_slots(state, deployment):
            assert name in slot.resident, f"I3 {name}: active on a part of its devices"


def _check_running(state: State, deployment: Deployment) -> None:
    name = deployment.name
    permitted = [
        op for op in deployment.queue.every if op.state is OpState.PERMITTED and not op.has_snapshot
    ]
    if deployment.wpg.state is WpgState.RECOVERING:
        assert len(deployment.activation.running) <= 1, f"I1 {name}: two replayed at once"
    else:
        running = sorted(deployment.activation.running)
        assert sorted(op.key for op in permitted) == running, f"{name}: permitted, not running"
    if any(op.is_mutating for op in permitted):
        assert len(permitted) == 1, f"I1 {name}: a mutating operation runs with others"
    for op in permitted:
        _check_order(deployment, op)
    if deployment.activation.running:
        for slot in devices.held_slots(state, deployment):
            assert name in slot.runs, f"I3 {name}: runs on a part of its devices"


def _check_order(deployment: Deployment, op: Op) -> None:
    seq = op.key.seq
    if seq is None:
        return
    if op.is_mutating:
        assert seq == deployment.queue.head_seq, f"I1 {op.key}: runs out of order"
    for lower in range(deployment.queue.next_seq, seq):
        before = deployment.queue.operations.get(lower)
        assert before is not None, f"I1 {op.key}: runs behind a gap"
        has_passed = before.has_ended or before.has_snapshot
        assert has_passed or not before.is_mutating, f"I1 {op.key}: runs before {before.key}"
