"""Plan how a rank reads a weights version: which parts and tensor slices, and their heap offsets.

The ranks of a node share fetched bytes. If they need all or nearly all of a part, the node fetches
the part whole and can then serve it to other nodes. Otherwise it fetches exactly the tensor slices
that its ranks need. Pure: equal layouts give equal plans.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.state_layout import Role, Slice, TensorSlot, VersionParts
from phaseloom.common.tensors.resharding import (
    Box,
    Holding,
    SliceFetch,
    StridedRanges,
    Tensor,
    Use,
    byte_rows,
    holding_of,
    item_bytes,
    plan_fetches,
    tensors_of,
)
from phaseloom.common.tensors.tensortable import TensorTable

_ALIGNMENT_BYTES = 64
_NEARLY_ALL = 0.9
"""A part is fetched whole if the node needs at least this fraction of its bytes. The node can then
serve the part to other nodes."""


Runs = list[StridedRanges]
"""Byte ranges to copy from a source to the heap. Bytes between the ranges are not copied."""


@dataclass(frozen=True)
class Reader:
    """A rank that receives weights, and the other ranks of its deployment on the same node."""

    holdings: Sequence[Holding]
    """The slices that each rank of the deployment holds."""
    rank: int
    node_ranks: Collection[int]
    """The ranks of the deployment on this node."""
    tensors: Mapping[str, Tensor]
    """The model's full tensors."""
    slots: Sequence[TensorSlot]
    """The rank's own slices of those tensors, with their offsets in its heap."""

    @property
    def node_holdings(self) -> dict[int, Holding]:
        return {rank: self.holdings[rank] for rank in self.node_ranks}


@dataclass(frozen=True)
class FetchPlan:
    whole_parts: Mapping[str, list[SliceFetch]]
    """Part name → the tensor slices used from it, for each part to fetch whole."""
    slices: list[Slice]
    fetches: list[SliceFetch]
    """The fetch that each entry of `slices` serves, in the same order."""


def plan_node_fetches(manifest: VersionParts, reader: Reader) -> FetchPlan:
    """Return the parts and tensor slices that a node must fetch from a version.

    Raises: CallerError: FAILED_PRECONDITION: the manifest belongs to another model.
    """
    tables = [TensorTable.read(part.table).tensors for part in manifest.parts]
    for table in tables:
        _check_same_model(table, reader)
    names = [part.part for part in manifest.parts]
    planned = plan_fetches(
        reader.tensors, [holding_of(table) for table in tables], reader.node_holdings
    )
    whole_parts: dict[str, list[SliceFetch]] = {}
    slices: list[Slice] = []
    sliced: list[SliceFetch] = []
    end = 0
    for part, group in groupby(planned, attrgetter("part")):
        part_fetches = list(group)
        part_bytes = sum(slot.num_bytes for slot in tables[part])
        if sum(fetch.num_bytes for fetch in part_fetches) >= _NEARLY_ALL * part_bytes:
            whole_parts[names[part]] = part_fetches
            continue
        for fetch in part_fetches:
            slices.append(
                Slice(
                    part=names[part],
                    name=fetch.name,
                    dtype=reader.tensors[fetch.name].dtype,
                    start=list(fetch.start),
                    size=list(fetch.size),
                    offset=end,
                    num_bytes=fetch.num_bytes,
                )
            )
            sliced.append(fetch)
            end += -(-fetch.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return FetchPlan(whole_parts, slices, sliced)


def fetches_of_full_version(reader: Reader) -> list[SliceFetch]:
    """Return the tensor slices that this rank reads from a version written as a whole."""
    full_tensors = {
        name: Box((0,) * len(tensor.shape), tensor.shape) for name, tensor in reader.tensors.items()
    }
    return plan_fetches(reader.tensors, [full_tensors], {reader.rank: reader.holdings[reader.rank]})


def runs_from_part(
    tensors: Sequence[TensorSlot], part_fetches: Sequence[SliceFetch], reader: Reader
) -> Runs:
    """Return the byte runs that this rank copies out of a part.

    Args:   tensors: the part's tensors with their offsets in the part.
    Raises: CallerError: FAILED_PRECONDITION: the tensors belong to another model.
    """
    slots_by_name = {slot.name: slot for slot in tensors}
    runs: Runs = []
    heap = _heap(reader)
    for fetch, use in _uses(part_fetches, reader.rank):
        name = fetch.name
        slot = slots_by_name.get(name)
        if slot is None or slot.dtype != reader.tensors[name].dtype:
            raise other_model_error(f"{name} is missing in it")
        if slot.num_bytes != math.prod(slot.shape) * item_bytes(slot.dtype):
            raise other_model_error(f"{name} is {slot.shape} in {slot.num_bytes} bytes")
        runs += _runs(fetch, use, slot, fetch.start, heap[name])
    return runs


def runs_from_slices(
    slices: Sequence[Slice], part_fetches: Sequence[SliceFetch], reader: Reader
) -> Runs:
    """Return the byte runs that this rank copies out of the memory that holds fetched tensor
    slices."""
    slices_by_fetch = {id(fetch): piece for fetch, piece in zip(part_fetches, slices, strict=True)}
    heap = _heap(reader)
    runs: Runs = []
    for fetch, use in _uses(part_fetches, reader.rank):
        at = slices_by_fetch[id(fetch)]
        box = TensorSlot(at.name, Role.WEIGHT, at.dtype, at.size, at.offset, at.num_bytes)
        start = (0,) * len(fetch.size)
        runs += _runs(fetch, use, box, start, heap[at.name])
    return runs


def _uses(part_fetches: Sequence[SliceFetch], rank: int) -> Iterator[tuple[SliceFetch, Use]]:
    return ((fetch, use) for fetch in part_fetches for use in fetch.uses if use.rank == rank)


def _runs(
    fetch: SliceFetch, use: Use, source: TensorSlot, start: tuple[int, ...], heap_slot: TensorSlot
) -> Runs:
    """Return the byte runs of one use of a fetch.

    Raises: CallerError: FAILED_PRECONDITION: the slice lies outside the source or the heap tensor.
    """
    for slot, at in ((source, start), (heap_slot, use.start)):
        inside = len(slot.shape) == len(at) and all(
            first >= 0 and first + size <= length
            for first, size, length in zip(at, fetch.size, slot.shape, strict=True)
        )
        if not inside:
            raise other_model_error(f"{at} + {fetch.size} is not inside {slot.name} {slot.shape}")
    rows_list = byte_rows(
        fetch.size,
        item_bytes(source.dtype),
        (start, tuple(source.shape)),
        (use.start, tuple(heap_slot.shape)),
    )
    return [rows.shifted(source.offset, heap_slot.offset) for rows in rows_list]


def _heap(reader: Reader) -> dict[str, TensorSlot]:
    return {slot.name: slot for slot in reader.slots}


def _check_same_model(table: Sequence[TensorSlot], reader: Reader) -> None:
    for name, tensor in tensors_of(table).items():
        expected = reader.tensors.get(name)
        if expected != tensor:
            raise other_model_error(
                f"{name} is {tensor.dtype}{list(tensor.shape)} in it"
                + (
                    f" and {expected.dtype}{list(expected.shape)} here"
                    if expected
                    else " and not here"
                )
            )


def other_model_error(reason: str) -> CallerError:
    return CallerError(
        f"the version is of another model: {reason}",
        code=Code.FAILED_PRECONDITION,
        remedy="sync only between deployments of the same model",
    )
