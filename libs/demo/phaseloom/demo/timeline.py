"""A run's spans as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

Each node is a process with two kinds of tracks. A device's track has executions, with the
sub-stages of rollouts inside, and switches, with offload and load inside. A track of shares shows
which deployment had how many units of a device that several use at the same time.

Each job is a process with the submits, queue waits and messages of each deployment. An arrow leads
from each submit to its execution. Slices of one thread must nest or be disjoint, so overlapping
submits use additional lanes of the same name. Queue waits and messages overlap by the hundred. They
are asynchronous events, which the viewer stacks in one track per name.

Format: the JSON object form of the Trace Event Format; `ts` and `dur` are microseconds.
All functions but `write_timeline` are pure. Cost: O(n log n) in the spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from phaseloom.common.observability.spans import Attribute, SpanLine, operation_of

DEVICE_SPANS = frozenset({"execute", "sub-stage", "switch", "offload", "load"})
ASYNC_SPANS = frozenset({"queue", "route", "permit", "complete"})

TraceEvent = dict[str, Any]
Track = tuple[str, str]
"""The names of a process and of a thread in it."""


def write_timeline(spans: Sequence[SpanLine], path: Path) -> None:
    path.write_bytes(msgspec.json.encode(chrome_trace(spans)))


def chrome_trace(spans: Sequence[SpanLine]) -> dict[str, Any]:
    """Return the trace as a JSON-ready object."""
    complete = [_with_inherited(span, attributes) for span, attributes in _inherited(spans)]
    tracks = _Tracks()
    origin_ns = min((span.start_unix_ns for span in complete), default=0)
    slices: list[TraceEvent] = []
    ends: dict[tuple[str, str], TraceEvent] = {}
    for span in sorted(complete, key=lambda s: (s.start_unix_ns, -s.end_unix_ns)):
        track = track_of(span)
        if track is None:
            continue
        if span.name in ASYNC_SPANS:
            slices += _async_slice(span, track[1], tracks.process(track[0]), origin_ns)
            continue
        event = _slice(span, tracks.lane(track, span), origin_ns)
        slices.append(event)
        if span.name in {"submit", "execute"} and (operation := operation_of(span)):
            ends.setdefault((span.name, operation), event)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"origin_unix_ns": str(origin_ns)},
        "traceEvents": [*tracks.names(), *slices, *_arrows(ends)],
    }


def track_of(span: SpanLine) -> Track | None:
    """Return the track of a span; None if it belongs to no device and no deployment."""
    attributes = span.attributes
    if span.name in DEVICE_SPANS and "node" in attributes:
        return (f"node {attributes['node']}", f"device {attributes.get('device', 0)}")
    if span.name == "share":
        return (f"node {attributes['node']}", f"device {attributes.get('device', 0)} shares")
    if "job" not in attributes or "deployment" not in attributes:
        return None
    if span.name in ASYNC_SPANS or span.name == "submit":
        return (f"job {attributes['job']}", f"{attributes['deployment']} {span.name}")
    return None


@dataclass(slots=True)
class _Lane:
    thread: int
    open_ends_ns: list[int] = field(default_factory=list)
    """Ends of the open slices, outermost first."""

    def takes(self, span: SpanLine) -> bool:
        while self.open_ends_ns and self.open_ends_ns[-1] <= span.start_unix_ns:
            self.open_ends_ns.pop()
        return not self.open_ends_ns or span.end_unix_ns <= self.open_ends_ns[-1]


class _Tracks:
    """Numbers of processes and threads, and for each span a lane in which it nests."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._lanes: dict[Track, list[_Lane]] = {}
        self._num_threads = 0

    def lane(self, track: Track, span: SpanLine) -> tuple[int, int]:
        """Return the (pid, tid) of a span's lane.

        Callers pass spans in order of their start, and longer ones first among equals.
        """
        pid = self.process(track[0])
        lanes = self._lanes.setdefault(track, [])
        match = next((lane for lane in lanes if lane.takes(span)), None)
        if match is None:
            self._num_threads += 1
            match = _Lane(self._num_threads)
            lanes.append(match)
        match.open_ends_ns.append(span.end_unix_ns)
        return pid, match.thread

    def process(self, name: str) -> int:
        return self._processes.setdefault(name, len(self._processes) + 1)

    def names(self) -> Iterator[TraceEvent]:
        """Yield metadata events that name processes and threads, and sort nodes above jobs."""
        for order, (process, pid) in enumerate(sorted(self._processes.items(), reverse=True)):
            yield _metadata("process_name", pid, 0, name=process)
            yield _metadata("process_sort_index", pid, 0, sort_index=order)
        order = 0
        for (process, thread), lanes in sorted(self._lanes.items()):
            for lane in lanes:
                order += 1
                pid = self._processes[process]
                yield _metadata("thread_name", pid, lane.thread, name=thread)
                yield _metadata("thread_sort_index", pid, lane.thread, sort_index=order)


def _metadata(event: str, pid: int, tid: int, **args: object) -> TraceEvent:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "args": args}


def _slice(span: SpanLine, lane: tuple[int, int], origin_ns: int) -> TraceEvent:
    attributes = span.attributes
    label = attributes.get("kind", span.name) if span.name == "execute" else span.name
    if span.name == "sub-stage":
        label = f"{attributes['steps']} steps of {attributes['tokens_per_step']} tokens"
    is_of_job = span.name in DEVICE_SPANS or span.name == "share"
    job = f"{attributes['job']} " if is_of_job and "job" in attributes else ""
    if span.name == "share":
        label = f"{attributes['deployment']}: {attributes['units']} units"
    return {
        "ph": "X",
        "name": f"{job}{label}",
        "cat": span.name,
        "ts": (span.start_unix_ns - origin_ns) / 1e3,
        "dur": (span.end_unix_ns - span.start_unix_ns) / 1e3,
        "pid": lane[0],
        "tid": lane[1],
        "args": _args(span),
    }


def _async_slice(
    span: SpanLine, track: str, pid: int, origin_ns: int
) -> tuple[TraceEvent, TraceEvent]:
    common = {"name": track, "cat": span.name, "id": span.span_id, "pid": pid, "tid": 0}
    begin_us, end_us = ((ns - origin_ns) / 1e3 for ns in (span.start_unix_ns, span.end_unix_ns))
    return (
        {"ph": "b", "ts": begin_us, **common, "args": _args(span)},
        {"ph": "e", "ts": end_us, **common},
    )


def _args(span: SpanLine) -> dict[str, Attribute]:
    error: dict[str, Attribute] = {} if span.error is None else {"error": span.error}
    return {**span.attributes, **error, "service": span.service}


def _arrows(ends: dict[tuple[str, str], TraceEvent]) -> Iterator[TraceEvent]:
    """Yield flow events from each submit to the slice that executed the operation."""
    submits = [(op, event) for (name, op), event in ends.items() if name == "submit"]
    for number, (operation, submit) in enumerate(submits, 1):
        execute = ends.get(("execute", operation))
        if execute is None:
            continue
        for phase, event in (("s", submit), ("f", execute)):
            arrow = {"ph": phase, "id": number, "name": "operation", "cat": "operation"}
            fields = {key: event[key] for key in ("ts", "pid", "tid")}
            yield {**arrow, **fields, **({"bp": "e"} if phase == "f" else {})}


def _inherited(spans: Sequence[SpanLine]) -> Iterable[tuple[SpanLine, dict[str, Attribute]]]:
    """Yield each span with its own attributes and those of its ancestors.

    `offload` and `load` only have the bytes moved; their parent `switch` has the node and device.
    """
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        attributes: dict[str, Attribute] = {}
        ancestor: SpanLine | None = span
        seen = set()
        while ancestor is not None and ancestor.span_id not in seen:
            seen.add(ancestor.span_id)
            attributes = {**ancestor.attributes, **attributes}
            ancestor = by_id.get(ancestor.parent_id) if ancestor.parent_id else None
        yield span, attributes


def _with_inherited(span: SpanLine, attributes: dict[str, Attribute]) -> SpanLine:
    return msgspec.structs.replace(span, attributes=attributes)
