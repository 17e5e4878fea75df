"""Deployments that are created or deleted while their job runs.

A new deployment starts next to the others. If it cannot start, it ends alone, STOPPED with its
error, and the job continues. A deleted deployment takes its open operations with it. Its name can
be reused. Sequence numbers and incarnations then continue from the last ones, because outcomes,
seals and late messages of the first deployment may still exist.
"""

from __future__ import annotations

from msgspec.structs import replace

from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from phaseloom.scheduler.core.devices import devices
from phaseloom.scheduler.core.durability import retention, seals
from phaseloom.scheduler.core.jobs import limits
from phaseloom.scheduler.core.operations import operations
from phaseloom.scheduler.core.placement import assignment
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.durability import DeploymentDurability
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.queue import OperationQueue
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JOB_ENDED, JobState
from phaseloom.scheduler.core.state.wpg import RankAssignment, Wpg
from phaseloom.scheduler.core.wpgs import wpgs


def add(step: Step, job: Job, spec: DeploymentSpec) -> Deployment:
    """Add the record of a deployment that is not placed yet."""
    key = DeploymentKey(job.key.tenant, job.key.job, spec.name)
    last_seq = job.earlier.last_seqs.get(spec.name, 0)
    # Requests to forget an earlier deployment of this name are not repeated, because the next seal
    # replaces its old seals. They may still be confirmed late, so their incarnations stay unused.
    stop_incarnations = [step.state.withdraw_forget(node, str(key)) for node in step.state.stopping]
    deployment = Deployment(
        key=key,
        spec=spec,
        queue=OperationQueue(first_seq=last_seq + 1, next_seq=last_seq + 1, head_seq=last_seq + 1),
        wpg=Wpg(
            incarnation=max([job.earlier.incarnations.get(spec.name, 0), *stop_incarnations]),
            origin_seq=last_seq,
        ),
        durability=DeploymentDurability(applied=last_seq),
    )
    step.state.add_deployment(deployment)
    return deployment


def create(step: Step, job: Job, spec: DeploymentSpec) -> ErrorInfo | None:
    """Add a deployment to a job that has not ended.

    It is placed now, or together with its job if that is still waiting.
    """
    if any(existing.name == spec.name for existing in job.spec.deployments):
        return ErrorInfo(
            Code.ALREADY_EXISTS,
            f"job {job.key} already has a deployment {spec.name!r}",
            field="spec.name",
            remedy="choose another name, or delete the existing deployment",
        )
    exceeded = limits.refusal(step, job.key, job, [spec], "spec")
    if exceeded is not None:
        return exceeded
    assignments: list[RankAssignment] = []
    if job.state is not JobState.SUBMITTED:
        room = assignment.room_for(step, job, spec)
        if isinstance(room, ErrorInfo):
            return room
        assignments = room
    job.have([*job.spec.deployments, spec])
    deployment = add(step, job, spec)
    if assignments:
        deployment.wpg.try_alone()
        assignment.extend(step, job, deployment, assignments)
    else:
        assignment.repin(step, job)
    step.job_changed(str(job.key))
    return None


def delete(step: Step, job: Job, name: str) -> ErrorInfo | None:
    """Delete a deployment: its operations end ABORTED, its workers stop, and its state is dropped.

    Its weights versions stay on its nodes if other deployments hold them or will sync them.
    """
    deployment = step.deployment(DeploymentKey(job.key.tenant, job.key.job, name))
    if deployment is None:
        return unknown_error(job, name)
    if len(job.spec.deployments) == 1:
        return ErrorInfo(
            Code.FAILED_PRECONDITION,
            f"{name!r} is the only deployment of job {job.key}",
            field="deployment",
            remedy="finish the job instead",
        )
    aborted = ErrorInfo(Code.ABORTED, f"deployment {deployment.key} was deleted")
    operations.abort_all(step, deployment, aborted, queue_ends=True)
    step.notify("deployment deleted", "on request", deployment.name)
    _retain_versions(step, job, deployment)
    retained = {version.rpartition(".")[0] for version in job.versions.retained}
    is_forgotten = deployment.name not in retained
    wpgs.stop(step, deployment, forget=is_forgotten)
    shrink_record(step, deployment)
    job.earlier.record_incarnation(name, deployment.wpg.incarnation + 1)
    devices.note_ready(step, deployment, is_ready=False)
    job.have([spec for spec in job.spec.deployments if spec.name != name])
    step.state.drop_deployment(deployment.name)
    retention.release_versions(step, job)
    # Nobody will publish the operations that others still wait for.
    prefix = f"{deployment.name}."
    for key in [key for key in step.state.waiters if key.startswith(prefix)]:
        operations.wake_waiters(step, key)
    for sibling in step.deployments_of(job):
        step.touch(sibling)  # a sync may have waited for its rebuild
    step.job_changed(str(job.key))
    assignment.repin(step, job)
    return None


def unknown_error(job: Job, name: str) -> ErrorInfo:
    names = ", ".join(spec.name for spec in job.spec.deployments)
    return ErrorInfo(
        Code.NOT_FOUND,
        f"job {job.key} has no deployment {name!r}",
        field="deployment",
        remedy=f"use one of {names}",
    )


def _retain_versions(step: Step, job: Job, policy: Deployment) -> None:
    """Record which nodes have the weights versions of a policy that others need."""
    if not policy.wpg.assignments:
        return
    in_use = retention.versions_in_use(step, job, but=policy)
    for version in job.versions.published:
        if version.policy == policy.key and version in in_use:
            job.versions.retain(str(version), retention.nodes_of(step, version))


def end_alone(step: Step, name: str, error: ErrorInfo) -> None:
    """End a deployment that was added to a running job and cannot start.

    Its record stays, STOPPED, so that its error can be read.
    """
    deployment = step.state.deployments[name]
    if step.job(deployment.key.job_key).state in JOB_ENDED:
        return
    step.notify("deployment cannot start", error.message, name)
    operations.abort_all(step, deployment, error)
    wpgs.stop(step, deployment)
    deployment.wpg.failed(error)
    deployment.wpg.put_on([])
    assignment.repin(step, step.job(deployment.key.job_key))


def shrink_record(step: Step, deployment: Deployment) -> None:
    """Reduce the record of an ended deployment to the fields that can still be queried."""
    seals.delete_operations(
        step, deployment, [mutation.seq for mutation in deployment.durability.history]
    )
    job = step.job(deployment.key.job_key)
    job.earlier.record_seq(deployment.key.deployment, deployment.last_seq)
    deployment.queue.end()
    deployment.durability.end()
    deployment.spec = replace(deployment.spec, model=ModelSpec({}))
    step.state.drop_switch(deployment.name)
