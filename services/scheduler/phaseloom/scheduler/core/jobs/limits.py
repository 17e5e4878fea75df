"""Limits of a tenant: jobs, deployments, ranks, and names that are kept."""

from __future__ import annotations

from collections.abc import Sequence

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.common.contract.tenantlimits import limit_exceeded
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JOB_ENDED

_END_A_JOB = "finish a job, or delete a deployment"


def refusal(
    step: Step, key: JobKey, old: Job | None, specs: Sequence[DeploymentSpec], field: str
) -> ErrorInfo | None:
    """Return the bound that these deployments exceed. None: their tenant may have them.

    Args: key: the job to which they belong.
          old: the record of that name: a running job that they join, an ended one, or None.
          field: the field of the request that has the deployments.
    """
    if step.state.config is None:
        return None
    jobs = [job for job in step.state.jobs.values() if job.key.tenant == key.tenant]
    running = [job for job in jobs if job.state not in JOB_ENDED]
    present = [spec for job in running for spec in job.spec.deployments]
    joins = old is not None and old.state not in JOB_ENDED
    known = {*old.earlier.last_seqs, *(d.name for d in old.spec.deployments)} if old else set()
    names = known | {spec.name for spec in specs}
    num_ranks = sum(spec.layout.num_ranks for spec in (*present, *specs))
    num_deployments = len(present) + len(specs)
    # Restarts of a job with the same deployments need no name and are always possible.
    for bound, label, used, remedy, at in (
        ("max_jobs", "jobs", len(running) + (not joins), _END_A_JOB, "job"),
        ("max_deployments", "deployments", num_deployments, _END_A_JOB, field),
        ("max_ranks", "ranks", num_ranks, _END_A_JOB, field),
        ("max_names", "names of jobs", len(jobs) + 1 if old is None else 0, _REUSE, "job"),
        ("max_names", "names of deployments", len(names - known) and len(names), _REUSE, field),
    ):
        limit = step.limit_of(key.tenant, bound)
        if limit and used > limit:
            return limit_exceeded(bound, f"{label} would exist", used, limit, remedy, field=at).info
    return None


_REUSE = "use the name of one that has ended"
