"""The proofs of state files, on the emulated driver."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from loadtest.gpu import files
from loadtest.gpu.proofs import Disproved, MiB
from phaseloom.common.contract.state_agent import DiskMethod
from phaseloom.common.tensors.blockhash import BLOCK_BYTES
from phaseloom.worker.cuda.memory import CudaHeap
from tests.support.emulatedcuda import EmulatedDriver

SIZE = BLOCK_BYTES + 3 * MiB


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmulatedDriver:
    monkeypatch.chdir(tmp_path)
    return EmulatedDriver(4 * SIZE)


def extent() -> memoryview:
    return memoryview(mmap.mmap(-1, SIZE))


def test_heap_goes_to_a_file_and_back(driver: EmulatedDriver) -> None:
    heap = CudaHeap(SIZE, driver)
    found = files.straight(heap, extent(), DiskMethod.DIRECT, free_bytes=driver.free_bytes)
    assert set(found.figures) == {"write_gb_s", "read_gb_s"}


def test_memory_that_is_not_given_back_is_noticed(driver: EmulatedDriver) -> None:
    with pytest.raises(Disproved, match="0 bytes were given back"):
        files.straight(CudaHeap(SIZE, driver), extent(), DiskMethod.DIRECT, free_bytes=lambda: SIZE)


def test_promoted_copy_is_loaded(driver: EmulatedDriver) -> None:
    found = files.prefetch(CudaHeap(SIZE, driver), extent())
    assert set(found.figures) == {"cold_load_ms", "prefetched_load_ms"}
