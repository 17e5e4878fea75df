"""Processes as /proc shows them."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """Of a process; none where it has just ended."""
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
    """Proportional set size; 0 where the process has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
