"""Why an operation waits and where it stands in the queue, in words: nothing is decided here.

From the outside in: the job, its place in the order, what it comes after, the WPG, the device. Only
an operation that waits for a device alone has a place in a queue. Predictions add up estimates and
know nothing of what is still to come. What other tenants run is counted and not named.
"""

from __future__ import annotations

from msgspec.structs import replace

from phaseloom.common.contract.api import Explanation
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, OperationKey
from phaseloom.common.contract.operations import Completion, result_kind
from phaseloom.scheduler.core.devices import devices, estimates
from phaseloom.scheduler.core.dispatch import choice, device_views, idle_hold, ready
from phaseloom.scheduler.core.policies.device_view import Candidate, Wait
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JobState, OpState, WpgState
from phaseloom.scheduler.core.wpgs import moves

Queue = list[tuple[Candidate, str]]
"""Deployments in the order in which they are expected to begin, each with the reason."""


def explain(step: Step, deployment: Deployment, op: Op) -> Explanation:
    """The present state of an operation that is in its queue."""
    if op.state is not OpState.QUEUED:
        return Explanation(op.key, op.kind, op.state)
    waits_for = _waits_for(step, deployment, op)
    if waits_for:
        return Explanation(op.key, op.kind, op.state, waits_for)
    waits_for = why_not(step, deployment, op)
    place, start_s = place_of(step, deployment, op)
    reasons = [why for c, why in _queue_of(step, deployment) if c.deployment == deployment.name]
    return Explanation(op.key, op.kind, op.state, waits_for, place, start_s, "; ".join(reasons))


def ended(key: OperationKey, op: Op | None, completion: Completion) -> Explanation:
    """How an operation ended. Args: op: where it is still in its queue."""
    kind = op.kind if op is not None else ""
    if completion.result is not None:
        kind = kind or result_kind(completion.result)
    error = completion.error
    return Explanation(key, kind, completion.outcome, why=error.message if error else "")


def not_open(deployment: Deployment, key: OperationKey) -> ErrorInfo:
    """Why an operation is not open: it is not in its queue, or only keeps its place there."""
    seq = key.seq
    has_ended = seq is not None and deployment.queue.is_done(seq)
    if has_ended:
        return ErrorInfo(
            Code.FAILED_PRECONDITION,
            f"{key} has ended",
            field="slot",
            remedy="ask `result.get` for its outcome",
        )
    return ErrorInfo(
        Code.NOT_FOUND,
        f"{key} is not open",
        field="slot",
        remedy="was it published? `result.get` tells the outcome of one that has ended",
    )


def _waits_for(step: Step, deployment: Deployment, op: Op) -> list[str]:
    """The things that must happen before the device of an operation is asked at all."""
    lines = _of_job(step, deployment)
    if op.is_settling:
        lines.append("what is stored as its outcome, which is being looked up")
    before = _comes_first(deployment, op)
    if before is not None:
        lines.append(f"{_name(deployment, before)}, which comes first")
    for after in op.after:
        other = step.deployment(DeploymentKey(op.key.tenant, op.key.job, after.deployment))
        if other is not None and not other.queue.is_done(after.seq):
            lines.append(f"{_name(other, after.seq)}, which `after` names")
    if deployment.wpg.state is not WpgState.READY:
        lines.append(f"the workers of {deployment.key.deployment}: {_why_not_up(step, deployment)}")
    return lines


def _why_not_up(step: Step, deployment: Deployment) -> str:
    wpg = deployment.wpg
    pause_s = wpg.retry_at_s - step.now_s
    if wpg.state is not WpgState.LOST or wpg.error is None or pause_s <= 0:
        return wpg.state
    died = f"they died {wpg.losses} times ({wpg.error.message})"
    return f"{died}, and are started again in {pause_s:.1f} s"


def _of_job(step: Step, deployment: Deployment) -> list[str]:
    job = step.job(deployment.key.job_key)
    reason = f": {job.error.message}" if job.error else ""
    match job.state:
        case JobState.SUBMITTED:
            return [f"a place for job {job.key}{reason}"]
        case JobState.ROLLED_BACK:
            return [f"a controller that attaches{reason}"]
        case _:
            return []


def _comes_first(deployment: Deployment, op: Op) -> int | None:
    """The lowest seq of the same deployment that must end before it."""
    for seq in range(deployment.queue.next_seq, op.key.seq or 0):
        other = deployment.queue.operations.get(seq)
        has_snapshot = other is not None and other.has_snapshot
        is_together = other is not None and not (op.is_mutating or other.is_mutating)
        if not (deployment.queue.is_done(seq) or is_together or has_snapshot):
            return seq
    return None


def _name(deployment: Deployment, seq: int) -> str:
    op = deployment.queue.operations.get(seq)
    state = f"{op.kind}, {op.state}" if op else "not published yet"
    return f"{deployment.key.deployment} {seq} ({state})"


def _queue_of(step: Step, deployment: Deployment) -> Queue:
    """The queue of its device; of several, of the one where it is last."""
    queues = [_queue_on(step, slot) for slot in devices.slots_of(step, deployment)]
    return max(queues, key=lambda queue: _index_in(queue, deployment), default=[])


def place_of(step: Step, deployment: Deployment, op: Op) -> tuple[int, float]:
    """The place of an operation among what is ready on its devices, and its predicted start.

    Returns: the place, and seconds from now; (0, -1) where it is not ready.
    """
    own = list(ready.operations(step, deployment))
    queue = _queue_of(step, deployment) if op in own else []
    ahead = _index_in(queue, deployment)
    if ahead < 0:
        return 0, -1.0
    slots = devices.slots_of(step, deployment)
    free_s = max((_remaining_s(step, slot) for slot in slots), default=0.0)
    free_s = max(free_s, _let_in_s(step, deployment) - step.now_s)
    timeline, ordered = choice.policy_of(step).timeline, [c for c, _ in queue]
    wait_s = timeline(ordered, free_s)[ahead].start_s
    for slot in slots:
        # What the phase on the device still brings is part of it, queued or not.
        phase_s = _phase_left_s(step, slot)
        others = [c for c in ordered[: ahead + 1] if c.job != slot.holder]
        if phase_s > 0.0 and deployment.job_name != slot.holder:
            wait_s = max(wait_s, timeline(others, max(free_s, phase_s))[-1].start_s)
    batches = _batches_before(step, deployment, own, op)
    wait_s += sum(estimates.duration_s(step.state, deployment, kind) for kind in batches)
    return 1 + ahead + own.index(op), wait_s + step.state.latency_s


def why_not(step: Step, deployment: Deployment, op: Op) -> list[str]:
    """The reasons why an operation waits that waits for no other of its job; one line each."""
    if deployment.activation.retry_at_s > step.now_s:
        pause_s = deployment.activation.retry_at_s - step.now_s
        return [f"a pause of {pause_s:.2f} s after a switch or a permit that came back"]
    if not ready.is_reachable(step, deployment, op):
        return [f"weights version {op.version}, which is being rebuilt"]
    if deployment.activation.running and op.is_mutating:
        return [f"{_running(step, deployment, deployment.name)}: it runs alone"]
    if moves.is_held(deployment) or moves.holds_back(deployment, op):
        return [f"the move of its deployment {moves.describe(deployment)}"]
    if deployment.activation.is_opening:
        nodes = ", ".join(deployment.activation.opening_on)
        return [f"its activation, which is not open yet on {nodes}"]
    lines = []
    for slot in devices.slots_of(step, deployment):
        lines += _of_slot(step, deployment, slot)
    return list(dict.fromkeys(lines))


def _of_slot(step: Step, deployment: Deployment, slot: Slot) -> list[str]:
    where = f"device {slot.device} of {slot.node}"
    lines = []
    for name in slot.runs:
        share = slot.share_of(name)
        is_asked = share is not None and bool(share.asked)
        asked = "; it was asked for a part of the device" if is_asked else ""
        lines.append(f"{where}, which runs {_running(step, deployment, name)}{asked}")
    claimant = devices.claimant(step, slot)
    if claimant is not None and claimant is not deployment:
        lines.append(f"{where}, which {_named(deployment, claimant.name)} has claimed")
    until_s = _held_s(step, slot, deployment)
    if until_s > step.now_s and not slot.running:
        left_s = until_s - step.now_s
        lines.append(f"{where}, which is kept {left_s:.2f} s for {_holder(step, deployment, slot)}")
    wait = _wait_on(step, slot)
    if wait is not None and wait.job != deployment.job_name:
        left_s, whom = wait.until_s - step.now_s, _job(deployment, wait.job)
        lines.append(f"{where}, which waits up to {left_s:.2f} s for {whom}: {wait.why}")
    for name in slot.resident:
        if step.state.deployments[name].durability.sealing:
            lines.append(f"{where}, while {_named(deployment, name)} is being sealed")
    return lines


def _named(asker: Deployment, name: str) -> str:
    """The name of a deployment or an operation; another tenant's is not told."""
    is_own = name.startswith(f"{asker.key.tenant}.")
    return name if is_own else "one of another tenant"


def _job(asker: Deployment, name: str) -> str:
    is_own = name.startswith(f"{asker.key.tenant}.")
    return f"job {name}" if is_own else "a job of another tenant"


def _wait_on(step: Step, slot: Slot) -> Wait | None:
    """The wait for which the ordering policy leaves a slot idle; None: it does not."""
    if slot.running or devices.claimant(step, slot) is not None:
        return None
    among = choice.contenders_on(step, slot)
    if not among.options:
        return None
    preferred = choice.prefer(step, slot, among.options, may_wait=among.may_wait)
    return preferred if isinstance(preferred, Wait) else None


def _holder(step: Step, asker: Deployment, slot: Slot) -> str:
    job = step.state.jobs[slot.holder]
    whom = _job(asker, slot.holder)
    if ready.is_any_on(step, slot, of_job=slot.holder):
        return f"{whom}, whose quantum is not over"
    if idle_hold.has_phase(step, job, slot):
        return f"{whom}, which has declared a phase"
    return f"{whom}, whose next operation may come"


def _held_s(step: Step, slot: Slot, deployment: Deployment) -> float:
    """The time until which the device is kept for another job than this deployment's."""
    if slot.holder in ("", deployment.job_name) or slot.speculative:
        return 0.0
    if ready.is_any_on(step, slot, of_job=slot.holder):
        return slot.held_since_s + step.config.quantum_s
    return idle_hold.held_until_s(step, slot)


def _let_in_s(step: Step, deployment: Deployment) -> float:
    until_s = 0.0
    for slot in devices.slots_of(step, deployment):
        if not slot.running and not ready.is_any_on(step, slot, of_job=slot.holder):
            until_s = max(until_s, _held_s(step, slot, deployment))
        wait = _wait_on(step, slot)
        if wait is not None:
            until_s = max(until_s, wait.until_s)
    return until_s


def _running(step: Step, asker: Deployment, name: str) -> str:
    keys = step.state.deployments[name].activation.running
    if not keys:
        return f"{_named(asker, name)}, which is being switched in"
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{_named(asker, str(keys[0]))}{more}"


def _queue_on(step: Step, slot: Slot) -> Queue:
    among = choice.contenders_on(step, slot)
    every = list(ready.on(step, slot))
    first = [*among.options, *among.rest]
    later = [option for option in every if option[0] not in [d for d, _ in first]]
    claimed = devices.claimant(step, slot)
    queue: Queue = []
    for options, what in ((among.options, ""), (among.rest, "; its quantum is over"), (later, "")):
        left = [option for option in options if option[0] is not claimed]
        queue += [(c, why + what) for c, why in _ordered(step, slot, left)]
    if claimed is not None and (op := ready.first(step, claimed)) is not None:
        first_of_all = device_views.candidate(step, slot, claimed, op)
        queue.insert(0, (first_of_all, "it has claimed its devices"))
    return queue


def _ordered(step: Step, slot: Slot, options: list[device_views.Option]) -> Queue:
    """The options in the order in which the policy would choose them now."""
    if not options:
        return []
    policy = choice.policy_of(step)
    view = device_views.view_of(step, slot, options, policy, may_wait=False, is_plan=True)
    left, queue = list(view.candidates), []
    while left:
        chosen = policy.choose(replace(view, candidates=left))
        assert not isinstance(chosen, Wait), f"{step.config.ordering} waits unasked"
        queue.append((chosen, policy.why(chosen, view)))
        left.remove(chosen)
    return queue


def _index_in(queue: Queue, deployment: Deployment) -> int:
    names = [candidate.deployment for candidate, _ in queue]
    return names.index(deployment.name) if deployment.name in names else -1


def _batches_before(step: Step, deployment: Deployment, own: list[Op], op: Op) -> list[str]:
    """Kinds of the operations of its own deployment that must end before it begins."""
    before = own[: own.index(op)]
    mutating = [other.kind for other in before if other.is_mutating]
    reading = [other.kind for other in before if not other.is_mutating]
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
    ends_s = [
        estimates.began_s(step.state, deployment, op)
        + estimates.duration_s(step.state, deployment, op.kind)
        + step.state.latency_s
        for op in ops
    ]
    return max(0.0, max(ends_s, default=step.now_s) - step.now_s)


def _phase_left_s(step: Step, slot: Slot) -> float:
    """Seconds for which the phase that runs on a device is expected to keep it; 0: it may be over.

    A phase usually takes as long as its segment of the job's cycle, and others are let in at the
    end of its quantum.
    """
    used_by = step.state.deployments.get(slot.running)
    is_kept = step.config.quantum_s > 0.0 or choice.policy_of(step).may_wait
    if used_by is None or slot.is_released or slot.phase.job != slot.holder or not is_kept:
        return 0.0
    usual_s = estimates.phase_s(step.state, used_by)
    # A kind that comes again begins a phase of the device; the segment began when its job came in.
    is_first = step.now_s < slot.held_since_s + usual_s
    began_s = slot.held_since_s if is_first else slot.phase.began_s
    if slot.used_since_s <= began_s:
        began_s = max(began_s, estimates.open_s(step.state, used_by))
    end_s = began_s + usual_s
    # What runs may take longer than usual, and all that usually follows it comes later by that.
    end_s = max(end_s, step.now_s + _remaining_s(step, slot) + _to_come_s(step, slot))
    if step.config.quantum_s and not choice.policy_of(step).may_wait:
        end_s = min(end_s, slot.held_since_s + step.config.quantum_s)
    return end_s - step.now_s


def _to_come_s(step: Step, slot: Slot) -> float:
    """Seconds of what usually follows in the phase on a device: one operation of each kind of its
    job there that has not begun in it."""
    trace = step.state.traces.get(slot.phase.job)
    if trace is None:
        return 0.0
    here = {
        deployment.key.deployment
        for name in slot.placed
        if (deployment := step.state.deployments[name]).job_name == slot.phase.job
    }
    known = {f"{e.deployment}.{e.kind}": e for e in trace.estimates if e.deployment in here}
    have_begun = [known[kind].count for kind in slot.phase.kinds if kind in known]
    # A kind that runs in fewer than half of the phases is not usual.
    rare = max(have_begun, default=0) / 2
    return sum(
        estimate.duration_s + step.state.latency_s
        for kind, estimate in known.items()
        if estimate.count > rare and kind not in slot.phase.kinds
    )
