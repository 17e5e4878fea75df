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
    SessionOpened,
)
from phaseloom.scheduler.core import operations, outputs, placement, seals, wpgs
from phaseloom.scheduler.core.state import (
    JOB_ENDED,
    Deployment,
    Job,
    JobState,
    Node,
    WpgState,
)
from phaseloom.scheduler.core.step import Step


def submit(step: Step, event: JobSubmitted) -> None:
    name = str(event.job)
    if name in step.state.jobs:
        error = ErrorInfo(
            Code.ALREADY_EXISTS,
            f"job {name} exists, in state {step.state.jobs[name].state}",
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
    step.state.jobs[name] = job
    step.changed_jobs.add(name)
    for spec in event.spec.deployments:
        key = DeploymentKey(event.job.tenant, event.job.job, spec.name)
        step.state.deployments[str(key)] = Deployment(key=key, spec=spec)
    _try_place(step, job)
    step.emit(outputs.Answer(event.request, status=status(step, job)))


def open_session(step: Step, event: SessionOpened) -> None:
    """Its router has found the job; the order of two attaches in the log may differ from theirs."""
    job = step.state.jobs.get(str(event.job))
    if job is not None:
        job.session = max(job.session, event.session)


def _place_waiting(step: Step) -> None:
    """Nodes or room have come: place what waits, the oldest first."""
    waiting = [job for job in step.state.jobs.values() if job.state is JobState.SUBMITTED]
    for job in sorted(waiting, key=lambda job: job.submitted_sequence):
        _try_place(step, job)


def _try_place(step: Step, job: Job) -> None:
    policy = placement.POLICIES[step.config.placement]
    chosen: dict[str, Node] = {}
    for pool in sorted({spec.pool for spec in job.spec.deployments}):
        nodes = [n for n in step.state.nodes.values() if n.pool == pool and n.is_up]
        if not nodes:
            return
        views = [placement.NodeView(n.node, _num_jobs(step, n)) for n in nodes]
        node = policy(sorted(views, key=lambda view: view.node))
        if node is None:
            return
        chosen[pool] = step.state.nodes[node.node]
    step.move_job(job, JobState.PLACED)
    for deployment in step.deployments_of(job.key):
        host = chosen[deployment.spec.pool]
        device = min(range(len(host.devices)), key=lambda i: (len(host.devices[i].placed), i))
        wpgs.place(step, deployment, host.node, device)


def _num_jobs(step: Step, node: Node) -> int:
    names = [name for device in node.devices for name in device.placed]
    return len({step.state.deployments[name].key.job_key for name in names})


def settle(step: Step) -> None:
    """What the step's event means for jobs: ready, doomed, or a place at last."""
    for name in sorted(step.doomed):
        _fail(step, step.state.jobs[name], step.doomed[name])
    for name in sorted(step.changed_jobs):
        job = step.state.jobs[name]
        ready = all(d.state is WpgState.READY for d in step.deployments_of(job.key))
        if job.state is JobState.PLACED and ready:
            step.move_job(job, JobState.ACTIVE)
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
        reason = "the controller gave up" if event.failed else "the controller finished"
        _end(step, job, JobState.FAILED if event.failed else JobState.DONE, reason)
    step.emit(outputs.Answer(event.request, status=status(step, job)))


def _fail(step: Step, job: Job, error: ErrorInfo) -> None:
    """It cannot run: never could (REJECTED), or cannot any more (FAILED)."""
    if job.state in JOB_ENDED:
        return
    job.error = error
    never_ran = job.state is not JobState.ACTIVE
    _end(step, job, JobState.REJECTED if never_ran else JobState.FAILED, error.message)


def _end(step: Step, job: Job, state: JobState, reason: str) -> None:
    step.move_job(job, state)
    step.tell(f"job {state}", reason, str(job.key))
    error = job.error or ErrorInfo(Code.ABORTED, f"job {job.key} has ended: {reason}")
    nodes = sorted({d.node for d in step.deployments_of(job.key) if d.node is not None})
    for deployment in step.deployments_of(job.key):
        operations.abort_all(step, deployment, error)
        wpgs.stop(step, deployment)
        _forget(step, deployment)
    if job.published:
        for node in nodes:
            step.send(ReleaseVersions, step.node(node), versions=job.published)
        job.published = []
    step.state.traces.pop(str(job.key), None)
    lean = [replace(spec, model=ModelSpec({})) for spec in job.spec.deployments]
    job.spec = replace(job.spec, deployments=lean)
    step.has_new_room = True


def _forget(step: Step, deployment: Deployment) -> None:
    """What an ended job leaves on the books is small, whatever it was."""
    seals.delete(step, deployment, [mutation.seq for mutation in deployment.history])
    for seq in deployment.operations:
        step.state.waiters.pop(f"{deployment.name}.{seq}", None)
    deployment.operations = {}
    deployment.history = []
    deployment.not_completed = []
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
                open_operations=[str(seq) for seq in sorted(d.operations)] + sorted(d.unordered),
                error=d.error,
            )
            for d in step.deployments_of(job.key)
        ],
    )
