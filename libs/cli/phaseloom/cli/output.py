"""Printing of tables and JSON to a terminal, a file or a pipe."""

from __future__ import annotations

import msgspec
from rich.console import Console, RenderableType
from rich.measure import Measurement

_UNBOUNDED = 1_000_000
"""A width in columns that no table reaches, so that no cell is cut or folded."""


def print_whole(console: Console, shown: RenderableType) -> None:
    """Print a table. In a file or a pipe it gets its full width, so that no cell is cut or
    folded."""
    if not console.is_terminal:
        unbounded = console.options.update(width=_UNBOUNDED, max_width=_UNBOUNDED)
        console.width = max(console.width, Measurement.get(console, unbounded, shown).maximum)
    console.print(shown)


def print_json(*values: object, console: Console | None = None) -> None:
    """Print each value as one line of JSON, the form of every command's `--json`."""
    target = console or Console()
    for value in values:
        target.out(msgspec.json.encode(value).decode(), highlight=False)


def with_names(value: object, **names: str) -> dict[str, object]:
    """Return a record as an object for `print_json`, with names that the record does not have."""
    return {**names, **msgspec.to_builtins(value)}
