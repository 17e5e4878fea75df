"""A state file that comes from elsewhere block by block: it has its name once it is whole."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path

from phaseloom.common.blockhash import CHECKSUM_BYTES
from phaseloom.common.errors import ResourceError
from phaseloom.statemgr.core.statefile import (
    PREFIX_BYTES,
    StateHeader,
    encode_header,
    part_offsets,
)
from phaseloom.statemgr.disk.blockfile import BlockFile
from phaseloom.statemgr.disk.files import StateDirectory, sync_directory, unwritable


def page_buffer(num_bytes: int) -> memoryview:
    """Memory that a disk takes directly; freed with the last reference to it."""
    return memoryview(mmap.mmap(-1, num_bytes))


class Receiving:
    """Write every block, then `finish`; or `abandon` it. Blocking: call it in a thread.

    What it writes is as its header says: blocks are checked before they are given to it.
    """

    def __init__(self, directory: StateDirectory, path: Path, header: StateHeader) -> None:
        """Raises: ResourceError: RESOURCE_EXHAUSTED: there is no room; UNAVAILABLE."""
        self._path = path
        self._partial = path.with_suffix(".partial")
        self._header = header
        self._start = encode_header(header)
        self._offsets = part_offsets(header, len(self._start) - PREFIX_BYTES)
        self._end = self._offsets[-1] + header.parts[-1].num_bytes
        self._file: BlockFile | None = None
        try:
            with self._typed():
                directory.make_directory(path.parent)
                self._file = directory.disk.create(self._partial, self._end)
        except ResourceError:
            self.abandon()
            raise

    def size_of(self, part: int, block: int) -> int:
        """Bytes of a block."""
        whole, size = self._header.parts[part].num_bytes, self._header.block_bytes
        return min(size, whole - block * size)

    def checksum_of(self, part: int, block: int) -> bytes:
        return self._header.parts[part].blocks[block * CHECKSUM_BYTES :][:CHECKSUM_BYTES]

    def write(self, part: int, block: int, memory: memoryview) -> None:
        """Raises: ResourceError: the disk refuses."""
        assert self._file is not None
        with self._typed():
            self._file.write(memory, self._offsets[part] + block * self._header.block_bytes)

    def finish(self) -> None:
        """On the disk for good, under its name; what was there before is replaced."""
        assert self._file is not None
        with self._typed():
            self._file.write(memoryview(self._start), 0)
            self._file.finish(self._end)
            self._file.close()
            self._file = None
            self._partial.rename(self._path)
            sync_directory(self._path.parent)

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(self._path, self._header, error) from error
