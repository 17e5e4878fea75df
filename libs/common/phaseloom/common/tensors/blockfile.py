"""Files whose blocks move between memory and a disk, by one of three methods (`DiskMethod`).

With direct I/O, aligned memory moves directly between its pages and the disk. Two kinds of bytes
go through the page cache: the last bytes of a file, which do not fill a page, and bytes that the
kernel refuses to move directly (EINVAL). Direct and cached bytes never share a page, because blocks
begin at multiples of the alignment. kvikio divides blocks in the same way.

The state manager moves host memory with these, and ranks their heaps. Blocking: call it in a
thread.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.state_agent import DiskMethod
from phaseloom.common.tensors.blockhash import BLOCK_BYTES

S = TypeVar("S")
T = TypeVar("T")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a disk that takes no more."""
PAGE_BYTES = 4096
"""Alignment of memory and offsets. No disk needs more."""
DEPTH = 4
"""Blocks that move between memory and disk at a time."""
NUM_CHECKING = 2
"""Threads that take checksums; each is faster than a disk."""

Move = Callable[[int, list[memoryview], int], int]
"""The type of `os.preadv` and `os.pwritev`."""


class DeviceBytes:
    """Device memory as other libraries accept it. Its owner keeps it valid."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }

    def __len__(self) -> int:
        return self._num_bytes


class BlockFile:
    """A file that is accessed through the page cache. Every method raises OSError."""

    def __init__(
        self, path: Path, *, writable: bool, num_bytes: int = 0, exists: bool = False
    ) -> None:
        """Open a file; a writable one is created or emptied, unless it `exists`.

        Args: num_bytes: space to reserve on the disk for a writable file.
        """
        new = 0 if exists else os.O_CREAT | os.O_TRUNC
        flags = os.O_RDWR | new if writable else os.O_RDONLY
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


class DirectFile(BlockFile):
    """A file that bypasses the page cache, in multiples of a page."""

    def __init__(
        self, path: Path, *, writable: bool, num_bytes: int = 0, exists: bool = False
    ) -> None:
        super().__init__(path, writable=writable, num_bytes=num_bytes, exists=exists)
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
    """A file that NVIDIA's kvikio moves, past the page cache where it can. It also moves device
    memory.

    kvikio needs `libcuda.so.1` even for host memory. It reports every failure as a RuntimeError,
    a full disk too.
    """

    def __init__(
        self, path: Path, *, writable: bool, num_bytes: int = 0, exists: bool = False
    ) -> None:
        super().__init__(path, writable=writable, num_bytes=num_bytes, exists=exists)
        try:
            with self._as_os_errors():
                self._handle = _kvikio().CuFile(path, "r+" if writable else "r")
        except OSError:
            super().close()
            raise

    def write(self, block: memoryview | DeviceBytes, offset: int) -> None:
        with self._as_os_errors():
            self._handle.write(block, len(block), offset)

    def read(self, block: memoryview | DeviceBytes, offset: int) -> int:
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


FILES = {
    DiskMethod.KVIKIO: KvikioFile,
    DiskMethod.DIRECT: DirectFile,
    DiskMethod.BUFFERED: BlockFile,
}
"""The methods, each before those that are simpler."""


class Cancelled(ResourceError):
    """A move ended early because it is no longer needed."""

    def __init__(self) -> None:
        super().__init__("the move was cancelled", code=Code.ABORTED)


def in_two_steps(
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


@contextmanager
def threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads. At the end it waits for work that has begun and cancels the rest."""
    pool = ThreadPoolExecutor(number, "disk")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
