"""Read spans back from their files: those of a run, and the waterfall of one operation.

`telemetry` writes the files. A span belongs to an operation if it names the operation or is below a
span that does, such as the context switch made for the operation, with its offloads and its load.
`phaseloom trace`, `phaseloom demo` and the console use this module. All functions except
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
"""The names of an operation's spans, in the order in which they start."""

Attribute = str | bool | int | float


class SpanLine(msgspec.Struct, frozen=True):
    """One line of `spans/*.jsonl`."""

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
class SpanRow:
    """A span and its position in the span tree."""

    span: SpanLine
    depth: int
    displaced: tuple[str, ...]
    """The last operation of each deployment that a context switch displaced."""


def read_spans(directory: Path) -> list[SpanLine]:
    """Read all spans of a run. An incomplete last line, left by a killed process, is skipped."""
    return [
        _decoder.decode(line) for path in _files(directory) for line in _lines(path.read_bytes())
    ]


def spans_of(operation: str, directory: Path, newest_bytes: int) -> list[SpanLine]:
    """Read the spans of the traces that an operation is part of, from the end of each file.

    Args:   operation: `<tenant>.<job>.<deployment>.<slot>`.
            newest_bytes: how many bytes to read from the end of each file.
    Cost:   reads each file once and searches each line twice.
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
    """Return the end of a file, starting at the beginning of a line."""
    with path.open("rb") as file:
        left_out = max(0, path.stat().st_size - num_bytes)
        file.seek(left_out)
        if left_out:
            file.readline()  # skip the rest of a line that starts before this point
        return file.read()


def operation_of(span: SpanLine) -> str | None:
    """Return the operation that a span names, as `tenant.job.deployment.seq`, or None."""
    names = ("tenant", "job", "deployment", "seq")
    if not all(name in span.attributes for name in names):
        return None
    return ".".join(str(span.attributes[name]) for name in names)


def describe_location(span: SpanLine) -> str:
    """Describe the service of a span and the node and device that it worked for."""
    node = span.attributes.get("node")
    if node is None:
        return span.service
    device = span.attributes.get("device")
    return f"{span.service} {node}" + ("" if device is None else f"/{device}")


def waterfall(spans: Sequence[SpanLine], operation: str) -> list[SpanRow]:
    """Return the operation's spans, each below its parent, siblings by start time.

    The list is empty if no span names the operation.
    """
    by_id = {span.span_id: span for span in spans}
    children: dict[str | None, list[SpanLine]] = {}
    for span in sorted(spans, key=_order):
        children.setdefault(span.parent_id, []).append(span)
    own_ids = {span.span_id for span in spans if operation_of(span) == operation}

    def subtree(span: SpanLine, depth: int) -> Iterator[SpanRow]:
        yield SpanRow(span, depth, _displaced(span, by_id))
        for child in children.get(span.span_id, []):
            operation_name = operation_of(child)
            if operation_name is None or operation_name == operation:
                yield from subtree(child, depth + 1)

    roots = [by_id[i] for i in own_ids if by_id[i].parent_id not in own_ids]
    return [row for root in sorted(roots, key=_order) for row in subtree(root, 0)]


def _order(span: SpanLine) -> tuple[int, int]:
    """Sort key: start time, then the usual order of an operation's steps."""
    return span.start_unix_ns, STEPS.index(span.name) if span.name in STEPS else len(STEPS)


def _displaced(span: SpanLine, by_id: dict[str, SpanLine]) -> tuple[str, ...]:
    """Describe the operations that a switch's links point to: the last one of each displaced
    deployment."""
    names = []
    for link in span.links:
        linked = by_id.get(link["span_id"])
        operation_name = operation_of(linked) if linked else None
        kind = linked.attributes.get("kind") if linked else None
        names.append(f"{operation_name} ({kind})" if operation_name else f"span {link['span_id']}")
    return tuple(names)


_decoder = msgspec.json.Decoder(SpanLine)
