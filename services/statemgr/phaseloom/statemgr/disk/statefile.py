"""The file format of seals, weights versions and demoted host copies.

A file is a checksummed header, then raw memory:

    magic (8 bytes) | header length (uint32, little-endian) | xxh3-128 of the header (16 bytes)
    | header (MessagePack `StateHeader`) | zeroes up to a multiple of 4096 | `num_bytes` of memory

The header has a checksum of each block of memory and the digest that follows from these
(`blockhash`), so that any flipped bit is found and located. The seal of a deployment with several
ranks has one section per rank; each section begins at the next multiple of 4096. Blocks are counted
from the beginning of their section; the last one may be shorter.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import xxhash

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, CHECKSUM_BYTES
from phaseloom.statemgr.records.stateheader import (
    MAX_HEADER_BYTES,
    SectionRef,
    StateHeader,
    data_loss,
    num_blocks,
)

MAGIC = b"PLSTATE2"
DATA_ALIGNMENT_BYTES = 4096
_PREFIX = struct.Struct("<8sI16s")
PREFIX_BYTES = _PREFIX.size


def encode_header(header: StateHeader) -> bytes:
    """The bytes of a file before the memory, including padding.

    Raises: ResourceError: RESOURCE_EXHAUSTED: the header is longer than a reader accepts.
    """
    payload = msgspec.msgpack.encode(header)
    if len(payload) > MAX_HEADER_BYTES:
        raise ResourceError(
            f"the {header.kind} of {header.deployment} at {header.seq} needs a header of "
            f"{len(payload)} bytes, more than {MAX_HEADER_BYTES}",
            code=Code.RESOURCE_EXHAUSTED,
            remedy="put fewer tensors on one node, or shorten their names",
        )
    start = _PREFIX.pack(MAGIC, len(payload), xxhash.xxh3_128_digest(payload)) + payload
    return start + bytes(-len(start) % DATA_ALIGNMENT_BYTES)


def _offsets(header: StateHeader, end: int) -> list[int]:
    """The offset of each part in the file. Args: end: of the header."""
    offsets = []
    for part in header.parts:
        offsets.append(end + -end % DATA_ALIGNMENT_BYTES)
        end = offsets[-1] + part.num_bytes
    return offsets


def layout_of(header: StateHeader) -> tuple[list[int], int]:
    """The offset of each part of a file, and the end of the last one."""
    # Blank checksums take as many bytes as the final ones.
    blank = [bytes(CHECKSUM_BYTES * num_blocks(p.num_bytes, BLOCK_BYTES)) for p in header.parts]
    start = encode_header(header.with_blocks(BLOCK_BYTES, blank))
    offsets = _offsets(header, len(start))
    return offsets, offsets[-1] + header.parts[-1].num_bytes


def parts_in(read: Callable[[int, int], bytes], name: str) -> list[SectionRef]:
    """The parts of a state file; verifies its header. Raises: ResourceError: DATA_LOSS.

    Args: read: returns up to `length` bytes of the file, starting at an offset.
    """
    prefix = read(0, PREFIX_BYTES)
    if len(prefix) != PREFIX_BYTES or not prefix.startswith(MAGIC):
        raise data_loss(name, "it is not a state file")
    _, length, checksum = _PREFIX.unpack(prefix)
    if length > MAX_HEADER_BYTES:
        raise data_loss(name, f"its header is too long: {length} bytes")
    payload = read(PREFIX_BYTES, length)
    if len(payload) != length:
        raise data_loss(name, "its header is truncated")
    if xxhash.xxh3_128_digest(payload) != checksum:
        raise data_loss(name, "the checksum of its header does not match")
    try:
        header = msgspec.msgpack.decode(payload, type=StateHeader)
    except msgspec.DecodeError as error:
        raise data_loss(name, f"its header cannot be read: {error}") from None
    if not header.parts:
        raise data_loss(name, "it has no section")
    if header.with_blocks(header.block_bytes, [part.blocks for part in header.parts]) != header:
        raise data_loss(name, "its digest does not match its blocks' checksums")
    offsets = _offsets(header, PREFIX_BYTES + length)
    return [SectionRef(name, header, index, at) for index, at in enumerate(offsets)]


def check_blocks(place: SectionRef) -> None:
    """Check that the header has a checksum for each block of a part.

    Raises: ResourceError: DATA_LOSS: it has not.
    """
    header, part = place.header, place.part
    if not part.has_checksums(header.block_bytes):
        raise data_loss(place.file, f"section {place.index} lacks checksums of some blocks")
