"""Draining a job: nothing new is taken, what is open runs to its end, then the job is done.

An operation behind one that was never published, or after such a one, would wait for ever: it ends
at once.
"""

from __future__ import annotations

from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.scheduler.core.operations import operations
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JobEvent, JobState


def begin(step: Step, job: Job) -> ErrorInfo | None:
    """Returns: why not. Idempotent."""
    if job.state is JobState.DRAINING:
        return None
    if job.state is JobState.SUBMITTED:
        return ErrorInfo(
            Code.FAILED_PRECONDITION,
            f"job {job.key} has no place yet, so nothing of it can run to its end",
            field="job",
            remedy="cancel it, or wait until it is placed",
        )
    step.advance_job(job, JobEvent.DRAIN)
    step.tell("job draining", "on request", str(job.key))
    for deployment in step.deployments_of(job.key):
        _end_stranded(step, job, deployment)
    return None


def is_done(step: Step, job: Job) -> bool:
    """Whether nothing is open any more."""
    return not any(_open(deployment) for deployment in step.deployments_of(job.key))


def _open(deployment: Deployment) -> list[Op]:
    return [op for op in deployment.queue.every if not op.has_ended]


def _end_stranded(step: Step, job: Job, deployment: Deployment) -> None:
    gap = deployment.queue.next_seq
    while gap in deployment.queue.operations:
        gap += 1
    for op in _open(deployment):
        missing = _missing(step, deployment, op, gap)
        if missing and not op.is_settling:
            error = ErrorInfo(
                Code.FAILED_PRECONDITION,
                f"job {job.key} is draining, and {missing}, which comes first, was not published",
                remedy="publish everything before the job is drained",
            )
            operations.give_up(step, deployment, op, error)


def _missing(step: Step, deployment: Deployment, op: Op, gap: int) -> str:
    """The operation that will never come for which this one waits."""
    seq = op.key.seq
    if seq is not None and seq > gap:
        return f"{deployment.key.deployment} {gap}"
    for after in op.after:
        other = step.deployment(DeploymentKey(op.key.tenant, op.key.job, after.deployment))
        if other is None:
            continue
        if not other.queue.is_done(after.seq) and after.seq not in other.queue.operations:
            return f"{after.deployment} {after.seq}"
    return ""
