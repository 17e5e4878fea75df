"""The file format of seals and of weights versions: a checksummed header, then raw memory.

    magic (8 bytes) | header length (uint32, little-endian) | xxh3-128 of the header (16 bytes)
    | header (MessagePack `StateHeader`) | zeroes up to a multiple of 4096 | `num_bytes` of memory

The header carries the digest of the memory, so that one flipped bit anywhere is found.
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


class StateHeader(msgspec.Struct, frozen=True):
    kind: str
    """`seal` or `version`"""
    deployment: DeploymentKey
    """Of a version: its policy."""
    seq: int
    """Of a seal: the last mutating operation in it. Of a version: its publish."""
    num_bytes: int
    tensors: list[TensorSlot]
    digest: str
    """xxh3-128 of the memory, in hex."""


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


def data_offset(header_num_bytes: int) -> int:
    """Where the memory begins in the file."""
    end = _PREFIX.size + header_num_bytes
    return end + -end % DATA_ALIGNMENT_BYTES


PREFIX_BYTES = _PREFIX.size


def check_restorable(
    header: StateHeader, heap_bytes: int, tensors: list[TensorSlot], file: str
) -> None:
    """Raises: CallerError: the rank's heap is not laid out as the seal is."""
    if header.num_bytes != heap_bytes or header.tensors != tensors:
        raise CallerError(
            f"{file} holds another layout than the rank's heap of {heap_bytes} bytes",
            code=Code.FAILED_PRECONDITION,
            remedy="restore with the model and backend that made the seal",
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
