"""What a state file says of itself: its header, its sections, and the place of each in it.

`disk/statefile.py` writes and reads these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.blockhash import CHECKSUM_BYTES, combined
from phaseloom.common.tensors.safetensors import Entry

MAX_HEADER_BYTES = 64 * 1024 * 1024
_MAX_NAMED = 3


class Section(msgspec.Struct, frozen=True, omit_defaults=True):
    """The memory of one rank."""

    num_bytes: int
    tensors: list[TensorSlot]
    digest: str
    """The digest of the memory; empty: it is not known before the section is written."""
    blocks: bytes = b""
    """The xxh3-64 of each block, 8 bytes each; empty: the section is not written yet."""

    def has_checksums(self, block_bytes: int) -> bool:
        """Whether there is a checksum for each block of this size."""
        if block_bytes <= 0:
            return False
        return len(self.blocks) == CHECKSUM_BYTES * num_blocks(self.num_bytes, block_bytes)


class StateHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: str
    """`seal`, `version` or `copy` (a host copy)."""
    deployment: DeploymentKey
    """The deployment of a seal or a host copy; the policy of a version."""
    seq: int
    """The seq of the last mutating operation in a seal or a host copy; the seq of the publish of a
    version."""
    parts: list[Section]
    """The sections, in the order of ranks: one, except in seals of several ranks."""
    block_bytes: int = 0
    rank_offset: int = 0
    """The number of a seal's first rank, among the deployment's ranks on all nodes."""
    num_ranks: int = 0
    """The number of the deployment's ranks on all nodes; 0: the seal has them all."""
    part: str = ""
    """The name of the part, where a version is written in parts; empty: the file holds all of the
    version, or its manifest."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all sections, without the gaps between them."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def tensors(self) -> list[TensorSlot]:
        return self.parts[0].tensors

    @property
    def digest(self) -> str:
        """The digest of the memory; for several sections, the xxh3-128 of their digests, in hex."""
        if len(self.parts) == 1:
            return self.parts[0].digest
        return xxhash.xxh3_128("".join(part.digest for part in self.parts)).hexdigest()

    def is_of(self, rank_offset: int, num_ranks: int) -> bool:
        """Whether the file holds the ranks from `rank_offset` on, or does not say which it holds.

        Args: num_ranks: the number of ranks on all nodes; 0: any ranks will do.
        """
        is_said = self.num_ranks and num_ranks
        return not is_said or (self.rank_offset, self.num_ranks) == (rank_offset, num_ranks)

    def with_blocks(self, block_bytes: int, blocks: list[bytes]) -> StateHeader:
        """The header as it is written, with the digests that follow from the blocks' checksums.

        Args: blocks: the checksums of the blocks of each part.
        """
        parts = [
            msgspec.structs.replace(part, digest=combined(checksums), blocks=checksums)
            for part, checksums in zip(self.parts, blocks, strict=True)
        ]
        return msgspec.structs.replace(self, block_bytes=block_bytes, parts=parts)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a part in a state file."""

    file: str
    header: StateHeader
    index: int
    """The number of the part in the file."""
    offset: int
    """The offset in the file at which the part begins."""

    @property
    def part(self) -> Section:
        return self.header.parts[self.index]

    @property
    def blocks(self) -> int:
        """The number of blocks of the part."""
        return num_blocks(self.part.num_bytes, self.header.block_bytes)

    def block_size(self, number: int) -> int:
        """The size of a block in bytes; the last block may be shorter."""
        size = self.header.block_bytes
        return min(size, self.part.num_bytes - number * size)

    def checksum_of(self, number: int) -> bytes:
        return self.part.blocks[number * CHECKSUM_BYTES :][:CHECKSUM_BYTES]

    def loss(self, reason: str, start: int, end: int) -> ResourceError:
        """The DATA_LOSS error for the bytes from `start` to `end` of the part, with the names of
        the tensors there."""
        named = names_within(self.part.tensors, start, end)
        return data_loss(
            self.file,
            f"{self.header.deployment} rank {self.index}, bytes {start} to {end} of its section "
            f"({named}): {reason}",
            deployment=self.header.deployment,
            section=self.index,
            offset=start,
            file_offset=self.offset + start,
        )


def data_loss(file: str, reason: str, **details: object) -> ResourceError:
    return ResourceError(
        f"{file}: {reason}",
        code=Code.DATA_LOSS,
        details={"file": file, **details},
        remedy="use an older seal",
    )


def names_within(tensors: Sequence[TensorSlot | Entry], start: int, end: int) -> str:
    """The names of the tensors that overlap these bytes, as text for people."""
    hit = [t for t in tensors if t.offset < end and start < t.offset + t.num_bytes]
    named = ", ".join(slot.name for slot in hit[:_MAX_NAMED]) or "no tensor"
    return f"{named} and {len(hit) - _MAX_NAMED} more" if len(hit) > _MAX_NAMED else named


def num_blocks(num_bytes: int, block_bytes: int) -> int:
    return -(-num_bytes // block_bytes)
