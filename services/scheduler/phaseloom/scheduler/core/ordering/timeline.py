"""When each operation of an order would begin and end (PlexRL §4.4, Algorithm 1, lines 13-24).

Deviation: a switch is charged once and where it happens, before the operation that needs it; the
algorithm as printed charges it inside every operation that waits, and once more at the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Planned(Protocol):
    """What a plan needs to know of an operation; see `Candidate`."""

    @property
    def operation(self) -> str: ...
    @property
    def job(self) -> str: ...
    @property
    def duration_s(self) -> float: ...
    @property
    def switch_s(self) -> float: ...
    @property
    def setup_s(self) -> float: ...
    @property
    def is_running(self) -> bool: ...


class Entry(msgspec.Struct, frozen=True):
    operation: str
    start_s: float
    """After its switch."""
    end_s: float


def timeline(ordered: Sequence[Planned], now_s: float) -> list[Entry]:
    """One after the other. What is resident now has to come back once a foreign one came in."""
    entries: list[Entry] = []
    cursor_s = now_s
    came_in: set[str] = set()
    for planned in ordered:
        is_displaced = bool(came_in - {planned.job})
        start_s = cursor_s + (planned.setup_s if is_displaced else planned.switch_s)
        cursor_s = start_s + planned.duration_s
        entries.append(Entry(planned.operation, start_s, cursor_s))
        if planned.switch_s:
            came_in.add(planned.job)
    return entries
