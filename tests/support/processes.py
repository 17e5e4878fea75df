"""What is running, as /proc says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path


def gone(pid: int) -> bool:
    """True when the process has ended, reaped or not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] in {"Z", "X"}


def child_pids(pid: int) -> list[int]:
    """The children of a process, of all its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except FileNotFoundError:
            continue  # the thread ended meanwhile
    return sorted(found)


def descendant_pids(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found: list[int] = []
    for child in child_pids(pid):
        found += [child, *descendant_pids(child)]
    return found


async def until_gone(pids: Iterable[int], timeout_s: float) -> None:
    """Raises: TimeoutError: some still run; in its text."""
    left = set(pids)
    try:
        async with asyncio.timeout(timeout_s):
            while left := {pid for pid in left if not gone(pid)}:
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise TimeoutError(f"still running: {sorted(left)}") from None
