"""`phaseloom trace OP` draws one operation's spans as a waterfall in the terminal.

Only the function `trace` reads files and prints; the others are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from phaseloom.cli.output import print_json
from phaseloom.cli.rundir import find_run
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import parse_operation_key
from phaseloom.common.observability.spans import SpanRow, describe_location, read_spans, waterfall

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


def trace(
    operation: str,
    /,
    *,
    run: Path | None = None,
    json: bool = False,
    console: Console | None = None,
) -> None:
    """Show where the time of one operation went.

    Parameters
    ----------
    operation
        `<tenant>.<job>.<deployment>.<seq>`.
    run
        Run directory, or its name under runs/. Default: the newest run.
    json
        Print one JSON object per span instead of a picture.
    """
    parse_operation_key(operation)
    directory = find_run(run) / "spans"
    rows = waterfall(read_spans(directory), operation)
    if not rows:
        raise CallerError(
            f"{directory} has no spans of {operation}",
            code=Code.NOT_FOUND,
            field="OP",
            remedy="check the key; spans appear after half a second, and only for sampled traces",
        )
    if json:
        return print_json(*rows, console=console)
    console = console or Console()
    console.print(render(operation, rows, console.width), soft_wrap=True)


def render(operation: str, rows: Sequence[SpanRow], width: int) -> Text:
    """Return the waterfall as text, `width` characters wide. All bars have the same time scale."""
    begin_ns = min(row.span.start_unix_ns for row in rows)
    total_ns = max(row.span.end_unix_ns for row in rows) - begin_ns
    kind = next((k for row in rows if (k := row.span.attributes.get("kind"))), "operation")
    names = max(2 * row.depth + len(row.span.name) for row in rows)
    services = max(len(describe_location(row.span)) for row in rows)
    cells = max(MIN_BAR_CELLS, width - names - services - 24)
    text = Text(f"{operation}  {kind}  {total_ns / 1e6:.2f} ms\n", "bold")
    text.append(f"{'span':{names}}  {'service':{services}} {'start ms':>9} {'ms':>9}\n", "dim")
    for row in rows:
        span, style = row.span, _STYLES.get(row.span.name, "white")
        start_ns, end_ns = span.start_unix_ns - begin_ns, span.end_unix_ns - begin_ns
        text.append(f"{'  ' * row.depth + span.name:{names}}", style)
        text.append(f"  {describe_location(span):{services}}", "default")
        text.append(f" {start_ns / 1e6:9.2f} {(end_ns - start_ns) / 1e6:9.2f}  ", "default")
        text.append(bar(start_ns, end_ns, total_ns, cells) + "\n", style)
        indent = "  " * (row.depth + 1)
        text.append("".join(f"{indent}displaced {name}\n" for name in row.displaced), "dim")
        text.append(f"{indent}failed: {span.error}\n" if span.error else "", "red")
    text.rstrip()
    return text


def bar(begin: int, end: int, scale: int, cells: int) -> str:
    """Return a bar between two times on a scale, precise to an eighth of a character.

    A bar is at least an eighth of a character long, so that it is visible.
    """
    if scale <= 0:
        return _EIGHTHS[8]
    first = min(cells - 1, begin * cells // scale)
    eighths = max(1, end * cells * 8 // scale - first * 8)
    return " " * first + _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
