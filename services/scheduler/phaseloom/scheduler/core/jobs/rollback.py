"""The roll-back of a job that cannot be rebuilt: the whole job falls back to its last checkpoint.

A single deployment never falls back alone, because the others hold state from after the checkpoint.
Every open operation ends. Every WPG starts again from its checkpoint, or from its seeds if the
checkpoint does not include it. Sessions that knew the lost state are over. A controller that
attaches continues from its own blob.
"""

from __future__ import annotations

from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import OperationFinished
from phaseloom.scheduler.core.durability import holders, retention, seals
from phaseloom.scheduler.core.operations import operations
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JobEvent, JobState
from phaseloom.scheduler.core.wpgs import wpgs

_CAN_ROLL_BACK = frozenset({JobState.ACTIVE, JobState.ROLLED_BACK})


def record_checkpoint(step: Step, event: OperationFinished) -> None:
    """Make a `save_state` with a controller's blob the job's last checkpoint."""
    if event.checkpoints:
        job = step.job(event.key.job_key)
        job.checkpoint = event.checkpoints.get(event.key.deployment, "")
        job.checkpoints = event.checkpoints


def is_possible(step: Step, job: Job) -> bool:
    """Whether the job has a checkpoint of every deployment that trains."""
    trainable = [d for d in step.deployments_of(job) if d.spec.trainable]
    return (
        job.state in _CAN_ROLL_BACK
        and bool(job.checkpoint)
        and all(d.key.deployment in job.checkpoints for d in trainable)
    )


def roll_back(step: Step, job: Job, error: ErrorInfo) -> None:
    step.notify("job rolled back", f"to {job.checkpoint}: {error.message}", str(job.key))
    details = {"rolled_back_to": job.checkpoint}
    aborted = ErrorInfo(
        Code.ABORTED,
        f"job {job.key} fell back to its checkpoint {job.checkpoint}: {error.message}",
        remedy="attach again, and continue from the checkpoint",
        details=details,
    )
    lost = ErrorInfo(Code.DATA_LOSS, aborted.message, remedy=aborted.remedy, details=details)
    job.failed(lost)
    job.controller.end_sessions()
    step.advance_job(job, JobEvent.FELL_BACK)
    retention.release_all(step, job)
    for deployment in step.deployments_of(job):
        _note_unfinished(deployment)
        operations.abort_all(step, deployment, aborted)
        _reset(step, deployment, job.checkpoints.get(deployment.key.deployment, ""))
    # Only after all are reset: a start asks which versions the other deployments need.
    for deployment in step.deployments_of(job):
        wpgs.restart(step, deployment)


def _note_unfinished(deployment: Deployment) -> None:
    """Record the weights versions that a deployment is publishing: they may exist before the WPG
    dies."""
    for key in deployment.activation.running:
        op = deployment.queue.find(key)
        if op is not None and op.kind == "publish_weights" and key.seq is not None:
            deployment.durability.note_unfinished(key.seq)


def _reset(step: Step, deployment: Deployment, checkpoint: str) -> None:
    """Reset a deployment to its checkpoint: the operations before it are no longer needed."""
    seals.delete_operations(
        step, deployment, [mutation.seq for mutation in deployment.durability.history]
    )
    last_seq = deployment.last_seq
    deployment.wpg.fall_back(checkpoint, last_seq)
    deployment.durability.fall_back(last_seq)
    deployment.queue.forget_missing_gradients()
    holders.drop_replicas(deployment)
