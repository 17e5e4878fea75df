"""The file format of seals, weights versions and demoted host copies.

A file is a checksummed header, then raw memory:

    magic (8 bytes) | header length (uint32, little-endian) | xxh3-128 of the header (16 bytes)
    | header (MessagePack `StateHeader`) | zeroes up to a multiple of 4096 | `num_bytes` of memory

The header carries a checksum of each block of the memory and the digest that follows from these
(`blockhash`), so that one flipped bit anywhere is found and its place is known. The seal of a
deployment with several ranks has one section of memory for each rank; each section begins at the
next multiple of 4096. Blocks are counted from the beginning of their section; the last one may be
shorter.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, CHECKSUM_BYTES, combined
from phaseloom.common.tensors.safetensors import Entry
from phaseloom.statemgr.residency.incarnations import Rank

MAGIC = b"PLSTATE2"
DATA_ALIGNMENT_BYTES = 4096
_PREFIX = struct.Struct("<8sI16s")
PREFIX_BYTES = _PREFIX.size
_MAX_NAMED = 3
MAX_HEADER_BYTES = 64 * 1024 * 1024


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
            msgspec.structs.replace(part, digest=combined(own), blocks=own)
            for part, own in zip(self.parts, blocks, strict=True)
        ]
        return msgspec.structs.replace(self, block_bytes=block_bytes, parts=parts)


def seal_header(
    deployment: DeploymentKey,
    seq: int,
    sections: list[Section],
    *,
    rank_offset: int = 0,
    num_ranks: int = 0,
) -> StateHeader:
    """The header of a seal, or of a node's part of a checkpoint.

    Args: sections: the sections of this node's ranks, in order. rank_offset: the first of these
          ranks. num_ranks: the number of ranks on all nodes; 0: this node has all of them.
    """
    header = StateHeader("seal", deployment, seq, sections)
    if num_ranks <= len(sections):
        return header
    return msgspec.structs.replace(header, rank_offset=rank_offset, num_ranks=num_ranks)


def encode_header(header: StateHeader) -> bytes:
    """The bytes of a file before the memory, padding included.

    Raises: ResourceError: RESOURCE_EXHAUSTED: the header is longer than a reader accepts.
    """
    payload = msgspec.msgpack.encode(header)
    if len(payload) > MAX_HEADER_BYTES:
        raise ResourceError(
            f"the {header.kind} of {header.deployment} at {header.seq} needs a header of "
            f"{len(payload)} bytes for its tensors, of {MAX_HEADER_BYTES}",
            code=Code.RESOURCE_EXHAUSTED,
            remedy="have fewer tensors on one node, or shorter names",
        )
    start = _PREFIX.pack(MAGIC, len(payload), xxhash.xxh3_128_digest(payload)) + payload
    return start + bytes(-len(start) % DATA_ALIGNMENT_BYTES)


def _offsets(header: StateHeader, end: int) -> list[int]:
    """The offset in the file at which the memory of each part begins. Args: end: the header's."""
    offsets = []
    for part in header.parts:
        offsets.append(end + -end % DATA_ALIGNMENT_BYTES)
        end = offsets[-1] + part.num_bytes
    return offsets


def layout_of(header: StateHeader) -> tuple[list[int], int]:
    """The offset at which each part of a file begins, and the offset at which the last one ends."""
    # As long as the final header: blank checksums take as many bytes as the real ones.
    blank = [bytes(CHECKSUM_BYTES * num_blocks(p.num_bytes, BLOCK_BYTES)) for p in header.parts]
    start = encode_header(header.with_blocks(BLOCK_BYTES, blank))
    offsets = _offsets(header, len(start))
    return offsets, offsets[-1] + header.parts[-1].num_bytes


def parts_in(read: Callable[[int, int], bytes], name: str) -> list[Place]:
    """The parts of a state file, whose header is verified. Raises: ResourceError: DATA_LOSS.

    Args: read: the bytes of the file from an offset on, as many as are asked for or there.
    """
    prefix = read(0, PREFIX_BYTES)
    if len(prefix) != PREFIX_BYTES or not prefix.startswith(MAGIC):
        raise data_loss(name, "it does not begin as a state file does")
    _, length, checksum = _PREFIX.unpack(prefix)
    if length > MAX_HEADER_BYTES:
        raise data_loss(name, f"its header claims {length} bytes")
    payload = read(PREFIX_BYTES, length)
    if len(payload) != length:
        raise data_loss(name, "its header is cut short")
    if xxhash.xxh3_128_digest(payload) != checksum:
        raise data_loss(name, "the checksum of its header does not match")
    try:
        header = msgspec.msgpack.decode(payload, type=StateHeader)
    except msgspec.DecodeError as error:
        raise data_loss(name, f"its header cannot be read: {error}") from None
    if not header.parts:
        raise data_loss(name, "it has no section")
    if header.with_blocks(header.block_bytes, [part.blocks for part in header.parts]) != header:
        raise data_loss(name, "its digest is not that of its blocks")
    offsets = _offsets(header, PREFIX_BYTES + length)
    return [Place(name, header, index, at) for index, at in enumerate(offsets)]


def section_of(rank: Rank, first: Place) -> Section:
    """The section of a seal that a rank's memory is filled from.

    Args:   first: the place of the seal's first section.
    Raises: ResourceError: DATA_LOSS: the file is of another node's ranks. CallerError:
            FAILED_PRECONDITION, with the numbers: the deployment has another layout than the
            sealed one.
    """
    header, file, wpg = first.header, first.file, rank.wpg
    if not header.is_of(wpg.rank_offset, wpg.num_ranks):
        raise data_loss(
            file,
            f"it holds ranks from {header.rank_offset} on, of {header.num_ranks}; here are those "
            f"from {wpg.rank_offset} on, of {wpg.num_ranks}",
        )
    num_ranks, heap_bytes, tensors = len(wpg.ranks), rank.extent_bytes, rank.tensors
    parts = header.parts
    part = parts[rank.index] if len(parts) == num_ranks else None
    if part is not None and (part.num_bytes, part.tensors) == (heap_bytes, tensors):
        return part
    sealed_bytes = [part.num_bytes for part in parts]
    raise CallerError(
        f"{file} holds another layout: {len(parts)} ranks with heaps of {sealed_bytes} bytes; "
        f"this is rank {rank.index} of {num_ranks} with a heap of {heap_bytes} bytes and "
        f"{len(tensors)} tensors",
        code=Code.FAILED_PRECONDITION,
        remedy="restore with the model, backend and layout that made the seal",
        details={
            "file": file,
            "sealed_ranks": len(parts),
            "ranks": num_ranks,
            "sealed_bytes": sum(sealed_bytes),
            "heap_bytes": heap_bytes,
        },
    )


def superseded_seals(seqs: list[int], written: int, committed: int) -> list[int]:
    """Seals that may be deleted once one was written: all but that one, the one before it, and the
    committed one.

    Seals above the written one are of an abandoned course of events: this incarnation has not come
    so far.
    """
    before = max((seq for seq in seqs if seq < written), default=0)
    return [seq for seq in sorted(seqs) if seq not in {written, before, committed}]


def data_loss(file: str, why: str, **details: object) -> ResourceError:
    return ResourceError(
        f"{file}: {why}",
        code=Code.DATA_LOSS,
        details={"file": file, **details},
        remedy="use an older seal",
    )


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

    def loss(self, why: str, start: int, end: int) -> ResourceError:
        """The DATA_LOSS error for the bytes from `start` to `end` of the part, with the names of
        the tensors there."""
        named = names_within(self.part.tensors, start, end)
        return data_loss(
            self.file,
            f"{self.header.deployment} rank {self.index}, bytes {start} to {end} of its section "
            f"({named}): {why}",
            deployment=self.header.deployment,
            section=self.index,
            offset=start,
            file_offset=self.offset + start,
        )


def names_within(tensors: Sequence[TensorSlot | Entry], start: int, end: int) -> str:
    """The names of the tensors that overlap these bytes, as text for people."""
    hit = [t for t in tensors if t.offset < end and start < t.offset + t.num_bytes]
    named = ", ".join(slot.name for slot in hit[:_MAX_NAMED]) or "no tensor"
    return f"{named} and {len(hit) - _MAX_NAMED} more" if len(hit) > _MAX_NAMED else named


def num_blocks(num_bytes: int, block_bytes: int) -> int:
    return -(-num_bytes // block_bytes)


def check_blocks(place: Place) -> None:
    """Check that the header has a checksum for each block of a part.

    Raises: ResourceError: DATA_LOSS: it has not.
    """
    header, part = place.header, place.part
    if not part.has_checksums(header.block_bytes):
        raise data_loss(place.file, f"section {place.index} has not a checksum for each block")


@dataclass(frozen=True, slots=True)
class HostSeal:
    """A seal in host memory: an extent with the bytes of a state file."""

    key: DeploymentKey
    seq: int
    extent: int
    num_bytes: int

    @property
    def name(self) -> str:
        """The name of the seal's memory, in errors."""
        return f"seal {self.seq} of {self.key} in host memory"


class HostSeals(dict[tuple[DeploymentKey, int], HostSeal]):
    """The seals in host memory, by deployment and seq."""

    def of(self, key: DeploymentKey) -> list[HostSeal]:
        return [seal for seal in self.values() if seal.key == key]
