"""Heaps on both kinds of devices, straight to a state file and back, by each method."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.state_agent import DiskMethod
from phaseloom.common.contract.state_rank import FileSection
from phaseloom.common.tensors.blockfile import (
    FILES,
    PAGE_BYTES,
    BlockFile,
    DeviceBytes,
    KvikioFile,
)
from phaseloom.common.tensors.blockhash import (
    BLOCK_BYTES,
    combine_checksums,
    digest_of,
)
from phaseloom.worker.cuda.memory import CudaHeap
from phaseloom.worker.state import devicememory
from phaseloom.worker.state.heap import Heap
from phaseloom.worker.state.heapfile import HeapFiles
from tests.support.emulatedcuda import EmulatedDriver
from tests.support.statefiles import PREFERRED

SIZE = 2 * BLOCK_BYTES + 5 * PAGE_BYTES + 100
METHODS = [DiskMethod.BUFFERED, DiskMethod.DIRECT, *([PREFERRED] * (PREFERRED == "kvikio"))]


@pytest.fixture(params=["emulated", "cuda"])
def heap(request: pytest.FixtureRequest) -> devicememory.DeviceMemory:
    return Heap(SIZE) if request.param == "emulated" else CudaHeap(SIZE, EmulatedDriver())


def filled(heap: devicememory.DeviceMemory) -> bytes:
    content = os.urandom(SIZE)
    devicememory.write(heap, 0, content)
    return content


def opened(path: Path) -> list[int]:
    return [os.open(path, os.O_RDWR | os.O_CREAT)]


@pytest.mark.parametrize("method", METHODS)
def test_heap_comes_back_from_its_section_bit_by_bit(
    tmp_path: Path, heap: devicememory.DeviceMemory, method: DiskMethod
) -> None:
    content, files, path = filled(heap), HeapFiles(), tmp_path / "f"
    path.write_bytes(b"the header")
    section = FileSection(PAGE_BYTES, method)
    checksums = files.write(heap, section, opened(path))
    assert combine_checksums(checksums) == digest_of(memoryview(content))
    stored = path.read_bytes()
    assert stored[:10] == b"the header"
    assert stored[PAGE_BYTES : PAGE_BYTES + SIZE] == content
    heap.release()
    section = FileSection(PAGE_BYTES, method, checksums)
    assert files.read(heap, section, opened(path)) == digest_of(memoryview(content))
    assert devicememory.read(heap, 0, SIZE) == content
    assert not [link for link in Path("/proc/self/fd").iterdir() if _is_open(link, path)]


def _is_open(link: Path, path: Path) -> bool:
    try:
        return link.readlink() == path
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block", [0, 2])
def test_bad_block_is_data_loss_with_its_offset(
    tmp_path: Path, heap: devicememory.DeviceMemory, method: DiskMethod, block: int
) -> None:
    filled(heap)
    files, path = HeapFiles(), tmp_path / "f"
    checksums = files.write(heap, FileSection(0, method), opened(path))
    with path.open("r+b") as file:
        file.seek(block * BLOCK_BYTES + 7)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ResourceError, match="checksum does not match") as caught:
        files.read(heap, FileSection(0, method, checksums), opened(path))
    assert caught.value.info.code is Code.DATA_LOSS
    assert caught.value.info.details == {"offset": str(block * BLOCK_BYTES)}


@pytest.mark.parametrize("method", METHODS)
def test_torn_file_is_data_loss_with_where_it_ends(
    tmp_path: Path, heap: devicememory.DeviceMemory, method: DiskMethod
) -> None:
    filled(heap)
    files, path = HeapFiles(), tmp_path / "f"
    checksums = files.write(heap, FileSection(0, method), opened(path))
    os.truncate(path, SIZE - 1)
    with pytest.raises(ResourceError, match="the file ends before them") as caught:
        files.read(heap, FileSection(0, method, checksums), opened(path))
    assert caught.value.info.details == {"offset": str(SIZE - 1)}


def test_move_ends_early_when_the_rank_leaves(
    tmp_path: Path, heap: devicememory.DeviceMemory
) -> None:
    files = HeapFiles()
    files.cancelled.set()
    with pytest.raises(ResourceError, match="cancelled") as caught:
        files.write(heap, FileSection(0, DiskMethod.DIRECT), opened(tmp_path / "f"))
    assert caught.value.info.code is Code.ABORTED


def test_full_disk_is_reported_as_such(
    heap: devicememory.DeviceMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockFile, "write", _full)
    with pytest.raises(ResourceError, match="cannot be written") as caught:
        HeapFiles().write(heap, FileSection(0, DiskMethod.BUFFERED), opened(tmp_path / "f"))
    assert caught.value.info.code is Code.RESOURCE_EXHAUSTED


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Straight(KvikioFile):
    """What kvikio does with an address of device memory, which the emulated driver has in this
    process; or refuses it."""

    moved: list[int]
    refuses = False

    def __init__(
        self, path: Path, *, writable: bool, num_bytes: int = 0, exists: bool = False
    ) -> None:
        BlockFile.__init__(self, path, writable=writable, num_bytes=num_bytes, exists=exists)

    def write(self, block: memoryview | DeviceBytes, offset: int) -> None:
        BlockFile.write(self, self._at(block), offset)

    def read(self, block: memoryview | DeviceBytes, offset: int) -> int:
        return BlockFile.read(self, self._at(block), offset)

    def close(self) -> None:
        BlockFile.close(self)

    def _at(self, block: memoryview | DeviceBytes) -> memoryview:
        if isinstance(block, memoryview):
            return block
        if self.refuses:
            raise OSError(errno.EIO, "cuFile refuses it")
        address, _ = block.__cuda_array_interface__["data"]
        self.moved.append(len(block))
        return memory_at(address, len(block))


def memory_at(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


@pytest.mark.parametrize("refuses", [False, True])
def test_kvikio_moves_device_memory_itself_unless_it_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    monkeypatch.setitem(FILES, DiskMethod.KVIKIO, Straight)
    monkeypatch.setattr(Straight, "moved", [], raising=False)
    monkeypatch.setattr(Straight, "refuses", refuses)
    heap = CudaHeap(SIZE, EmulatedDriver())
    content, files, path = filled(heap), HeapFiles(), tmp_path / "f"
    checksums = files.write(heap, FileSection(0, DiskMethod.KVIKIO), opened(path))
    assert path.read_bytes() == content
    heap.release()
    section = FileSection(0, DiskMethod.KVIKIO, checksums)
    assert files.read(heap, section, opened(path)) == digest_of(memoryview(content))
    assert devicememory.read(heap, 0, SIZE) == content
    assert sum(Straight.moved) == (0 if refuses else 2 * SIZE)
    assert files.is_straight is not refuses


def test_method_that_is_missing_in_the_rank_is_replaced_by_a_simpler_one(
    tmp_path: Path, heap: devicememory.DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter of a backend may lack kvikio."""

    def missing(*_: object, **__: object) -> BlockFile:
        raise ImportError("no kvikio")

    monkeypatch.setitem(FILES, DiskMethod.KVIKIO, missing)
    content, files, path = filled(heap), HeapFiles(), tmp_path / "f"
    files.write(heap, FileSection(0, DiskMethod.KVIKIO), opened(path))
    assert path.read_bytes() == content
