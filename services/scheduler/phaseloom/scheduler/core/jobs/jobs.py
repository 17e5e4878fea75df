"""Jobs from submission to their end: placed on nodes, active, drained, ended."""

from __future__ import annotations

from msgspec.structs import replace

from phaseloom.common.contract import events
from phaseloom.common.contract.api import DeploymentStatus, JobStatus
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.specs import ModelSpec
from phaseloom.scheduler.core.dispatch import shares
from phaseloom.scheduler.core.durability import retention
from phaseloom.scheduler.core.jobs import deployments, limits, rollback
from phaseloom.scheduler.core.operations import operations
from phaseloom.scheduler.core.placement import assignment, evacuation
from phaseloom.scheduler.core.planning import admission, groups
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.state.cluster import Decision, Member, Placed, Refused, Waits
from phaseloom.scheduler.core.state.job import Job, run_name
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import JOB_ENDED, JobEvent, JobState, WpgState
from phaseloom.scheduler.core.wpgs import moves, wpgs

MIN_KEPT_S = 600.0
"""Minimum time for which an ended job is kept.

For this long the bus treats messages of a later job with the same ids as duplicates.
"""


def submit(step: Step, event: events.JobSubmitted) -> None:
    name = str(event.job)
    old = step.state.jobs.get(name)
    if old is not None and old.state not in JOB_ENDED:
        error = ErrorInfo(
            Code.ALREADY_EXISTS,
            f"job {name} already exists, in state {old.state}",
            field="job",
            remedy=f"choose another name, attach to it, or end it: `phaseloom cancel {name}`",
        )
        step.emit(outputs.Answer(event.request, error=error))
        return
    deployments_field = admission.DEPLOYMENTS
    exceeded = limits.refusal(step, event.job, old, event.spec.deployments, deployments_field)
    if exceeded is not None:
        step.emit(outputs.Answer(event.request, error=exceeded))
        return
    job = Job(
        key=event.job,
        spec=event.spec,
        submitted_s=step.now_s,
        submitted_sequence=step.sequence,
        run=run_name(step.now_s, old.run if old is not None else ""),
    )
    if old is not None:
        _inherit_name(step, job, old)
    step.state.jobs[name] = job
    step.job_changed(name)
    for spec in event.spec.deployments:
        deployments.add(step, job, spec)
    step.state.cluster.waiting.append(groups.member_of(job.key, event.spec, step.now_s))
    _place_waiting(step, name)
    step.emit(outputs.Answer(event.request, status=status(step, job)))


def _inherit_name(step: Step, job: Job, old: Job) -> None:
    """Take over the name of an ended job.

    Outcomes, seals and late messages of that job may still exist. So sequence numbers and
    incarnations continue from its last ones, and its sessions are over.
    """
    job.controller.succeed(old.controller.session)
    job.earlier.succeed(old.earlier)
    for deployment in step.deployments_of(job):
        name = deployment.key.deployment
        job.earlier.raise_seq(name, deployment.last_seq)
        job.earlier.record_incarnation(name, deployment.wpg.incarnation + 1)
        step.state.drop_deployment(deployment.name)
    step.emit(outputs.DropCheckpoint(job.key))


def forget(step: Step, name: str, submitted_sequence: int) -> None:
    """Drop a job that ended long ago, unless its name is in use again."""
    job = step.state.jobs.get(name)
    if job is None or job.submitted_sequence != submitted_sequence:
        return
    names = {*job.earlier.last_seqs, *(spec.name for spec in job.spec.deployments)}
    for deployment in step.deployments_of(job):
        step.state.drop_deployment(deployment.name)
    del step.state.jobs[name]
    step.emit(outputs.ForgetJob(job.key, sorted(names)))


def place_waiting(step: Step) -> None:
    """Give free room first to deployments on nodes that are being vacated, then to waiting jobs."""
    evacuation.go_on(step)
    _place_waiting(step)


def _place_waiting(step: Step, only: str = "") -> None:
    """Place the waiting jobs that have room now, oldest first.

    Args: only: place only this job, because nothing has changed for the others.
    """
    cluster = step.state.cluster
    if not cluster.waiting:
        return  # also before the first configuration, when there is no policy to ask
    may_overtake = assignment.policy_of(step).may_overtake
    blocked: set[str] = set()
    for member in list(cluster.waiting):
        job = step.state.jobs[member.job]
        shared = sorted(blocked & member.needs.keys())
        if only in ("", member.job):
            if shared:
                reason = f"an older job waits for pool {', '.join(shared)} and goes first"
                _apply_decision(step, job, member, Waits(reason))
            else:
                _apply_decision(step, job, member, assignment.seek(step, job, member))
        # A waiting job holds back later ones of its pools, unless all of these are blocked already.
        is_first = not blocked.issuperset(member.needs)
        if job.state is JobState.SUBMITTED and not may_overtake and is_first:
            blocked |= admission.blocked_pools(cluster, member)


def _apply_decision(step: Step, job: Job, member: Member, decision: Decision) -> None:
    """Carry out a placement decision for a waiting job."""
    match decision:
        case Placed():
            job.failed(None)
            group = assignment.put(step, job, member, decision)
            step.advance_job(job, JobEvent.PLACED_ALONE if group.is_closed else JobEvent.PLACED)
        case Refused(error):
            _fail(step, job, error)
        case Waits(reason) if not job.spec.may_wait:
            _fail(step, job, _no_room_error(step, reason))
        case Waits(reason):
            _keep_waiting(step, job, reason)


def _keep_waiting(step: Step, job: Job, reason: str) -> None:
    error = ErrorInfo(
        Code.UNAVAILABLE,
        f"the job is waiting for nodes: {reason}",
        field="spec.deployments",
        remedy="start more nodes, or finish a job; "
        f"known pools: {assignment.known_pools(step.state.cluster)}",
    )
    # Publish the status only if the reason has changed: this runs whenever room may be free.
    if job.error != error:
        job.failed(error)
        step.job_changed(str(job.key))


def _no_room_error(step: Step, reason: str) -> ErrorInfo:
    return ErrorInfo(
        Code.RESOURCE_EXHAUSTED,
        f"there are no nodes for the job now, and may_wait is false: {reason}",
        field="spec.may_wait",
        remedy="set may_wait, try again when a job has ended, or start more nodes; "
        f"known pools: {assignment.known_pools(step.state.cluster)}",
    )


def fall_back(step: Step, name: str, error: ErrorInfo) -> None:
    """Roll a job back to its last checkpoint, or fail it if it has none."""
    job = step.state.jobs[name]
    if rollback.is_possible(step, job):
        rollback.roll_back(step, job, error)
    elif name not in step.follow_ups.get(FollowUp.FAIL_JOB, {}):
        step.follow_up(FollowUp.FAIL_JOB, name, error)


def fail(step: Step, name: str, error: ErrorInfo) -> None:
    """End a job that cannot continue."""
    _fail(step, step.state.jobs[name], error)


def review(step: Step, name: str) -> None:
    """End a job that has drained, or make it active when all of its deployments are up."""
    job = step.state.jobs[name]
    _end_drained(step, job)
    up_or_gone = (WpgState.READY, WpgState.STOPPED)
    ready = all(d.wpg.state in up_or_gone for d in step.deployments_of(job))
    if job.state in (JobState.PROFILING, JobState.PLACED) and ready:
        step.advance_job(job, JobEvent.UP)
    has_new_session = job.controller.session > job.controller.ended_session
    if job.state is JobState.ROLLED_BACK and ready and has_new_session:
        step.advance_job(job, JobEvent.ATTACHED)
        job.failed(None)


def publish_status(step: Step, name: str) -> None:
    """Publish the status of a job, without its open operations, which may be thousands."""
    job = step.state.jobs[name]
    step.emit(outputs.PutView(job.key, status(step, job, lists_operations=False)))


def finish(step: Step, event: events.JobFinished) -> None:
    job = step.state.jobs.get(str(event.job))
    if job is not None and job.state not in JOB_ENDED:
        job.failed(None)
        if event.cancelled:
            _end(step, job, JobEvent.CANCELLED, "a person cancelled it")
        elif event.failed:
            _end(step, job, JobEvent.FAILED, "the controller gave up")
        else:
            _end(step, job, JobEvent.FINISHED, "the controller finished")
    _answer(step, event.request, job or event.job)


def drain(step: Step, event: events.DrainRequested) -> None:
    job = step.state.jobs.get(str(event.job))
    error = None
    if job is not None and job.state not in JOB_ENDED:
        error = _drain(step, job)
        _end_drained(step, job)
    _answer(step, event.request, job or event.job, error)


def _end_drained(step: Step, job: Job) -> None:
    if job.state is not JobState.DRAINING:
        return
    if not any(deployment.queue.has_open for deployment in step.deployments_of(job)):
        job.failed(None)
        _end(step, job, JobEvent.FINISHED, "it was drained")


def _drain(step: Step, job: Job) -> ErrorInfo | None:
    """Start to drain a job: it accepts nothing new, and open operations run to their end.

    An operation that comes after one that was never published would wait forever, so it ends at
    once. Idempotent.

    Returns: the error if the job cannot be drained.
    """
    if job.state is JobState.DRAINING:
        return None
    if job.state is JobState.SUBMITTED:
        return ErrorInfo(
            Code.FAILED_PRECONDITION,
            f"job {job.key} has no nodes yet, so its operations cannot run to their end",
            field="job",
            remedy="cancel it, or wait until it is placed",
        )
    step.advance_job(job, JobEvent.DRAIN)
    step.notify("job draining", "on request", str(job.key))
    for deployment in step.deployments_of(job):
        open_ops = [str(op.key) for op in deployment.queue.every if not op.has_ended]
        operations.look_again_at(step, open_ops)
    return None


def create_deployment(step: Step, event: events.DeploymentCreated) -> None:
    job = step.state.jobs.get(str(event.job))
    error = None
    if job is not None:
        if job.state is JobState.DRAINING:
            error = operations.draining_error(job)
        else:
            error = _ended_error(job) or deployments.create(step, job, event.spec)
        if job.state is JobState.SUBMITTED:
            _place_waiting(step, str(job.key))
    _answer(step, event.request, job or event.job, error)


def delete_deployment(step: Step, event: events.DeploymentDeleted) -> None:
    key = event.deployment
    job = step.state.jobs.get(str(key.job_key))
    error = None
    if job is not None:
        error = _ended_error(job) or deployments.delete(step, job, key.deployment)
    _answer(step, event.request, job or key.job_key, error)


def _ended_error(job: Job) -> ErrorInfo | None:
    if job.state not in JOB_ENDED:
        return None
    return ErrorInfo(
        Code.FAILED_PRECONDITION,
        f"job {job.key} has ended",
        field="job",
        remedy="submit a new job",
    )


def _answer(step: Step, request: str, job: Job | JobKey, error: ErrorInfo | None = None) -> None:
    """Answer a request about a job.

    Args: job: the job, or its key if it does not exist.
    """
    if isinstance(job, JobKey):
        message = f"job {job} does not exist"
        error = ErrorInfo(Code.NOT_FOUND, message, field="job", remedy="see `phaseloom jobs`")
    if error is not None or isinstance(job, JobKey):
        step.emit(outputs.Answer(request, error=error))
    else:
        step.emit(outputs.Answer(request, status=status(step, job)))


def _fail(step: Step, job: Job, error: ErrorInfo) -> None:
    """End a job that could never run (REJECTED) or can no longer run (FAILED)."""
    if job.state in JOB_ENDED:
        return
    job.failed(error)
    never_ran = job.state in (JobState.SUBMITTED, JobState.PROFILING, JobState.PLACED)
    _end(step, job, JobEvent.REJECTED if never_ran else JobEvent.FAILED, error.message)


def _end(step: Step, job: Job, event: JobEvent, reason: str) -> None:
    step.advance_job(job, event)
    job.ended(step.now_s)
    if job.state is JobState.CANCELLED:
        step.notify("job cancelled", reason, str(job.key))
    else:
        step.notify(f"job {job.state}", reason, str(job.key))
    error = job.error or ErrorInfo(Code.ABORTED, f"job {job.key} has ended: {reason}")
    for deployment in step.deployments_of(job):
        operations.abort_all(step, deployment, error, queue_ends=True)
        wpgs.stop(step, deployment)
        deployments.shrink_record(step, deployment)
    retention.release_all(step, job)
    step.state.drop_trace(str(job.key))
    operations.forget_waiters(step, job.key)
    # An ended job is kept for `outcome_retention_s`, but its model specs are no longer needed.
    lean = [replace(spec, model=ModelSpec({})) for spec in job.spec.deployments]
    job.have(lean)
    kept_s = max(step.config.outcome_retention_s, MIN_KEPT_S)
    step.set_timer(f"forget/{job.key}/{job.submitted_sequence}", step.now_s + kept_s)
    assignment.release(step, job)


def status(step: Step, job: Job, *, lists_operations: bool = True) -> JobStatus:
    return JobStatus(
        job=job.key.job,
        state=job.state,
        error=job.error,
        deployments=[
            DeploymentStatus(
                name=d.key.deployment,
                pool=d.spec.pool,
                node="" if d.wpg.state is WpgState.STOPPED else d.node or "",
                state=d.wpg.state,
                incarnation=d.wpg.incarnation,
                next_seq=d.queue.next_seq,
                open_operations=d.queue.open_slots if lists_operations else [],
                error=d.wpg.error,
                moving=moves.describe(d),
            )
            for d in step.deployments_of(job)
        ],
        placement=assignment.describe(step, job),
        device_s=dict(job.device_s),
        slower=shares.describe_corrections(step, job),
        run=job.run,
        submitted_s=job.submitted_s,
        ended_s=job.ended_s,
        config=job.spec.config,
        tags=job.spec.tags,
    )
