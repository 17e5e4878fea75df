"""Reading spans back from their files: those of a run, and the waterfall of one operation.

`telemetry` writes the files. A span belongs to an operation when it names the operation, or when it
lies under a span that does: the context switch that was made for the operation, with its offloads
and its load. `phaseloom trace`, `phaseloom demo` and the console read them. All functions but
`read_spans` and `spans_of` are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

STEPS = (
    "submit",
    "route",
    "queue",
    "permit",
    "switch",
    "offload",
    "load",
    "execute",
    "sub-stage",
    "complete",
)
"""The names of an operation's spans, in the order in which they begin."""

Attribute = str | bool | int | float


class SpanLine(msgspec.Struct, frozen=True):
    """A line of `spans/*.jsonl`."""

    name: str
    span_id: str
    start_unix_ns: int
    end_unix_ns: int
    service: str
    parent_id: str | None = None
    attributes: dict[str, Attribute] = {}
    links: list[dict[str, str]] = []
    error: str | None = None
    trace_id: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A span at its place in the tree of spans."""

    span: SpanLine
    depth: int
    displaced: tuple[str, ...]
    """The last operations of the deployments that a context switch displaced."""


def read_spans(directory: Path) -> list[SpanLine]:
    """All spans of a run. A last line that a killed process left unfinished is skipped."""
    return [
        _decoder.decode(line) for path in _files(directory) for line in _lines(path.read_bytes())
    ]


def spans_of(operation: str, directory: Path, newest_bytes: int) -> list[SpanLine]:
    """The spans of the traces that an operation is part of, among the newest of each file.

    Args: operation: `<tenant>.<job>.<deployment>.<slot>`. newest_bytes: how much of the end of each
          file is read.
    Cost: each file is read once, and two searches of each line.
    """
    lines = [line for path in _files(directory) for line in _lines(_end_of(path, newest_bytes))]
    slot = f'"{operation.rpartition(".")[2]}"'.encode()
    named = (_decoder.decode(line) for line in lines if slot in line)
    traces = {span.trace_id.encode() for span in named if operation_of(span) == operation}
    return [_decoder.decode(line) for line in lines if any(trace in line for trace in traces)]


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.jsonl"))


def _lines(content: bytes) -> Iterator[bytes]:
    return (line for line in content.splitlines(keepends=True) if line.endswith(b"\n"))


def _end_of(path: Path, num_bytes: int) -> bytes:
    """The end of a file, from the beginning of a line on."""
    with path.open("rb") as file:
        left_out = max(0, path.stat().st_size - num_bytes)
        file.seek(left_out)
        if left_out:
            file.readline()
        return file.read()


def operation_of(span: SpanLine) -> str | None:
    """The operation that a span belongs to, as `tenant.job.deployment.seq`; None: it belongs to
    none."""
    names = ("tenant", "job", "deployment", "seq")
    if not all(name in span.attributes for name in names):
        return None
    return ".".join(str(span.attributes[name]) for name in names)


def where(span: SpanLine) -> str:
    """The service that a span is of, and the node and device that it worked for."""
    node = span.attributes.get("node")
    if node is None:
        return span.service
    device = span.attributes.get("device")
    return f"{span.service} {node}" + ("" if device is None else f"/{device}")


def waterfall(spans: Sequence[SpanLine], operation: str) -> list[Row]:
    """The operation's spans, each below its parent, siblings by their start.

    The list is empty where no span names the operation.
    """
    by_id = {span.span_id: span for span in spans}
    children: dict[str | None, list[SpanLine]] = {}
    for span in sorted(spans, key=_order):
        children.setdefault(span.parent_id, []).append(span)
    own = {span.span_id for span in spans if operation_of(span) == operation}

    def under(span: SpanLine, depth: int) -> Iterator[Row]:
        yield Row(span, depth, _displaced(span, by_id))
        for child in children.get(span.span_id, []):
            named = operation_of(child)
            if named is None or named == operation:
                yield from under(child, depth + 1)

    roots = [by_id[i] for i in own if by_id[i].parent_id not in own]
    return [row for root in sorted(roots, key=_order) for row in under(root, 0)]


def _order(span: SpanLine) -> tuple[int, int]:
    """Spans are ordered by their start; those with one start, by the steps of an operation."""
    return span.start_unix_ns, STEPS.index(span.name) if span.name in STEPS else len(STEPS)


def _displaced(span: SpanLine, by_id: dict[str, SpanLine]) -> tuple[str, ...]:
    """The operations that a switch's links point to: the last one of each displaced deployment."""
    names = []
    for link in span.links:
        other = by_id.get(link["span_id"])
        named = operation_of(other) if other else None
        kind = other.attributes.get("kind") if other else None
        names.append(f"{named} ({kind})" if named else f"span {link['span_id']}")
    return tuple(names)


_decoder = msgspec.json.Decoder(SpanLine)
