"""WholeTensor tensors from slices of any layout: every byte once, or a refusal."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.statemgr.checkpoints.assembly import assemble


def slot(
    shape: list[int],
    offset: int = 0,
    whole: list[int] | None = None,
    start: list[int] | None = None,
) -> TensorSlot:
    num_bytes = math.prod(shape) * 4
    part = (whole or [], start or [])
    return TensorSlot("w", Role.WEIGHT, "float32", shape, offset, num_bytes, *part)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[TensorSlot]]:
    """A shape, and slots of a grid of its slices, in any order, some of them twice."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    cuts = [
        [
            0,
            *sorted(
                draw(st.sets(st.integers(1, size - 1), max_size=2) if size > 1 else st.just(set()))
            ),
            size,
        ]
        for size in shape
    ]
    boxes = list(itertools.product(*(itertools.pairwise(dim) for dim in cuts)))
    boxes += draw(st.lists(st.sampled_from(boxes), max_size=2))
    boxes = draw(st.permutations(boxes))
    offsets = draw(st.lists(st.integers(0, 3), min_size=len(boxes), max_size=len(boxes)))
    slots = []
    for box, offset in zip(boxes, offsets, strict=True):
        own = [high - low for low, high in box]
        start = [low for low, _ in box]
        is_whole = own == shape
        slots.append(
            slot(own, 64 * offset, None if is_whole else shape, None if is_whole else start)
        )
    return shape, slots


@given(layouts())
def test_runs_of_all_ranks_make_the_whole_tensor(drawn: tuple[list[int], list[TensorSlot]]) -> None:
    shape, slots = drawn
    expected = np.arange(math.prod(shape), dtype="<f4").reshape(shape)
    memories = []
    for each in slots:
        start = each.start or [0] * len(shape)
        box = tuple(slice(at, at + size) for at, size in zip(start, each.shape, strict=True))
        memories.append(b"\xff" * each.offset + expected[box].tobytes())
    (whole,) = assemble([[each] for each in slots])
    content = bytearray()
    for run in whole.runs():
        assert run.whole_offset == len(content)
        content += memories[run.rank][run.offset : run.offset + run.num_bytes]
    assert bytes(content) == expected.tobytes()


@pytest.mark.parametrize(
    ("slots", "why"),
    [
        ([slot([2, 3], whole=[4, 3], start=[0, 0])], "do not cover the whole tensor"),
        ([slot([2], whole=[4], start=[0]), slot([3], whole=[4], start=[1])], "do not cover"),
        (
            [
                slot([2, 2], whole=[2, 4], start=[0, 0]),
                slot([2, 2], whole=[2, 4], start=[0, 1]),
            ],
            "overlap",
        ),
        ([slot([2], whole=[4], start=[3])], "differently"),
        ([slot([2], whole=[2], start=[-1])], "differently"),
        ([slot([2], whole=[4])], "differently"),
        ([slot([4]), slot([5])], "differently"),
        ([slot([2], whole=[2, 1], start=[0, 0])], "differently"),
        ([TensorSlot("w", Role.WEIGHT, "float32", [2], 0, 4)], "differently"),
        ([TensorSlot("w", Role.WEIGHT, "nothing", [2], 0, 8)], "differently"),
        # Sizes below zero make a product that fits, and runs that begin before the tensor.
        ([slot([1, -2, -9], whole=[2, -1, -9], start=[0, 1, 0])], "differently"),
        ([slot([-2, -3])], "differently"),
    ],
)
def test_slices_that_contradict_are_refused_by_name(slots: list[TensorSlot], why: str) -> None:
    with pytest.raises(CallerError, match=why) as refused:
        assemble([[each] for each in slots])
    assert refused.value.info.field == "tensors[w]"


def test_long_runs_stay_together() -> None:
    rows = [slot([2, 8], whole=[4, 8], start=[at, 0]) for at in (0, 2)]
    (whole,) = assemble([[each] for each in rows])
    assert [run.num_bytes for run in whole.runs()] == [64, 64]
    columns = [slot([4, 4], whole=[4, 8], start=[0, at]) for at in (0, 4)]
    (whole,) = assemble([[each] for each in columns])
    assert [run.num_bytes for run in whole.runs()] == [16] * 8


SIDE = 4
boxes_within = st.tuples(
    *[st.tuples(st.integers(0, SIDE - 1), st.integers(1, SIDE)) for _ in range(2)]
).map(lambda axes: [(start, min(size, SIDE - start)) for start, size in axes])


@given(st.lists(boxes_within, min_size=1, max_size=8))
def test_slices_are_taken_where_each_element_is_in_one(boxes: list[list[tuple[int, int]]]) -> None:
    held = np.zeros((SIDE, SIDE), dtype=int)
    slots = []
    for (row, rows), (column, columns) in boxes:
        held[row : row + rows, column : column + columns] += 1
        shape = [rows, columns]
        slots.append(
            TensorSlot(
                *("w", Role.WEIGHT, "uint8", shape, 0, rows * columns),
                global_shape=[SIDE, SIDE],
                start=[row, column],
            )
        )
    replicas = {tuple(box) for box in boxes}
    if len(replicas) == len(boxes) and (held == 1).all():
        (whole,) = assemble([[slot] for slot in slots])
        assert len(whole.slices) == len(boxes)
    elif len(replicas) == len(boxes):
        with pytest.raises(CallerError):
            assemble([[slot] for slot in slots])


def test_slices_of_many_ranks_are_not_compared_each_with_each() -> None:
    """So many of one tensor would take minutes."""
    number = 20_000
    slots = [
        TensorSlot("w", Role.WEIGHT, "uint8", [2, 1], 0, 2, global_shape=[2, number], start=[0, at])
        for at in range(number)
    ]
    (whole,) = assemble([[slot] for slot in slots])
    assert len(whole.slices) == number
