"""What ranks say about their memory: a bad layout is refused before anything happens."""

from __future__ import annotations

import msgspec

from phaseloom.common.errors import CallerError
from phaseloom.common.statewire import TensorSlot

ALIGNMENT_BYTES = 64


def check_layout(tensors: list[TensorSlot], num_bytes: int) -> None:
    """Raises: CallerError: names twice, misaligned, overlapping or out of bounds; names the slot.

    Cost: O(n log n) in tensors.
    """
    if num_bytes < 0:
        raise CallerError(f"{num_bytes} bytes", field="num_bytes", remedy="use zero or more")
    names = {slot.name for slot in tensors}
    if len(names) != len(tensors):
        raise CallerError("two tensors have the same name", field="tensors")
    end = 0
    for slot in sorted(tensors, key=lambda slot: slot.offset):
        where = f"tensors[{slot.name}]"
        if slot.num_bytes < 0 or slot.offset < end:
            raise CallerError(
                f"at {slot.offset}, {slot.num_bytes} bytes: overlaps what ends at {end}",
                field=where,
            )
        if slot.offset % ALIGNMENT_BYTES:
            raise CallerError(f"offset {slot.offset} is no multiple of 64", field=where)
        end = slot.offset + slot.num_bytes
        if end > num_bytes:
            raise CallerError(f"ends at {end}, beyond {num_bytes} bytes", field=where)


def pack(tensors: list[TensorSlot]) -> bytes:
    """As they stand in the books: made once a layout, for the books are recorded often."""
    return msgspec.msgpack.encode(tensors)


def unpack(packed: bytes | msgspec.Raw) -> list[TensorSlot]:
    return msgspec.msgpack.decode(packed, type=list[TensorSlot])
