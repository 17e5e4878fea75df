"""Layouts of memory as ranks send them. Each is decoded and checked once."""

from __future__ import annotations

from operator import attrgetter
from weakref import WeakValueDictionary

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.tensortable import ALIGNMENT_BYTES, TensorTable

PAGE_BYTES = 4096
_OFFSET = attrgetter("offset")


class Layouts:
    """The layouts in use; equal bytes are decoded and checked only once."""

    def __init__(self) -> None:
        self._alive: WeakValueDictionary[bytes, TensorTable] = WeakValueDictionary()

    def read(self, packed: bytes) -> TensorTable:
        """Decode a layout, or return the one in use with the same bytes.

        Raises: CallerError: the bytes are not a table of tensors.
        """
        table = self._alive.get(packed)
        if table is None:
            table = TensorTable.read(packed)
        if table.end is not None:
            self._alive[table.packed] = table
        return table


def rounded(num_bytes: int) -> int:
    """Round up to whole pages, at least one."""
    return max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES


def exhausted(needed_bytes: int, used_bytes: int, budget_bytes: int) -> dict[str, int]:
    """Details of an error for lack of memory."""
    return {"needed_bytes": needed_bytes, "used_bytes": used_bytes, "budget_bytes": budget_bytes}


def check_layout(tensors: TensorTable | list[TensorSlot], num_bytes: int) -> None:
    """Check that the tensors of a layout fit `num_bytes`.

    Raises: CallerError, naming the tensor: a name occurs twice, or a tensor is misaligned, overlaps
            another or is out of bounds.
    Cost:   O(n log n) in tensors. A valid `TensorTable` is walked only once.
    """
    if isinstance(tensors, TensorTable):
        if tensors.end is not None and tensors.end <= num_bytes:
            return
        tensors = tensors.tensors
    if num_bytes < 0:
        raise CallerError(f"{num_bytes} bytes", field="num_bytes", remedy="use zero or more")
    names = {slot.name for slot in tensors}
    if len(names) != len(tensors):
        raise CallerError("two tensors have the same name", field="tensors")
    end = 0
    for slot in sorted(tensors, key=_OFFSET):
        if slot.num_bytes < 0 or slot.offset < end:
            raise CallerError(
                f"{slot.num_bytes} bytes at {slot.offset} overlap a tensor that ends at {end}",
                field=_where(slot),
            )
        if slot.offset % ALIGNMENT_BYTES:
            raise CallerError(
                f"offset must be a multiple of 64, got {slot.offset}", field=_where(slot)
            )
        end = slot.offset + slot.num_bytes
        if end > num_bytes:
            raise CallerError(
                f"must end within {num_bytes} bytes, ends at {end}", field=_where(slot)
            )


def _where(slot: TensorSlot) -> str:
    return f"tensors[{slot.name}]"
