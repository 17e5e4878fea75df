"""Tensor slices: cut for the transfer, gathered where they lie."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.state_layout import Role, Slice, TensorSlot
from phaseloom.statemgr.transfer.tensorslices import (
    MAX_BATCH_BYTES,
    Batch,
    Box,
    Piece,
    batches,
    box_of,
    chunk_bytes,
    contains,
    overlap,
    raw_slot,
    runs,
    slices_of_part,
    slots_of,
    subtract,
)


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(shape, start, size)."""
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    start = [draw(st.integers(0, n - 1)) for n in shape]
    size = [draw(st.integers(1, n - at)) for n, at in zip(shape, start, strict=True)]
    return shape, start, size


def _tensor(shape: list[int]) -> TensorSlot:
    return TensorSlot("w", Role.WEIGHT, "int16", shape, 64, 2 * math.prod(shape))


@given(_boxes())
def test_runs_are_the_box_s_bytes_in_order(box: tuple[list[int], list[int], list[int]]) -> None:
    shape, start, size = box
    whole = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    raw = whole.tobytes()
    offsets, length = runs(_tensor(shape), Box("w", start, size))
    expected = whole[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))]
    assert b"".join(raw[at : at + length] for at in offsets) == expected.tobytes()
    # As few as can be: no two follow one another.
    assert all(after != before + length for before, after in pairwise(offsets))


def test_a_box_that_is_too_large_is_refused_before_its_runs_are_listed() -> None:
    tensor = TensorSlot("w", Role.WEIGHT, "uint8", [2**40, 2], 0, 2**41)
    with pytest.raises(CallerError, match="is larger than"):
        runs(tensor, Box("w", [0, 0], [2**40, 1]))


@given(st.lists(_boxes(), max_size=5), st.integers(0, 2**20))
def test_batches_hold_every_byte_once(
    boxes: list[tuple[list[int], list[int], list[int]]], extra: int
) -> None:
    slices: list[Slice] = []
    offset = 0
    sizes = [size for _, _, size in boxes] + [[extra, 3]] * bool(extra)
    for number, size in enumerate(sizes):
        num_bytes = 2 * math.prod(size)
        start = [0] * len(size)
        slices.append(Slice(f"{number % 2}of2", "w", "int16", start, size, offset, num_bytes))
        offset += -(-num_bytes // 64) * 64
    names = [f"w{number}" for number in range(len(slices))]
    slices = [msgspec.structs.replace(e, name=n) for e, n in zip(slices, names, strict=True)]
    slots_of(slices, offset)
    written = np.zeros(offset, np.uint8)
    for batch in batches(slices):
        assert 0 < batch.num_bytes <= MAX_BATCH_BYTES
        assert sum(2 * math.prod(box.size) for box in batch.boxes) == batch.num_bytes
        assert sum(span.stop - span.start for span in batch.spans) == batch.num_bytes
        for span in batch.spans:
            written[span] += 1
    expected = np.zeros(offset, np.uint8)
    for each in slices:
        expected[each.offset : each.offset + each.num_bytes] = 1
    assert np.array_equal(written, expected)


@pytest.mark.parametrize("size", [[300_001], [3, 100_003], [1, 2, 3, 70_001], [40_001, 7], [5, 1]])
def test_pieces_of_a_large_box_lie_end_to_end(size: list[int]) -> None:
    """What the pieces gather, one after another, is what the whole box would."""
    whole = Slice("", "w", "uint8", [0] * len(size), size, 0, math.prod(size))
    flat = np.arange(math.prod(size)).reshape(size)
    at = 0
    for batch in batches([whole]):
        for piece in batch.boxes:
            relative_to = tuple(
                slice(s, s + n) for s, n in zip(piece.start, piece.size, strict=True)
            )
            found = flat[relative_to].reshape(-1)
            assert np.array_equal(found, np.arange(at, at + len(found)))
            at += len(found)
    assert at == flat.size


@given(st.data())
def test_what_is_left_of_a_box_and_what_is_taken_are_the_box(data: st.DataObject) -> None:
    shape, start, size = data.draw(_boxes())
    whole = Box("w", start, size)
    left = [whole]
    seen = np.zeros(shape, np.int8)
    for _ in range(data.draw(st.integers(0, 4))):
        at = [data.draw(st.integers(0, n - 1)) for n in shape]
        most = [n - a for n, a in zip(shape, at, strict=True)]
        taken = Box("w", at, [data.draw(st.integers(1, n)) for n in most])
        common = [each for each in (overlap(box, taken) for box in left) if each is not None]
        for each in common:
            assert contains(whole, each)
            assert contains(taken, each)
            seen[_inside(each)] += 1
        left = subtract(left, taken)
        assert all(overlap(box, taken) is None for box in left)
    for each in left:
        seen[_inside(each)] += 1
    expected = np.zeros(shape, np.int8)
    expected[_inside(whole)] = 1
    assert np.array_equal(seen, expected)


def _inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))


@given(_boxes(), st.data())
def test_shares_of_a_batch_go_where_the_whole_would(
    box: tuple[list[int], list[int], list[int]], data: st.DataObject
) -> None:
    """Cut anywhere, and each share put where it belongs from its own bytes."""
    shape, start, size = box
    part = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    num_bytes = 2 * math.prod(size)
    batch = Batch(
        "", [Piece(Slice("", "w", "int16", start, size, 128, num_bytes), Box("w", start, size))]
    )
    at = [data.draw(st.integers(s, s + n - 1)) for s, n in zip(start, size, strict=True)]
    end = [data.draw(st.integers(a + 1, s + n)) for a, s, n in zip(at, start, size, strict=True)]
    cut = Box("w", at, [e - a for a, e in zip(at, end, strict=True)])
    shares = [[(0, cut)], [(0, each) for each in subtract(batch.boxes, cut)]]
    memory = memoryview(bytearray(128 + num_bytes))
    for share in batch.split(shares):
        share.put(memory, b"".join(part[_inside(each)].tobytes() for each in share.boxes))
    assert bytes(memory[128:]) == part[_inside(Box("w", start, size))].tobytes()
    for bad in (shares[:1], [*shares, shares[0]], [[(1, cut)]], [[(0, Box("v", start, size))]]):
        if bad != [[(0, batch.boxes[0])]]:
            with pytest.raises(CallerError):
                batch.split(bad)


@given(st.lists(st.tuples(_boxes(), st.integers(0, 2)), max_size=5), st.integers(0, 200))
def test_all_of_a_part_is_its_tensors_and_what_lies_between(
    tensors: list[tuple[tuple[list[int], list[int], list[int]], int]], extra: int
) -> None:
    """Each byte once, and found again by its name."""
    slots, end = [], 0
    for number, ((shape, _, _), odd) in enumerate(tensors):
        num_bytes = 2 * math.prod(shape) + odd  # where it is odd, they are not its elements
        slots.append(TensorSlot(f"w{number}", Role.WEIGHT, "int16", shape, end, num_bytes))
        end += -(-num_bytes // 64) * 64 + 64 * odd
    part = np.random.default_rng(1).integers(0, 256, end + extra, np.uint8).tobytes()
    seen = np.zeros(len(part), np.uint8)
    named = {slot.name: slot for slot in slots}
    for each in slices_of_part("0of2", slots, len(part)):
        slot = named.get(each.name) or raw_slot(each.name, len(part))
        assert slot is not None
        seen[each.offset : each.offset + each.num_bytes] += 1
        offsets, length = runs(slot, box_of(each))
        assert offsets == [0]
        assert (slot.offset, length) == (each.offset, each.num_bytes)
    assert np.all(seen == 1)
    for name in ("w", f"bytes from {len(part)}", "bytes from -1", "bytes from " + "9" * 30, ""):
        assert raw_slot(name, len(part)) is None


@given(st.integers(0, 10**10))
def test_chunks_are_of_a_size_that_gives_several_nodes_something_to_do(num_bytes: int) -> None:
    size = chunk_bytes(num_bytes)
    assert size in range(65536, 4 * 2**20 + 1, 65536)
    assert size == 65536 or size == 4 * 2**20 or num_bytes / size >= 32
