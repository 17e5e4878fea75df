"""Tracing: spans of an operation across all services, with W3C trace context in NATS headers.

Span names: submit, route, queue, permit, switch, offload, load, execute, complete. Attributes:
tenant, job, deployment, seq, kind, node, device, epoch.

Spans go to a JSON-lines file, to an OTLP receiver, to both, or nowhere. `setup` configures
OpenTelemetry's global tracer provider once per process. A recorded span costs about 27 µs, an
unsampled one about 5 µs. If an exporter cannot keep up, the batch processor drops the spans above
its queue size and logs that. No decision depends on spans.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from phaseloom.common.contract.errors import CallerError, Code

log = logging.getLogger(__name__)

Attribute = str | bool | int | float

_QUEUE_SPANS = 65_536
_EXPORT_EVERY_MS = 500
_BATCH_SPANS = 4096
_SHUTDOWN_TIMEOUT_S = 3.0
_TRACEPARENT = "traceparent"
_TRACEPARENT_LENGTH = 55


class TelemetryConfig(msgspec.Struct, frozen=True):
    """The targets of spans. Without a target, traces that start in this process are not
    recorded."""

    spans_dir: str = ""
    """Directory for `<service>-<pid>.jsonl`, with one span per line; empty: no file."""
    otlp_endpoint: str = ""
    """`http://host:4318` of an OTLP/HTTP receiver; empty: none. Needs the extra `otlp`."""
    sample_ratio: float = 1.0
    """Fraction of traces to record, 0 to 1, decided where a trace starts."""


def setup(service: str, settings: TelemetryConfig) -> Callable[[], None]:
    """Install the exporters of this process. Call it once, before the first span.

    Returns: a function to call at the end, which exports the remaining spans and closes files.
    Raises:  CallerError: an OTLP endpoint is set but the package for it is missing, or the ratio is
            invalid.
    """
    exporters: list[SpanExporter] = []
    if settings.spans_dir:
        exporters.append(SpanFile(service, Path(settings.spans_dir)))
    if settings.otlp_endpoint:
        exporters.append(_otlp_exporter(settings.otlp_endpoint))
    ratio = settings.sample_ratio
    if not 0.0 <= ratio <= 1.0:
        raise CallerError(
            f"sample_ratio must be between 0 and 1, got {ratio}",
            field="PHASELOOM_TELEMETRY_SAMPLE_RATIO",
            remedy="use a number from 0 to 1",
        )
    provider = TracerProvider(
        # The service that starts a trace decides for all: it is recorded entirely or not at all.
        sampler=ParentBased(TraceIdRatioBased(ratio) if exporters else ALWAYS_OFF),
        resource=Resource.create({"service.name": service}),
        shutdown_on_exit=False,
    )
    for exporter in exporters:
        provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=_QUEUE_SPANS,
                schedule_delay_millis=_EXPORT_EVERY_MS,
                max_export_batch_size=_BATCH_SPANS,
            )
        )
    trace.set_tracer_provider(provider)
    return partial(_shut_down, provider)


def flush() -> None:
    """Export the remaining spans, in bounded time, before the process exits hard."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        _shut_down(provider)


def _shut_down(provider: TracerProvider) -> None:
    """Shut a provider down in bounded time: an unresponsive receiver must not keep the process
    alive."""
    ending = threading.Thread(target=provider.shutdown, daemon=True)
    ending.start()
    ending.join(_SHUTDOWN_TIMEOUT_S)
    if ending.is_alive():
        log.warning("could not export the last spans within %.0f s", _SHUTDOWN_TIMEOUT_S)


def tracer() -> Tracer:
    return _tracer_of(trace.get_tracer_provider())


@lru_cache(maxsize=1)
def _tracer_of(provider: trace.TracerProvider) -> Tracer:
    # Cached: getting the tracer from the provider costs a third of a span.
    return provider.get_tracer("phaseloom")


def inject(headers: Mapping[str, str], context: Context | None = None) -> dict[str, str]:
    """Return a copy of the headers with a trace context added.

    Args:   context: the context to add; None: the current one.
    """
    carrier = dict(headers)
    if trace.get_current_span(context).get_span_context().is_valid:
        TraceContextTextMapPropagator().inject(carrier, context)
    return carrier


def extract(headers: Mapping[str, str] | None) -> Context:
    """Return the trace context of a message; an empty context if it has none."""
    if not headers or _TRACEPARENT not in headers:
        return Context()
    return _parse_traceparent(headers) or TraceContextTextMapPropagator().extract(
        dict(headers), Context()
    )


def _parse_traceparent(headers: Mapping[str, str]) -> Context | None:
    """Parse trace context headers in the form that we write; None for any other form.

    OpenTelemetry's propagator handles all forms, at three times the cost.
    """
    text = headers[_TRACEPARENT]
    if len(text) != _TRACEPARENT_LENGTH or not text.startswith("00-") or "tracestate" in headers:
        return None
    try:
        ids = int(text[3:35], 16), int(text[36:52], 16)
        flags = trace.TraceFlags(int(text[53:], 16))
    except ValueError:
        return None
    return child_context(SpanContext(*ids, is_remote=True, trace_flags=flags))


def span_context(context: Context) -> SpanContext:
    """Return the span of a context, in the form needed for links."""
    return trace.get_current_span(context).get_span_context()


@contextmanager
def use_context(context: Context) -> Iterator[None]:
    """Make a context current in the block, so that its log lines carry the trace."""
    token = attach(context)
    try:
        yield
    finally:
        detach(token)


@contextmanager
def span(
    name: str,
    *,
    parent: Context | None = None,
    links: Sequence[SpanContext] = (),
    start_unix_s: float | None = None,
    **attributes: object,
) -> Iterator[Span]:
    """Open a span for the block and make it current.

    An exception in the block marks the span as failed and propagates.

    Args:   parent: the parent context; None: the current one.
            start_unix_s: when the span started; None: now.
    """
    current = _unsampled(parent) or tracer().start_span(
        name,
        parent,
        attributes=_attributes(attributes),
        links=_links(links),
        start_time=None if start_unix_s is None else _nanoseconds(start_unix_s),
    )
    # Equivalent to `start_as_current_span`, without its three context managers.
    token = attach(trace.set_span_in_context(current))
    try:
        yield current
    except Exception as error:
        current.set_status(Status(StatusCode.ERROR, str(error)))
        raise
    finally:
        detach(token)
        current.end()


def record(
    name: str,
    start_unix_s: float,
    end_unix_s: float,
    parent: Context | None = None,
    links: Sequence[SpanContext] = (),
    **attributes: object,
) -> SpanContext:
    """Record a span after the fact. Returns: its context, for children and links.

    Args:   parent: the parent context; None: the current one.
    """
    if unsampled := _unsampled(parent):
        return unsampled.get_span_context()
    current = tracer().start_span(
        name,
        parent,
        attributes=_attributes(attributes),
        links=_links(links),
        start_time=_nanoseconds(start_unix_s),
    )
    current.end(_nanoseconds(end_unix_s))
    return current.get_span_context()


def _unsampled(parent: Context | None) -> Span | None:
    """Return the parent span if its trace is not recorded, otherwise None.

    That span can serve as all its children too. The SDK would give the same result at five times
    the cost.
    """
    current = trace.get_current_span(parent)
    context = current.get_span_context()
    return current if context.is_valid and not context.trace_flags.sampled else None


def child_context(parent: SpanContext) -> Context:
    """Return a context in which new spans become children of `parent`.

    Use it for parents made with `record`, and for `inject`.
    """
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


class SpanFile(SpanExporter):
    """Writes spans as JSON lines to `<directory>/<service>-<pid>.jsonl`."""

    def __init__(self, service: str, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._service = service
        self._path = directory / f"{service}-{os.getpid()}.jsonl"
        self._file: TextIO | None = self._path.open("a", encoding="utf-8")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._file is None:
            return SpanExportResult.FAILURE
        # A single write: readers of a running mesh must not see partial lines of a killed process.
        self._file.write("".join(self._line(span) for span in spans))
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def _line(self, span: ReadableSpan) -> str:
        context = span.get_span_context()
        assert context is not None
        entry = {
            "name": span.name,
            "trace_id": trace.format_trace_id(context.trace_id),
            "span_id": trace.format_span_id(context.span_id),
            "parent_id": trace.format_span_id(span.parent.span_id) if span.parent else None,
            "start_unix_ns": span.start_time,
            "end_unix_ns": span.end_time,
            "service": self._service,
            "attributes": dict(span.attributes or {}),
            "links": [_link_ids(link.context) for link in span.links],
        }
        if span.status.status_code is StatusCode.ERROR:
            entry["error"] = span.status.description
        return json.dumps(entry) + "\n"


def _link_ids(context: SpanContext) -> dict[str, str]:
    return {
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
    }


def _otlp_exporter(endpoint: str) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise CallerError(
            "cannot send spans: the OTLP exporter is not installed",
            code=Code.FAILED_PRECONDITION,
            field="PHASELOOM_TELEMETRY_OTLP_ENDPOINT",
            remedy="pip install 'phaseloom[otlp]', or unset it",
        ) from None
    path = urlsplit(endpoint).path
    return OTLPSpanExporter(
        endpoint=endpoint if path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    )


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1e9)


def _links(contexts: Sequence[SpanContext]) -> list[Link]:
    return [Link(context) for context in contexts if context.is_valid]


def _attributes(values: Mapping[str, object]) -> dict[str, Attribute]:
    return {
        name: value if isinstance(value, Attribute) else str(value)
        for name, value in values.items()
        if value is not None
    }
