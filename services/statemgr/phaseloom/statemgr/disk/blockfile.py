"""One file, written and read in blocks at offsets, from several threads at a time.

Memory that is aligned goes straight between its pages and the disk; the last bytes of a file, which
no disk takes alone, and whatever the kernel refuses to move so (EINVAL), go through the page cache.
The two never share a page: blocks begin at multiples of the alignment.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

Move = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""


class BlockFile(Protocol):
    """Every method raises OSError."""

    def write(self, block: memoryview, offset: int) -> None: ...

    def read(self, block: memoryview, offset: int) -> int:
        """Bytes read; fewer than asked for where the file ends."""

    def finish(self, num_bytes: int) -> None:
        """What was written is on the disk for good, and the file this long."""

    def close(self) -> None: ...


class BufferedFile:
    """Through the page cache."""

    def __init__(self, path: Path, *, writable: bool, num_bytes: int = 0) -> None:
        """Args: num_bytes: of a writable one, made or emptied: room for as much is taken."""
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
        done = 0
        while done < len(block):
            count = os.preadv(self._fd, [block[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def finish(self, num_bytes: int) -> None:
        os.ftruncate(self._fd, num_bytes)
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class DirectFile(BufferedFile):
    """Past the page cache, in multiples of `alignment_bytes`."""

    def __init__(
        self, path: Path, alignment_bytes: int, *, writable: bool, num_bytes: int = 0
    ) -> None:
        super().__init__(path, writable=writable, num_bytes=num_bytes)
        mode = os.O_RDWR if writable else os.O_RDONLY
        try:
            self._direct_fd = os.open(path, mode | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            super().close()
            raise
        self._alignment_bytes = alignment_bytes

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
        """As many bytes as can be moved so, a multiple of the alignment."""
        whole = len(block) - len(block) % self._alignment_bytes
        if offset % self._alignment_bytes:
            return 0
        done = 0
        while done < whole:
            try:
                moved = move(self._direct_fd, [block[done:whole]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break
            if moved < self._alignment_bytes:
                break
            done += moved - moved % self._alignment_bytes
        return done
