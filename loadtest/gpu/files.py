"""Proofs of state files: a heap goes straight to NVMe and back, and is prefetched from there."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.gpu.proofs import Found, MiB, Skipped, require, with_heap
from phaseloom.worker.cuda.driver import Driver
from phaseloom.worker.cuda.memory import CudaHeap

if TYPE_CHECKING:
    from phaseloom.common.contract.state_agent import DiskMethod

NUM_BYTES = 1024 * MiB


def heap_to_nvme(driver: Driver) -> Found:
    """A heap goes to NVMe and back by kvikio, as ranks do it if host memory has no room."""
    try:
        import kvikio  # noqa: F401

        from phaseloom.common.contract.state_agent import DiskMethod
    except ImportError as error:
        raise Skipped(f"kvikio is not installed: {error}") from error
    with with_heap(driver, NUM_BYTES) as (heap, extent):
        return straight(heap, extent, DiskMethod.KVIKIO, free_bytes=driver.free_bytes)


def straight(
    heap: CudaHeap, extent: memoryview, method: DiskMethod, *, free_bytes: Callable[[], int]
) -> Found:
    """Fill a heap, write it straight to a file, release it, and read it back."""
    from phaseloom.common.contract.state_rank import FileSection
    from phaseloom.worker.state.heapfile import HeapFiles

    _scatter(extent)
    heap.copy_in(extent)
    files = HeapFiles()
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        path = Path(scratch) / "heap"

        def opened() -> list[int]:
            return [os.open(path, os.O_RDWR | os.O_CREAT)]

        started_s = time.perf_counter()
        checksums = files.write(heap, FileSection(0, method), opened())
        written_s = time.perf_counter()
        before = free_bytes()
        heap.release()
        freed = free_bytes() - before
        require(freed >= heap.num_bytes // 2, f"{freed} bytes were given back")
        released_s = time.perf_counter()
        files.read(heap, FileSection(0, method, checksums), opened())
        read_s = time.perf_counter() - released_s
    arrived = memoryview(mmap.mmap(-1, heap.num_bytes))
    heap.copy_out(arrived)
    require(arrived == extent, "what came back differs")
    way = "the device and the file themselves" if files.is_straight else "host memory, see the log"
    speeds = {"write": written_s - started_s, "read": read_s}
    return Found(
        f"bit-identical, through {way}",
        {f"{what}_gb_s": heap.num_bytes / 1e9 / taken for what, taken in speeds.items()},
    )


def prefetched(driver: Driver) -> Found:
    """A host copy that comes up from NVMe while the device works is loaded as fast as any other."""
    with with_heap(driver, NUM_BYTES) as (heap, extent):
        return prefetch(heap, extent)


def prefetch(heap: CudaHeap, extent: memoryview) -> Found:
    """Demote a heap's host copy, and load it cold, then after its promotion."""
    try:
        from phaseloom.common.contract.ids import DeploymentKey
        from phaseloom.statemgr.disk.files import StateDirectory, find_parts
        from phaseloom.statemgr.records.stateheader import Section, StateHeader
    except ImportError as error:
        raise Skipped(f"the state manager is not installed: {error}") from error
    _scatter(extent)
    content = bytes(extent[::4096])
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        directory, path = StateDirectory(Path(scratch)), Path(scratch) / "copy"
        section = Section(len(extent), [], "")
        header = StateHeader("copy", DeploymentKey("a", "b", "c"), 1, [section])
        directory.write(path, header, [extent])
        (place,) = find_parts(path)
        for name in ("cold_load_ms", "prefetched_load_ms"):
            heap.release()
            extent[:] = bytes(len(extent))
            started_s = time.perf_counter()
            directory.read(place, extent)
            if name == "prefetched_load_ms":
                started_s = time.perf_counter()  # this was hidden behind work on the device
            heap.copy_in(extent)
            seconds[name] = (time.perf_counter() - started_s) * 1e3
            arrived = memoryview(mmap.mmap(-1, heap.num_bytes))
            heap.copy_out(arrived)
            require(bytes(arrived[::4096]) == content and arrived == extent, "it differs")
    return Found("bit-identical after a promotion", seconds)


def _scatter(extent: memoryview) -> None:
    """Fill memory with bytes that differ from block to block."""
    block = os.urandom(MiB)
    for start in range(0, len(extent), MiB):
        part = extent[start : start + MiB]
        part[:] = block[start // MiB % 997 :].ljust(MiB, b"\1")[: len(part)]
