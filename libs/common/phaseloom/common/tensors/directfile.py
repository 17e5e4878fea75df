"""Reads of a file past the page cache, for bytes that nobody reads again soon."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import TracebackType

_ALIGNMENT_BYTES = mmap.PAGESIZE
"""Offsets, lengths and addresses of direct reads are multiples of it."""


class DirectFile:
    """A file that is read direct where its file system can do that, and else as any file."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError: it cannot be opened."""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._buffer = mmap.mmap(-1, _ALIGNMENT_BYTES)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """These bytes, until the next read. Raises: OSError: they cannot be read, or the file ends
        before them."""
        start = offset // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        stop = -(-(offset + num_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if stop - start > len(self._buffer):
            self._buffer = mmap.mmap(-1, stop - start)
        whole = memoryview(self._buffer)[: stop - start]
        have, needed = 0, offset + num_bytes - start
        while have < needed:
            came = os.preadv(self._fd, [whole[have:]], start + have)
            if came == 0:
                raise OSError(f"it ends before byte {offset + num_bytes}")
            # A direct read that ends within a page is the file's last one.
            have += came
        return whole[offset - start : needed]
