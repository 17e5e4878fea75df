"""The heap layout: aligned, ordered, without overlap, and the same weights region everywhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.state_layout import Role
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.layout import plan
from phaseloom.worker.state.heap import ALIGNMENT_BYTES

SHAPES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.lists(st.integers(1, 20), max_size=3),
    min_size=1,
    max_size=8,
)


@given(SHAPES)
def test_plan_places_tensors_aligned_in_order_without_overlap(shapes: dict[str, list[int]]) -> None:
    layout = plan(shapes, trainable=True)
    end = 0
    for slot in layout.slots:
        assert slot.offset % ALIGNMENT_BYTES == 0
        assert slot.offset >= end
        end = slot.offset + slot.num_bytes
    assert end <= layout.heap_bytes < end + ALIGNMENT_BYTES


@given(SHAPES)
def test_plan_gives_the_same_weights_region_when_trainable(shapes: dict[str, list[int]]) -> None:
    weights = plan(shapes, trainable=False)
    trained = plan(shapes, trainable=True)
    assert trained.slots[: len(shapes)] == weights.slots
    assert [slot.name for slot in weights.slots] == sorted(shapes)
    assert {slot.role for slot in weights.slots} == {Role.WEIGHT}
    assert len({slot.name for slot in trained.slots}) == 4 * len(shapes) + 1


def test_plan_places_each_moment_where_its_weight_is_in_the_region() -> None:
    layout = plan({"b": [3], "a": [5, 7]}, trainable=True)
    assert layout.training is not None
    for region in (layout.training.gradients, layout.training.exp_avg, layout.training.exp_avg_sq):
        for name, weight in layout.weights.slots.items():
            assert region.slots[name].offset - region.start == weight.offset
            assert region.slots[name].shape == weight.shape


@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=6),
        st.lists(st.integers(1, 20), min_size=1, max_size=3),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 5),
    st.booleans(),
)
def test_ranks_have_equal_regions_that_hold_every_row_once(
    shapes: dict[str, list[int]], world_size: int, trainable: bool
) -> None:
    """Room for padding included, so that all ranks gather from as much."""
    plans = [
        plan(shapes, trainable=trainable, ranks=RankGroup(rank, world_size))
        for rank in range(world_size)
    ]
    assert len({(each.heap_bytes, each.weights.stop) for each in plans}) == 1
    for name, shape in shapes.items():
        slots = [each.weights.slots[name] for each in plans]
        assert len({slot.offset for slot in slots}) == 1
        assert sum(slot.shape[0] for slot in slots) == shape[0]
        assert all(slot.shape[1:] == shape[1:] for slot in slots)
        assert all(slot.num_bytes <= slots[0].num_bytes for slot in slots)
    if world_size == 1:
        assert plans[0] == plan(shapes, trainable=trainable)
