"""What the machine that runs the tests can do."""

from __future__ import annotations

import mmap

import pytest

from phaseloom.common.tensors.hugepages import touch


def can_prefault() -> bool:
    """Whether memory can be had before it is written (Linux 5.14)."""
    return touch(memoryview(mmap.mmap(-1, mmap.PAGESIZE)))


needs_prefault = pytest.mark.skipif(
    not can_prefault(), reason="this system gives no memory before it is written"
)
