"""What must hold after every step. Runs in tests, on idle, and costs a walk over the state."""

from __future__ import annotations

from phaseloom.scheduler.core.state import (
    Deployment,
    Device,
    JobState,
    Node,
    Op,
    OpState,
    State,
    WpgState,
)


def validate(state: State) -> None:
    """Raises: AssertionError: names the invariant and the entity."""
    for node in state.nodes.values():
        for index, device in enumerate(node.devices):
            _check_device(state, device, f"device {index} of {node.node}")
        _check_claims(state, node)
    waiting = [name for name, job in state.jobs.items() if job.state is JobState.SUBMITTED]
    assert sorted(state.waiting_jobs) == sorted(waiting), "not every job that waits is known to"
    for deployment in state.deployments.values():
        _check_deployment(state, deployment)


def _check_device(state: State, device: Device, where: str) -> None:
    active = [name for name in device.resident if state.deployments[name].epoch]
    used = sum(state.deployments[name].state_bytes for name in active)
    assert used <= device.memory_bytes, f"I3 {where}: {used} of {device.memory_bytes} bytes claimed"
    assert len(set(device.resident)) == len(device.resident), f"{where}: resident twice"
    assert set(device.resident) <= set(device.placed), f"{where}: resident but not placed"
    assert set(device.ready) <= set(device.placed), f"{where}: ready but not placed"
    if device.running:
        deployment = state.deployments[device.running]
        assert deployment.running, f"{where}: {device.running} runs nothing"
        assert deployment.epoch, f"{where}: {device.running} runs without an activation"
        assert deployment.name in device.resident, f"{where}: {device.running} is not resident"


def _check_claims(state: State, node: Node) -> None:
    assert len(set(node.claims)) == len(node.claims), f"{node.node}: claimed twice"
    for name in node.claims:
        deployment = state.deployments[name]
        assert deployment.node == node.node, f"{node.node}: claimed by {name} of another node"
        assert not deployment.running, f"{name}: runs, and waits for its devices"


def _check_deployment(state: State, deployment: Deployment) -> None:
    name = deployment.name
    _check_running(state, deployment)
    assert all(seq >= deployment.next_seq for seq in deployment.operations), f"{name}: stale op"
    seqs = [mutation.seq for mutation in deployment.history]
    assert seqs == sorted(set(seqs)), f"I2 {name}: history out of order {seqs}"
    assert set(deployment.queued_syncs) <= set(deployment.operations), f"{name}: a sync that ended"
    if deployment.epoch:
        up = deployment.state in (WpgState.READY, WpgState.RECOVERING)
        assert up, f"{name}: an activation of a WPG that is {deployment.state}"
        for device in _devices(state, deployment):
            assert name in device.resident, f"I3 {name}: active on a part of its devices"
    if deployment.state is WpgState.READY:
        assert not deployment.replay, f"{name}: ready with mutations still to replay"


def _check_running(state: State, deployment: Deployment) -> None:
    name = deployment.name
    every = [*deployment.operations.values(), *deployment.unordered.values()]
    permitted = [op for op in every if op.state is OpState.PERMITTED]
    if deployment.state is WpgState.RECOVERING:
        assert len(deployment.running) <= 1, f"I1 {name}: two replayed at once"
    else:
        running = sorted(deployment.running)
        assert sorted(op.key for op in permitted) == running, f"{name}: permitted, not running"
    if any(op.is_mutating for op in permitted):
        assert len(permitted) == 1, f"I1 {name}: a mutating operation beside others"
    for op in permitted:
        _check_order(deployment, op)
    if deployment.running:
        for device in _devices(state, deployment):
            assert device.running == name, f"I3 {name}: runs on a part of its devices"


def _check_order(deployment: Deployment, op: Op) -> None:
    seq = op.key.seq
    if seq is None:
        return
    if op.is_mutating:
        assert seq == deployment.next_seq, f"I1 {op.key}: runs out of order"
    for lower in range(deployment.next_seq, seq):
        before = deployment.operations.get(lower)
        assert before is not None, f"I1 {op.key}: runs behind a gap"
        assert before.has_ended or not before.is_mutating, f"I1 {op.key}: runs before {before.key}"


def _devices(state: State, deployment: Deployment) -> list[Device]:
    assert deployment.node is not None, f"{deployment.name}: active nowhere"
    devices = state.nodes[deployment.node].devices
    return [devices[index] for index in deployment.devices]
