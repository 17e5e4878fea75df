"""Metrics: one table of all instruments of the mesh, and a Prometheus endpoint per process.

`TABLE` lists all metrics. `docs/metrics.md` documents them, and a test compares the two. The
profiler computes the metrics that follow from the decision log, using `Activity`; the other
services count what only they can see. Pure cores contain no instruments: their shells measure the
outputs.

`endpoint` configures OpenTelemetry's global meter provider once per process. Without a port nothing
is configured, and using an instrument costs one lookup (about 1 µs; with a port, about 5 µs). The
endpoint runs on the service's event loop. So gauges never read half-changed state, but a scrape
blocks the loop for some milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec
from opentelemetry import metrics as otel
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

from phaseloom.common.contract.errors import PhaseloomError, ResourceError
from phaseloom.common.contract.ids import JobKey

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)

MAX_JOBS = 100
"""Maximum number of jobs with their own series: those with the largest values. The sum of all
remaining jobs is reported as `other`."""
_OTHERS = JobKey("other", "other")
_REQUEST_TIMEOUT_S = 5.0
_REFRESH_TIMEOUT_S = 1.0
_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0),
)
_SHORT_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0)

_SUFFIX = {"s": "_seconds", "By": "_bytes"}


class InstrumentKind(StrEnum):
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """An instrument. Its labels have few values, or are limited by `per_job`.

    Metrics are compared by identity, because every use looks one up.
    """

    name: str
    """Name by OpenTelemetry's conventions."""
    kind: InstrumentKind
    unit: str
    """Unit in UCUM: `s`, `By`, or the counted thing in braces."""
    labels: tuple[str, ...]
    service: str
    """The service that exposes the metric."""
    meaning: str

    @property
    def prometheus(self) -> str:
        """The metric's name in Prometheus.

        The series of a histogram add `_bucket`, `_sum` and `_count` to it.
        """
        name = self.name.replace(".", "_") + _SUFFIX.get(self.unit, "")
        return f"{name}_total" if self.kind is InstrumentKind.COUNTER else name


@dataclass(frozen=True, slots=True)
class _Service:
    """Creates the metrics of a service. Names omit the project's prefix; labels are separated by
    spaces."""

    service: str

    def counter(self, name: str, unit: str, labels: str, meaning: str) -> Metric:
        return self._metric(name, unit, labels, meaning, InstrumentKind.COUNTER)

    def gauge(self, name: str, unit: str, labels: str, meaning: str) -> Metric:
        return self._metric(name, unit, labels, meaning, InstrumentKind.GAUGE)

    def histogram(self, name: str, unit: str, labels: str, meaning: str) -> Metric:
        return self._metric(name, unit, labels, meaning, InstrumentKind.HISTOGRAM)

    def _metric(
        self, name: str, unit: str, labels: str, meaning: str, kind: InstrumentKind
    ) -> Metric:
        label_names = tuple(labels.split())
        return Metric(f"phaseloom.{name}", kind, unit, label_names, self.service, meaning)


# --- From the decision log: the profiler ----------------------------------------------------------

_profiler = _Service("profiler")
OPERATION_WAIT = _profiler.histogram(
    "operation.wait",
    "s",
    "pool kind",
    "Time from ready (queued, with its predecessors and everything in `after` done) to the start",
)
OPERATION_DURATION = _profiler.histogram(
    "operation.duration", "s", "pool kind", "Execution time on the device, without replays"
)
OPERATIONS_FINISHED = _profiler.counter(
    "operations.finished",
    "{operation}",
    "tenant kind outcome",
    "Operations that ran, by outcome, without replays",
)
OPERATIONS_REPLAYED = _profiler.counter(
    "operations.replayed",
    "{operation}",
    "kind",
    "Operations run again to rebuild a lost WPG",
)
OPERATION_TOKENS = _profiler.counter(
    "operation.tokens", "{token}", "pool kind", "Tokens that operations processed"
)
SWITCH_DURATION = _profiler.histogram(
    "switch.duration",
    "s",
    "node part",
    "Duration of context switches that moved bytes; part is `offload` or `load`",
)
SWITCH_HIDDEN = _profiler.counter(
    "switch.hidden",
    "s",
    "node",
    "Seconds of switches in which no ready operation waited for the device; divided by the "
    "sum of `phaseloom.switch.duration` it is the hidden share",
)
SWITCH_MOVED = _profiler.counter(
    "switch.moved",
    "By",
    "node direction",
    "State moved by context switches; direction is `out` or `in`",
)
SWITCHES_SPECULATIVE = _profiler.counter(
    "switches.speculative",
    "{switch}",
    "node",
    "Activations opened for an operation that was only predicted",
)
DEVICE_BUSY = _profiler.counter(
    "device.busy",
    "s",
    "node device",
    "Seconds in which the device ran an operation; its rate is the utilization",
)
ACTIVATIONS_REFUSED = _profiler.counter(
    "activations.refused",
    "{activation}",
    "node code",
    "Switch-ins that were rolled back or did not fit, by error code",
)
WPG_LOSSES = _profiler.counter(
    "wpg.losses",
    "{wpg}",
    "node code",
    "Worker-process groups that died or were stopped, by error code",
)
NODE_LOSSES = _profiler.counter("node.losses", "{node}", "node", "Number of times a node was lost")
SEALS = _profiler.counter("seals", "{seal}", "node result", "Seals `committed` and `failed`")
JOB_PERIOD = _profiler.gauge(
    "job.period", "s", "tenant job", "A job's measured cycle; absent until one is detected"
)
PROFILER_LAG = _profiler.gauge(
    "profiler.lag", "{entry}", "", "Entries of the decision log that the profiler has not read yet"
)

# --- Scheduler ------------------------------------------------------------------------------------

_scheduler = _Service("scheduler")
QUEUE_DEPTH = _scheduler.gauge(
    "queue.depth",
    "{operation}",
    "tenant job",
    "Operations without an outcome, including running ones",
)
PERMITS = _scheduler.counter(
    "permits", "{permit}", "kind", "Permits issued, by kind of operation, including replays"
)
STEP_DURATION = _scheduler.histogram(
    "scheduler.step.duration",
    "s",
    "",
    "Time of the core's decision on one log entry",
)
SCHEDULER_LAG = _scheduler.gauge(
    "scheduler.lag",
    "{entry}",
    "",
    "Entries of the decision log that the scheduler has not processed yet",
)
LOG_SIZE = _scheduler.gauge(
    "log.size",
    "By",
    "",
    "Size of the decision log in the server's store, above the second-newest snapshot",
)
OPERATIONS_SIZE = _scheduler.gauge(
    "operations.size",
    "By",
    "tenant",
    "Size of a tenant's operation stream in the server's store: the operations above the seals",
)

# --- Router ---------------------------------------------------------------------------------------

_router = _Service("router")
OPERATIONS_ROUTED = _router.counter(
    "operations.routed",
    "{operation}",
    "tenant code",
    "Operations read from the stream: admitted (code `OK`), or refused, by error code",
)
VALIDATION_DURATION = _router.histogram(
    "router.validation.duration",
    "s",
    "",
    "Time to validate one operation, including its session",
)
ROUTER_LAG = _router.gauge(
    "router.lag",
    "{operation}",
    "tenant",
    "Operations that no router has read yet; every replica reports the same number",
)

# --- Every service --------------------------------------------------------------------------------

LOOP_STALLS = _Service("all").counter(
    "loop.stalls",
    "{callback}",
    "service",
    "Callbacks that used more than 50 ms of an event loop's processor time; the log shows where",
)

# --- Worker ---------------------------------------------------------------------------------------

_worker = _Service("worker")
WORKER_WPGS = _worker.gauge(
    "worker.wpgs", "{wpg}", "node", "Worker-process groups that the node's agent runs"
)
WORKER_COMMANDS = _worker.gauge(
    "worker.commands", "{command}", "node", "Scheduler commands that the agent is executing"
)

# --- State manager --------------------------------------------------------------------------------

_statemgr = _Service("statemgr")
ARENA_USED = _statemgr.gauge("arena.used", "By", "node", "Host memory in use by managed state")
ARENA_BUDGET = _statemgr.gauge(
    "arena.budget", "By", "node", "Budget of host memory for managed state"
)
DEVICE_USED = _statemgr.gauge("device.used", "By", "node device", "Managed state on the device")
DEVICE_BUDGET = _statemgr.gauge(
    "device.budget", "By", "node device", "Budget of managed state on the device"
)
TRANSFER_DURATION = _statemgr.histogram(
    "transfer.duration",
    "s",
    "node direction",
    "Duration of moves of a rank's state; direction is `offload`, `load`, `copy` for a seal "
    "of resident state, or `demote` and `promote` between host memory and NVMe",
)
TRANSFER_MOVED = _statemgr.counter("transfer.moved", "By", "node direction", "Bytes of those moves")
SEAL_DURATION = _statemgr.histogram(
    "seal.duration",
    "s",
    "node",
    "Time to write a seal to disk, including its versions and the fsync",
)
CHECKPOINT_DURATION = _statemgr.histogram(
    "checkpoint.duration",
    "s",
    "node",
    "Time to write a checkpoint from its snapshot to disk, including the fsync",
)
VERSION_RECEIVED = _statemgr.counter(
    "version.received",
    "By",
    "form",
    "Bytes of weights versions and slices received from other nodes; form is `whole`, or "
    "`delta` of an earlier version",
)
VERSION_REBUILT = _statemgr.counter(
    "version.rebuilt", "By", "", "Bytes of weights versions rebuilt from those deltas"
)
NOT_ON_DEVICE = _statemgr.counter(
    "version.unshared",
    "{version}",
    "",
    "Weights versions offered in device memory but not kept there: no room next to their "
    "policy, or dropped meanwhile; readers then load them from host memory",
)
UNFORESEEN = _statemgr.counter(
    "failures.unforeseen",
    "{failure}",
    "part",
    "Unexpected failures, contained and logged with a traceback; part is `request`, `peer`, "
    "`move` or `checkpoint`",
)

_SHORT = (STEP_DURATION, VALIDATION_DURATION)
"""Histograms of durations in the range of microseconds."""
TABLE: tuple[Metric, ...] = tuple(m for m in vars().copy().values() if isinstance(m, Metric))


# --- Using them -----------------------------------------------------------------------------------

Reading = tuple[float, Mapping[str, str]]
"""A gauge's value and its labels."""
Refresh = Callable[[], Awaitable[None]]


@runtime_checkable
class _Refreshing(Protocol):
    """The meter provider of a process that has an endpoint."""

    refreshes: list[Refresh]


def count(metric: Metric, amount: float = 1, **labels: str) -> None:
    """Add to a counter."""
    _counter(otel.get_meter_provider(), metric).add(amount, labels)


def measure(metric: Metric, value: float, **labels: str) -> None:
    """Add a value to a histogram."""
    _histogram(otel.get_meter_provider(), metric).record(value, labels)


@contextmanager
def timed(metric: Metric, **labels: str) -> Iterator[None]:
    """Record the duration of the block in a histogram, unless the block raises."""
    began_s = time.perf_counter()
    yield
    measure(metric, time.perf_counter() - began_s, **labels)


def observe(metric: Metric, read: Callable[[], Iterable[Reading]]) -> None:
    """Read a gauge, or a counter's total, at every scrape. `read` runs on the event loop."""

    def callback(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, labels) for value, labels in read()]

    meter = otel.get_meter_provider().get_meter("phaseloom")
    if metric.kind is InstrumentKind.COUNTER:
        meter.create_observable_counter(metric.name, [callback], metric.unit, metric.meaning)
    else:
        meter.create_observable_gauge(metric.name, [callback], metric.unit, metric.meaning)


def before_scrape(refresh: Refresh) -> None:
    """Register a function to call before every scrape, to refresh values that gauges read.

    It may send requests to the server.
    """
    provider = otel.get_meter_provider()
    if isinstance(provider, _Refreshing):
        provider.refreshes.append(refresh)


def per_job(values: Mapping[JobKey, float]) -> list[Reading]:
    """Return readings by tenant and job: one for each of the `MAX_JOBS` largest values, plus the
    sum of all remaining ones."""
    jobs = sorted(values, key=lambda job: (-values[job], job))
    readings: list[Reading] = [(values[job], _job_labels(job)) for job in jobs[:MAX_JOBS]]
    if len(jobs) > MAX_JOBS:
        remaining = sum(values[job] for job in jobs[MAX_JOBS:])
        readings.append((remaining, _job_labels(_OTHERS)))
    return readings


def _job_labels(job: JobKey) -> dict[str, str]:
    return {"tenant": job.tenant, "job": job.job}


@lru_cache(maxsize=len(TABLE))
def _counter(provider: MeterProvider, metric: Metric) -> otel.Counter:
    assert metric.kind is InstrumentKind.COUNTER, metric.name
    return provider.get_meter("phaseloom").create_counter(metric.name, metric.unit, metric.meaning)


@lru_cache(maxsize=len(TABLE))
def _histogram(provider: MeterProvider, metric: Metric) -> otel.Histogram:
    assert metric.kind is InstrumentKind.HISTOGRAM, metric.name
    return provider.get_meter("phaseloom").create_histogram(
        metric.name,
        metric.unit,
        metric.meaning,
        explicit_bucket_boundaries_advisory=_SHORT_SECONDS if metric in _SHORT else _SECONDS,
    )


# --- The endpoint ---------------------------------------------------------------------------------


class MetricsConfig(msgspec.Struct, frozen=True):
    """Section `metrics`; PHASELOOM_METRICS_<FIELD>."""

    port: int = 0
    """TCP port of `http://<host>:<port>/metrics`, and of `/healthz`, which answers as long as the
    event loop runs; 0: no endpoint and no measurements."""
    host: str = "127.0.0.1"
    """Address to listen on."""


@asynccontextmanager
async def endpoint(service: str, settings: MetricsConfig) -> AsyncIterator[None]:
    """Measure, and answer scrapes, within the block.

    Enter it once per process, before the first instrument is used.

    Raises: ResourceError: the port is not available.
    """
    if not settings.port:
        yield
        return
    registry, refreshes = _set_up(service)
    scraping = asyncio.Lock()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S), scraping:
                writer.write(await _response(reader, registry, refreshes))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            log.debug("a scrape ended early: %r", error)
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(answer, settings.host, settings.port)
    except OSError as error:
        raise ResourceError(
            f"cannot serve metrics at {settings.host}:{settings.port}: {error.strerror}",
            field="PHASELOOM_METRICS_PORT",
            remedy="choose a free port, or 0 for no endpoint",
        ) from None
    try:
        yield
    finally:
        server.close()


def _set_up(service: str) -> tuple[CollectorRegistry, list[Refresh]]:
    # Imported here: a process without an endpoint saves the memory of these packages.
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
    from opentelemetry.sdk.resources import Resource
    from prometheus_client import CollectorRegistry

    class Provider(SdkMeterProvider):
        refreshes: list[Refresh]

    registry = CollectorRegistry()
    provider = Provider(
        [PrometheusMetricReader(scope_info_enabled=False, registry=registry)],
        resource=Resource.create({"service.name": service}),
        shutdown_on_exit=False,
    )
    provider.refreshes = []
    otel.set_meter_provider(provider)
    return registry, provider.refreshes


async def _response(
    reader: asyncio.StreamReader,
    registry: CollectorRegistry,
    refreshes: list[Refresh],
) -> bytes:
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    # Parse just enough of HTTP: only GET of two paths is served, one request per connection.
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    method, path, *_ = [*head.split(), "", ""]
    if (method, path) == ("GET", "/healthz"):
        return b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    if (method, path.partition("?")[0]) != ("GET", "/metrics"):
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    for refresh in refreshes:
        await _run_refresh(refresh)
    body = generate_latest(registry)
    return (
        f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE_LATEST}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body


async def _run_refresh(refresh: Refresh) -> None:
    """Run a refresh before a scrape.

    If the NATS server is unreachable, the gauges that depend on it keep their old values and the
    scrape is still answered.
    """
    from nats.errors import Error as NatsError

    try:
        async with asyncio.timeout(_REFRESH_TIMEOUT_S):
            await refresh()
    except (TimeoutError, NatsError, PhaseloomError) as error:
        log.warning("metrics from the NATS server are as old as the last scrape: %r", error)
