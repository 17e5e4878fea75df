"""The life of operations: they are enqueued, become eligible and end.

Order (I1): the ordered operations of a deployment run by `seq`, and after the operations that they
name in `after`. A mutating one runs alone, after everything before it has ended. Reading ones
between two mutating ones run together and may end in any order. An unordered reading operation may
run whenever its deployment's WPG is up. The first log entry for a key decides (I2); later ones are
ignored.

An operation without a permit ends at once if it is cancelled or expires. It keeps its place in the
order, and operations that name it in `after` fail. An operation whose WPG died while it was
permitted may have taken effect. Then its stored outcome decides, and is looked up before any other
outcome is written.

There are several ways to end:

- `end_now` writes an outcome for an operation that will never run.
- `end_or_settle` does the same, unless the operation may have taken effect: then the stored outcome
  is looked up first.
- `end_if_unwanted` ends an operation only if it is cancelled or has expired.
- `abort_all` ends all open operations of a deployment.
- `remove_ended` takes an operation that has its outcome off the queue.

Thousands of operations may wait for one event, or end with it. A step handles `MAX_AT_ONCE` of
them. `State.woken` and `State.endings` have the rest, for which a timer causes further steps.
"""

from __future__ import annotations

from phaseloom.common.contract.errors import Code, ErrorInfo, session_superseded
from phaseloom.common.contract.events import QueuedOperation
from phaseloom.common.contract.ids import (
    DeploymentKey,
    JobKey,
    OperationKey,
    parse_operation_key,
)
from phaseloom.common.contract.operations import Completion, Outcome
from phaseloom.scheduler.core.operations import after_cycles, gradients, reads
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.operation import Ending, Op
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import (
    JOB_ENDED,
    JobState,
    OpEvent,
    OpState,
    WpgState,
)

RETRY_AFTER_S = 1.0
"""When a caller with too many open operations may try again; some may have ended by then."""


def enqueue(step: Step, event: QueuedOperation) -> None:
    """Add an operation that a router admitted or refused to its deployment's queue."""
    deployment = step.deployment_of(event.key)
    if deployment is None:
        _refuse_unknown(step, event)
        return
    seq = event.key.seq
    if seq is None:
        if event.key.slot in deployment.queue.unordered:
            return
    elif seq in deployment.queue.operations:
        if deployment.queue.is_done(seq):
            step.emit(outputs.DeleteOperations([event.key]))
        return
    elif seq < deployment.queue.next_seq:
        if all(mutation.seq != seq for mutation in deployment.durability.history):
            # A duplicate of an operation that has ended and was deleted.
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
        expires_s=step.now_s + event.timeout_s if event.timeout_s > 0 else 0.0,
        num_bytes=event.num_bytes,
        ttl_s=event.ttl_s,
        payer=event.payer,
    )
    error = (
        event.error or _closed_error(step, deployment, event) or _too_many_error(step, deployment)
    )
    deployment.queue.add(op, seq)
    if error is not None:
        # A refused operation keeps its place, so that later ones do not wait for a gap.
        end_now(step, deployment, op, error)
    else:
        _admit(step, deployment, op)
    step.touch(deployment)


def _admit(step: Step, deployment: Deployment, op: Op) -> None:
    after_cycles.record_targets(step.state, op)
    cycle = after_cycles.find_cycle(step.state, deployment, op)
    if cycle:
        error = ErrorInfo(
            Code.FAILED_PRECONDITION,
            f"`after` closes a cycle: {' after '.join(cycle)}",
            field="after",
            remedy="name only earlier operations in `after`",
        )
        end_now(step, deployment, op, error)
        return
    if op.kind == "publish_weights" and op.ttl_s:
        exceeded = reads.too_many_named(step, deployment)
        if exceeded is not None:
            end_now(step, deployment, op, exceeded)
            return
        assert op.key.seq is not None
        deployment.queue.note_naming(op.key.seq)
    if op.version is not None:
        if op.is_mutating:
            assert op.key.seq is not None
            deployment.queue.note_sync(op.key.seq, op.version)
        reads.start_reading(step, op)
    await_dependencies(step, deployment, op)
    if op.expires_s and op.state is OpState.QUEUED:
        step.set_timer(_expiry_timer(op.key), op.expires_s)


def _closed_error(step: Step, deployment: Deployment, event: QueuedOperation) -> ErrorInfo | None:
    """The reason why the deployment accepts no such operation; None: it does."""
    job = step.job_of(deployment)
    if job.state in JOB_ENDED:
        return ErrorInfo(
            Code.FAILED_PRECONDITION, f"job {job.key} has ended", remedy="submit a new job"
        )
    if job.state is JobState.DRAINING:
        return draining_error(job)
    if deployment.wpg.state is WpgState.STOPPED:
        reason = deployment.wpg.error.message if deployment.wpg.error else "it was stopped"
        return ErrorInfo(
            Code.FAILED_PRECONDITION,
            f"deployment {deployment.key} could not start: {reason}",
            remedy="delete the deployment and create it again",
        )
    if event.session <= job.controller.ended_session:
        return session_over_error(job, event.session)
    if event.session < job.controller.session:
        # A router may not know yet about a session that another router opened. Here the order of
        # the log counts.
        return session_superseded(event.session, job.controller.session)
    return None


def _too_many_error(step: Step, deployment: Deployment) -> ErrorInfo | None:
    num_open = len(deployment.queue.operations) + len(deployment.queue.unordered)
    if num_open >= step.config.max_open_operations:
        return ErrorInfo(
            Code.RESOURCE_EXHAUSTED,
            f"{deployment.name} has {num_open} open operations",
            remedy="wait for some of them to end",
            details={"retry_after_s": str(RETRY_AFTER_S)},
        )
    return None


def draining_error(job: Job) -> ErrorInfo:
    return ErrorInfo(
        Code.FAILED_PRECONDITION,
        f"job {job.key} is draining and accepts no new operations",
        remedy="submit a new job for further operations",
    )


def session_over_error(job: Job, session: int) -> ErrorInfo:
    """The error for a session that ended with a roll-back, or with an earlier job of the same
    name."""
    details = {"rolled_back_to": job.checkpoint} if job.checkpoint else {}
    return ErrorInfo(
        Code.ABORTED,
        f"session {session} is over",
        field="session",
        remedy="attach again, and continue from the job's last checkpoint",
        details=details,
    )


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
    job = step.state.jobs.get(str(event.key.job_key))
    name, seq = event.key.deployment, event.key.seq
    if job is not None and name in job.earlier.last_seqs and seq is not None:
        # The deployment was deleted. A new one of the same name must not mistake this outcome for
        # one of its own.
        job.earlier.raise_seq(name, seq)


def await_dependencies(step: Step, deployment: Deployment, op: Op) -> None:
    """Make an operation eligible, or wait for the first of its dependencies that is still open.

    It fails if a dependency does not exist or was not completed.
    """
    for after in op.after:
        name = f"{deployment.job_name}.{after.deployment}"
        dependency = step.state.deployments.get(name)
        if dependency is None:
            error = ErrorInfo(
                Code.NOT_FOUND,
                f"`after` names deployment {after.deployment!r}, which does not exist in this job",
                field="after",
                remedy="name a deployment of the same job",
            )
            end_now(step, deployment, op, error)
            return
        if dependency.queue.was_not_completed(after.seq) or after.seq < dependency.queue.first_seq:
            error = ErrorInfo(
                Code.FAILED_PRECONDITION,
                f"{after.deployment} {after.seq} was not completed",
                field="after",
                remedy="see the error of that operation",
            )
            end_now(step, deployment, op, error)
            return
        if not dependency.queue.is_done(after.seq):
            step.state.wait_for(f"{name}.{after.seq}", str(op.key))
            return
    if op.version is not None:
        publish = reads.running_publish(step, op)
        if publish is not None:
            step.state.wait_for(str(publish.key), str(op.key))
            return
        unreadable = reads.resolve(step, deployment, op)
        if unreadable is not None:
            end_now(step, deployment, op, unreadable)
            return
    op.eligible_s = step.now_s
    if op.version is not None and op.is_mutating:
        step.follow_up(FollowUp.PREFETCH, str(op.key))


def end_now(
    step: Step,
    deployment: Deployment,
    op: Op,
    error: ErrorInfo,
    outcome: Outcome = Outcome.FAILED,
) -> None:
    """End an operation that will never run, and write its outcome."""
    step.advance_op(op, OpEvent(outcome))
    completion = Completion(op.id, outcome, error=error)
    step.emit(outputs.WriteCompletion(op.key, completion, op.content_type))
    step.emit(outputs.DeleteOperations([op.key]))
    remove_ended(step, deployment, op, completed=False)


def end_or_settle(
    step: Step,
    deployment: Deployment,
    op: Op,
    error: ErrorInfo,
    outcome: Outcome = Outcome.FAILED,
) -> None:
    """End an operation that has no permit now, unless it may have taken effect: then its stored
    outcome decides."""
    if not op.uncertain:
        end_now(step, deployment, op, error, outcome)
        return
    # Until the stored outcome arrives the operation must neither run nor end otherwise.
    op.is_settling = True
    op.eligible_s = -1.0
    completion = Completion(op.id, outcome, error=error)
    step.emit(outputs.SettleCompletion(op.key, op.kind, completion, op.content_type))


def end_if_unwanted(step: Step, deployment: Deployment, op: Op) -> None:
    """End an operation without a permit if it is cancelled, or if its time is over.

    An operation that had a permit when its WPG died has not missed its time.
    """
    if op.state is not OpState.QUEUED or op.is_settling:
        return
    if op.is_cancelled:
        cancelled = ErrorInfo(Code.ABORTED, "cancelled", remedy="submit it again if it is needed")
        end_or_settle(step, deployment, op, cancelled, Outcome.CANCELLED)
    elif op.expires_s and op.expires_s <= step.now_s and not op.uncertain:
        waited_s = op.expires_s - op.queued_s
        expired = ErrorInfo(
            Code.DEADLINE_EXCEEDED,
            f"the operation got no permit within {waited_s:g} s after it was queued",
            field="timeout_s",
            remedy="set a longer timeout_s; `explain` shows what an operation waits for",
        )
        end_now(step, deployment, op, expired, Outcome.EXPIRED)


def expire(step: Step, key_text: str) -> None:
    """End an operation whose expiry timer has fired, if it still has no permit."""
    key = parse_operation_key(key_text)
    deployment = step.deployment_of(key)
    op = deployment.queue.find(key) if deployment else None
    if deployment is not None and op is not None:
        end_if_unwanted(step, deployment, op)
        step.touch(deployment)


def _expiry_timer(key: OperationKey) -> str:
    return f"expire/{key}"


def remove_ended(step: Step, deployment: Deployment, op: Op, completed: bool) -> None:
    """Take an ended operation off the queue, and wake the operations that waited for it."""
    seq = op.key.seq
    job = step.job_of(deployment)
    if job.state is JobState.DRAINING:
        # This may have been its last open operation.
        step.follow_up(FollowUp.REVIEW_JOB, deployment.job_name)
    if op.expires_s:
        step.state.pop_timer(_expiry_timer(op.key))
    if op.has_snapshot and seq is not None and deployment.move.relocation is not None:
        step.job_changed(str(job.key))  # a move may have waited for this save
    has_advanced = deployment.queue.remove(op, completed=completed)
    reads.stop_reading(step, op, step.nodes_of(deployment))
    if completed or has_advanced:
        deployment.wpg.forgive_losses()
    if has_advanced:
        step.touch(deployment)
    if seq is None:
        return
    if not completed:
        gradients.record_missing(deployment, op)
    wake_waiters(step, str(op.key))


def wake_waiters(step: Step, key: str) -> None:
    """Wake the operations that wait for this one."""
    look_again_at(step, step.state.pop_waiters(key))


def look_again_at(step: Step, ops: list[str]) -> None:
    if ops:
        step.state.wake(ops)
        step.follow_up(FollowUp.WAKE)


def wake(step: Step) -> None:
    """Look again at operations whose dependency has ended, or whose job drains.

    One failure may end a long chain of operations, so this is a loop and not a recursion.
    """
    gaps: dict[str, int] = {}
    while step.room and step.state.woken:
        step.room -= 1
        key = parse_operation_key(step.state.pop_woken())
        deployment = step.deployment_of(key)
        op = deployment.queue.find(key) if deployment else None
        if deployment is None or op is None or op.state is not OpState.QUEUED or op.is_settling:
            continue
        job, missing = step.job_of(deployment), ""
        if job.state is JobState.DRAINING:
            gap = gaps.setdefault(deployment.name, deployment.queue.first_gap())
            missing = _unpublished_dependency(step, deployment, op, gap)
        if missing:
            end_or_settle(step, deployment, op, _stranded_error(job, missing))
        elif op.eligible_s < 0:
            await_dependencies(step, deployment, op)
        step.touch(deployment)


def _stranded_error(job: Job, missing: str) -> ErrorInfo:
    return ErrorInfo(
        Code.FAILED_PRECONDITION,
        f"job {job.key} is draining, but {missing}, which must run first, was never published",
        remedy="publish all operations before draining the job",
    )


def _unpublished_dependency(step: Step, deployment: Deployment, op: Op, gap: int) -> str:
    """An operation that this one waits for and that will never be published; empty: there is
    none."""
    seq = op.key.seq
    if seq is not None and seq > gap:
        return f"{deployment.key.deployment} {gap}"
    for after in op.after:
        dependency = step.deployment(DeploymentKey(op.key.tenant, op.key.job, after.deployment))
        if dependency is None:
            continue
        if not dependency.queue.is_done(after.seq) and after.seq not in dependency.queue.operations:
            return f"{after.deployment} {after.seq}"
    return ""


def forget_waiters(step: Step, job: JobKey) -> None:
    """Forget the operations of an ended job that waited for operations that were never
    published."""
    prefix = f"{job}."
    for key in [key for key in step.state.waiters if key.startswith(prefix)]:
        step.state.pop_waiters(key)


def requeue(step: Step, op: Op) -> None:
    """Queue an operation again that was permitted when its WPG died."""
    if op.state is OpState.PERMITTED:
        step.advance_op(op, OpEvent.TAKEN_BACK)
        op.uncertain = True
        deployment = step.deployment_of(op.key)
        assert deployment is not None
        if op.key.seq is None:
            deployment.queue.forget_snapshot(op)
        end_if_unwanted(step, deployment, op)


def abort_all(
    step: Step, deployment: Deployment, error: ErrorInfo, *, queue_ends: bool = False
) -> None:
    """End all open operations of a deployment, because it, or its job, ends or falls back.

    All have ended when this returns. Their outcomes may be written by later steps.

    Args: queue_ends: whether the caller empties the queue.
    """
    ops, nodes = deployment.queue.take_open(), step.nodes_of(deployment)
    if not queue_ends:
        for op in deployment.queue.operations.values():
            if not op.has_ended:
                step.advance_op(op, OpEvent.FAILED)
    for op in ops:
        if op.permitted_s:
            reads.stop_reading(step, op, nodes)
    if ops:
        step.state.add_ending(Ending(error, ops))
        step.follow_up(FollowUp.WRITE_ENDINGS)
    step.touch(deployment)


def write_endings(step: Step) -> None:
    """Write the outcomes of operations that failed together, a group of one deployment at a
    time."""
    while step.room and step.state.endings:
        ops, error = step.state.take_ending(step.room)
        step.room -= len(ops)
        for op in ops:
            completion = Completion(op.id, Outcome.FAILED, error=error)
            step.emit(outputs.WriteCompletion(op.key, completion, op.content_type))
            if op.expires_s:
                step.state.pop_timer(_expiry_timer(op.key))
            reads.stop_reading(step, op, [])
            wake_waiters(step, str(op.key))
        step.emit(outputs.DeleteOperations([op.key for op in ops]))


def continue_later(step: Step) -> None:
    """Set a timer for the operations that this step had no room for."""
    if (step.state.woken or step.state.endings) and not step.state.is_continuing:
        step.state.set_continuing(True)
        step.set_timer(f"continue/{step.sequence}", step.now_s)


def go_on(step: Step) -> None:
    step.state.set_continuing(False)
    step.follow_up(FollowUp.WAKE)
    step.follow_up(FollowUp.WRITE_ENDINGS)
