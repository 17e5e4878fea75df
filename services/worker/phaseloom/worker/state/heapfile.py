"""Moves a heap straight to a section of a state file, or back, if host memory has no room for it.

Every block has a checksum. The blocks of a GPU pass through a few blocks of pinned host memory,
where the checksums are taken. kvikio moves the bytes between the device and the file itself, and
only the checksum is taken from a copy in host memory: of the bytes that arrived on the device, if
they are read. All functions block: call them in the thread of the heap.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.state_agent import DiskMethod
from phaseloom.common.contract.state_rank import FileSection
from phaseloom.common.tensors.blockfile import (
    DEPTH,
    FILES,
    FULL,
    NUM_CHECKING,
    BlockFile,
    DeviceBytes,
    KvikioFile,
    in_two_steps,
)
from phaseloom.common.tensors.blockhash import (
    BLOCK_BYTES,
    CHECKSUM_BYTES,
    checksum,
    combine_checksums,
)
from phaseloom.common.transport.framing import close_fds
from phaseloom.worker.cuda.memory import CudaHeap
from phaseloom.worker.state.devicememory import DeviceMemory
from phaseloom.worker.state.heap import Heap

log = logging.getLogger(__name__)

_NUM_THREADS = DEPTH + NUM_CHECKING


class HeapFiles:
    """Writes and reads the heap of one rank."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        """Set when the rank leaves: the move under way then ends early."""
        self.is_straight = True
        """Whether kvikio has moved this device's memory, or has not been tried yet."""

    def write(self, heap: DeviceMemory, section: FileSection, fds: list[int]) -> bytes:
        """Write the whole heap. Returns: the checksums of its blocks.

        Raises: ResourceError: RESOURCE_EXHAUSTED: the disk is full; UNAVAILABLE: it fails.
        """
        with self._opened(section, fds, writable=True) as file, self._blocks(heap, file) as blocks:

            def move(start: int, end: int) -> bytes:
                return blocks.write(start, end, section.offset + start)

            return self._each(heap, move)

    def read(self, heap: DeviceMemory, section: FileSection, fds: list[int]) -> str:
        """Fill the whole heap, verifying every block. Returns: the digest.

        Raises: ResourceError: DATA_LOSS, with the offset of the bad block; UNAVAILABLE.
        """
        with self._opened(section, fds, writable=False) as file, self._blocks(heap, file) as blocks:

            def move(start: int, end: int) -> bytes:
                count, total = blocks.read(start, end, section.offset + start)
                at = start // BLOCK_BYTES * CHECKSUM_BYTES
                if count < end - start:
                    raise _loss("the file ends before them", start + count)
                if total != section.checksums[at : at + CHECKSUM_BYTES]:
                    raise _loss("their checksum does not match", start)
                return total

            return combine_checksums(self._each(heap, move))

    def _each(self, heap: DeviceMemory, move: Callable[[int, int], bytes]) -> bytes:
        moving, passing = (_NUM_THREADS, move), (1, lambda _start, _end, total: total)
        return b"".join(in_two_steps(heap.num_bytes, BLOCK_BYTES, moving, passing, self.cancelled))

    @contextmanager
    def _opened(
        self, section: FileSection, fds: list[int], *, writable: bool
    ) -> Iterator[BlockFile]:
        """Open the file of the descriptor by the method of the section, or the next simpler one
        that works. Closes the descriptor. OSErrors of the block become typed errors."""
        try:
            # Opened again, because each method has its own flags.
            path = Path(f"/proc/self/fd/{fds[0]}")
            with closing(_open(path, section.method, writable=writable)) as file:
                yield file
        except OSError as error:
            is_full = error.errno in FULL
            raise ResourceError(
                f"the state file cannot be {'written' if writable else 'read'}: "
                f"{error.strerror or error}",
                code=Code.RESOURCE_EXHAUSTED if is_full else Code.UNAVAILABLE,
                remedy="free space on the node's state directory" if is_full else "check the disk",
            ) from error
        finally:
            close_fds(fds)

    @contextmanager
    def _blocks(self, heap: DeviceMemory, file: BlockFile) -> Iterator[_Blocks]:
        if isinstance(heap, Heap):
            yield _HostBlocks(heap, file)
            return
        with closing(_DeviceBlocks(heap, file, self)) as blocks:
            yield blocks


class _Blocks(Protocol):
    def write(self, start: int, end: int, offset: int) -> bytes:
        """Write a block of the heap to an offset of the file. Returns: its checksum."""
        ...

    def read(self, start: int, end: int, offset: int) -> tuple[int, bytes]:
        """Fill a block of the heap. Returns: the number of bytes that the file had; the
        checksum."""
        ...


class _HostBlocks:
    """The blocks of an emulated device, which are host memory."""

    def __init__(self, heap: Heap, file: BlockFile) -> None:
        self._memory, self._file = heap.buffer, file

    def write(self, start: int, end: int, offset: int) -> bytes:
        block = self._memory[start:end]
        self._file.write(block, offset)
        return checksum(block)

    def read(self, start: int, end: int, offset: int) -> tuple[int, bytes]:
        block = self._memory[start:end]
        return self._file.read(block, offset), checksum(block)


class _DeviceBlocks:
    """The blocks of a GPU's memory."""

    def __init__(self, heap: CudaHeap, file: BlockFile, files: HeapFiles) -> None:
        heap.populate()
        self._heap, self._file, self._files = heap, file, files
        self._lock = threading.Lock()
        """The heap is not thread-safe."""
        memory = memoryview(mmap.mmap(-1, _NUM_THREADS * BLOCK_BYTES))
        self._pinned = heap.pinned(memory)
        self._buffers: SimpleQueue[memoryview] = SimpleQueue()
        for start in range(0, len(memory), BLOCK_BYTES):
            self._buffers.put(memory[start : start + BLOCK_BYTES])

    def close(self) -> None:
        if self._pinned is not None:
            self._pinned.close()

    def write(self, start: int, end: int, offset: int) -> bytes:
        with self._buffer(end - start) as block:
            self._copy_out(start, block)

            def move(file: KvikioFile, memory: DeviceBytes) -> int:
                file.write(memory, offset)
                return len(memory)

            if self._straight(move, start, end) is None:
                self._file.write(block, offset)
            return checksum(block)

    def read(self, start: int, end: int, offset: int) -> tuple[int, bytes]:
        with self._buffer(end - start) as block:
            count = self._straight(lambda file, memory: file.read(memory, offset), start, end)
            if count is not None:
                self._copy_out(start, block)
            else:
                count = self._file.read(block, offset)
                with self._lock:
                    self._heap.copy_parts_in(block, [(0, start, len(block))])
            return count, checksum(block)

    def _copy_out(self, start: int, block: memoryview) -> None:
        with self._lock:
            self._heap.copy_parts_out([(start, 0, len(block))], block)

    def _straight(
        self, move: Callable[[KvikioFile, DeviceBytes], int], start: int, end: int
    ) -> int | None:
        """Move a block between device and file by kvikio.

        Returns: the result of `move`; None: kvikio is not used, or refuses this memory.
        """
        if not (isinstance(self._file, KvikioFile) and self._files.is_straight):
            return None
        try:
            return move(self._file, DeviceBytes(self._heap.address + start, end - start))
        except OSError as error:
            if error.errno in FULL:
                raise
            log.warning("kvikio refuses device memory, so it passes through the host: %s", error)
            self._files.is_straight = False
            return None

    @contextmanager
    def _buffer(self, num_bytes: int) -> Iterator[memoryview]:
        buffer = self._buffers.get()
        try:
            yield buffer[:num_bytes]
        finally:
            self._buffers.put(buffer)


def _open(path: Path, method: DiskMethod, *, writable: bool) -> BlockFile:
    for simpler in list(FILES)[list(FILES).index(method) : -1]:
        try:
            return FILES[simpler](path, writable=writable, exists=True)
        except (ImportError, OSError) as error:
            log.info("%s does not work here: %s", simpler, error)
    return BlockFile(path, writable=writable, exists=True)


def _loss(reason: str, offset: int) -> ResourceError:
    return ResourceError(
        f"{reason} (offset {offset})", code=Code.DATA_LOSS, details={"offset": offset}
    )
