"""Why an operation waits, in words: nothing is decided here.

From the outside in: the job, its place in the order, what it comes after, the WPG, the device.
"""

from __future__ import annotations

from phaseloom.common.contract.api import Explanation
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, OperationKey
from phaseloom.common.contract.operations import Completion, result_kind
from phaseloom.scheduler.core import queue
from phaseloom.scheduler.core.state import Deployment, JobState, Op, OpState, WpgState
from phaseloom.scheduler.core.step import Step


def explain(step: Step, deployment: Deployment, op: Op) -> Explanation:
    """How an operation that is on the books stands now."""
    if op.state is not OpState.QUEUED:
        return Explanation(op.key, op.kind, op.state)
    waits_for = _waits_for(step, deployment, op)
    if waits_for:
        return Explanation(op.key, op.kind, op.state, waits_for)
    waits_for = queue.why_not(step, deployment, op)
    place, start_s = queue.place_of(step, deployment, op)
    reasons = [
        why for c, why in queue.queue_of(step, deployment) if c.deployment == deployment.name
    ]
    return Explanation(op.key, op.kind, op.state, waits_for, place, start_s, "; ".join(reasons))


def ended(key: OperationKey, op: Op | None, completion: Completion) -> Explanation:
    """How it ended. Args: op: where it keeps its place on the books."""
    kind = op.kind if op is not None else ""
    if completion.result is not None:
        kind = kind or result_kind(completion.result)
    error = completion.error
    return Explanation(key, kind, completion.outcome, why=error.message if error else "")


def not_open(deployment: Deployment, key: OperationKey) -> ErrorInfo:
    """Of an operation that is not on the books, or only keeps its place there."""
    seq = key.seq
    has_ended = seq is not None and deployment.is_done(seq)
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
    """What must happen before its device is asked at all."""
    lines = _of_job(step, deployment)
    if op.is_settling:
        lines.append("what is stored as its outcome, which is being looked up")
    before = _comes_first(deployment, op)
    if before is not None:
        lines.append(f"{_name(deployment, before)}, which comes first")
    for after in op.after:
        other = step.deployment(DeploymentKey(op.key.tenant, op.key.job, after.deployment))
        if other is not None and not other.is_done(after.seq):
            lines.append(f"{_name(other, after.seq)}, which `after` names")
    if deployment.state is not WpgState.READY:
        lines.append(f"the workers of {deployment.key.deployment}: {deployment.state}")
    return lines


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
    for seq in range(deployment.next_seq, op.key.seq or 0):
        other = deployment.operations.get(seq)
        is_cut = other is not None and other.is_cut
        is_together = other is not None and not (op.is_mutating or other.is_mutating)
        if not (deployment.is_done(seq) or is_together or is_cut):
            return seq
    return None


def _name(deployment: Deployment, seq: int) -> str:
    op = deployment.operations.get(seq)
    state = f"{op.kind}, {op.state}" if op else "not published yet"
    return f"{deployment.key.deployment} {seq} ({state})"
