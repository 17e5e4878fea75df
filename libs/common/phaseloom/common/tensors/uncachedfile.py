"""Read files past the page cache, for bytes that will not be read again soon."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from types import TracebackType

_ALIGNMENT_BYTES = mmap.PAGESIZE
"""Required alignment of offsets, lengths and addresses of direct reads."""


class UncachedFile:
    """A file opened for direct reads, or for ordinary reads if its file system does not support
    direct ones."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raises: OSError: it cannot be opened."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._buffer = mmap.mmap(-1, _ALIGNMENT_BYTES)

    def __enter__(self) -> UncachedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Read bytes. The view is valid until the next read.

        Raises: OSError: they cannot be read, or the file ends before them.
        """
        start = offset // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        stop = -(-(offset + num_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if stop - start > len(self._buffer):
            self._buffer = mmap.mmap(-1, stop - start)
        buffer = memoryview(self._buffer)[: stop - start]
        num_bytes_read, needed = 0, offset + num_bytes - start
        while num_bytes_read < needed:
            num_read = self._read(buffer[num_bytes_read:], start + num_bytes_read)
            if num_read == 0:
                raise OSError(f"the file ends before byte {offset + num_bytes}")
            num_bytes_read += num_read
        return buffer[offset - start : needed]

    def _read(self, memory: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._fd, [memory], offset)
        except OSError as error:
            # Some file systems refuse direct I/O only at the first read. And after a read that
            # ended within a page, the next offset is not aligned.
            if error.errno != errno.EINVAL:
                raise
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        os.close(self._fd)
        self._fd = fd
        return os.preadv(fd, [memory], offset)
