"""`phaseloom trace OP` draws one operation's spans as a waterfall in the terminal.

A span belongs to an operation when it names the operation, or when it lies under a span that does:
the context switch that was made for the operation, with its offloads and its load. All functions
but `trace` are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from phaseloom.cli.rundir import find_run
from phaseloom.cli.timeline import SpanLine, operation_of, read_spans
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import parse_operation_key

MIN_BAR_CELLS = 16
_STYLES = {
    "submit": "cyan",
    "route": "cyan",
    "queue": "yellow",
    "permit": "magenta",
    "switch": "red",
    "offload": "red",
    "load": "red",
    "execute": "green",
    "sub-stage": "green",
    "complete": "blue",
}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def trace(operation: str, /, *, run: Path | None = None, console: Console | None = None) -> None:
    """Show where the time of one operation went.

    Parameters
    ----------
    operation
        `<tenant>.<job>.<deployment>.<seq>`.
    run
        The run's directory. Without it: the newest one under runs/.
    """
    parse_operation_key(operation)
    directory = find_run(run) / "spans"
    rows = waterfall(read_spans(directory), operation)
    if not rows:
        raise CallerError(
            f"no span of {operation} is in {directory}",
            code=Code.NOT_FOUND,
            field="OP",
            remedy="check the key; spans come half a second late, and of sampled traces only",
        )
    console = console or Console()
    console.print(render(operation, rows, console.width), soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Row:
    """A span at its place in the tree of spans."""

    span: SpanLine
    depth: int
    displaced: tuple[str, ...]
    """The last operations of the deployments that a context switch displaced."""


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
    names = list(_STYLES)
    return span.start_unix_ns, names.index(span.name) if span.name in names else len(names)


def _displaced(span: SpanLine, by_id: dict[str, SpanLine]) -> tuple[str, ...]:
    """The operations that a switch's links point to: the last one of each displaced deployment."""
    names = []
    for link in span.links:
        other = by_id.get(link["span_id"])
        named = operation_of(other) if other else None
        kind = other.attributes.get("kind") if other else None
        names.append(f"{named} ({kind})" if named else f"span {link['span_id']}")
    return tuple(names)


def render(operation: str, rows: Sequence[Row], width: int) -> Text:
    """The waterfall as text, `width` characters wide; all bars share one time scale."""
    begin_ns = min(row.span.start_unix_ns for row in rows)
    whole_ns = max(row.span.end_unix_ns for row in rows) - begin_ns
    kind = next((k for row in rows if (k := row.span.attributes.get("kind"))), "operation")
    names = max(2 * row.depth + len(row.span.name) for row in rows)
    services = max(len(_where(row.span)) for row in rows)
    cells = max(MIN_BAR_CELLS, width - names - services - 24)
    text = Text(f"{operation}  {kind}  {whole_ns / 1e6:.2f} ms\n", "bold")
    text.append(f"{'span':{names}}  {'service':{services}} {'start ms':>9} {'ms':>9}\n", "dim")
    for row in rows:
        span, style = row.span, _STYLES.get(row.span.name, "white")
        start_ns, end_ns = span.start_unix_ns - begin_ns, span.end_unix_ns - begin_ns
        text.append(f"{'  ' * row.depth + span.name:{names}}", style)
        text.append(f"  {_where(span):{services}}", "default")
        text.append(f" {start_ns / 1e6:9.2f} {(end_ns - start_ns) / 1e6:9.2f}  ", "default")
        text.append(bar(start_ns, end_ns, whole_ns, cells) + "\n", style)
        indent = "  " * (row.depth + 1)
        text.append("".join(f"{indent}displaced {name}\n" for name in row.displaced), "dim")
        text.append(f"{indent}failed: {span.error}\n" if span.error else "", "red")
    text.rstrip()
    return text


def _where(span: SpanLine) -> str:
    node = span.attributes.get("node")
    if node is None:
        return span.service
    device = span.attributes.get("device")
    return f"{span.service} {node}" + ("" if device is None else f"/{device}")


def bar(begin: int, end: int, whole: int, cells: int) -> str:
    """A bar from `begin` to `end` on a scale of `whole`, with its end on an eighth of a cell.

    A bar that would be too short to see is drawn an eighth of a cell long.
    """
    if whole <= 0:
        return _EIGHTHS[8]
    first = min(cells - 1, begin * cells // whole)
    eighths = max(1, end * cells * 8 // whole - first * 8)
    return " " * first + _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
