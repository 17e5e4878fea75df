"""Blocks that a new seal need not write again, because an earlier seal has them on disk.

A block counts as on disk if its checksum is the same; besides, every load verifies the digest of
the whole state. Files are referred to through hard links, which the file system counts. A new seal
refers to a file only if the seal before used at least half of the file, so that dead blocks never
take more room than live ones for longer than one seal.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phaseloom.common.tensors.blockhash import BLOCK_BYTES, CHECKSUM_BYTES, checksum
from phaseloom.statemgr.disk.statefile import PREFIX_BYTES, Section, StateHeader, num_blocks

log = logging.getLogger(__name__)

BASE_SUFFIX = ".base"
_NUM_SAMPLES = 4
"""The number of blocks of a section that are sampled, to see whether any blocks are unchanged."""
_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}


@dataclass(slots=True)
class Base:
    """The blocks of an earlier seal that a new seal may refer to. Blocking: use it in a thread."""

    before: StateHeader
    """The header of the earlier seal."""
    files: Mapping[int, Path]
    """The files that hold the earlier seal's blocks, by that seal's source numbers."""
    names: list[str] = field(default_factory=list)
    """The names of the new seal's links, in the order of that seal's sources, from 1 on."""
    _numbers: dict[int, int] = field(default_factory=dict)
    """The source number in the new seal for each source number in the earlier one."""

    def is_like(self, header: StateHeader) -> bool:
        """Whether the earlier seal's blocks can be those of a new file with this header."""
        sizes = [part.num_bytes for part in header.parts]
        is_like = sizes == [part.num_bytes for part in self.before.parts]
        return is_like and self.before.block_bytes == BLOCK_BYTES

    def has_some(self, header: StateHeader, memories: Sequence[memoryview]) -> bool:
        """Whether a few sampled blocks show that some blocks are unchanged."""
        return any(
            (part.digest and part.digest == before.digest) or _has_sample(before, memory)
            for part, before, memory in zip(header.parts, self.before.parts, memories, strict=True)
        )

    def link(self, path: Path) -> None:
        """Make hard links for the new seal, at `path`, to the files. Raises: OSError."""
        for source, file in self.files.items():
            name = f"{path.stem}.{_identity(file)}{BASE_SUFFIX}"
            try:
                os.link(file, path.with_name(name))
            except FileExistsError:
                pass  # The link is of a seal that is replaced, or was not finished.
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                log.info("%s cannot be referred to: %s", file, error.strerror)
                continue
            self.names.append(name)
            self._numbers[source] = len(self.names)

    def has_all(self, part: Section, index: int) -> bool:
        before = self.before.parts[index]
        is_same = part.digest != "" and part.digest == before.digest
        return is_same and (set(before.sources) or {0}) <= self._numbers.keys()

    def has(self, index: int, block: int, taken: bytes) -> bool:
        return self._source(index, block, taken) > 0

    def blocks(self, index: int) -> bytes:
        return self.before.parts[index].blocks

    def sources(self, index: int, blocks: bytes) -> bytes:
        """The source of each block of a part, a byte each, given the blocks' checksums."""
        return bytes(
            self._source(index, at // CHECKSUM_BYTES, blocks[at : at + CHECKSUM_BYTES])
            for at in range(0, len(blocks), CHECKSUM_BYTES)
        )

    def _source(self, index: int, block: int, taken: bytes) -> int:
        before = self.before.parts[index]
        if before.blocks[block * CHECKSUM_BYTES :][:CHECKSUM_BYTES] != taken:
            return 0
        return self._numbers.get(before.source_of(block), 0)


def worth_referring(before: StateHeader, source: int, file: StateHeader) -> bool:
    """Whether a new seal should refer to a file: the seal before used at least half of it.

    Args: before: the header of the seal before. source: the number of the file among that seal's
          sources. file: the header of the file.
    """
    return 2 * before.bytes_from(source) >= file.bytes_from(0)


def _has_sample(before: Section, memory: memoryview) -> bool:
    number = num_blocks(before.num_bytes, BLOCK_BYTES)
    for block in {number * i // _NUM_SAMPLES for i in range(_NUM_SAMPLES)} if number else set():
        start = block * BLOCK_BYTES
        taken = checksum(memory[start : min(start + BLOCK_BYTES, before.num_bytes)])
        if taken == before.blocks[block * CHECKSUM_BYTES :][:CHECKSUM_BYTES]:
            return True
    return False


def _identity(file: Path) -> str:
    """The checksum of a file's header, which has the checksums of all blocks of the file."""
    with file.open("rb") as opened:
        return opened.read(PREFIX_BYTES)[-16:].hex()
