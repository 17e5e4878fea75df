"""Which operation a device runs next: hold, switch, permit.

A device runs one operation at a time (one claim on all of its compute). Its *holder* is the job
that used it last, and a phase of it is held open in two ways, so that the parts of one phase cost
no switch between them. While the holder has ready operations they go first, for a quantum: the next
operation of a job that submits serially has not waited yet and would lose against anyone who has
(PlexRL's HRRS has that weakness). While it has none, another job's operation waits for the idle
grace, the time in which the holder's controller may answer and go on. That wait ends early when the
holder has said that its next work here comes after work elsewhere; where the profiler knows when
the next operation usually comes, the wait lasts until that is overdue, or is not begun. Nothing
starves: when a quantum ends, others go first. A quantum of 0 leaves the order to the policy alone.
"""

from __future__ import annotations

from phaseloom.common.ids import DeploymentKey, OperationKey
from phaseloom.common.messages import OpenActivation, Permit, Residency
from phaseloom.scheduler.core import estimates, seals
from phaseloom.scheduler.core.ordering import POLICIES, Candidate
from phaseloom.scheduler.core.state import (
    JOB_ENDED,
    Deployment,
    Device,
    Node,
    Op,
    OpState,
    WpgState,
)
from phaseloom.scheduler.core.step import Step

SOON = 2.0
"""Times the idle grace: an operation known to come later than that is not waited for at all."""
OVERDUE = 1.5
"""Times its usual gap: an operation that has not come by then is not waited for any longer."""


def dispatch(step: Step, node: Node, index: int) -> None:
    """Give the device its next operation, if it is free and one is ready."""
    device = node.devices[index]
    if not node.is_up or device.running is not None:
        return
    ready = _ready(step, device)
    if not ready:
        _seal_idle(step, device)
        return
    candidates = [_candidate(step, deployment, op) for deployment, op in ready]
    of_holder = [c for c in candidates if c.job == device.holder]
    if device.holder and not of_holder:
        held_until_s = _held_until_s(step, device)
        if held_until_s > step.now_s:
            _wake_at(step, node, index, held_until_s)
            return
    choice = _within_quantum(step, device, candidates, of_holder)
    chosen = POLICIES[step.config.ordering](choice, step.now_s)
    deployment, op = ready[candidates.index(chosen)]
    if not deployment.epoch:
        _open(step, node, device, deployment)
    _permit(step, node, device, deployment, op)


def _within_quantum(
    step: Step, device: Device, candidates: list[Candidate], of_holder: list[Candidate]
) -> list[Candidate]:
    """Among whom the policy chooses: the holder's operations for a quantum, then the others'."""
    others = [c for c in candidates if c.job != device.holder]
    if not of_holder or not others or step.config.quantum_s == 0:
        return candidates
    is_over = step.now_s - device.held_since_s >= step.config.quantum_s
    return others if is_over else of_holder


def _ready(step: Step, device: Device) -> list[tuple[Deployment, Op]]:
    deployments = [step.state.deployments[name] for name in device.placed]
    return [(d, op) for d in deployments for op in _next_of(step, d) if _is_reachable(step, d, op)]


def _next_of(step: Step, deployment: Deployment) -> list[Op]:
    if deployment.retry_at_s > step.now_s:
        return []
    if deployment.replay and deployment.state is WpgState.RECOVERING:
        return [_replay_op(step, deployment)]
    if deployment.state is not WpgState.READY:
        return []
    head = deployment.operations.get(deployment.next_seq)
    ops = [*([head] if head else []), *deployment.unordered.values()]
    return [op for op in ops if op.state is OpState.QUEUED and op.eligible_s >= 0]


def _is_reachable(step: Step, deployment: Deployment, op: Op) -> bool:
    """Whether the weights version that it brings can be had, as far as is known.

    A version lives in the memory of its policy's node and may be gone with it: it is then cut again
    when the policy is rebuilt, unless it is on disk.
    """
    policy = step.deployment(op.version.policy) if op.version else None
    if policy is None or op.version is None:
        return True
    if policy.state is WpgState.LOST:
        return False
    is_rebuilding = policy.state is WpgState.STARTING or op.version.seq in policy.replay
    return not is_rebuilding or op.version.seq in policy.durable_versions


def _replay_op(step: Step, deployment: Deployment) -> Op:
    seq = deployment.replay[0]
    key = deployment.key
    mutation = next(m for m in deployment.history if m.seq == seq)
    return Op(
        key=OperationKey(key.tenant, key.job, key.deployment, str(seq)),
        id="",
        kind=mutation.kind,
        after=[],
        version=deployment.holds if mutation.kind == "sync_weights" else None,
        content_type="",
        arrival=0,
        queued_s=step.now_s,
        eligible_s=step.now_s,
    )


def _candidate(step: Step, deployment: Deployment, op: Op) -> Candidate:
    return Candidate(
        operation=str(op.key),
        deployment=deployment.name,
        job=str(deployment.key.job_key),
        arrival_s=max(op.queued_s, op.eligible_s),
        arrival=op.arrival,
        duration_s=estimates.duration_s(step.state, deployment, op.kind),
        switch_s=0.0 if deployment.epoch else estimates.switch_s(step.state, deployment),
    )


def _held_until_s(step: Step, device: Device) -> float:
    """Until when the device is kept for its holder, which has nothing ready."""
    job = step.state.jobs.get(device.holder)
    if job is None or job.state in JOB_ENDED:
        return 0.0
    deployments = [step.state.deployments[name] for name in device.placed]
    mine = [d for d in deployments if d.key.job_key == job.key]
    if any(_waits_elsewhere(d) for d in mine):
        return 0.0
    grace_s = step.config.idle_grace_s
    gap_s = estimates.next_gap_s(step.state, job.key, device.last)
    if gap_s > SOON * grace_s:
        return 0.0
    return device.idle_since_s + max(grace_s, OVERDUE * gap_s)


def _waits_elsewhere(deployment: Deployment) -> bool:
    head = deployment.operations.get(deployment.next_seq)
    return head is not None and head.state is OpState.QUEUED and head.eligible_s < 0


def _wake_at(step: Step, node: Node, index: int, due_s: float) -> None:
    device = node.devices[index]
    timer = f"grace/{node.node}/{index}/{step.sequence}"
    if step.state.timers.get(device.timer, -1.0) == due_s:
        return
    device.timer = timer
    step.set_timer(timer, due_s)


def _open(step: Step, node: Node, device: Device, deployment: Deployment) -> None:
    """Open an activation: its epoch is this event's place in the log."""
    victims = _victims(step, node, device, deployment)
    for victim in victims:
        victim.epoch = 0
        device.resident.remove(victim.name)
    deployment.epoch = step.sequence
    step.send(
        OpenActivation,
        node,
        deployment=deployment.key,
        incarnation=deployment.incarnation,
        epoch=deployment.epoch,
        displaces=[victim.key for victim in victims],
    )
    for victim in victims:
        if seals.is_due(step, victim):
            seals.seal(step, victim)


def _victims(step: Step, node: Node, device: Device, deployment: Deployment) -> list[Deployment]:
    """What must leave the device: other jobs' state where residency is per job, then the least
    recently used until the newcomer fits."""
    residents = [step.state.deployments[name] for name in device.resident]
    victims = []
    if node.residency is Residency.JOB:
        victims = [d for d in residents if d.key.job_key != deployment.key.job_key]
    staying = [d for d in residents if d not in victims]
    used = deployment.state_bytes + sum(d.state_bytes for d in staying)
    for resident in staying:
        if used <= device.memory_bytes:
            break
        victims.append(resident)
        used -= resident.state_bytes
    return victims


def _permit(step: Step, node: Node, device: Device, deployment: Deployment, op: Op) -> None:
    replay = deployment.state is WpgState.RECOVERING
    if not replay:
        step.move_op(op, OpState.PERMITTED)
    device.running = op.key
    job = str(deployment.key.job_key)
    if device.holder != job:
        device.holder = job
        device.held_since_s = step.now_s
    if deployment.name in device.resident:
        device.resident.remove(deployment.name)
    device.resident.append(deployment.name)
    step.send(
        Permit,
        node,
        operation=op.key,
        operation_id=op.id,
        kind=op.kind,
        incarnation=deployment.incarnation,
        epoch=deployment.epoch,
        prev=deployment.applied,
        replay=replay or (op.uncertain and op.is_mutating),
        sources=_sources(step, op),
    )


def _sources(step: Step, op: Op) -> list[str]:
    """Where the weights version of a `sync_weights` is: at the node of its policy."""
    if op.version is None:
        return []
    policy = step.deployment(op.version.policy)
    if policy is None or policy.node is None:
        return []
    return [step.node_of(policy).state_endpoint]


def _seal_idle(step: Step, device: Device) -> None:
    """A deployment that nobody displaces is sealed when it has nothing to do."""
    for name in device.resident:
        deployment = step.state.deployments[name]
        if deployment.state is WpgState.READY and seals.is_due(step, deployment, times=2):
            seals.seal(step, deployment)


def refused(step: Step, key: DeploymentKey, epoch: int) -> Op | None:
    """An activation did not open; returns the operation that it was opened for.

    What it should have displaced may be on the device still: it stays booked there, without an
    activation, so that the next one displaces it again (harmless where it is gone).
    """
    deployment = step.deployment(key)
    if deployment is None or deployment.epoch != epoch:
        return None
    device = step.device_of(deployment)
    running = device.running
    op = None
    if running is not None and running.deployment_key == key:
        op = deployment.open_operation(running)
        step.free(device, running, "")
    for name in device.placed:
        other = step.state.deployments[name]
        if name not in device.resident and other.incarnation and other is not deployment:
            device.resident.insert(0, name)
    deployment.epoch = 0
    if deployment.name in device.resident:
        device.resident.remove(deployment.name)
    step.touch(deployment)
    return op
