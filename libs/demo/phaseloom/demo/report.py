"""The figures of a run, computed from its recorded events and its controllers' results.

Everything here is pure. Definitions:

- *Window* of a job: from the queueing of its first GRPO operation to the end of the last one. GRPO
  operations are queued between the controller's `grpo_start_t` and `grpo_end_t`, so warm-up and
  evaluations are outside. T of a run: from the first window's start to the last window's end.
- *Device-seconds per training step*, for D devices and N_A and N_B steps: alone
  (D·T_A + D·T_B)/(N_A + N_B), the jobs one after the other; shared D·T/(N_A + N_B).
  Saved = 1 − shared/alone.
- *Context switch*: an activation that moved bytes and belongs to another job than the device's
  previous activation. Its seconds are offload plus load. A switch over several devices counts once,
  with its seconds on each.
- *Hidden*: the switch seconds during which no ready operation waited for the device. An operation
  waits from ready (queued, predecessors and `after` done) until it starts. So a speculative
  activation hides the part before its operation was ready, and a wrong guess hides nothing of the
  wait of another job's operation.
- *Bound*: two synchronous jobs that share devices need at least the busiest device's time for both,
  and at least the time of either job alone: T ≥ max(per device: busy_A + busy_B; T_A; T_B), all
  measured alone.

A device has the name of its node, or `<node>/<index>` if the node has several. Execution times come
from the workers' clocks and all others from the server's clock, so the clocks must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from phaseloom.cli.recorder import Recorded
from phaseloom.common.contract.events import (
    ActivationOpened,
    NodeUp,
    OperationFinished,
    QueuedOperation,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.observability.intervals import Interval, intersect, merge, subtract, total
from phaseloom.common.observability.readiness import Readiness
from phaseloom.simulator.predictions import PredictedDurations, PredictedStarts

# --- From the controllers -------------------------------------------------------------------------


class JobResult(msgspec.Struct, frozen=True):
    """The outcome of a job, with the start and the end of its GRPO steps."""

    name: str
    steps: int
    reward_start: float
    """Mean held-out reward before GRPO."""
    reward_end: float
    weights_sha256: str
    grpo_start_unix_s: float
    grpo_end_unix_s: float
    rewards: list[float] = []
    """Mean training reward of each step."""


# --- From the log ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Execution:
    """The execution of one operation on its devices."""

    key: OperationKey
    kind: str
    devices: tuple[str, ...]
    queued_s: float
    ready_s: float
    start_s: float
    end_s: float

    @property
    def interval(self) -> Interval:
        return (self.start_s, self.end_s)

    @property
    def waited(self) -> Interval:
        return (self.ready_s, self.start_s)


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of job on the devices of a deployment."""

    devices: tuple[str, ...]

    to: DeploymentKey
    start_s: float
    offload_s: float
    load_s: float
    bytes_out: int
    bytes_in: int

    @property
    def interval(self) -> Interval:
        return (self.start_s, self.start_s + self.offload_s + self.load_s)


@dataclass(slots=True)
class RunLog:
    """The executions, switches and counts of a recorded decision log."""

    devices: list[str] = field(default_factory=list)
    executions: list[Execution] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    submitted: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def num_open(self) -> int:
        """Number of operations without an outcome in the log."""
        return self.submitted - self.completed - self.failed

    def of_job(self, job: str) -> list[Execution]:
        return [e for e in self.executions if e.key.job == job]


class LogReader:
    """Folds recorded events into a RunLog, which can be read during the run."""

    def __init__(self) -> None:
        self.log = RunLog()
        self._readiness = Readiness()
        self._queued_s: dict[OperationKey, float] = {}
        self._ready_s: dict[OperationKey, float] = {}
        self._ended: set[OperationKey] = set()
        self._device_names: dict[str, list[str]] = {}
        """Node → the names of its devices."""
        self._devices: dict[DeploymentKey, tuple[str, ...]] = {}
        self.resident: dict[str, str] = {}
        """Device → the job of its newest activation."""

    def step(self, entry: Recorded) -> None:
        for key in self._readiness.step(entry.event):
            self._ready_s[key] = entry.time_unix_s
        match entry.event:
            case NodeUp(node=node, devices=devices):
                several = [f"{node}/{index}" for index in range(len(devices))]
                self._device_names[node] = several if len(devices) > 1 else [node]
                self.log.devices = sorted({*self.log.devices, *self._device_names[node]})
            case WpgStarted(deployment=deployment, node=node, devices=devices):
                self._devices[deployment] = self._devices_on(node, devices or [0])
            case ActivationOpened():
                self._activation(entry.event)
            case QueuedOperation():
                self._queue(entry.event, entry.time_unix_s)
            case OperationFinished() if not entry.event.replay:
                self._finish(entry.event)

    def _devices_on(self, node: str, indices: Iterable[int]) -> tuple[str, ...]:
        names = self._device_names.get(node, [node])
        return tuple(names[index] for index in indices if index < len(names))

    def _queue(self, operation: QueuedOperation, time_s: float) -> None:
        if operation.key in self._queued_s:
            return
        self._queued_s[operation.key] = time_s
        self.log.submitted += 1
        if operation.error is not None:
            self._ended.add(operation.key)
            self.log.failed += 1

    def _finish(self, event: OperationFinished) -> None:
        key = event.key
        if key in self._ended:
            return
        self._ended.add(key)
        if event.outcome is Outcome.COMPLETED:
            self.log.completed += 1
        else:
            self.log.failed += 1
        start_s = event.started_unix_s
        queued_s = self._queued_s.get(key, start_s)
        self.log.executions.append(
            Execution(
                key,
                event.kind,
                self._devices.get(key.deployment_key, ()),
                queued_s,
                self._ready_s.get(key, queued_s),
                start_s,
                start_s + event.duration_s,
            )
        )

    def _activation(self, event: ActivationOpened) -> None:
        devices = self._devices.setdefault(event.deployment, self._devices_on(event.node, [0]))
        job = event.deployment.job
        is_switch = any(self.resident.get(device, job) != job for device in devices)
        self.resident.update(dict.fromkeys(devices, job))
        if not is_switch or event.bytes_out + event.bytes_in == 0:
            return
        self.log.switches.append(
            Switch(
                devices,
                event.deployment,
                event.started_unix_s,
                event.offload_s,
                event.load_s,
                event.bytes_out,
                event.bytes_in,
            )
        )


def read_log(events: Iterable[Recorded]) -> RunLog:
    """Fold all recorded events of a run."""
    reader = LogReader()
    for entry in events:
        reader.step(entry)
    return reader.log


# --- Figures --------------------------------------------------------------------------------------


class Figures(msgspec.Struct, frozen=True):
    """The use of the devices during a window of a run."""

    seconds: float
    context_switches: int
    switch_seconds: float
    hidden_switch_seconds: float
    busy_share: dict[str, float]
    """Device → share of the window in which an operation ran on it."""
    waiting_share: dict[str, float]
    """Device → share of the window in which it neither ran nor switched although an operation was
    ready: the cost of messages, and of keeping the device for a job that will return."""


def grpo_executions(log: RunLog, result: JobResult) -> list[Execution]:
    """Return the operations of a job's GRPO steps.

    Raises: ValueError: the log has none.
    """
    matches = [
        e
        for e in log.of_job(result.name)
        if result.grpo_start_unix_s <= e.queued_s <= result.grpo_end_unix_s
    ]
    if not matches:
        raise ValueError(f"the log has no operation of {result.name} between its barriers")
    return matches


def window_of(executions: Sequence[Execution]) -> Interval:
    """Return the window from the first queueing to the last end of these executions."""
    return (min(e.queued_s for e in executions), max(e.end_s for e in executions))


def figures(log: RunLog, window: Interval) -> Figures:
    """Compute the use of the devices in one window of a run."""
    seconds = window[1] - window[0]
    switches = [s for s in log.switches if window[0] <= s.start_s < window[1]]
    switch_s = hidden_s = 0.0
    busy_share, waiting_share = {}, {}
    for device in log.devices:
        executions = [e for e in log.executions if device in e.devices]
        busy = intersect(merge(e.interval for e in executions), [window])
        waited = merge(e.waited for e in executions)
        switching = merge(s.interval for s in switches if device in s.devices)
        switch_s += total(switching)
        hidden_s += total(subtract(switching, waited))
        busy_share[device] = total(busy) / seconds
        unused = subtract(subtract(intersect(waited, [window]), busy), switching)
        waiting_share[device] = total(unused) / seconds
    return Figures(seconds, len(switches), switch_s, hidden_s, busy_share, waiting_share)


def busy_seconds(executions: Iterable[Execution]) -> dict[str, float]:
    """Return device → seconds in which any of these executions ran on it."""
    on_device: dict[str, list[Interval]] = {}
    for execution in executions:
        for device in execution.devices:
            on_device.setdefault(device, []).append(execution.interval)
    return {device: total(merge(intervals)) for device, intervals in sorted(on_device.items())}


def least_shared_seconds(alone: Sequence[tuple[float, dict[str, float]]]) -> float:
    """Return the lower bound of the T of a shared run.

    Args: alone: for each job, measured alone, its T and its busy seconds on each device.
    """
    nodes = {node for _, busy in alone for node in busy}
    loads = [sum(busy.get(node, 0.0) for _, busy in alone) for node in nodes]
    return max([*loads, *(t for t, _ in alone)])


# --- The summary ----------------------------------------------------------------------------------


class JobSummary(msgspec.Struct, frozen=True):
    name: str
    steps: int
    reward_start: float
    reward_end: float
    weights_sha256: str
    slowdown: float | None
    """GRPO seconds shared, relative to alone; None without a baseline."""
    grpo_seconds: float


class BaselineJob(msgspec.Struct, frozen=True):
    name: str
    steps: int
    reward_start: float
    reward_end: float
    weights_sha256: str
    grpo_seconds: float
    seconds_per_step: float
    busy_seconds_per_step: dict[str, float]
    """Device → busy seconds of a step of the job alone."""
    context_switches: int


class Baseline(msgspec.Struct, frozen=True):
    jobs: list[BaselineJob]
    weights_identical: bool
    """Whether each job's weights have the same SHA-256 alone and shared."""


class Usage(msgspec.Struct, frozen=True):
    """The processor time of the measured rounds of some runs."""

    wall_s: float = 0.0
    processor_s: float = 0.0
    """Of the mesh and the controllers."""
    others_s: float = 0.0
    """Of all other programs on the machine."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.wall_s + other.wall_s,
            self.processor_s + other.processor_s,
            self.others_s + other.others_s,
        )

    def __sub__(self, other: Usage) -> Usage:
        return self + Usage(-other.wall_s, -other.processor_s, -other.others_s)


class Processors(msgspec.Struct, frozen=True):
    """The processor time of the GRPO steps, all jobs together."""

    cores: int
    alone: Usage
    shared: Usage


class DeviceSeconds(msgspec.Struct, frozen=True):
    alone: float | None
    shared: float


class WholeRun(msgspec.Struct, frozen=True):
    """The figures of a whole run, including warm-up and evaluations."""

    seconds: float
    alone_seconds: float | None
    """Sum of the jobs' whole runs alone; None without a baseline."""
    saved_percent: float | None
    context_switches: int
    switch_seconds: float
    hidden_switch_seconds: float
    busy_share: dict[str, float]


class Operations(msgspec.Struct, frozen=True):
    submitted: int
    completed: int
    failed: int


class Summary(msgspec.Struct, frozen=True):
    """The content of `summary.json`. All figures except `whole_run` are of the GRPO window."""

    run: str
    seed: int
    devices: int
    jobs: list[JobSummary]
    baseline: Baseline | None
    grpo_seconds: float
    context_switches: int
    switch_seconds: float
    hidden_switch_seconds: float
    busy_share: dict[str, float]
    waiting_share: dict[str, float]
    device_seconds_per_step: DeviceSeconds
    saved_percent: float | None
    bound_saved_percent: float | None
    """The most that two synchronous jobs can save, given their phases measured alone."""
    operations: Operations
    whole_run: WholeRun
    notes: list[str]
    predicted_starts: PredictedStarts | None = None
    """Errors of the starts that `explain` predicted in the whole shared run; None: not computed."""
    predicted_durations: PredictedDurations | None = None
    """Errors of the durations that the profiler predicted in the whole shared run."""
    processors: Processors | None = None


@dataclass(frozen=True, slots=True)
class AloneRun:
    """One job measured alone."""

    result: JobResult
    log: RunLog


def summarize(
    run: str,
    seed: int,
    log: RunLog,
    results: Sequence[JobResult],
    *,
    alone: Sequence[AloneRun] = (),
    notes: Sequence[str] = (),
    predicted_starts: PredictedStarts | None = None,
    predicted_durations: PredictedDurations | None = None,
    processors: Processors | None = None,
) -> Summary:
    """Summarize a shared run, and compare it with the same jobs alone if those were run.

    Args:   results: the results of every job in the shared run.
            alone: a run of each of these jobs, in the same order; empty: no comparison.
    Raises: ValueError: a job has no GRPO operation in its log.
    """
    windows = [window_of(grpo_executions(log, r)) for r in results]
    window = (min(w[0] for w in windows), max(w[1] for w in windows))
    grpo = figures(log, window)
    num_devices, num_steps = len(log.devices), sum(r.steps for r in results)
    shared = num_devices * grpo.seconds / num_steps
    baseline = _baseline(alone, results)
    alone_s = [job.grpo_seconds for job in baseline.jobs] if baseline else []
    per_step_alone = num_devices * sum(alone_s) / num_steps if alone_s else None
    return Summary(
        run=run,
        seed=seed,
        devices=num_devices,
        jobs=[
            _job_summary(r, w, alone_s[i] if alone_s else None)
            for i, (r, w) in enumerate(zip(results, windows, strict=True))
        ],
        baseline=baseline,
        grpo_seconds=grpo.seconds,
        context_switches=grpo.context_switches,
        switch_seconds=grpo.switch_seconds,
        hidden_switch_seconds=grpo.hidden_switch_seconds,
        busy_share=grpo.busy_share,
        waiting_share=grpo.waiting_share,
        device_seconds_per_step=DeviceSeconds(per_step_alone, shared),
        saved_percent=_saved_percent(grpo.seconds, alone_s),
        bound_saved_percent=_bound_percent(alone, alone_s),
        operations=Operations(log.submitted, log.completed, log.failed),
        whole_run=_whole_run(log, alone),
        notes=list(notes),
        predicted_starts=predicted_starts,
        predicted_durations=predicted_durations,
        processors=processors,
    )


def _job_summary(result: JobResult, window: Interval, alone_s: float | None) -> JobSummary:
    seconds = window[1] - window[0]
    return JobSummary(
        result.name,
        result.steps,
        result.reward_start,
        result.reward_end,
        result.weights_sha256,
        seconds / alone_s if alone_s else None,
        seconds,
    )


def _baseline(alone: Sequence[AloneRun], shared: Sequence[JobResult]) -> Baseline | None:
    if not alone:
        return None
    identical = all(
        a.result.name == r.name and a.result.weights_sha256 == r.weights_sha256
        for a, r in zip(alone, shared, strict=True)
    )
    return Baseline([_baseline_job(a) for a in alone], identical)


def _baseline_job(alone: AloneRun) -> BaselineJob:
    result = alone.result
    executions = grpo_executions(alone.log, result)
    start_s, end_s = window_of(executions)
    num_switches = figures(alone.log, (start_s, end_s)).context_switches
    return BaselineJob(
        result.name,
        result.steps,
        result.reward_start,
        result.reward_end,
        result.weights_sha256,
        end_s - start_s,
        (end_s - start_s) / result.steps,
        {node: s / result.steps for node, s in busy_seconds(executions).items()},
        num_switches,
    )


def _saved_percent(shared_s: float, alone_s: Sequence[float]) -> float | None:
    return 100.0 * (1.0 - shared_s / sum(alone_s)) if alone_s else None


def _bound_percent(alone: Sequence[AloneRun], alone_s: Sequence[float]) -> float | None:
    if not alone:
        return None
    busy = [busy_seconds(grpo_executions(a.log, a.result)) for a in alone]
    return _saved_percent(least_shared_seconds(list(zip(alone_s, busy, strict=True))), alone_s)


def _whole_run(log: RunLog, alone: Sequence[AloneRun]) -> WholeRun:
    totals = figures(log, window_of(log.executions))
    windows = [window_of(a.log.executions) for a in alone]
    alone_s = [end - start for start, end in windows]
    return WholeRun(
        totals.seconds,
        sum(alone_s) if alone_s else None,
        _saved_percent(totals.seconds, alone_s),
        totals.context_switches,
        totals.switch_seconds,
        totals.hidden_switch_seconds,
        totals.busy_share,
    )
