"""Explain why an operation waits and where it stands in the queue. Nothing is decided here.

Reasons are looked for from the outside in: the job, the order of the deployment, `after`, the WPG,
the device. Only an operation that waits for a device has a position in a queue. Predictions add up
estimates and ignore operations that have not arrived yet. The names of other tenants' work are
hidden.
"""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from phaseloom.common.contract.api import Explanation
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import KindEstimate
from phaseloom.common.contract.ids import DeploymentKey, OperationKey
from phaseloom.common.contract.operations import After, Completion, result_kind
from phaseloom.scheduler.core.devices import devices, estimates
from phaseloom.scheduler.core.dispatch import choice, ready
from phaseloom.scheduler.core.operations import reads
from phaseloom.scheduler.core.policies.device_view import Candidate, Wait
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JobState, OpState, WpgState
from phaseloom.scheduler.core.wpgs import moves

_MOST_QUEUED = 64
"""Maximum number of a deployment's operations that a prediction looks at. It bounds the cost if
thousands are queued, and a quantum is over by then."""
Queue = list[tuple[Candidate, str]]
"""Deployments in the order in which they are expected to start, each with the reason."""


def explain(step: Step, deployment: Deployment, op: Op) -> Explanation:
    """The current state of an operation in its queue."""
    if op.state is not OpState.QUEUED:
        return Explanation(op.key, op.kind, op.state)
    waits_for = _waits_for(step, deployment, op)
    if waits_for:
        return Explanation(op.key, op.kind, op.state, waits_for)
    waits_for = waiting_reasons(step, deployment, op)
    position, start_s = queue_position(step, deployment, op)
    reasons = [
        reason for c, reason in _queue_of(step, deployment) if c.deployment == deployment.name
    ]
    return Explanation(op.key, op.kind, op.state, waits_for, position, start_s, "; ".join(reasons))


def explain_ended(key: OperationKey, op: Op | None, completion: Completion) -> Explanation:
    """How an operation ended.

    Args: op: the operation, if it is still in its queue.
    """
    kind = op.kind if op is not None else ""
    if completion.result is not None:
        kind = kind or result_kind(completion.result)
    error = completion.error
    return Explanation(key, kind, completion.outcome, why=error.message if error else "")


def not_open_error(deployment: Deployment, key: OperationKey) -> ErrorInfo:
    """The error for an operation that is not open: it has ended, or is not in its queue."""
    seq = key.seq
    has_ended = seq is not None and deployment.queue.is_done(seq)
    if has_ended:
        return ErrorInfo(
            Code.FAILED_PRECONDITION,
            f"{key} has ended",
            field="slot",
            remedy="call `result.get` for its outcome",
        )
    return ErrorInfo(
        Code.NOT_FOUND,
        f"{key} is not open",
        field="slot",
        remedy="check that it was published; if it has ended, `result.get` returns its outcome",
    )


def _waits_for(step: Step, deployment: Deployment, op: Op) -> list[str]:
    """Everything that must happen before the operation can wait for a device."""
    lines = _job_reasons(step, deployment)
    if op.is_settling:
        lines.append("its stored outcome, which is being looked up")
    before = _first_blocking_seq(deployment, op)
    if before is not None:
        lines.append(f"{_op_name(deployment, before)}, which comes first")
    for after in op.after:
        dependency = step.deployment(DeploymentKey(op.key.tenant, op.key.job, after.deployment))
        if dependency is not None and not dependency.queue.is_done(after.seq):
            lines.append(f"{_op_name(dependency, after.seq)}, named in `after`")
    publish = reads.running_publish(step, op)
    if publish is not None:
        lines.append(f"{publish.key}, which publishes the version that it reads")
    if deployment.wpg.state is not WpgState.READY:
        lines.append(f"the workers of {deployment.key.deployment}: {_why_not_up(step, deployment)}")
    return lines


def _why_not_up(step: Step, deployment: Deployment) -> str:
    wpg = deployment.wpg
    pause_s = wpg.retry_at_s - step.now_s
    if wpg.state is not WpgState.LOST or wpg.error is None or pause_s <= 0:
        return wpg.state
    died = f"died {wpg.losses} times ({wpg.error.message})"
    return f"{died}; restart in {pause_s:.1f} s"


def _job_reasons(step: Step, deployment: Deployment) -> list[str]:
    job = step.job(deployment.key.job_key)
    reason = f": {job.error.message}" if job.error else ""
    match job.state:
        case JobState.SUBMITTED:
            return [f"nodes for job {job.key}{reason}"]
        case JobState.ROLLED_BACK:
            return [f"a controller to attach{reason}"]
        case _:
            return []


def _first_blocking_seq(deployment: Deployment, op: Op) -> int | None:
    """The lowest seq of the same deployment that must end before the operation can run."""
    for seq in range(deployment.queue.next_seq, op.key.seq or 0):
        lower = deployment.queue.operations.get(seq)
        has_snapshot = lower is not None and lower.has_snapshot
        is_together = lower is not None and not (op.is_mutating or lower.is_mutating)
        if not (deployment.queue.is_done(seq) or is_together or has_snapshot):
            return seq
    return None


def _op_name(deployment: Deployment, seq: int) -> str:
    op = deployment.queue.operations.get(seq)
    state = f"{op.kind}, {op.state}" if op else "not published yet"
    return f"{deployment.key.deployment} {seq} ({state})"


def _queue_of(step: Step, deployment: Deployment) -> Queue:
    """The queue of the deployment's device, or of the device where it is last."""
    queues = [_queue_on(step, slot) for slot in devices.slots_of(step, deployment)]
    return max(queues, key=lambda queue: _index_in(queue, deployment), default=[])


def queue_position(step: Step, deployment: Deployment, op: Op) -> tuple[int, float]:
    """The position of an operation among the ready ones on its devices, and its predicted start.

    Returns: the position, and the start in seconds from now; (0, -1) if the operation is not ready.
    """
    ready_ops = list(ready.operations(step, deployment))
    queue = _queue_of(step, deployment) if op in ready_ops else []
    ahead = _index_in(queue, deployment)
    if ahead < 0:
        return 0, -1.0
    slots = devices.slots_of(step, deployment)
    free_s = max((_remaining_s(step, slot) for slot in slots), default=0.0)
    free_s = max(free_s, _admitted_s(step, deployment) - step.now_s)
    timeline, ordered = choice.policy_of(step).timeline, [c for c, _ in queue]
    wait_s = timeline(ordered, free_s)[ahead].start_s
    for slot in slots:
        # Count the rest of the phase on the device too, even what is not queued yet.
        phase_s = _phase_left_s(step, slot)
        outsiders = [c for c in ordered[: ahead + 1] if c.job != slot.holder]
        if phase_s > 0.0 and deployment.job_name != slot.holder:
            wait_s = max(wait_s, timeline(outsiders, max(free_s, phase_s))[-1].start_s)
    batches = _batches_before(step, deployment, ready_ops, op)
    wait_s += sum(estimates.recent_s(step.state, deployment, kind) for kind in batches)
    return 1 + ahead + ready_ops.index(op), wait_s + step.state.latency_s


def waiting_reasons(step: Step, deployment: Deployment, op: Op) -> list[str]:
    """Why an operation does not run although it waits for no other operation; one line each."""
    if deployment.activation.retry_at_s > step.now_s:
        pause_s = deployment.activation.retry_at_s - step.now_s
        return [f"the end of a pause of {pause_s:.2f} s after a failed switch or a returned permit"]
    if not ready.is_reachable(step, deployment, op):
        return [f"weights version {op.version}, which is being rebuilt"]
    if deployment.activation.running and op.is_mutating:
        return [
            f"{_describe_running(step, deployment, deployment.name)}, because it must run alone"
        ]
    if moves.is_paused(deployment) or moves.must_wait(deployment, op):
        return [f"the move of its deployment {moves.describe(deployment)}"]
    if deployment.activation.is_opening:
        nodes = ", ".join(deployment.activation.opening_on)
        return [f"its activation to open on {nodes}"]
    lines = []
    for slot in devices.slots_of(step, deployment):
        lines += _device_reasons(step, deployment, slot)
    return list(dict.fromkeys(lines))


def _device_reasons(step: Step, deployment: Deployment, slot: Slot) -> list[str]:
    label = f"device {slot.device} of {slot.node}"
    lines = []
    for name in slot.runs:
        share = slot.share_of(name)
        is_shrinking = share is not None and bool(share.remaining_units)
        suffix = "; it was asked to give up part of the device" if is_shrinking else ""
        lines.append(f"{label}, which runs {_describe_running(step, deployment, name)}{suffix}")
    claimant = devices.claimant(step, slot)
    if claimant is not None and claimant is not deployment:
        lines.append(f"{label}, claimed by {_named(deployment, claimant.name)}")
    until_s = _held_s(step, slot, deployment)
    if until_s > step.now_s and not slot.running:
        left_s = until_s - step.now_s
        lines.append(
            f"{label}, kept for {left_s:.2f} s for {_describe_holder(step, deployment, slot)}"
        )
    wait = _wait_on(step, slot)
    if wait is not None and wait.job != deployment.job_name:
        left_s, job_name = wait.until_s - step.now_s, _job_name(deployment, wait.job)
        lines.append(f"{label}, kept idle up to {left_s:.2f} s for {job_name}: {wait.why}")
    for name in slot.resident:
        if step.state.deployments[name].durability.sealing:
            lines.append(f"{label}, while {_named(deployment, name)} is being sealed")
    return lines


def _named(asker: Deployment, name: str) -> str:
    """The name of a deployment or operation, unless it is another tenant's."""
    is_own = name.startswith(f"{asker.key.tenant}.")
    return name if is_own else "another tenant's work"


def _job_name(asker: Deployment, name: str) -> str:
    is_own = name.startswith(f"{asker.key.tenant}.")
    return f"job {name}" if is_own else "a job of another tenant"


def _wait_on(step: Step, slot: Slot) -> Wait | None:
    """The wait for which the ordering policy keeps a free slot idle; None: it does not."""
    if slot.running or devices.claimant(step, slot) is not None:
        return None
    among = choice.contenders_on(step, slot)
    if not among.options:
        return None
    preferred = choice.prefer(step, slot, among.options, may_wait=among.may_wait)
    return preferred if isinstance(preferred, Wait) else None


def _describe_holder(step: Step, asker: Deployment, slot: Slot) -> str:
    job = step.state.jobs[slot.holder]
    job_name = _job_name(asker, slot.holder)
    if ready.is_any_on(step, slot, of_job=slot.holder):
        return f"{job_name}, whose quantum is not over"
    if ready.has_phase(step, job, slot):
        return f"{job_name}, which has declared a phase"
    return f"{job_name}, whose next operation may come soon"


def _held_s(step: Step, slot: Slot, deployment: Deployment) -> float:
    """Until when the device is kept for a job other than this deployment's."""
    if slot.holder in ("", deployment.job_name) or slot.speculative:
        return 0.0
    if ready.is_any_on(step, slot, of_job=slot.holder):
        return slot.held_since_s + step.config.quantum_s
    return choice.held_until_s(step, slot)


def _admitted_s(step: Step, deployment: Deployment) -> float:
    until_s = 0.0
    for slot in devices.slots_of(step, deployment):
        if not slot.running and not ready.is_any_on(step, slot, of_job=slot.holder):
            until_s = max(until_s, _held_s(step, slot, deployment))
        wait = _wait_on(step, slot)
        if wait is not None:
            until_s = max(until_s, wait.until_s)
    return until_s


def _describe_running(step: Step, asker: Deployment, name: str) -> str:
    keys = step.state.deployments[name].activation.running
    if not keys:
        return f"{_named(asker, name)}, which is being switched in"
    suffix = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{_named(asker, str(keys[0]))}{suffix}"


def _queue_on(step: Step, slot: Slot) -> Queue:
    among = choice.contenders_on(step, slot)
    every = list(ready.options_on(step, slot))
    first = [*among.options, *among.held_back]
    later = [option for option in every if option[0] not in [d for d, _ in first]]
    claimant = devices.claimant(step, slot)
    queue: Queue = []
    for options, suffix in (
        (among.options, ""),
        (among.held_back, "; its quantum is over"),
        (later, ""),
    ):
        remaining = [option for option in options if option[0] is not claimant]
        queue += [(c, reason + suffix) for c, reason in _ordered(step, slot, remaining)]
    if claimant is not None and (op := ready.first(step, claimant)) is not None:
        older = ready.before_claim(step, slot, claimant)
        names = [d.name for d in older if len(devices.slots_of(step, d)) == 1]
        queue.sort(key=lambda e: names.index(e[0].deployment) if e[0].deployment in names else 99)
        claimed = choice.candidate_of(step, slot, claimant, op)
        queue.insert(len(names), (claimed, "it has claimed its devices"))
    return queue


def _ordered(step: Step, slot: Slot, options: list[choice.Option]) -> Queue:
    """The options in the order in which the policy would choose them now."""
    if not options:
        return []
    policy = choice.policy_of(step)
    view = choice.view_of(step, slot, options, policy, may_wait=False, is_plan=True)
    remaining, queue = list(view.candidates), []
    while remaining:
        chosen = policy.choose(replace(view, candidates=remaining))
        assert not isinstance(chosen, Wait), f"{step.config.ordering} waits although it may not"
        queue.append((chosen, policy.why(chosen, view)))
        remaining.remove(chosen)
    return queue


def _index_in(queue: Queue, deployment: Deployment) -> int:
    names = [candidate.deployment for candidate, _ in queue]
    return names.index(deployment.name) if deployment.name in names else -1


def _batches_before(step: Step, deployment: Deployment, ready_ops: list[Op], op: Op) -> list[str]:
    """Kinds of the operations of its own deployment that must end before this one starts."""
    before = ready_ops[: ready_ops.index(op)]
    mutating = [earlier.kind for earlier in before if earlier.is_mutating]
    reading = [earlier.kind for earlier in before if not earlier.is_mutating]
    size = max(1, step.config.max_reading)
    return mutating + reading[size - 1 :: size]


def _remaining_s(step: Step, slot: Slot) -> float:
    if not slot.running:
        return 0.0
    deployment = step.state.deployments[slot.running]
    ops = [
        op
        for key in deployment.activation.running
        if (op := deployment.queue.find(key)) is not None
    ]
    return max((estimates.left_s(step.state, deployment, op) for op in ops), default=0.0)


def _phase_left_s(step: Step, slot: Slot) -> float:
    """Seconds for which the phase of a device is expected to keep it; 0: it may be over.

    The phase consists of the running operation, the operations that its job has queued behind it on
    the device, and those that usually follow. Other jobs are admitted at the end of the quantum.
    """
    policy, quantum_s = choice.policy_of(step), step.config.quantum_s
    is_kept = quantum_s > 0.0 or policy.may_wait
    if slot.is_released or not slot.holder or slot.phase.job != slot.holder or not is_kept:
        return 0.0
    used_by = step.state.deployments.get(slot.running)
    if used_by is None:
        left_s = _arrival_s(step, slot)
        if left_s < 0.0:
            return 0.0
    else:
        left_s = _remaining_s(step, slot)
        if slot.phase.job not in step.state.traces:
            left_s = max(left_s, _segment_left_s(step, slot, used_by))
    quantum_left_s = inf
    if quantum_s and not policy.may_wait:
        quantum_left_s = slot.held_since_s + quantum_s - step.now_s
    for duration_s in _upcoming_s(step, slot):
        # An operation that runs at the end of the quantum is not cut short.
        if left_s >= quantum_left_s:
            return left_s
        left_s += duration_s + step.state.latency_s
    if quantum_left_s < inf and _returns_within_grace(step, slot):
        return max(left_s, quantum_left_s)
    return left_s


def _segment_left_s(step: Step, slot: Slot, used_by: Deployment) -> float:
    """Seconds until the end of a phase that takes as long as its job has declared."""
    began_s = slot.held_since_s
    if slot.used_since_s <= began_s:
        began_s = max(began_s, estimates.open_s(step.state, used_by))
    return began_s + estimates.phase_s(step.state, used_by) - step.now_s


def _arrival_s(step: Step, slot: Slot) -> float:
    """Seconds until the holder's next operation is expected on an idle device that is kept for it.

    Returns: -1 if no operation is expected, or it may come too late.
    """
    expected = slot.expected.get(slot.holder)
    until_s = choice.held_until_s(step, slot)
    is_usual = bool(_usual_s(step, slot, set()))
    if expected is None or not is_usual or not step.now_s < until_s >= expected.at_s:
        return -1.0
    return max(0.0, expected.at_s - step.now_s)


def _upcoming_s(step: Step, slot: Slot) -> list[float]:
    """Durations of the next operations in a device's phase: first the queued ones, then the usual
    ones."""
    queued = _queued(step, slot)
    kinds = [f"{d.key.deployment}.{op.kind}" for d, op in queued]
    durations = [estimates.recent_s(step.state, d, op.kind) for d, op in queued]
    latest = _holder_estimates(step, slot).get(kinds[-1] if kinds else _current_kind(step, slot))
    # After a kind with a long gap the device is given away, even if other kinds have yet to run.
    if latest is not None and latest.next_gap_s > choice.MAX_GRACES * step.config.idle_grace_s:
        return durations
    usual = _usual_s(step, slot, set(kinds))
    if usual and latest is not None and (kinds or slot.running):
        usual[0] += max(0.0, latest.next_gap_s)
    return durations + usual


def _current_kind(step: Step, slot: Slot) -> str:
    """The kind that runs on a device, or ran there last, as `<deployment>.<kind>`."""
    deployment = step.state.deployments.get(slot.running)
    for key in deployment.activation.running if deployment is not None else ():
        assert deployment is not None
        if (op := deployment.queue.find(key)) is not None:
            return f"{key.deployment}.{op.kind}"
    return slot.last


def _queued(step: Step, slot: Slot) -> list[tuple[Deployment, Op]]:
    """Operations that the holder of a device has queued for it."""
    deployments = _holder_deployments(step, slot)
    names = {deployment.name for deployment in deployments}
    return [(d, op) for d in deployments for op in _queued_behind(step, d, names)]


def _holder_deployments(step: Step, slot: Slot) -> list[Deployment]:
    placed = (step.state.deployments[name] for name in slot.placed)
    return [deployment for deployment in placed if deployment.job_name == slot.holder]


def _queued_behind(step: Step, deployment: Deployment, names: set[str]) -> list[Op]:
    """Queued operations of a deployment that can run one after the other on its device.

    The list ends before the first one that waits for a deployment elsewhere or is not published
    yet.
    """

    def waits_elsewhere(after: After) -> bool:
        key = DeploymentKey(deployment.key.tenant, deployment.key.job, after.deployment)
        dependency = step.deployment(key)
        if dependency is None or dependency.name in names:
            return False
        return not dependency.queue.is_done(after.seq)

    ops = []
    for seq in range(deployment.queue.next_seq, deployment.queue.next_seq + _MOST_QUEUED):
        op = deployment.queue.operations.get(seq)
        if op is None or any(map(waits_elsewhere, op.after)):
            break
        if op.state is OpState.QUEUED:
            ops.append(op)
    return ops


def _holder_estimates(step: Step, slot: Slot) -> dict[str, KindEstimate]:
    """Estimates for the kinds that the holder of a device runs there, by `<deployment>.<kind>`."""
    trace = step.state.traces.get(slot.holder)
    names = {deployment.key.deployment for deployment in _holder_deployments(step, slot)}
    all_estimates = trace.estimates if trace is not None else []
    return {f"{e.deployment}.{e.kind}": e for e in all_estimates if e.deployment in names}


def _returns_within_grace(step: Step, slot: Slot) -> bool:
    """Whether the holder's next operation always arrives within the grace, so that it keeps the
    device for its whole quantum."""
    estimates_by_kind, grace_s = _holder_estimates(step, slot), step.config.idle_grace_s
    kinds = {f"{d.key.deployment}.{op.kind}" for d, op in _queued(step, slot)}
    if not estimates_by_kind or not kinds <= estimates_by_kind.keys():
        return False
    return all(0.0 <= estimate.next_gap_s <= grace_s for estimate in estimates_by_kind.values())


def _usual_s(step: Step, slot: Slot, queued: set[str]) -> list[float]:
    """Expected durations of operations that usually follow in the phase and are not queued yet: one
    for each kind of operation that the holder has not yet run in the phase."""
    estimates_by_kind = _holder_estimates(step, slot)
    have_begun = [
        estimates_by_kind[kind].count for kind in slot.phase.kinds if kind in estimates_by_kind
    ]
    # A kind that runs in fewer than half of the phases is not usual.
    rare = max(have_begun, default=0) / 2
    deployments = {
        deployment.key.deployment: deployment for deployment in _holder_deployments(step, slot)
    }
    return [
        estimates.recent_s(step.state, deployments[estimate.deployment], estimate.kind)
        for kind, estimate in estimates_by_kind.items()
        if estimate.count > rare and kind not in slot.phase.kinds and kind not in queued
    ]
