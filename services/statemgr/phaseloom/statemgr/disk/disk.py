"""The disk: reads and writes state files by the fastest method that it supports.

Several blocks of a file move at a time, each with its checksum. Some threads only move blocks, so
that the disk always has its next block, while others take checksums. Neither hold the GIL.
Blocking: call it in a thread.

There are three methods (`DiskMethod`). A test write and read on the disk decides: the preferred
method is used if its bytes come back, otherwise the next simpler one.

With direct I/O, aligned memory moves directly between its pages and the disk. Two kinds of bytes
go through the page cache: the last bytes of a file, which do not fill a page, and bytes that the
kernel refuses to move directly (EINVAL). Direct and cached bytes never share a page, because blocks
begin at multiples of the alignment. kvikio divides blocks in the same way.

`python -m phaseloom.statemgr.disk.disk DIRECTORY [METHOD]` prints the working method as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.state_agent import DiskMethod, DiskPath
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, checksum, combine_checksums
from phaseloom.common.tensors.hugepages import make_huge
from phaseloom.statemgr.disk.statefile import check_blocks, encode_header, layout_of
from phaseloom.statemgr.records.stateheader import SectionRef, StateHeader

S = TypeVar("S")
T = TypeVar("T")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a disk that takes no more."""
PAGE_BYTES = 4096
"""Alignment of memory and offsets. No disk needs more."""
PROBE_PREFIX = ".probe-"
_PROBE_BYTES = 3 * PAGE_BYTES + 100

Move = Callable[[int, list[memoryview], int], int]
"""The type of `os.preadv` and `os.pwritev`."""


class BlockFile:
    """A file that is accessed through the page cache. Every method raises OSError."""

    def __init__(self, path: Path, *, writable: bool, num_bytes: int = 0) -> None:
        """Open a file; a writable one is created or emptied.

        Args: num_bytes: space to reserve on the disk for a writable file.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC if writable else os.O_RDONLY
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        if num_bytes:
            try:
                os.posix_fallocate(self._fd, 0, num_bytes)
            except OSError:
                os.close(self._fd)
                raise

    def write(self, block: memoryview, offset: int) -> None:
        while block:
            done = os.pwrite(self._fd, block, offset)
            block, offset = block[done:], offset + done

    def read(self, block: memoryview, offset: int) -> int:
        """Fill a block. Returns: the bytes read; fewer at the end of the file."""
        done = 0
        while done < len(block):
            count = os.preadv(self._fd, [block[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def finish(self, num_bytes: int) -> None:
        """Make the file `num_bytes` long, and wait until everything written is on the disk."""
        os.ftruncate(self._fd, num_bytes)
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class MemoryFile:
    """A file of fixed size in memory: a seal that is on no disk."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def write(self, block: memoryview, offset: int) -> None:
        copy(self._memory[offset : offset + len(block)], block)

    def read(self, block: memoryview, offset: int) -> int:
        """As `BlockFile.read`."""
        content = self._memory[offset : offset + len(block)]
        copy(block[: len(content)], content)
        return len(content)


class DirectFile(BlockFile):
    """A file that bypasses the page cache, in multiples of a page."""

    def __init__(self, path: Path, *, writable: bool, num_bytes: int = 0) -> None:
        super().__init__(path, writable=writable, num_bytes=num_bytes)
        mode = os.O_RDWR if writable else os.O_RDONLY
        try:
            self._direct_fd = os.open(path, mode | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            super().close()
            raise

    def write(self, block: memoryview, offset: int) -> None:
        done = self._directly(os.pwritev, block, offset)
        super().write(block[done:], offset + done)

    def read(self, block: memoryview, offset: int) -> int:
        done = self._directly(os.preadv, block, offset)
        return done + super().read(block[done:], offset + done)

    def close(self) -> None:
        os.close(self._direct_fd)
        super().close()

    def _directly(self, move: Move, block: memoryview, offset: int) -> int:
        """Move bytes past the page cache. Returns: the bytes moved, a multiple of a page."""
        whole_pages = len(block) - len(block) % PAGE_BYTES
        if offset % PAGE_BYTES:
            return 0
        done = 0
        while done < whole_pages:
            try:
                moved = move(self._direct_fd, [block[done:whole_pages]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break
            if moved < PAGE_BYTES:
                break
            done += moved - moved % PAGE_BYTES
        return done


class KvikioFile(BlockFile):
    """A file that NVIDIA's kvikio moves, past the page cache where it can.

    kvikio needs `libcuda.so.1` even for host memory. It reports every failure as a RuntimeError,
    a full disk too.
    """

    def __init__(self, path: Path, *, writable: bool, num_bytes: int = 0) -> None:
        super().__init__(path, writable=writable, num_bytes=num_bytes)
        try:
            with self._as_os_errors():
                self._handle = _kvikio().CuFile(path, "r+" if writable else "r")
        except OSError:
            super().close()
            raise

    def write(self, block: memoryview, offset: int) -> None:
        with self._as_os_errors():
            self._handle.write(block, len(block), offset)

    def read(self, block: memoryview, offset: int) -> int:
        # kvikio fails at the end of the file, whatever it has read before it.
        num_bytes = min(len(block), max(os.fstat(self._fd).st_size - offset, 0))
        with self._as_os_errors():
            return self._handle.read(block, num_bytes, offset) if num_bytes else 0

    def close(self) -> None:
        self._handle.close()
        super().close()

    @contextmanager
    def _as_os_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            number = next((full for full in FULL if os.strerror(full) in text), errno.EIO)
            raise OSError(number, text) from error


@functools.cache
def _kvikio() -> Any:
    """kvikio, set to move as many whole blocks at a time as this module does.

    Raises: ImportError: it is not installed. RuntimeError: it cannot start.
    """
    import kvikio
    import kvikio.defaults

    kvikio.defaults.set(
        {
            "num_threads": DEPTH,
            "task_size": BLOCK_BYTES,
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
        }
    )
    return kvikio


_FILES = {
    DiskMethod.KVIKIO: KvikioFile,
    DiskMethod.DIRECT: DirectFile,
    DiskMethod.BUFFERED: BlockFile,
}
"""The methods, each before those that are simpler."""


def probe(directory: Path, preferred: DiskMethod = DiskMethod.DIRECT) -> DiskPath:
    """Find the method for a directory: the preferred one, or the next simpler one that works.

    Raises nothing: if the directory is not writable, each later write fails by itself.
    """
    reasons = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=PROBE_PREFIX) as scratch:
            for method in list(_FILES)[list(_FILES).index(preferred) : -1]:
                why_not = _why_not(method, Path(scratch) / method)
                if not why_not:
                    reasons.append(f"a round trip by {method} came back")
                    return DiskPath(method, PAGE_BYTES, "; ".join(reasons))
                reasons.append(f"{method}: {why_not}")
    except OSError as error:
        reasons = [f"nothing can be written in {directory}: {error.strerror}"]
    return DiskPath(DiskMethod.BUFFERED, 1, "; ".join(reasons) or "buffered I/O is preferred")


def _why_not(method: DiskMethod, path: Path) -> str:
    """The reason why a method does not work here; empty: what it wrote came back."""
    try:
        if method is DiskMethod.DIRECT:
            _write_page_directly(path)
        opened = _FILES[method]
        written, read = (memoryview(mmap.mmap(-1, _PROBE_BYTES)) for _ in range(2))
        written[:] = os.urandom(_PROBE_BYTES)
        with contextlib.closing(opened(path, writable=True, num_bytes=_PROBE_BYTES)) as file:
            file.write(written, 0)
            file.finish(_PROBE_BYTES)
        with contextlib.closing(opened(path, writable=False)) as file:
            came_back = file.read(read, 0) == _PROBE_BYTES and read == written
        return "" if came_back else "it lost bytes"
    except ImportError as error:
        return f"it is not installed ({error}): pip install 'phaseloom[gds]'"
    except OSError as error:
        return error.strerror or repr(error)


def _write_page_directly(path: Path) -> None:
    """Write a page past the page cache, which `DirectFile` would use instead. Raises: OSError: the
    kernel refuses."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        with mmap.mmap(-1, PAGE_BYTES) as memory:
            os.pwrite(fd, memory, PAGE_BYTES)
    finally:
        os.close(fd)


class Writable(Protocol):
    def write(self, block: memoryview, offset: int) -> None: ...


class Readable(Protocol):
    def read(self, block: memoryview, offset: int) -> int: ...


DEPTH = 4
"""Blocks that move between memory and disk at a time."""
_NUM_CHECKING = 2
"""Threads that take checksums; each is faster than a disk."""


class Cancelled(ResourceError):
    """A move ended early because it is no longer needed."""

    def __init__(self) -> None:
        super().__init__("the move was cancelled", code=Code.ABORTED)


class Disk:
    """The disk of a directory. Opens files by the method that `probe` finds."""

    def __init__(self, directory: Path, preferred: DiskMethod = DiskMethod.DIRECT) -> None:
        self.path: DiskPath = probe(directory, preferred)
        self._open = _FILES[self.path.method]

    def create(self, path: Path, num_bytes: int) -> BlockFile:
        """Create an empty file with space for `num_bytes`. Raises: OSError: the disk is full."""
        return self._open(path, writable=True, num_bytes=num_bytes)

    def open(self, path: Path) -> BlockFile:
        return self._open(path, writable=False)


def write_state(
    file: Writable,
    name: str,
    header: StateHeader,
    memories: Sequence[memoryview],
    cancelled: threading.Event,
) -> StateHeader:
    """Write every section of a state file, then its header.

    Args:    name: the file's name in errors.
             header: if it has a digest for a part, the part's memory must match it.
    Returns: the header as written.
    """
    offsets, _ = layout_of(header)
    blocks = [
        _write_part(file, SectionRef(name, header, index, at), memory, cancelled)
        for index, (at, memory) in enumerate(zip(offsets, memories, strict=True))
    ]
    written = header.with_blocks(BLOCK_BYTES, blocks)
    start = encode_header(written)
    assert len(start) == offsets[0]
    file.write(memoryview(bytearray(start)), 0)
    return written


def _write_part(
    file: Writable, place: SectionRef, memory: memoryview, cancelled: threading.Event
) -> bytes:
    part = place.part

    def take(start: int, end: int) -> bytes:
        return checksum(memory[start:end])

    def put(start: int, end: int, block_checksum: bytes) -> bytes:
        file.write(memory[start:end], place.offset + start)
        return block_checksum

    checking, moving = (_NUM_CHECKING, take), (DEPTH, put)
    blocks = b"".join(_in_two_steps(part.num_bytes, BLOCK_BYTES, checking, moving, cancelled))
    if part.digest and combine_checksums(blocks) != part.digest:
        raise place.loss("the host copy does not match its digest", 0, part.num_bytes)
    return blocks


def read_part(
    file: Readable, place: SectionRef, memory: memoryview, cancelled: threading.Event
) -> None:
    """Fill `memory` with a part of a state file, verifying every block."""
    check_blocks(place)
    make_huge(memory[: place.part.num_bytes])

    def get(start: int, end: int) -> int:
        return file.read(memory[start:end], place.offset + start)

    def check(start: int, end: int, count: int) -> None:
        _check(place, start, memory[start:end], count)

    moving, checking = (DEPTH, get), (_NUM_CHECKING, check)
    _in_two_steps(place.part.num_bytes, place.header.block_bytes, moving, checking, cancelled)


def read_block(file: Readable, place: SectionRef, number: int, memory: memoryview) -> int:
    """Fill the beginning of `memory` with one verified block. Returns: the block's size."""
    check_blocks(place)
    start = number * place.header.block_bytes
    block = memory[: place.block_size(number)]
    _check(place, start, block, file.read(block, place.offset + start))
    return len(block)


def _check(place: SectionRef, start: int, block: memoryview, count: int) -> None:
    """Verify a block of which `count` bytes were read.

    Raises: ResourceError: DATA_LOSS: it is not the whole block that was written.
    """
    if count < len(block):
        raise place.loss("the file ends before them", start + count, place.part.num_bytes)
    if checksum(block) != place.checksum_of(start // place.header.block_bytes):
        raise place.loss("their checksum does not match", start, start + len(block))


def _in_two_steps(
    num_bytes: int,
    block_bytes: int,
    first: tuple[int, Callable[[int, int], S]],
    then: tuple[int, Callable[[int, int, S], T]],
    cancelled: threading.Event,
) -> list[T]:
    """Run two steps over all blocks: `first(start, end)`, then `then(start, end, result of first)`.

    Args:    first, then: the number of threads for the step, and its function.
    Returns: the results of `then`, in the order of the blocks.
    Raises:  the error of the first block that failed, after all threads have ended.
    """

    def begin(start: int) -> Future[T]:
        unless_cancelled()
        end = min(start + block_bytes, num_bytes)
        return behind.submit(finish, start, end, first[1](start, end))

    def finish(start: int, end: int, intermediate: S) -> T:
        unless_cancelled()
        return then[1](start, end, intermediate)

    def unless_cancelled() -> None:
        if cancelled.is_set():
            raise Cancelled

    with threads(then[0]) as behind, threads(first[0]) as ahead:
        begun = [ahead.submit(begin, start) for start in range(0, num_bytes, block_bytes)]
        return [future.result().result() for future in begun]


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes between two views of the same length.

    Blocking and slow: run it in a thread. Unlike slice assignment, it releases the GIL.
    """
    assert len(target) == len(source)
    ctypes.memmove(_address(target), _address(source), len(source))


def _address(view: memoryview) -> int:
    return ctypes.addressof((ctypes.c_char * len(view)).from_buffer(view))


@contextmanager
def threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads. At the end it waits for work that has begun and cancels the rest."""
    pool = ThreadPoolExecutor(number, "disk")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def main() -> None:
    directory, *preferred = sys.argv[1:]
    print(msgspec.json.encode(probe(Path(directory), *map(DiskMethod, preferred))).decode())


if __name__ == "__main__":
    main()
