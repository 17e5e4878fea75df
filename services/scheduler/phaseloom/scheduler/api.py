"""The job API (jobs, deployments, phases, cancel, explain) and the node API for operators.

Calls that change something append an event to the log. The others read the core's state.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from phaseloom.common.contract import api, events
from phaseloom.common.contract.checks import check_labels, check_range
from phaseloom.common.contract.codec import encode
from phaseloom.common.contract.configcheck import check_config
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    ResourceError,
    session_superseded,
    to_exception,
)
from phaseloom.common.contract.ids import (
    DeploymentKey,
    JobKey,
    NodeId,
    OperationKey,
    check_name,
    parse_operation_key,
)
from phaseloom.common.contract.operations import Completion
from phaseloom.common.contract.specs import Cycle, DeploymentSpec, JobSpec, Segment
from phaseloom.common.transport.services import ApiHandler
from phaseloom.scheduler.core.dispatch import explain
from phaseloom.scheduler.core.jobs import jobs
from phaseloom.scheduler.core.placement import evacuation
from phaseloom.scheduler.core.placement.assignment import known_pools
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JOB_ENDED, JobState
from phaseloom.scheduler.registered import ModelOf, pin_deployment, pin_job
from phaseloom.scheduler.shell import Shell

OutcomeOf = Callable[[OperationKey], Awaitable[Completion | None]]
"""Look up the stored outcome of an operation. None: none is stored."""

_JOINING_S = 10.0
"""How long after a new node the mesh counts as starting, so that another pool may still come."""
_MAX_RANKS = 4096
_MAX_SEGMENTS = 1024
_MAX_ADAPTERS = 1024
_MAX_BYTES = 2**50
_ROUNDING = 1e-9
MAX_SPEC_BYTES = 2**20
"""Maximum size of a job's spec, as MessagePack. Every command that starts a WPG includes a part of
it."""
MAX_REQUEST_BYTES = dict.fromkeys(("job.submit", "deployment.create"), 2 * MAX_SPEC_BYTES)
"""Maximum size of requests with a spec, which needs more bytes in JSON."""


def check_job(request: api.SubmitJob) -> None:
    """Check a job's name and spec.

    Raises: CallerError: names the invalid field.
    """
    check_name(request.job, "job")
    specs = request.spec.deployments
    if not specs:
        raise CallerError(
            "a job needs at least one deployment",
            field="spec.deployments",
            remedy="describe each model that the job runs",
        )
    for index, spec in enumerate(specs):
        _check_deployment(spec, f"spec.deployments[{index}]")
    _check_size(request.spec)
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise CallerError(
            "deployments of a job must have different names",
            field="spec.deployments",
            remedy="rename one of the deployments with the same name",
        )
    if request.spec.slo != 0 and not 1 <= request.spec.slo <= 1000:
        raise CallerError(
            f"slo must be 0 or from 1 to 1000, got {request.spec.slo}",
            field="spec.slo",
            remedy="give the allowed slowdown relative to running alone, or 0 for best effort",
        )
    if not 0 <= request.spec.duration_s < math.inf:
        raise CallerError(
            f"duration_s must be finite and at least 0, got {request.spec.duration_s}",
            field="spec.duration_s",
            remedy="give how long the job would run alone, or 0 if that is unknown",
        )
    if request.spec.cycle is not None:
        _check_cycle(request.spec.cycle, {spec.pool for spec in specs})
    check_labels(request.spec.config, request.spec.tags, "spec.")


def _check_cycle(cycle: Cycle, pools: set[str]) -> None:
    if not 0 < cycle.period_s < math.inf:
        raise CallerError(
            f"period_s must be finite and greater than 0, got {cycle.period_s}",
            field="spec.cycle.period_s",
            remedy="give the seconds of an iteration if the job runs alone, or omit the cycle",
        )
    if cycle.num_optim_steps < 1:
        raise CallerError(
            f"num_optim_steps must be at least 1, got {cycle.num_optim_steps}",
            field="spec.cycle.num_optim_steps",
            remedy="count the optimizer steps of all deployments in one iteration",
        )
    field = "spec.cycle.segments"
    check_range(len(cycle.segments), 0, _MAX_SEGMENTS, field, "segments")
    if not cycle.segments:
        raise CallerError(
            "a cycle needs at least one segment",
            field="spec.cycle.segments",
            remedy="describe when the job uses which pool, or omit the cycle to have it measured",
        )
    for index, segment in enumerate(cycle.segments):
        _check_segment(segment, cycle.period_s, pools, f"spec.cycle.segments[{index}]")


def _check_segment(segment: Segment, period_s: float, pools: set[str], field: str) -> None:
    if segment.pool not in pools:
        raise CallerError(
            f"no deployment of the job is in pool {segment.pool!r}",
            field=f"{field}.pool",
            remedy=f"use one of its pools: {', '.join(sorted(pools))}",
        )
    if not segment.duration_s > 0:
        raise CallerError(
            f"duration_s must be greater than 0, got {segment.duration_s}",
            field=f"{field}.duration_s",
            remedy="give the segment's usual duration, or omit the segment",
        )
    end_s = segment.offset_s + segment.duration_s
    if not (segment.offset_s >= 0 and end_s <= period_s * (1 + _ROUNDING)):
        raise CallerError(
            f"the segment must be within the cycle of {period_s} s, but it lasts from "
            f"{segment.offset_s} s to {end_s} s",
            field=f"{field}.offset_s",
            remedy="count offset_s from the start of the cycle, and split a segment at its end",
        )
    if segment.worst_s and not segment.duration_s <= segment.worst_s < math.inf:
        raise CallerError(
            f"worst_s must be finite and at least {segment.duration_s}, got {segment.worst_s}",
            field=f"{field}.worst_s",
            remedy="give at least duration_s, or 0 if the worst case equals it",
        )


def check_deployment(request: api.CreateDeployment, job: JobSpec) -> None:
    """Check the spec of a new deployment.

    Args: job: spec of the job to which it would be added.
    Raises: CallerError: names the invalid field.
    """
    _check_deployment(request.spec, "spec")
    _check_size(replace(job, deployments=[*job.deployments, request.spec]))


async def _pinned(request: api.SubmitJob, model_of: ModelOf) -> JobSpec:
    """Check the job's spec and pin its registered models.

    Raises: CallerError: the spec is invalid, or names a model that is not registered.
    """
    check_job(request)
    pinned = await pin_job(request.spec, model_of, "spec")
    _check_size(pinned)
    return pinned


async def _pinned_deployment(
    request: api.CreateDeployment, job: JobSpec, model_of: ModelOf
) -> DeploymentSpec:
    """Check the spec of a new deployment and pin its registered model.

    Raises: CallerError: the spec is invalid, or names a model that is not registered.
    """
    check_deployment(request, job)
    pinned = await pin_deployment(request.spec, model_of, "spec")
    _check_size(replace(job, deployments=[*job.deployments, pinned]))
    return pinned


def _check_size(spec: JobSpec) -> None:
    num_bytes = _encoded_bytes(spec)
    if num_bytes > MAX_SPEC_BYTES:
        raise CallerError(
            f"the job's spec may have at most {MAX_SPEC_BYTES} bytes, got {num_bytes}",
            code=Code.RESOURCE_EXHAUSTED,
            field="spec",
            remedy="omit `token_texts` if the job uses no stop strings",
        )


def _check_deployment(spec: DeploymentSpec, field: str) -> None:
    check_name(spec.name, f"{field}.name")
    check_name(spec.pool, f"{field}.pool")
    check_name(spec.backend, f"{field}.backend")
    _check_layout(spec, f"{field}.layout")
    _check_nodes(spec, f"{field}.num_nodes")
    for name, remedy in (
        ("host_bytes", "give the host memory that it needs on each node, or 0 if unknown"),
        ("scratch_bytes", "give the size of its KV cache, or 0 for the backend's choice"),
    ):
        num_bytes = getattr(spec, name)
        if not 0 <= num_bytes <= _MAX_BYTES:
            raise CallerError(
                f"{name} must be from 0 to {_MAX_BYTES}, got {num_bytes}",
                field=f"{field}.{name}",
                remedy=remedy,
            )
    if not 0 <= spec.tail_share < 1:
        raise CallerError(
            f"tail_share must be at least 0 and less than 1, got {spec.tail_share}",
            field=f"{field}.tail_share",
            remedy="give the share of a call's samples at which to gather its tail, or 0 for never",
        )
    check_range(spec.max_adapters, 0, _MAX_ADAPTERS, f"{field}.max_adapters", "adapters")
    is_drawn = not spec.model.registered
    check_config(spec.model.config, f"{field}.model.config", is_drawn=is_drawn)


def _encoded_bytes(spec: JobSpec) -> int:
    try:
        return len(encode(spec))
    except CallerError:
        raise CallerError(
            "an integer is out of range", field="spec", remedy="use integers from -2^63 to 2^64 - 1"
        ) from None


def _check_layout(spec: DeploymentSpec, field: str) -> None:
    layout = spec.layout
    for axis in layout.__struct_fields__:
        if getattr(layout, axis) < 1:
            raise CallerError(
                f"{axis} must be at least 1, got {getattr(layout, axis)}",
                field=f"{field}.{axis}",
                remedy="use 1 if the model is not split along this axis",
            )
    check_range(layout.num_ranks, 1, _MAX_RANKS, field, "ranks")


def _check_nodes(spec: DeploymentSpec, field: str) -> None:
    num_nodes, num_ranks = spec.num_nodes, spec.layout.num_ranks
    if num_nodes < 1 or num_ranks % num_nodes:
        raise CallerError(
            f"{num_ranks} ranks cannot be spread evenly over {num_nodes} nodes",
            field=field,
            remedy="use 1, or a divisor of the layout's number of ranks",
        )


def job_api(
    shell: Shell, outcome_of: OutcomeOf, model_of: ModelOf
) -> dict[str, tuple[Any, ApiHandler]]:
    """Endpoints for tenants, in the form that `serve_api` expects."""

    async def submit(tenant: str, request: api.SubmitJob) -> api.JobStatus:
        spec = await _pinned(request, model_of)
        job = JobKey(tenant, request.job)
        old = shell.core.state.jobs.get(str(job))
        if old is None or old.state in JOB_ENDED:  # otherwise the name is taken
            _check_pools(shell, spec, spec.deployments, "spec.deployments[{}].pool")
        return await _request_status(shell, lambda id: events.JobSubmitted(job, spec, id))

    async def finish(tenant: str, request: api.JobRequest) -> api.JobStatus:
        job = _job_key(tenant, request.job)
        return await _request_status(
            shell,
            lambda id: events.JobFinished(
                job, id, failed=request.failed, cancelled=request.cancelled
            ),
        )

    async def drain(tenant: str, request: api.JobRequest) -> api.JobStatus:
        job = _job_key(tenant, request.job)
        return await _request_status(shell, lambda id: events.DrainRequested(job, id))

    async def create(tenant: str, request: api.CreateDeployment) -> api.JobStatus:
        job = _job(shell, _job_key(tenant, request.job))
        spec = await _pinned_deployment(request, job.spec, model_of)
        if job.state is JobState.SUBMITTED:  # it would wait for this pool too
            _check_pools(shell, job.spec, [spec], "spec.pool")
        return await _request_status(shell, lambda id: events.DeploymentCreated(job.key, spec, id))

    async def delete(tenant: str, request: api.DeploymentRequest) -> api.JobStatus:
        check_name(request.job, "job")
        check_name(request.deployment, "deployment")
        key = DeploymentKey(tenant, request.job, request.deployment)
        return await _request_status(shell, lambda id: events.DeploymentDeleted(key, id))

    async def status(tenant: str, request: api.JobRequest) -> api.JobStatus:
        return jobs.status(_present_step(shell), _job(shell, _job_key(tenant, request.job)))

    async def declare(tenant: str, request: api.PhaseRequest) -> api.JobStatus:
        job = _job(shell, _job_key(tenant, request.job))
        _check_phase(job, request)
        await shell.append(
            events.PhaseDeclared(job.key, request.session, request.pool, request.is_open)
        )
        return jobs.status(_present_step(shell), job)

    async def cancel(tenant: str, request: api.CancelRequest) -> api.Explanation:
        key = _operation_key(tenant, request)
        answer = await shell.request(
            lambda id: events.CancelRequested(key, id, request.keeps_partial)
        )
        assert answer.explanation is not None
        return answer.explanation

    async def explain_operation(tenant: str, request: api.OperationRequest) -> api.Explanation:
        key = _operation_key(tenant, request)
        # The stored outcome decides; it reaches the log a little later.
        completion = await outcome_of(key)
        step = _present_step(shell)
        deployment = step.deployment(key.deployment_key)
        op = deployment.queue.find(key) if deployment else None
        is_open = op is not None and not op.has_ended
        if completion is None and not is_open:
            completion = await outcome_of(key)  # it may have ended meanwhile
        if completion is not None:
            return explain.explain_ended(key, op, completion)
        if deployment is not None and op is not None and is_open:
            return explain.explain(step, deployment, op)
        if deployment is not None:
            raise to_exception(explain.not_open_error(deployment, key))
        message = f"deployment {key.deployment_key} does not exist"
        raise CallerError(
            message, code=Code.NOT_FOUND, field="deployment", remedy="see `phaseloom jobs`"
        )

    async def usage(tenant: str, _: api.UsageRequest) -> api.Usage:
        state = shell.core.state
        deployments = [d for d in state.deployments.values() if d.key.tenant == tenant]
        return api.Usage(
            sum(len(d.queue.operations) + len(d.queue.unordered) for d in deployments)
            + sum(len(e.ops) for e in state.endings if e.tenant == tenant),
            state.sequence,
            state.outcome_bytes(tenant, shell.now_s()),
        )

    return {
        "tenant.usage": (api.UsageRequest, usage),
        "job.submit": (api.SubmitJob, submit),
        "job.finish": (api.JobRequest, finish),
        "job.drain": (api.JobRequest, drain),
        "deployment.create": (api.CreateDeployment, create),
        "deployment.delete": (api.DeploymentRequest, delete),
        "job.status": (api.JobRequest, status),
        "phase.declare": (api.PhaseRequest, declare),
        "operation.cancel": (api.CancelRequest, cancel),
        "operation.explain": (api.OperationRequest, explain_operation),
    }


def node_api(shell: Shell) -> dict[str, tuple[Any, ApiHandler]]:
    """Endpoints for operators, in the form that `serve_api` expects."""

    async def drain(_: str, request: api.DrainNode) -> api.NodeStatus:
        node = NodeId(check_name(request.node, "node"))
        answer = await shell.request(
            lambda id: events.NodeDrainRequested(node, id, undo=request.undo, gone=request.gone)
        )
        assert answer.node is not None
        return answer.node

    async def status(_: str, request: api.DrainNode) -> api.NodeStatus:
        node = NodeId(check_name(request.node, "node"))
        if node not in shell.core.state.nodes:
            raise CallerError(
                f"node {node} is not known",
                code=Code.NOT_FOUND,
                field="node",
                remedy="see `phaseloom state`",
            )
        return evacuation.status(_present_step(shell), node)

    return {"drain": (api.DrainNode, drain), "status": (api.DrainNode, status)}


async def _request_status(shell: Shell, make_event: Callable[[str], events.Event]) -> api.JobStatus:
    """Append an event and return the job's status after the core has handled it."""
    answer = await shell.request(make_event)
    assert answer.status is not None
    return answer.status


def _present_step(shell: Shell) -> Step:
    """The core's present state, for reading only, with the present time."""
    state = shell.core.state
    return Step(state, state.sequence, shell.now_s())


def _check_pools(shell: Shell, job: JobSpec, specs: list[DeploymentSpec], field: str) -> None:
    """Refuse a pool that never had a node, unless the job waits for its pools.

    If other pools have nodes, the name is probably misspelt. Before the first node is up, any pool
    may still come, and for a while after each new node the caller has to ask again.

    Raises: CallerError: NOT_FOUND. ResourceError: UNAVAILABLE: nodes are still joining.
    """
    cluster = shell.core.state.cluster
    known = {host.pool for host in cluster.hosts.values()}
    for index, spec in enumerate(specs):
        if known and spec.pool not in known and job.may_wait != "pool":
            if shell.now_s() < cluster.joined_s + _JOINING_S:
                raise ResourceError(
                    f"no node of pool {spec.pool!r} is up, and nodes are still joining the mesh",
                    field=field.format(index),
                    remedy=f"ask again; {_JOINING_S:.0f} s after the last node this is an error, "
                    'unless may_wait is "pool"',
                )
            raise CallerError(
                f"there is no pool {spec.pool!r}: no node of it has ever been up",
                code=Code.NOT_FOUND,
                field=field.format(index),
                remedy=f"use one of the mesh's pools: {known_pools(cluster)}; or set may_wait to "
                '"pool" to wait for its first node',
            )


def _job_key(tenant: str, job: str) -> JobKey:
    return JobKey(tenant, check_name(job, "job"))


def _job(shell: Shell, key: JobKey) -> Job:
    job = shell.core.state.jobs.get(str(key))
    if job is None:
        raise CallerError(
            f"job {key} does not exist",
            code=Code.NOT_FOUND,
            field="job",
            remedy="submit it first",
        )
    return job


def _operation_key(tenant: str, request: api.OperationRequest) -> OperationKey:
    return parse_operation_key(f"{tenant}.{request.job}.{request.deployment}.{request.slot}")


def _check_phase(job: Job, request: api.PhaseRequest) -> None:
    if job.state in JOB_ENDED:
        raise CallerError(
            f"job {job.key} has ended ({job.state})",
            code=Code.FAILED_PRECONDITION,
            field="job",
            remedy="submit it again, or submit a job with another name",
        )
    # A session that is not in the log yet is newer. Then the order of the log decides.
    if request.session < job.controller.session:
        raise to_exception(session_superseded(request.session, job.controller.session))
    pools = sorted({spec.pool for spec in job.spec.deployments})
    if request.pool not in pools:
        raise CallerError(
            f"job {job.key} has no deployment in pool {request.pool!r}",
            field="pool",
            remedy=f"use one of its pools: {', '.join(pools)}",
        )
