"""One file, written and read in blocks at offsets, by the fastest method that its disk supports.

Several threads may use a file at a time. Aligned memory goes straight between its pages and the
disk. Two kinds of bytes go through the page cache: the last bytes of a file, which are no whole
page, and bytes that the kernel refuses to move directly (EINVAL). Direct and cached bytes never
share a page: blocks begin at multiples of the alignment. A round trip through the disk decides
which method is used, never the list of what is installed.

`python -m phaseloom.statemgr.disk.blockfile DIRECTORY` prints the method that works, as JSON.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from phaseloom.common.contract.state_agent import DiskMethod, DiskPath
from phaseloom.statemgr.memory.extents import copy

PAGE_BYTES = 4096
"""The alignment of memory and offsets in bytes: no disk asks for more."""
PROBE_PREFIX = ".probe-"
_PROBE_BYTES = 3 * PAGE_BYTES + 100

Move = Callable[[int, list[memoryview], int], int]
"""The type of `os.preadv` and `os.pwritev`."""


class BlockFile:
    """A file that is read and written through the page cache. Every method raises OSError."""

    def __init__(self, path: Path, *, writable: bool, num_bytes: int = 0) -> None:
        """Open a file; a writable one is made, or emptied.

        Args: num_bytes: the room that is reserved on the disk for a writable file.
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
        """Fill a block. Returns: the number of bytes read; fewer where the file ends in it."""
        done = 0
        while done < len(block):
            count = os.preadv(self._fd, [block[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def finish(self, num_bytes: int) -> None:
        """Make the file `num_bytes` long, and wait until all that was written is on the disk."""
        os.ftruncate(self._fd, num_bytes)
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class MemoryFile:
    """A file in memory, of a fixed size: a seal that is on no disk."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def write(self, block: memoryview, offset: int) -> None:
        copy(self._memory[offset : offset + len(block)], block)

    def read(self, block: memoryview, offset: int) -> int:
        """Fill a block. Returns: the number of bytes read; fewer where the file ends in it."""
        there = self._memory[offset : offset + len(block)]
        copy(block[: len(there)], there)
        return len(there)


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
        """Move bytes past the page cache. Returns: the number moved, a multiple of a page."""
        whole = len(block) - len(block) % PAGE_BYTES
        if offset % PAGE_BYTES:
            return 0
        done = 0
        while done < whole:
            try:
                moved = move(self._direct_fd, [block[done:whole]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break
            if moved < PAGE_BYTES:
                break
            done += moved - moved % PAGE_BYTES
        return done


def probe(directory: Path) -> DiskPath:
    """The fastest method that works in a directory. Raises nothing: where nothing can be written
    now, each later write fails by itself."""
    try:
        return _probe(directory)
    except OSError as error:
        why = f"nothing can be written in {directory}: {error.strerror}"
        return DiskPath(DiskMethod.BUFFERED, 1, why)


def _probe(directory: Path) -> DiskPath:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=PROBE_PREFIX) as scratch:
        why_not_direct = _why_not_direct(Path(scratch) / "direct")
    if why_not_direct:
        return DiskPath(DiskMethod.BUFFERED, 1, f"direct I/O: {why_not_direct}")
    return DiskPath(DiskMethod.DIRECT, PAGE_BYTES, "a direct round trip came back")


def way_to(path: DiskPath) -> type[BlockFile]:
    return DirectFile if path.method is DiskMethod.DIRECT else BlockFile


def _why_not_direct(path: Path) -> str:
    """The reason why direct I/O does not work here; empty: the disk takes a page of memory
    directly, and what is written so comes back."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            with mmap.mmap(-1, PAGE_BYTES) as memory:
                os.pwrite(fd, memory, PAGE_BYTES)
        finally:
            os.close(fd)
        written, read = (memoryview(mmap.mmap(-1, _PROBE_BYTES)) for _ in range(2))
        written[:] = os.urandom(_PROBE_BYTES)
        with contextlib.closing(DirectFile(path, writable=True, num_bytes=_PROBE_BYTES)) as file:
            file.write(written, 0)
            file.finish(_PROBE_BYTES)
        with contextlib.closing(DirectFile(path, writable=False)) as file:
            came_back = file.read(read, 0) == _PROBE_BYTES and read == written
        return "" if came_back else "it lost bytes"
    except OSError as error:
        return error.strerror or repr(error)


def main() -> None:
    print(msgspec.json.encode(probe(Path(sys.argv[1]))).decode())


if __name__ == "__main__":
    main()
