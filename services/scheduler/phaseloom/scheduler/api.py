"""The job API: submit, status, finish. Calls become events of the log; the core answers."""

from __future__ import annotations

import uuid
from typing import Any

from phaseloom.common.api import ApiHandler
from phaseloom.common.errors import CallerError, Code
from phaseloom.common.ids import JobKey, check_name
from phaseloom.common.messages import (
    DeploymentSpec,
    JobFinished,
    JobRequest,
    JobStatus,
    JobSubmitted,
    SubmitJob,
)
from phaseloom.scheduler.core import jobs
from phaseloom.scheduler.core.step import Step
from phaseloom.scheduler.shell import Shell


def check_job(request: SubmitJob) -> None:
    """Raises: CallerError: names the field that is wrong."""
    check_name(request.job, "job")
    specs = request.spec.deployments
    if not specs:
        raise CallerError(
            "a job needs at least one deployment",
            field="spec.deployments",
            remedy="describe the models that it runs",
        )
    for index, spec in enumerate(specs):
        _check_deployment(spec, f"spec.deployments[{index}]")
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise CallerError("two deployments have the same name", field="spec.deployments")
    if request.spec.slo != 0 and not 1 <= request.spec.slo <= 1000:
        raise CallerError(
            f"an SLO of {request.spec.slo} is not a slowdown over running alone",
            field="spec.slo",
            remedy="give a factor of at least 1, or 0 for best effort",
        )


def _check_deployment(spec: DeploymentSpec, field: str) -> None:
    check_name(spec.name, f"{field}.name")
    check_name(spec.pool, f"{field}.pool")
    check_name(spec.backend, f"{field}.backend")


def job_api(shell: Shell) -> dict[str, tuple[Any, ApiHandler]]:
    """The endpoints of `serve_api`."""

    async def submit(tenant: str, request: SubmitJob) -> JobStatus:
        check_job(request)
        id = uuid.uuid4().hex
        return await shell.request(JobSubmitted(JobKey(tenant, request.job), request.spec, id), id)

    async def finish(tenant: str, request: JobRequest) -> JobStatus:
        check_name(request.job, "job")
        id = uuid.uuid4().hex
        event = JobFinished(JobKey(tenant, request.job), id, failed=request.failed)
        return await shell.request(event, id)

    async def status(tenant: str, request: JobRequest) -> JobStatus:
        check_name(request.job, "job")
        key = JobKey(tenant, request.job)
        state = shell.core.state
        job = state.jobs.get(str(key))
        if job is None:
            raise CallerError(f"job {key} does not exist", code=Code.NOT_FOUND, field="job")
        return jobs.status(Step(state, state.sequence, state.now_s), job)

    return {
        "job.submit": (SubmitJob, submit),
        "job.finish": (JobRequest, finish),
        "job.status": (JobRequest, status),
    }
