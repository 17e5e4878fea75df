"""A receiver of traces, as Jaeger is one: OTLP over HTTP, protobuf."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

Span = dict[str, Any]

_PATIENCE_S = 60.0


class Receiver:
    """Its address, and the spans that have arrived."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.spans: list[Span] = []
        self._grown = threading.Condition()

    def take(self, spans: Iterator[Span]) -> None:
        with self._grown:
            self.spans += spans
            self._grown.notify_all()

    async def until(self, is_met: Callable[[list[Span]], bool]) -> None:
        """Until what has arrived meets a condition. Raises: AssertionError: it never does."""

        def wait() -> bool:
            with self._grown:
                return self._grown.wait_for(lambda: is_met(self.spans), _PATIENCE_S)

        assert await asyncio.to_thread(wait), [span["name"] for span in self.spans]


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Receives within the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.take(_spans(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        names = {a.key: a.value.string_value for a in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield {
                    "name": span.name,
                    "service": names["service.name"],
                    "trace_id": span.trace_id.hex(),
                    "span_id": span.span_id.hex(),
                    "parent_id": span.parent_span_id.hex() or None,
                    "attributes": {a.key: _value(a.value) for a in span.attributes},
                    "links": [
                        {"trace_id": link.trace_id.hex(), "span_id": link.span_id.hex()}
                        for link in span.links
                    ],
                    "duration_ns": span.end_time_unix_nano - span.start_time_unix_nano,
                }


def _value(value: AnyValue) -> object:
    return getattr(value, str(value.WhichOneof("value")))
