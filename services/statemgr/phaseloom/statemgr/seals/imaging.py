"""Images: state files in host memory instead of on a disk, with the same bytes and checks.

Blocking, and as fast as memory: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from phaseloom.common.tensors.blockhash import (
    BLOCK_BYTES,
    CHECKSUM_BYTES,
    checksum,
    combined,
    each_part,
)
from phaseloom.statemgr.disk.statefile import (
    PREFIX_BYTES,
    Place,
    StateHeader,
    check_blocks,
    decode_header,
    encode_header,
    header_bytes,
    num_blocks,
    part_offsets,
)
from phaseloom.statemgr.memory.extents import copy


def image_bytes(header: StateHeader) -> int:
    """The bytes of memory that an image with this header takes."""
    return _layout(header)[1]


def write_image(
    image: memoryview, header: StateHeader, memories: Sequence[memoryview]
) -> StateHeader:
    """Copy every part into an image, and take the checksums on the way.

    Args:    header: where it has a digest for a part, the part's memory must have that digest.
    Returns: the header as written.
    Raises:  ResourceError: DATA_LOSS: the memory is not what the header's digest says.
    """
    offsets, _ = _layout(header)
    blocks = []
    for index, (offset, memory) in enumerate(zip(offsets, memories, strict=True)):
        place = Place("host memory", header, index, offset)
        target = image[offset : offset + place.part.num_bytes]

        work = partial(_copy_block, target, memory)
        taken = b"".join(each_part(place.part.num_bytes, BLOCK_BYTES, work))
        if place.part.digest and combined(taken) != place.part.digest:
            raise place.loss("the host copy is not what its digest says", 0, place.part.num_bytes)
        blocks.append(taken)
    written = header.with_blocks(BLOCK_BYTES, blocks)
    start = encode_header(written)
    assert len(start) <= offsets[0]
    image[: len(start)] = start
    return written


def _copy_block(target: memoryview, source: memoryview, start: int, end: int) -> bytes:
    copy(target[start:end], source[start:end])
    return checksum(target[start:end])


def find_image_parts(image: memoryview, name: str) -> list[Place]:
    """The parts of an image, whose header is checked. Raises: ResourceError: DATA_LOSS."""
    prefix = bytes(image[:PREFIX_BYTES])
    length = header_bytes(prefix, name)
    header = decode_header(prefix, bytes(image[PREFIX_BYTES : PREFIX_BYTES + length]), name)
    offsets = part_offsets(header, length)
    return [Place(name, header, index, offset) for index, offset in enumerate(offsets)]


def read_image(image: memoryview, place: Place, memory: memoryview) -> None:
    """Fill `memory` with a part, verified. Raises: ResourceError: DATA_LOSS, saying where."""
    count = num_blocks(place.part.num_bytes, place.header.block_bytes)
    check_blocks(place)
    for number in range(count):
        read_image_block(image, place, number, memory[number * place.header.block_bytes :])


def read_image_block(image: memoryview, place: Place, number: int, memory: memoryview) -> int:
    """Fill the beginning of `memory` with one block; returns its size. Raises: as `read_image`."""
    start = number * place.header.block_bytes
    size = min(place.header.block_bytes, place.part.num_bytes - start)
    block = memory[:size]
    copy(block, image[place.offset + start : place.offset + start + size])
    if checksum(block) != place.part.blocks[number * CHECKSUM_BYTES :][:CHECKSUM_BYTES]:
        raise place.loss("their checksum does not match", start, start + size)
    return size


def _layout(header: StateHeader) -> tuple[list[int], int]:
    """The offset at which each part begins, and the offset at which the last one ends."""
    blank = [bytes(CHECKSUM_BYTES * num_blocks(p.num_bytes, BLOCK_BYTES)) for p in header.parts]
    start = encode_header(header.with_blocks(BLOCK_BYTES, blank))
    offsets = part_offsets(header, len(start) - PREFIX_BYTES)
    return offsets, offsets[-1] + header.parts[-1].num_bytes
