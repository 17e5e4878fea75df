"""Writes a state file that is fetched block by block, and names the file once it is whole."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path

from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, CHECKSUM_BYTES
from phaseloom.statemgr.disk.blockfile import BlockFile
from phaseloom.statemgr.disk.files import StateDirectory, bases_named, sync_directory, unwritable
from phaseloom.statemgr.disk.statefile import (
    PREFIX_BYTES,
    StateHeader,
    encode_header,
    num_blocks,
    part_offsets,
)


def page_buffer(num_bytes: int) -> memoryview:
    """Memory that a disk takes directly; freed with the last reference to it."""
    return memoryview(mmap.mmap(-1, num_bytes))


class Receiving:
    """A state file that is being fetched. Blocking: call it in a thread.

    The caller writes every block that is `missing`, then calls `finish`; or calls `abandon`. The
    caller verifies blocks by the header before it gives them to `write`. Where an earlier seal has
    blocks with the same checksums, the file refers to these through links of its own, as a file
    that is written here does.
    """

    def __init__(
        self,
        directory: StateDirectory,
        path: Path,
        header: StateHeader,
        before: Path | None = None,
    ) -> None:
        """Begin the file, under a temporary name.

        Args:   before: a seal that is here, whose blocks the file may refer to; None: every block
                is missing.
        Raises: ResourceError: RESOURCE_EXHAUSTED: the disk is full; UNAVAILABLE: it fails.
        """
        self._directory = directory
        self._path = path
        self._partial = path.with_suffix(".partial")
        self._header = header
        self._file: BlockFile | None = None
        try:
            with self._typed():
                directory.make_directory(path.parent)
                if before is not None:
                    self._refer(before)
                self._start = encode_header(self._header)
                self._offsets = part_offsets(header, len(self._start) - PREFIX_BYTES)
                self._end = self._offsets[-1] + header.parts[-1].num_bytes
                # Blocks in other files take no room here.
                is_whole = not self._header.bases
                self._file = directory.disk.create(self._partial, self._end if is_whole else 0)
        except ResourceError:
            self.abandon()
            raise

    def _refer(self, before: Path) -> None:
        base = self._directory.base_before(self._header, before)
        if base is None or self._header.block_bytes != BLOCK_BYTES:
            return
        base.link(self._path)
        sources = [base.sources(i, part.blocks) for i, part in enumerate(self._header.parts)]
        if any(any(of_part) for of_part in sources):
            self._header = self._header.referring(base.names, sources)
        sync_directory(self._path.parent)

    @property
    def missing(self) -> list[tuple[int, int]]:
        """The blocks that no file here has, as (number of the part, number of the block)."""
        size = self._header.block_bytes
        return [
            (index, block)
            for index, part in enumerate(self._header.parts)
            for block in range(num_blocks(part.num_bytes, size))
            if part.source_of(block) == 0
        ]

    def size_of(self, part: int, block: int) -> int:
        """The size of a block in bytes."""
        whole, size = self._header.parts[part].num_bytes, self._header.block_bytes
        return min(size, whole - block * size)

    def checksum_of(self, part: int, block: int) -> bytes:
        return self._header.parts[part].blocks[block * CHECKSUM_BYTES :][:CHECKSUM_BYTES]

    def write(self, part: int, block: int, memory: memoryview) -> None:
        """Write one block of a part. Raises: ResourceError: the disk is full or fails."""
        assert self._file is not None
        with self._typed():
            self._file.write(memory, self._offsets[part] + block * self._header.block_bytes)

    def finish(self) -> None:
        """Put the whole file on the disk under its name; it replaces a file of that name."""
        assert self._file is not None
        with self._typed():
            self._file.write(memoryview(self._start), 0)
            self._file.finish(self._end)
            self._file.close()
            self._file = None
            self._partial.rename(self._path)
            used = {source for part in self._header.parts for source in part.sources} - {0}
            kept = {self._header.bases[source - 1] for source in used}
            self._directory.unlink_bases(self._path, kept=kept)
            sync_directory(self._path.parent)

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._partial.unlink(missing_ok=True)
        if self._path.parent.is_dir():
            self._directory.unlink_bases(self._path, kept=bases_named(self._path))

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(self._path, self._header, error) from error
