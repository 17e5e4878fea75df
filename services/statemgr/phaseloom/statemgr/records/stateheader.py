"""The header of a state file, and its sections. `disk/statefile.py` writes and reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.blockhash import CHECKSUM_BYTES, combine_checksums
from phaseloom.common.tensors.safetensors import TensorEntry

MAX_HEADER_BYTES = 64 * 1024 * 1024
_MAX_NAMED = 3


class Section(msgspec.Struct, frozen=True, omit_defaults=True):
    """The memory of one rank."""

    num_bytes: int
    tensors: list[TensorSlot]
    digest: str
    """Empty: not known before the section is written."""
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
    """The deployment of a seal or host copy; the policy of a version."""
    seq: int
    """The seq of the last mutating operation in a seal or host copy, or of the publish of a
    version."""
    parts: list[Section]
    """Sections in the order of ranks: one, except in seals of several ranks."""
    block_bytes: int = 0
    rank_offset: int = 0
    """Number of a seal's first rank, counted over all nodes."""
    num_ranks: int = 0
    """Ranks of the deployment on all nodes; 0: the seal has them all."""
    part: str = ""
    """The name of the part of a version; empty: the file has the whole version, or its manifest."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all sections, without the gaps between them."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def tensors(self) -> list[TensorSlot]:
        return self.parts[0].tensors

    @property
    def digest(self) -> str:
        """The digest of the memory. For several sections: the xxh3-128 of their digests, in hex."""
        if len(self.parts) == 1:
            return self.parts[0].digest
        return xxhash.xxh3_128("".join(part.digest for part in self.parts)).hexdigest()

    def is_of(self, rank_offset: int, num_ranks: int) -> bool:
        """Whether the file has the ranks from `rank_offset` on, or does not record its ranks.

        Args: num_ranks: ranks on all nodes; 0: any ranks will do.
        """
        is_said = self.num_ranks and num_ranks
        return not is_said or (self.rank_offset, self.num_ranks) == (rank_offset, num_ranks)

    def with_blocks(self, block_bytes: int, blocks: list[bytes]) -> StateHeader:
        """The final header, with the digests that follow from the blocks' checksums.

        Args: blocks: the checksums of the blocks of each part.
        """
        parts = [
            msgspec.structs.replace(part, digest=combine_checksums(checksums), blocks=checksums)
            for part, checksums in zip(self.parts, blocks, strict=True)
        ]
        return msgspec.structs.replace(self, block_bytes=block_bytes, parts=parts)


@dataclass(frozen=True, slots=True)
class SectionRef:
    """The location of a section in a state file."""

    file: str
    header: StateHeader
    index: int
    """The number of the section."""
    offset: int
    """Offset in the file."""

    @property
    def part(self) -> Section:
        return self.header.parts[self.index]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return num_blocks(self.part.num_bytes, self.header.block_bytes)

    def block_size(self, number: int) -> int:
        """Size of a block in bytes; the last one may be shorter."""
        size = self.header.block_bytes
        return min(size, self.part.num_bytes - number * size)

    def checksum_of(self, number: int) -> bytes:
        return self.part.blocks[number * CHECKSUM_BYTES :][:CHECKSUM_BYTES]

    def loss(self, reason: str, start: int, end: int) -> ResourceError:
        """The DATA_LOSS error for bytes `start` to `end` of the section, which names the tensors
        there."""
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


def names_within(tensors: Sequence[TensorSlot | TensorEntry], start: int, end: int) -> str:
    """Names of the tensors that overlap these bytes, for people."""
    hit = [t for t in tensors if t.offset < end and start < t.offset + t.num_bytes]
    named = ", ".join(slot.name for slot in hit[:_MAX_NAMED]) or "no tensor"
    return f"{named} and {len(hit) - _MAX_NAMED} more" if len(hit) > _MAX_NAMED else named


def num_blocks(num_bytes: int, block_bytes: int) -> int:
    return -(-num_bytes // block_bytes)
