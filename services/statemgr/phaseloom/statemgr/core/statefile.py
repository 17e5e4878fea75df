"""The file format of seals and of weights versions: a checksummed header, then raw memory.

    magic (8 bytes) | header length (uint32, little-endian) | xxh3-128 of the header (16 bytes)
    | header (MessagePack `StateHeader`) | zeroes up to a multiple of 4096 | `num_bytes` of memory

The header carries the digest of the memory, so that one flipped bit anywhere is found. The seal of
a deployment with several ranks has one section of memory for each, the next one beginning at the
next multiple of 4096.
"""

from __future__ import annotations

import struct

import msgspec
import xxhash

from phaseloom.common.errors import CallerError, Code, ResourceError
from phaseloom.common.ids import DeploymentKey
from phaseloom.common.statewire import TensorSlot

MAGIC = b"PLSTATE1"
DATA_ALIGNMENT_BYTES = 4096
_PREFIX = struct.Struct("<8sI16s")
MAX_HEADER_BYTES = 64 * 1024 * 1024


class Section(msgspec.Struct, frozen=True):
    """The memory of one rank."""

    num_bytes: int
    tensors: list[TensorSlot]
    digest: str
    """xxh3-128 of it, in hex."""


class StateHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: str
    """`seal` or `version`"""
    deployment: DeploymentKey
    """Of a version: its policy."""
    seq: int
    """Of a seal: the last mutating operation in it. Of a version: its publish."""
    num_bytes: int
    """Of all sections together, without the gaps between them."""
    tensors: list[TensorSlot]
    digest: str
    """xxh3-128 of the memory, in hex; of several sections: of their digests."""
    sections: list[Section] = []
    """Of rank 0, 1, …; none: the whole memory is one."""

    @property
    def parts(self) -> list[Section]:
        return self.sections or [Section(self.num_bytes, self.tensors, self.digest)]


def seal_header(deployment: DeploymentKey, seq: int, sections: list[Section]) -> StateHeader:
    """Args: sections: of every rank, rank 0 first."""
    if len(sections) == 1:
        (only,) = sections
        return StateHeader("seal", deployment, seq, only.num_bytes, only.tensors, only.digest)
    num_bytes = sum(section.num_bytes for section in sections)
    digest = xxhash.xxh3_128("".join(section.digest for section in sections)).hexdigest()
    return StateHeader("seal", deployment, seq, num_bytes, [], digest, sections)


def encode_header(header: StateHeader) -> bytes:
    """Everything before the memory, padding included."""
    payload = msgspec.msgpack.encode(header)
    start = _PREFIX.pack(MAGIC, len(payload), xxhash.xxh3_128_digest(payload)) + payload
    return start + bytes(-len(start) % DATA_ALIGNMENT_BYTES)


def header_bytes(prefix: bytes, file: str) -> int:
    """How long the header behind this prefix is. Raises: ResourceError: DATA_LOSS."""
    if len(prefix) != _PREFIX.size or not prefix.startswith(MAGIC):
        raise data_loss(file, "it does not begin as a state file does")
    length: int = _PREFIX.unpack(prefix)[1]
    if length > MAX_HEADER_BYTES:
        raise data_loss(file, f"its header claims {length} bytes")
    return length


def decode_header(prefix: bytes, payload: bytes, file: str) -> StateHeader:
    """Raises: ResourceError: DATA_LOSS naming the file."""
    if header_bytes(prefix, file) != len(payload):
        raise data_loss(file, "its header is cut short")
    if xxhash.xxh3_128_digest(payload) != _PREFIX.unpack(prefix)[2]:
        raise data_loss(file, "the checksum of its header does not match")
    try:
        return msgspec.msgpack.decode(payload, type=StateHeader)
    except msgspec.DecodeError as error:
        raise data_loss(file, f"its header cannot be read: {error}") from None


def part_offsets(header: StateHeader, header_num_bytes: int) -> list[int]:
    """Where the memory of each part begins in the file."""
    offsets = []
    end = _PREFIX.size + header_num_bytes
    for part in header.parts:
        offsets.append(end + gap_bytes(end))
        end = offsets[-1] + part.num_bytes
    return offsets


def gap_bytes(offset: int) -> int:
    """How many zeroes lie between this offset and the next part."""
    return -offset % DATA_ALIGNMENT_BYTES


PREFIX_BYTES = _PREFIX.size


def check_restorable(
    header: StateHeader,
    rank: int,
    num_ranks: int,
    *,
    heap_bytes: int,
    tensors: list[TensorSlot],
    file: str,
) -> Section:
    """The part of the seal that this rank's heap is filled from.

    Raises: CallerError: FAILED_PRECONDITION, with the numbers: the deployment has another layout
            than the sealed one.
    """
    parts = header.parts
    part = parts[rank] if len(parts) == num_ranks else None
    if part is not None and part.num_bytes == heap_bytes and part.tensors == tensors:
        return part
    sealed_bytes = [part.num_bytes for part in parts]
    raise CallerError(
        f"{file} holds another layout: {len(parts)} ranks with heaps of {sealed_bytes} bytes; "
        f"this is rank {rank} of {num_ranks} with a heap of {heap_bytes} bytes and "
        f"{len(tensors)} tensors",
        code=Code.FAILED_PRECONDITION,
        remedy="restore with the model, backend and layout that made the seal",
        details={
            "file": file,
            "sealed_ranks": str(len(parts)),
            "ranks": str(num_ranks),
            "sealed_bytes": str(sum(sealed_bytes)),
            "heap_bytes": str(heap_bytes),
        },
    )


def superseded_seals(seqs: list[int], written: int, committed: int) -> list[int]:
    """Seals that may be deleted once one was written: all but it, the one before, the committed.

    Those above it are of an abandoned course of events: this life has not come so far.
    """
    before = max((seq for seq in seqs if seq < written), default=0)
    return [seq for seq in sorted(seqs) if seq not in {written, before, committed}]


def data_loss(file: str, why: str) -> ResourceError:
    return ResourceError(
        f"{file}: {why}", code=Code.DATA_LOSS, details={"file": file}, remedy="use an older seal"
    )
