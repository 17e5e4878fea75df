"""Checks of the configured budgets against the machine's memory and disk; called at start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from phaseloom.common.contract.errors import CallerError, Code


def check_host(budget_bytes: int) -> None:
    """Check the budget of host memory.

    Raises: CallerError: RESOURCE_EXHAUSTED: it is more than the machine's memory.
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if budget_bytes > there:
        raise _too_much("host_memory_bytes", budget_bytes, there, "bytes of memory")


def nvme_budget(directory: Path, budget_bytes: int | None) -> int:
    """The budget of host copies on NVMe in bytes; the size of the disk where none is configured.

    Args:    directory: the state directory, which exists unless it could not be made.
    Returns: 0 where the directory cannot be read.
    Raises:  CallerError: RESOURCE_EXHAUSTED: the budget is more than the whole disk.
    """
    try:
        disk = shutil.disk_usage(directory)
    except OSError:
        # Every write there will fail by itself, saying why.
        return 0
    if budget_bytes is None:
        return disk.total
    if budget_bytes > disk.total:
        raise _too_much("nvme_bytes", budget_bytes, disk.total, f"bytes at {directory}")
    return budget_bytes


def _too_much(field: str, configured: int, there: int, what: str) -> CallerError:
    return CallerError(
        f"{field} is {configured}: this machine has {there} {what}",
        code=Code.RESOURCE_EXHAUSTED,
        field=field,
        remedy=f"set it to {there} or less",
        details={"configured_bytes": str(configured), "there_bytes": str(there)},
    )
