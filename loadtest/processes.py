"""Processes as /proc shows them."""

from __future__ import annotations

import os
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12
"""Fields of /proc/<pid>/stat after the name."""
_IDLE, _WAITING = 4, 5
"""Fields of the first line of /proc/stat."""


def children(pid: int) -> list[int]:
    """The children of a process; none where it has just ended."""
    try:
        texts = [f.read_text() for f in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for text in texts for child in text.split()]


def descendants(pids: list[int]) -> list[int]:
    found: list[int] = []
    wave = pids
    while wave:
        wave = [child for pid in wave for child in children(pid)]
        found += wave
    return found


def pss_bytes(pid: int) -> int:
    """The proportional set size of a process; 0 where it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def cpu_s(pid: int) -> float:
    """The seconds of processor time that a process has used; 0 where it has just ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = text.rpartition(")")[2].split()
    return _TICK_S * (int(fields[_USER]) + int(fields[_SYSTEM]))


def idle_s() -> float:
    """The seconds in which this machine's cores did nothing, summed over cores."""
    fields = Path("/proc/stat").read_text().split(maxsplit=_WAITING + 1)
    return _TICK_S * (int(fields[_IDLE]) + int(fields[_WAITING]))
