"""The commands `phaseloom jobs`, `explain`, `cancel` and `drain`.

- `jobs` lists the jobs of a mesh.
- `explain` says where a job is placed, or what an operation waits for.
- `cancel` ends a job immediately.
- `drain` ends a job once its open operations have ended, or empties a node.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phaseloom.cli.output import print_json, print_whole, with_names
from phaseloom.cli.rundir import bus_config, open_bus
from phaseloom.common.contract import api
from phaseloom.common.contract.codec import JSON, MSGPACK, decode
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError
from phaseloom.common.contract.events import KindEstimate, PhaseTrace, StepRun
from phaseloom.common.contract.ids import JobKey, check_name, parse_operation_key
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import BusConfig
from phaseloom.common.transport.services import call_api, call_node_api, node_report

T = TypeVar("T")

_UNKNOWN = "–"
_DRAIN_POLL_S = 0.2
_REPORT_TIMEOUT_S = 2.0


def jobs(
    *,
    run: Path | None = None,
    profile: bool = False,
    json: bool = False,
    console: Console | None = None,
) -> None:
    """List the jobs, their deployments and where they run.

    Parameters
    ----------
    run
        Run directory, or its name under runs/. Default: the mesh that PHASELOOM_BUS_URL, _USER and
        _PASSWORD name if they are set, otherwise the newest run under runs/.
    profile
        Also show the profiler's measurements: each job's cycle, the durations of its operations,
        the gaps between them, worst cases, and the sub-stages of each rollout.
    json
        Print one JSON object per job instead of tables, with its profile if `--profile` is given.
    """
    views, traces = uvloop.run(_jobs(bus_config(run), profile))
    if json:
        for name, view in views.items():
            measured = {"profile": traces.get(name)} if profile else {}
            print_json(with_names(view, tenant=_parse_job(name).tenant) | measured, console=console)
        return
    target = console or Console()
    print_whole(target, job_table(views))
    if lines := placement_lines(views):
        target.print("", *lines, sep="\n", soft_wrap=True)
    for name in sorted(traces):
        target.print()
        for part in profile_tables(name, traces[name]):
            print_whole(target, part)


def explain(
    what: str, *, run: Path | None = None, json: bool = False, console: Console | None = None
) -> None:
    """Explain where a job is placed and why, or what an operation waits for.

    For an operation, this also shows its position in the queue, its predicted start and the reason.

    Parameters
    ----------
    what
        A job, `<tenant>.<job>`, or an operation, `<tenant>.<job>.<deployment>.<seq>`.
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    json
        Print one JSON object instead of text.
    """
    answer: api.JobStatus | api.Explanation
    settings = bus_config(run)
    if what.count(".") < len(JobKey.__struct_fields__):
        key = _parse_job(what)
        answer, description = uvloop.run(_explained(settings, key))
    else:
        operation = parse_operation_key(what)
        request = api.OperationRequest(operation.job, operation.deployment, operation.slot)
        call = _call(settings, operation.tenant, "operation.explain", request, api.Explanation)
        answer = uvloop.run(call)
        description = describe_operation(answer)
    if json:
        return print_json(with_names(answer, tenant=what.partition(".")[0]), console=console)
    (console or Console()).print(description, soft_wrap=True, markup=False)


def cancel(
    job: str, *, run: Path | None = None, json: bool = False, console: Console | None = None
) -> None:
    """End a job now. Its open operations are aborted and its models dropped. Its checkpoints stay.

    Parameters
    ----------
    job
        `<tenant>.<job>`.
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    json
        Print one JSON object instead of text.
    """
    _end_job(_parse_job(job), "job.finish", run, console, json=json)


def drain(
    what: str,
    *,
    run: Path | None = None,
    undo: bool = False,
    gone: bool = False,
    timeout_s: float = 600.0,
    console: Console | None = None,
) -> int:
    """Drain a node or a job.

    Draining a node moves its deployments to other nodes, and waits until the node may be shut down.
    The exit code is 1 if the node is not empty after the timeout. A drained job accepts no new
    operations and ends when its open ones have ended.

    Parameters
    ----------
    what
        A node to empty, or a job to end once its open operations have ended (`<tenant>.<job>`).
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    undo
        Stop draining the node, so that jobs may be placed on it again.
    gone
        Declare that the node is down permanently. Jobs that need state which only that node had
        fall back to their last checkpoint, or fail if they have none.
    timeout_s
        How long to wait until a node is empty, in seconds.
    """
    target = console or Console()
    if "." not in what:
        request = api.DrainNode(check_name(what, "node"), undo, gone)
        return uvloop.run(drain_node(bus_config(run), request, timeout_s, target))
    _end_job(_parse_job(what), "job.drain", run, target)
    return 0


def _parse_job(text: str) -> JobKey:
    tokens = text.split(".")
    if len(tokens) != len(JobKey.__struct_fields__):
        raise CallerError(
            f"expected <tenant>.<job>, got {text!r}",
            field="job",
            remedy="copy the job's name from `phaseloom jobs`",
        )
    tenant, job = tokens
    return JobKey(check_name(tenant, "tenant"), check_name(job, "job"))


def _end_job(
    key: JobKey, call: str, run: Path | None, console: Console | None, *, json: bool = False
) -> None:
    """Call `job.finish` (which cancels the job) or `job.drain`, and print the job's state."""
    request = api.JobRequest(key.job, cancelled=call == "job.finish")
    status = uvloop.run(_call(bus_config(run), key.tenant, call, request, api.JobStatus))
    if json:
        return print_json(with_names(status, tenant=key.tenant), console=console)
    num_open = sum(len(deployment.open_operations) for deployment in status.deployments)
    open_text = f", {num_open} open operations" if num_open else ""
    (console or Console()).print(f"{key}: {status.state}{open_text}", soft_wrap=True, markup=False)


async def _call(settings: BusConfig, tenant: str, call: str, request: object, kind: type[T]) -> T:
    async with open_bus(settings, "jobs") as bus:
        return await call_api(bus.client, tenant, call, request, kind)


async def _explained(settings: BusConfig, key: JobKey) -> tuple[api.JobStatus, str]:
    async with open_bus(settings, "jobs") as bus:
        request = api.JobRequest(key.job)
        status = await call_api(bus.client, key.tenant, "job.status", request, api.JobStatus)
        nodes = sorted({d.node for d in status.deployments if d.node and not status.has_ended})
        ways = await asyncio.gather(*(_ways(bus, key, node) for node in nodes))
    return status, "\n".join([describe_job(key, status), *itertools.chain(*ways)])


async def _ways(bus: Bus, key: JobKey, node: str) -> list[str]:
    """Describe how the job's state moves on a node; nothing if the node does not tell."""
    try:
        report = await node_report(bus.client, node, timeout_s=_REPORT_TIMEOUT_S)
    except PhaseloomError:
        return []
    return [
        f"  {state.deployment.deployment} on {node}: {state.way}"
        for state in report.deployments
        if state.deployment.job_key == key and state.way
    ]


async def _jobs(
    settings: BusConfig, profile: bool
) -> tuple[dict[str, api.JobStatus], dict[str, PhaseTrace]]:
    async with open_bus(settings, "jobs") as bus:
        views = await _all(bus, Bucket.VIEW, api.JobStatus)
        views = {name: await _as_of_now(bus, name, view) for name, view in views.items()}
        return views, await _all(bus, Bucket.PROFILES, PhaseTrace) if profile else {}


async def _all(bus: Bus, bucket: Bucket, kind: type[T]) -> dict[str, T]:
    values = {}
    for key in sorted(await bus.keys.names(bucket)):
        stored = await bus.keys.get(bucket, key)
        if stored is not None:  # it may have been deleted since its name was listed
            content_type = JSON if bucket is Bucket.PROFILES else MSGPACK
            values[key] = _decode(stored.payload, kind, content_type)
    return values


async def _as_of_now(bus: Bus, name: str, view: api.JobStatus) -> api.JobStatus:
    """Return the scheduler's current status of a job, or the stored view if it does not answer.

    Device seconds in the stored view are outdated: it is written only when the job changes.
    """
    if view.has_ended:
        return view
    key = _parse_job(name)
    request = api.JobRequest(key.job)
    try:
        return await call_api(bus.client, key.tenant, "job.status", request, api.JobStatus)
    except PhaseloomError:
        return view


# --- nodes ---------------------------------------------------------------------------------------


async def drain_node(
    settings: BusConfig, request: api.DrainNode, timeout_s: float, console: Console
) -> int:
    """Drain a node and wait until it may be shut down, or stop draining if `request.undo` is set.

    A node may be shut down once it is empty and no copy on it is needed. Prints the remaining
    obstacles whenever they change.

    Returns: 0 once the node is empty; 1 after the timeout, while draining continues.
    Raises:  PhaseloomError: the scheduler refuses.
    """
    async with open_bus(settings, "drain") as bus:
        status = await call_node_api(bus.client, "drain", request, api.NodeStatus)
        if request.undo:
            message = (
                "counts as gone until it comes back"
                if status.is_gone
                else "no longer draining; jobs may be placed on it again"
            )
            console.print(f"{status.node}: {message}", markup=False)
            return 0
        return await _wait_until_empty(bus, status, timeout_s, console)


async def _wait_until_empty(
    bus: Bus, status: api.NodeStatus, timeout_s: float, console: Console
) -> int:
    until_s = time.monotonic() + timeout_s
    reported: list[str] = []

    def report(*lines: str) -> None:
        for line in lines:
            console.print(f"{status.node}: {line}", soft_wrap=True, markup=False)

    while status.deployments or status.waits_for:
        if status.waits_for != reported:
            reported = status.waits_for
            report(*reported)
        if not (status.is_draining or status.is_gone):
            report("draining was cancelled")
            return 1
        if time.monotonic() > until_s:
            report(f"not empty after {timeout_s:g} s; draining continues in the background")
            return 1
        await asyncio.sleep(_DRAIN_POLL_S)
        request = api.DrainNode(status.node)
        status = await call_node_api(bus.client, "status", request, api.NodeStatus)
    report("empty; it may be shut down")
    return 0


# --- output --------------------------------------------------------------------------------------


def job_table(views: dict[str, api.JobStatus]) -> Table:
    columns = ("job", "state", "device s", "deployment", "pool", "node", "worker", "incarnation")
    table = Table(*columns, box=None)
    for name, status in views.items():
        rows: list[api.DeploymentStatus | None] = [*status.deployments] or [None]
        for index, deployment in enumerate(rows):
            first = [name, status.state, _device_seconds(status)] if index == 0 else [""] * 3
            table.add_row(*first, *_deployment_cells(deployment))
    if not views:
        table.add_row("none yet")
    return table


def _device_seconds(status: api.JobStatus) -> str:
    """Format the device seconds that a job has used in each pool."""
    used = sorted(status.device_s.items())
    return ", ".join(f"{pool} {seconds:.1f}" for pool, seconds in used) or _UNKNOWN


def placement_lines(views: dict[str, api.JobStatus]) -> list[Text]:
    """Return lines for each job: its run with tags and config, its placement with the reason, or
    its error."""
    lines = []
    for name, status in views.items():
        if labels := _labels(status):
            lines.append(Text.assemble((name, "bold"), f": {labels}"))
        if status.placement:
            lines.append(Text.assemble((name, "bold"), f": {status.placement}"))
        if status.error:
            error = f": {status.error.code}: {status.error.message}"
            lines.append(Text.assemble((name, "bold"), (error, "red")))
    return lines


def _labels(status: api.JobStatus) -> str:
    """Describe the run of a job that has tags or a config."""
    config = [f"{name}={value}" for name, value in status.config.items()]
    labels = [*(f"#{tag}" for tag in status.tags), *config]
    return f"run {status.run}, {', '.join(labels)}" if labels else ""


def _deployment_cells(deployment: api.DeploymentStatus | None) -> list[str]:
    if deployment is None:
        return []
    return [
        deployment.name,
        deployment.pool,
        deployment.node or _UNKNOWN,
        deployment.state,
        str(deployment.incarnation),
    ]


def profile_tables(name: str, trace: PhaseTrace) -> list[Text | Table]:
    """Return the profile of a job: a line about its cycle, and a table of its operations."""
    head = Text(f"{name}: ", "bold")
    if trace.period_s:
        head.append(f"cycle {_seconds(trace.period_s)}, at worst {_seconds(trace.worst_period_s)}")
        if trace.drift:
            head.append(f", {trace.drift:+.0%} since the last measurement", "yellow")
        for segment in trace.segments:
            end_s = segment.offset_s + segment.duration_s
            head.append(f"; {segment.pool} {_seconds(segment.offset_s)}–{_seconds(end_s)}")
    else:
        head.append("no cycle detected yet")
    table = Table("operation", "seen", "median", "p95", "worst", "gap", "gap p10–p90", box=None)
    for estimate in trace.estimates:
        table.add_row(*_estimate_cells(estimate))
    return [head, table, *_sub_stage_lines(trace)]


def _sub_stage_lines(trace: PhaseTrace) -> list[Text]:
    """Return a line for each replica of each operation that reports its sub-stages."""
    lines = []
    for estimate in trace.estimates:
        num_replicas = len({stage.replica for stage in estimate.sub_stages})
        for replica, stages in groupby(estimate.sub_stages, key=lambda stage: stage.replica):
            name = f"{estimate.deployment}.{estimate.kind}"
            name += f", replica {replica}" if num_replicas > 1 else ""
            steps = ", then ".join(map(_sub_stage, stages))
            lines.append(Text.assemble("sub-stages of ", (name, "bold"), f": {steps}"))
    return lines


def _sub_stage(stage: StepRun) -> str:
    tokens_per_step = stage.tokens / stage.steps
    steps = "1 step" if stage.steps == 1 else f"{stage.steps} steps"
    return f"{_seconds(stage.duration_s)} in {steps} of {tokens_per_step:.0f} tokens"


def _estimate_cells(estimate: KindEstimate) -> list[str]:
    has_gap = estimate.next_gap_s >= 0
    return [
        f"{estimate.deployment}.{estimate.kind}",
        str(estimate.count),
        _seconds(estimate.duration_s),
        _seconds(estimate.p95_s),
        _seconds(estimate.worst_s),
        _seconds(estimate.next_gap_s) if has_gap else _UNKNOWN,
        f"{_seconds(estimate.gap_p10_s)}–{_seconds(estimate.gap_p90_s)}" if has_gap else _UNKNOWN,
    ]


def describe_job(key: JobKey, status: api.JobStatus) -> str:
    """Describe a job in several lines: its state, its placement and co-located jobs, and its
    errors."""
    lines = [f"{key}: {status.state}"]
    if labels := _labels(status):
        lines.append(f"  {labels}")
    if status.placement:
        lines.append(f"  in {status.placement}")
    lines += [f"  {slower}" for slower in status.slower]
    errors = [("", status.error), *((f"{d.name}: ", d.error) for d in status.deployments)]
    for name, error in errors:
        if error is not None:
            lines.append(f"  {name}{error.code}: {error.message}")
            lines += [f"  remedy: {error.remedy}"] * bool(error.remedy)
    return "\n".join(lines)


def describe_operation(explanation: api.Explanation) -> str:
    """Describe an operation, with a line for each reason why it waits."""
    summary = ", ".join(filter(None, (explanation.kind, explanation.state)))
    lines = [f"{explanation.key}: {summary}"]
    lines += [f"  waits for {reason}" for reason in explanation.waits_for]
    if explanation.place:
        lines.append(f"  position {explanation.place} in the queue of its device")
    if explanation.predicted_start_s >= 0:
        lines.append(f"  starts in about {_seconds(explanation.predicted_start_s)}")
    if explanation.why:
        lines.append(f"  reason: {explanation.why}")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def _decode(payload: bytes, kind: type[T], content_type: str) -> T:
    try:
        value: T = decode(payload, kind, content_type)
    except CallerError as error:
        raise CallerError(
            f"this mesh runs another version of phaseloom: {error.info.message}",
            code=Code.FAILED_PRECONDITION,
            remedy="use the phaseloom command of the mesh's version",
        ) from None
    return value
