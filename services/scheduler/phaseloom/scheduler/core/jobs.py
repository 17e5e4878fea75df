"""The life of jobs: submitted, placed on nodes, active, ended."""

from __future__ import annotations

from msgspec.structs import replace

from phaseloom.common.errors import Code, ErrorInfo
from phaseloom.common.ids import DeploymentKey
from phaseloom.common.messages import (
    DeploymentStatus,
    JobFinished,
    JobStatus,
    JobSubmitted,
    ModelSpec,
    ReleaseVersions,
)
from phaseloom.scheduler.core import operations, outputs, placement, rollback, seals, wpgs
from phaseloom.scheduler.core.state import (
    JOB_ENDED,
    Deployment,
    Job,
    JobState,
    Node,
    WpgState,
)
from phaseloom.scheduler.core.step import Step

MIN_KEPT_S = 600.0
"""Of an ended job: for as long the bus takes another's messages of the same ids for copies."""


def submit(step: Step, event: JobSubmitted) -> None:
    name = str(event.job)
    old = step.state.jobs.get(name)
    if old is not None and old.state not in JOB_ENDED:
        error = ErrorInfo(
            Code.ALREADY_EXISTS,
            f"job {name} exists, in state {old.state}",
            field="job",
            remedy="choose another name, or attach to it",
        )
        step.emit(outputs.Answer(event.request, error=error))
        return
    job = Job(
        key=event.job,
        spec=event.spec,
        submitted_s=step.now_s,
        submitted_sequence=step.sequence,
    )
    if old is not None:
        _succeed(step, job, old)
    step.state.jobs[name] = job
    step.changed_jobs.add(name)
    for spec in event.spec.deployments:
        key = DeploymentKey(event.job.tenant, event.job.job, spec.name)
        last_seq = job.last_seqs.get(spec.name, 0)
        step.state.deployments[str(key)] = Deployment(
            key=key,
            spec=spec,
            incarnation=job.incarnations.get(spec.name, 0),
            next_seq=last_seq + 1,
            applied=last_seq,
            origin_seq=last_seq,
        )
    step.state.waiting_jobs.append(name)
    _try_place(step, job)
    step.emit(outputs.Answer(event.request, status=status(step, job)))


def _succeed(step: Step, job: Job, old: Job) -> None:
    """The name was an ended job's, of which outcomes, seals and late messages may still be about:
    sequence numbers and incarnations go on from its last ones, and its sessions are over."""
    job.session = job.ended_session = old.session
    job.last_seqs = dict(old.last_seqs)
    job.incarnations = dict(old.incarnations)
    for deployment in step.deployments_of(job.key):
        name = deployment.key.deployment
        job.last_seqs[name] = max(deployment.last_seq, job.last_seqs.get(name, 0))
        job.incarnations[name] = deployment.incarnation + 1
        del step.state.deployments[deployment.name]
    for spec in job.spec.deployments:
        key = str(DeploymentKey(job.key.tenant, job.key.job, spec.name))
        for stopping in step.state.stopping.values():
            stopping.pop(key, None)  # the next seal replaces what is left of the old ones
    step.emit(outputs.DropCheckpoint(job.key))


def forget(step: Step, name: str, submitted_sequence: int) -> None:
    """A job ended so long ago that nobody asks for it any more, unless its name is used again."""
    job = step.state.jobs.get(name)
    if job is None or job.submitted_sequence != submitted_sequence:
        return
    deployments = step.deployments_of(job.key)
    for deployment in deployments:
        del step.state.deployments[deployment.name]
    del step.state.jobs[name]
    names = {*job.last_seqs, *(d.key.deployment for d in deployments)}
    step.emit(outputs.ForgetJob(job.key, sorted(names)))


def _place_waiting(step: Step) -> None:
    """Nodes or room have come: place what waits, the oldest first."""
    for name in list(step.state.waiting_jobs):
        _try_place(step, step.state.jobs[name])


def _try_place(step: Step, job: Job) -> None:
    policy = placement.POLICIES[step.config.placement]
    chosen: dict[str, Node] = {}
    for pool in sorted({spec.pool for spec in job.spec.deployments}):
        of_pool = [n for n in step.state.nodes.values() if n.pool == pool]
        num_devices = max(s.layout.num_ranks for s in job.spec.deployments if s.pool == pool)
        nodes = [n for n in of_pool if n.is_up and len(n.devices) >= num_devices]
        most = max((len(n.devices) for n in of_pool), default=num_devices)
        if most < num_devices:
            _fail(step, job, _too_few_devices(pool, num_devices, most))
            return
        if not nodes:
            _wait_for_pool(step, job, pool)
            return
        views = [placement.NodeView(n.node, _num_jobs(step, n)) for n in nodes]
        node = policy(sorted(views, key=lambda view: view.node))
        if node is None:
            return
        chosen[pool] = step.state.nodes[node.node]
    step.move_job(job, JobState.PLACED)
    step.state.waiting_jobs.remove(str(job.key))
    job.error = None
    for deployment in step.deployments_of(job.key):
        host = chosen[deployment.spec.pool]
        by_load = sorted(range(len(host.devices)), key=lambda i: (len(host.devices[i].placed), i))
        wpgs.place(step, deployment, host.node, sorted(by_load[: deployment.spec.layout.num_ranks]))


def _too_few_devices(pool: str, num_devices: int, most: int) -> ErrorInfo:
    return ErrorInfo(
        Code.RESOURCE_EXHAUSTED,
        f"a deployment of it takes {num_devices} devices of one node of pool {pool!r}, "
        f"where no node has more than {most}",
        field="spec.deployments",
        remedy=f"lay it out over at most {most} ranks, or start a node with {num_devices} devices",
    )


def _wait_for_pool(step: Step, job: Job, pool: str) -> None:
    known = sorted({node.pool for node in step.state.nodes.values()})
    is_known = pool in known
    what = "every node of it is down" if is_known else "no node has ever declared it"
    error = ErrorInfo(
        Code.UNAVAILABLE,
        f"the job waits for pool {pool!r}: {what}",
        field="spec.deployments",
        remedy=f"start a node of it, or finish the job; known pools: {', '.join(known) or 'none'}",
    )
    if job.error != error:
        job.error = error
        step.changed_jobs.add(str(job.key))


def _num_jobs(step: Step, node: Node) -> int:
    names = [name for device in node.devices for name in device.placed]
    return len({step.state.deployments[name].key.job_key for name in names})


def settle(step: Step) -> None:
    """What the step's event means for jobs: ready, doomed, or a place at last."""
    for name in sorted(step.unrecoverable):
        job = step.state.jobs[name]
        if rollback.is_possible(step, job):
            rollback.roll_back(step, job, step.unrecoverable[name])
        else:
            step.doomed.setdefault(name, step.unrecoverable[name])
    for name in sorted(step.doomed):
        _fail(step, step.state.jobs[name], step.doomed[name])
    for name in sorted(step.changed_jobs):
        job = step.state.jobs[name]
        ready = all(d.state is WpgState.READY for d in step.deployments_of(job.key))
        if job.state is JobState.PLACED and ready:
            step.move_job(job, JobState.ACTIVE)
        has_new_session = job.session > job.ended_session
        if job.state is JobState.ROLLED_BACK and ready and has_new_session:
            step.move_job(job, JobState.ACTIVE)
            job.error = None
    if step.has_new_room:
        _place_waiting(step)


def finish(step: Step, event: JobFinished) -> None:
    name = str(event.job)
    job = step.state.jobs.get(name)
    if job is None:
        error = ErrorInfo(Code.NOT_FOUND, f"job {name} does not exist", field="job")
        step.emit(outputs.Answer(event.request, error=error))
        return
    if job.state not in JOB_ENDED:
        job.error = None
        reason = "the controller gave up" if event.failed else "the controller finished"
        _end(step, job, JobState.FAILED if event.failed else JobState.DONE, reason)
    step.emit(outputs.Answer(event.request, status=status(step, job)))


def _fail(step: Step, job: Job, error: ErrorInfo) -> None:
    """It cannot run: never could (REJECTED), or cannot any more (FAILED)."""
    if job.state in JOB_ENDED:
        return
    job.error = error
    never_ran = job.state in (JobState.SUBMITTED, JobState.PLACED)
    _end(step, job, JobState.REJECTED if never_ran else JobState.FAILED, error.message)


def _end(step: Step, job: Job, state: JobState, reason: str) -> None:
    if job.state is JobState.SUBMITTED:
        step.state.waiting_jobs.remove(str(job.key))
    step.move_job(job, state)
    step.tell(f"job {state}", reason, str(job.key))
    error = job.error or ErrorInfo(Code.ABORTED, f"job {job.key} has ended: {reason}")
    nodes = wpgs.nodes_of(step, job.key)
    for deployment in step.deployments_of(job.key):
        operations.abort_all(step, deployment, error)
        wpgs.stop(step, deployment)
        _forget(step, deployment)
    if job.published:
        for node in nodes:
            step.send(ReleaseVersions, node, versions=job.published)
        job.published = []
    step.state.traces.pop(str(job.key), None)
    lean = [replace(spec, model=ModelSpec({})) for spec in job.spec.deployments]
    job.spec = replace(job.spec, deployments=lean)
    kept_s = max(step.config.outcome_retention_s, MIN_KEPT_S)
    step.set_timer(f"forget/{job.key}/{job.submitted_sequence}", step.now_s + kept_s)
    step.has_new_room = True


def _forget(step: Step, deployment: Deployment) -> None:
    """What an ended job leaves on the books is small, whatever it was."""
    seals.delete(step, deployment, [mutation.seq for mutation in deployment.history])
    for seq in deployment.operations:
        step.state.waiters.pop(f"{deployment.name}.{seq}", None)
    job = step.job(deployment.key.job_key)
    job.last_seqs[deployment.key.deployment] = deployment.last_seq
    deployment.operations = {}
    deployment.history = []
    deployment.not_completed = []
    deployment.missing_gradients = []
    deployment.queued_syncs = {}
    deployment.spec = replace(deployment.spec, model=ModelSpec({}))
    step.state.switch_s.pop(deployment.name, None)


def status(step: Step, job: Job) -> JobStatus:
    return JobStatus(
        job=job.key.job,
        state=job.state,
        error=job.error,
        deployments=[
            DeploymentStatus(
                name=d.key.deployment,
                pool=d.spec.pool,
                node=d.node or "",
                state=d.state,
                incarnation=d.incarnation,
                next_seq=d.next_seq,
                open_operations=[str(s) for s in sorted(d.operations) if not d.is_done(s)]
                + sorted(d.unordered),
                error=d.error,
            )
            for d in step.deployments_of(job.key)
        ],
    )
