"""What must hold after every step. Runs in tests, on idle, and costs a walk over the state."""

from __future__ import annotations

from phaseloom.scheduler.core.state import Deployment, Device, OpState, State, WpgState


def validate(state: State) -> None:
    """Raises: AssertionError: names the invariant and the entity."""
    for node in state.nodes.values():
        for device in node.devices:
            _check_device(state, device, f"device of {node.node}")
    for deployment in state.deployments.values():
        _check_deployment(state, deployment)


def _check_device(state: State, device: Device, where: str) -> None:
    active = [name for name in device.resident if state.deployments[name].epoch]
    used = sum(state.deployments[name].state_bytes for name in active)
    assert used <= device.memory_bytes, f"I3 {where}: {used} of {device.memory_bytes} bytes claimed"
    assert len(set(device.resident)) == len(device.resident), f"{where}: resident twice"
    assert set(device.resident) <= set(device.placed), f"{where}: resident but not placed"
    if device.running is not None:
        deployment = state.deployments[str(device.running.deployment_key)]
        assert deployment.epoch, f"{where}: {device.running} runs without an activation"
        assert deployment.name in device.resident, f"{where}: {device.running} is not resident"


def _check_deployment(state: State, deployment: Deployment) -> None:
    name = deployment.name
    permitted = [op for op in deployment.operations.values() if op.state is OpState.PERMITTED]
    assert len(permitted) <= 1, f"I1 {name}: two ordered operations permitted"
    for op in permitted:
        assert op.key.seq == deployment.next_seq, f"I1 {name}: {op.key} runs out of order"
    if permitted and deployment.node is not None:
        running = state.nodes[deployment.node].devices[deployment.device].running
        assert running == permitted[0].key, f"{name}: {permitted[0].key} permitted, not running"
    assert all(seq >= deployment.next_seq for seq in deployment.operations), f"{name}: stale op"
    seqs = [mutation.seq for mutation in deployment.history]
    assert seqs == sorted(set(seqs)), f"I2 {name}: history out of order {seqs}"
    if deployment.epoch:
        up = deployment.state in (WpgState.READY, WpgState.RECOVERING)
        assert up, f"{name}: an activation of a WPG that is {deployment.state}"
    if deployment.state is WpgState.READY:
        assert not deployment.replay, f"{name}: ready with mutations still to replay"
