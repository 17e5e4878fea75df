"""Plans of resharding, carried out on small arrays and compared with slicing the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import Layout
from phaseloom.common.tensors.resharding import (
    Box,
    Holding,
    StridedRanges,
    Tensor,
    assign,
    byte_rows,
    item_bytes,
    parts_of,
    plan_fetches,
)
from tests.support.sharded import DTYPES, Parameter, Sharded, arrays, inside, tensors

# --- Random worlds -------------------------------------------------------------------------------


@st.composite
def _parameters(draw: st.DrawFn) -> list[Parameter]:
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    return [
        Parameter(f"p{number}.{i}", shape, dtype, 0.0)
        for number in range(draw(st.integers(1, 4)))
        for shape, dtype in [(draw(shapes), draw(st.sampled_from(list(DTYPES))))]
        for i in range(draw(st.integers(1, 3)))
    ]


def _edges(draw: st.DrawFn, size: int) -> list[int]:
    return sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})


@st.composite
def _parts(draw: st.DrawFn, model: Sequence[Parameter]) -> list[dict[str, Box]]:
    """Some cut of each parameter, every piece of it in one part or in several."""
    parts: list[dict[str, Box]] = [{} for _ in range(draw(st.integers(1, 5)))]
    for each in model:
        boxes = [Box((), ())]
        for size in each.shape:
            runs = [*pairwise(_edges(draw, size))] or [(0, 0)]
            boxes = [Box((*box.start, a), (*box.size, b - a)) for box in boxes for a, b in runs]
        # A part has one box of a parameter, so with fewer parts than pieces all have all of it.
        if len(boxes) > len(parts):
            boxes = [Box((0,) * len(each.shape), each.shape)]
        holders = draw(st.permutations(range(len(parts))))
        for i, box in enumerate(boxes):
            parts[holders[i]][each.name] = box
        for part in holders[len(boxes) :]:
            twin = draw(st.sampled_from([None, *boxes]))
            if twin is not None:
                parts[part][each.name] = twin
    return parts


@st.composite
def _ranks(draw: st.DrawFn, model: Sequence[Parameter]) -> dict[int, dict[str, Box]]:
    """Any box of some of the parameters, for each rank."""
    ranks: dict[int, dict[str, Box]] = {}
    for rank in draw(st.sets(st.integers(0, 7), max_size=4)):
        ranks[rank] = {}
        for each in model:
            if draw(st.booleans()):
                starts = [draw(st.integers(0, size)) for size in each.shape]
                pairs = zip(each.shape, starts, strict=True)
                sizes = [draw(st.integers(0, size - start)) for size, start in pairs]
                ranks[rank][each.name] = Box(tuple(starts), tuple(sizes))
    return ranks


# --- Plans ---------------------------------------------------------------------------------------


@given(_parameters(), st.data())
def test_a_node_fetches_what_its_ranks_need_once(
    model: list[Parameter], data: st.DataObject
) -> None:
    parts, ranks = data.draw(_parts(model)), data.draw(_ranks(model))
    check_carried_out(model, parts, ranks)


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize(
    "target", [Layout(tp=1), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(dp=2, tp=4)]
)
def test_rows_of_fsdp_reach_the_layouts_of_vllm(dp: int, target: Layout, num_nodes: int) -> None:
    """Key-value heads that fewer ranks cut are held by several."""
    model = [
        Parameter("embed", (37, 8), "bfloat16", 0.0, 0),
        *(
            parameter
            for layer in range(3)
            for parameter in (
                Parameter(f"{layer}.q", (16, 8), "bfloat16", layer / 3, 0),
                Parameter(f"{layer}.k", (4, 8), "bfloat16", layer / 3, 0, heads=2),
                Parameter(f"{layer}.out", (8, 16), "bfloat16", layer / 3, 1),
                Parameter(f"{layer}.norm", (7,), "float32", layer / 3),
            )
        ),
    ]
    source = Sharded(Layout(dp=dp), is_fsdp=True).holdings(model)
    wanted = dict(enumerate(Sharded(target).holdings(model)))
    for node in range(num_nodes):
        here = {rank: held for rank, held in wanted.items() if rank % num_nodes == node}
        check_carried_out(model, source, here)


def check_carried_out(
    model: Sequence[Parameter], parts: Sequence[Holding], ranks: dict[int, dict[str, Box]]
) -> None:
    there = [arrays(model, part) for part in parts]
    wanted = {rank: arrays(model, held) for rank, held in ranks.items()}
    built = {r: {n: np.zeros_like(a) for n, a in held.items()} for r, held in wanted.items()}
    fetched = 0
    for fetch in plan_fetches(tensors(model), parts, ranks):
        content = there[fetch.part][fetch.name][inside(fetch.start, fetch.size)]
        assert content.nbytes == fetch.num_bytes
        fetched += content.nbytes
        assert fetch.uses
        for use in fetch.uses:
            mine = built[use.rank][fetch.name][inside(use.start, fetch.size)]
            assert not mine.any(), "a byte comes twice"
            built[use.rank][fetch.name][inside(use.start, fetch.size)] = content
    for rank, held in wanted.items():
        for name, each in held.items():
            assert np.array_equal(built[rank][name], each)
    assert fetched == _needed(model, ranks)


def _needed(model: Sequence[Parameter], ranks: dict[int, dict[str, Box]]) -> int:
    """Distinct bytes that these ranks hold."""
    needed = 0
    for each in model:
        mask = np.zeros(each.shape, dtype=bool)
        for held in ranks.values():
            if each.name in held:
                mask[inside(*held[each.name])] = True
        needed += int(mask.sum()) * item_bytes(each.dtype)
    return needed


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=5),
    st.lists(st.integers(0, 30), min_size=1, max_size=5),
)
def test_assignment_is_one_by_one_to_the_least_loaded(
    items: list[tuple[int, int]], loads: list[int]
) -> None:
    assigned, by_hand = Counter(dict(enumerate(loads))), [*loads]
    for count, size in items:
        runs = assign(range(10, 10 + count), size, range(len(loads)), assigned)
        assert [i for _, run in runs for i in run] == [*range(10, 10 + count)]
        for _ in range(count):
            by_hand[by_hand.index(min(by_hand))] += size
        assert sorted(assigned.values()) == sorted(by_hand)


def test_runs_are_as_long_as_both_sides_allow() -> None:
    """Rows that are whole on both sides are one run; a column is one for each row."""
    assert [*byte_rows((2, 6), 4, ((2, 0), (4, 6)), ((0, 0), (2, 6)))] == [StridedRanges(48, 0, 48)]
    (turned,) = byte_rows((4, 3), 4, ((0, 0), (8, 3)), ((0, 0), (4, 6)))
    assert turned == StridedRanges(0, 0, 12, 4, 12, 24)
    assert [*turned.runs()] == [(12 * i, 24 * i, 12) for i in range(4)]
    assert [*turned.subset(1, 2).runs()] == [(12 * i, 24 * i, 12) for i in (1, 2)]


def test_slices_of_more_dims_are_rows_at_each_outer_index() -> None:
    found = [*byte_rows((2, 3, 2), 1, ((0, 1, 0), (2, 4, 5)), ((1, 0, 1), (4, 3, 3)))]
    assert found == [StridedRanges(5, 10, 2, 3, 5, 3), StridedRanges(25, 19, 2, 3, 5, 3)]


def test_half_as_many_ranks_fetch_one_slice_from_each_of_two() -> None:
    model = [Parameter("w", (64, 8), "bfloat16", 0.0, 0)]
    parts = Sharded(Layout(tp=8)).holdings(model)
    held = Sharded(Layout(tp=4)).holdings(model)
    slices = [
        (fetch.part, rank, fetch.size)
        for rank in range(4)
        for fetch in plan_fetches(tensors(model), parts, {rank: held[rank]})
    ]
    assert slices == [(2 * t + i, t, (8, 8)) for t in range(4) for i in range(2)]


def test_replicas_are_asked_alike() -> None:
    model = [Parameter(f"w{i}", (8, 8), "int8", 0.0) for i in range(10)]
    whole = Sharded(Layout()).holding(model, 0)
    load = Counter(fetch.part for fetch in plan_fetches(tensors(model), [whole] * 5, {0: whole}))
    assert load == dict.fromkeys(range(5), 2)


def test_ranks_that_hold_the_same_share_a_part() -> None:
    model = [Parameter("w", (8, 8), "int8", 0.0, 0)]
    assert parts_of(Sharded(Layout(dp=3)).holdings(model)) == [[0, 1, 2]]
    assert parts_of(Sharded(Layout(dp=2, tp=2)).holdings(model)) == [[0, 2], [1, 3]]
    assert parts_of(Sharded(Layout(dp=2), is_fsdp=True).holdings(model)) == [[0], [1]]


@pytest.mark.parametrize("part", [{}, {"w": Box((0, 0), (4, 8))}, {"other": Box((0,), (8,))}])
def test_what_nobody_holds_is_refused(part: dict[str, Box]) -> None:
    wanted = {0: {"w": Box((0, 0), (8, 8))}}
    with pytest.raises(CallerError, match="no part of the version has w") as caught:
        plan_fetches({"w": Tensor((8, 8), "int8")}, [part], wanted)
    assert caught.value.info.code is Code.FAILED_PRECONDITION


def test_dtype_that_no_weight_has_is_refused() -> None:
    with pytest.raises(CallerError, match="unsupported dtype"):
        item_bytes("str")
