"""The life of operations: filed, made eligible, ended.

Order (I1): a deployment's ordered operations run one at a time in `seq` order; only `next_seq` may
run, and only after what it names. A reading operation without order may run whenever its
deployment's WPG is up. The first entry for a key decides (I2); later ones are ignored.
"""

from __future__ import annotations

from phaseloom.common.errors import Code, ErrorInfo, session_over
from phaseloom.common.ids import DeploymentKey
from phaseloom.common.messages import (
    Completion,
    Outcome,
    QueuedOperation,
)
from phaseloom.scheduler.core import outputs
from phaseloom.scheduler.core.state import (
    JOB_ENDED,
    Deployment,
    Job,
    Op,
    OpState,
)
from phaseloom.scheduler.core.step import Step


def file(step: Step, event: QueuedOperation) -> None:
    """Take in what a router admitted or refused."""
    deployment = step.deployment(event.key.deployment_key)
    if deployment is None:
        _refuse_unknown(step, event)
        return
    seq = event.key.seq
    if seq is None:
        if event.key.slot in deployment.unordered:
            return
    elif seq in deployment.operations:
        return
    elif seq < deployment.next_seq:
        if all(mutation.seq != seq for mutation in deployment.history):
            # A copy that came after its original was done and deleted.
            step.emit(outputs.DeleteOperations([event.key]))
        return
    op = Op(
        key=event.key,
        id=event.id,
        kind=event.kind,
        after=event.after,
        version=event.version,
        content_type=event.content_type,
        arrival=step.sequence,
        queued_s=step.now_s,
    )
    if seq is None:
        deployment.unordered[event.key.slot] = op
    else:
        deployment.operations[seq] = op
    error = event.error or _refusal(step.job(event.key.job_key), event)
    if error is not None:
        # Refused, yet it keeps its place: whoever comes later must not wait for a gap.
        end_unrun(step, deployment, op, error)
    else:
        settle_after(step, deployment, op)
    step.touch(deployment)


def _refusal(job: Job, event: QueuedOperation) -> ErrorInfo | None:
    """Why an operation that its router found sound comes too late."""
    if job.state in JOB_ENDED:
        return ErrorInfo(
            Code.FAILED_PRECONDITION, f"job {job.key} has ended", remedy="submit a new job"
        )
    if event.session < job.session:
        # A router may not know of a session yet that another gave out: here the log's order counts.
        return session_over(event.session, job.session)
    return None


def _refuse_unknown(step: Step, event: QueuedOperation) -> None:
    error = event.error or ErrorInfo(
        Code.NOT_FOUND,
        f"deployment {event.key.deployment_key} does not exist",
        field="subject.deployment",
        remedy="submit the job with this deployment first",
    )
    step.emit(
        outputs.WriteCompletion(
            event.key, Completion(event.id, Outcome.FAILED, error=error), event.content_type
        )
    )
    step.emit(outputs.DeleteOperations([event.key]))


def settle_after(step: Step, deployment: Deployment, op: Op) -> None:
    """Find out whether anything that `op` names is still open; wait for the first that is."""
    for after in op.after:
        key = DeploymentKey(op.key.tenant, op.key.job, after.deployment)
        other = step.deployment(key)
        if other is None:
            error = ErrorInfo(
                Code.NOT_FOUND,
                f"`after` names deployment {after.deployment!r}, which this job does not have",
                field="after",
            )
            end_unrun(step, deployment, op, error)
            return
        if after.seq in other.not_completed:
            error = ErrorInfo(
                Code.FAILED_PRECONDITION,
                f"{after.deployment} {after.seq} was not completed",
                field="after",
                remedy="look at that operation's error first",
            )
            end_unrun(step, deployment, op, error)
            return
        if after.seq >= other.next_seq:
            waiting = step.state.waiters.setdefault(f"{key}.{after.seq}", [])
            if deployment.name not in waiting:
                waiting.append(deployment.name)
            return
    op.eligible_s = step.now_s


def end_unrun(step: Step, deployment: Deployment, op: Op, error: ErrorInfo) -> None:
    """An operation that will never run fails now; the scheduler writes its outcome."""
    step.move_op(op, OpState.FAILED)
    completion = Completion(op.id, Outcome.FAILED, error=error)
    step.emit(outputs.WriteCompletion(op.key, completion, op.content_type))
    step.emit(outputs.DeleteOperations([op.key]))
    close(step, deployment, op, completed=False)


def close(step: Step, deployment: Deployment, op: Op, completed: bool) -> None:
    """Take an ended operation off the books and wake whoever waited for it."""
    seq = op.key.seq
    if completed:
        deployment.losses = 0
    if seq is None:
        deployment.unordered.pop(op.key.slot, None)
        return
    if not completed:
        deployment.not_completed.append(seq)
    if seq == deployment.next_seq:
        _advance(step, deployment)
    # A refused one above `next_seq` stays on the books, ended, until its turn comes.


def _advance(step: Step, deployment: Deployment) -> None:
    """Move `next_seq` past everything that has an outcome."""
    while True:
        op = deployment.operations.get(deployment.next_seq)
        if op is None or op.state in (OpState.QUEUED, OpState.PERMITTED):
            return
        del deployment.operations[deployment.next_seq]
        ended = f"{deployment.name}.{deployment.next_seq}"
        deployment.next_seq += 1
        deployment.losses = 0
        step.woken += step.state.waiters.pop(ended, [])
        step.touch(deployment)


def wake_all(step: Step) -> None:
    """Settle whoever waited for what this step ended; one failure may end a long chain of others,
    hence a list and no recursion."""
    while step.woken:
        deployment = step.state.deployments.get(step.woken.pop())
        if deployment is not None:
            _wake(step, deployment)


def _wake(step: Step, deployment: Deployment) -> None:
    for op in [*deployment.operations.values(), *deployment.unordered.values()]:
        if op.state is OpState.QUEUED and op.eligible_s < 0:
            settle_after(step, deployment, op)
    step.touch(deployment)


def requeue(step: Step, op: Op) -> None:
    """A permitted operation lost its WPG."""
    if op.state is OpState.PERMITTED:
        step.move_op(op, OpState.QUEUED)
        op.uncertain = True


def abort_all(step: Step, deployment: Deployment, error: ErrorInfo) -> None:
    """End everything that is open: the job ends."""
    for op in [*deployment.operations.values(), *deployment.unordered.values()]:
        if op.state is OpState.PERMITTED:
            step.move_op(op, OpState.QUEUED)
        if op.state is OpState.QUEUED:
            end_unrun(step, deployment, op, error)
