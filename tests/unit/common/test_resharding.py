"""Plans of resharding, carried out on small arrays and compared with slicing the whole."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import Layout
from phaseloom.common.tensors.layouts import coordinates
from phaseloom.common.tensors.resharding import (
    Along,
    End,
    Fetch,
    FusedQkv,
    GatedMlp,
    Parameter,
    Rule,
    Sharding,
    Vocabulary,
    byte_runs,
    node_fetches,
    plan,
    source_parts,
)
from phaseloom.common.tensors.resharding.planning import assign
from tests.support.sharded import DTYPES, holdings, tensors

QKV = FusedQkv(num_heads=8, num_kv_heads=2, head_size=2)
NUM_LAYERS = 4
NUM_EXPERTS = 4
_SMALL = st.integers(1, 4)


# --- Random worlds -------------------------------------------------------------------------------


@st.composite
def _rules(draw: st.DrawFn) -> tuple[Rule, tuple[int, ...]]:
    """With a shape that it fits."""
    match draw(st.integers(0, 5)):
        case 0:
            return QKV, (24, draw(_SMALL))
        case 1:
            return GatedMlp(), (2 * draw(st.integers(1, 9)), draw(_SMALL))
        case 2:
            return Vocabulary(multiple=2), (draw(st.integers(1, 21)), draw(_SMALL))
        case 3:
            return None, tuple(draw(st.lists(_SMALL, max_size=3)))
        case _:
            shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
            return Along(draw(st.integers(0, len(shape) - 1))), tuple(shape)


@st.composite
def _parameters(draw: st.DrawFn) -> list[Parameter]:
    found: list[Parameter] = []
    for number in range(draw(st.integers(1, 4))):
        rule, shape = draw(_rules())
        layer = draw(st.sampled_from([*range(NUM_LAYERS), *End]))
        expert = draw(st.sampled_from([None, *range(NUM_EXPERTS)]))
        dtype = draw(st.sampled_from(list(DTYPES)))
        alike = draw(st.integers(1, 3))
        found += [
            Parameter(f"p{number}.{i}", shape, dtype, layer, rule, expert) for i in range(alike)
        ]
    return found


def _divisors(number: int, allowed: tuple[int, ...] = (1, 2, 3, 4)) -> list[int]:
    return [n for n in allowed if number % n == 0]


@st.composite
def _shardings(draw: st.DrawFn) -> Sharding:
    tp = draw(st.sampled_from([1, 2, 4]))
    dp, pp, cp = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    stage = dp * cp * tp
    ep = draw(st.sampled_from(_divisors(stage, (1, 2, 4))))
    expert_tp = draw(st.sampled_from(_divisors(stage // ep, (1, 2, 4))))
    is_plain = draw(st.booleans())
    return Sharding(
        Layout(dp, tp, pp, cp, ep),
        NUM_LAYERS,
        NUM_EXPERTS,
        expert_tp=expert_tp,
        fsdp=draw(st.sampled_from(_divisors(dp * cp))),
        expert_fsdp=draw(st.sampled_from(_divisors(stage // ep // expert_tp))),
        rules={QKV: None, GatedMlp(): Along(0)} if is_plain else {},
    )


# --- Plans ---------------------------------------------------------------------------------------


@given(_parameters(), _shardings(), _shardings(), st.data())
def test_a_node_fetches_what_its_ranks_need_once(
    parameters: list[Parameter], source: Sharding, target: Sharding, data: st.DataObject
) -> None:
    made = plan(parameters, source, target)
    parts = source_parts(made)
    all_ranks = st.integers(0, target.layout.num_ranks - 1)
    here = data.draw(st.sets(all_ranks, max_size=4))
    there, wanted = tensors(parameters, source), tensors(parameters, target)
    built = {key: np.zeros_like(each) for key, each in wanted.items() if key[1] in here}
    boxes: Counter[tuple[int, int, tuple[int, ...]]] = Counter()
    fetched = 0
    for fetch in node_fetches(made, here):
        sender = there[fetch.parameter, parts[fetch.part][0]]
        for twin in parts[fetch.part]:
            assert np.array_equal(there[fetch.parameter, twin], sender)
        content = sender[_inside(fetch.start, fetch.size)]
        assert content.nbytes == fetch.num_bytes
        fetched += content.nbytes
        assert fetch.uses
        for use in fetch.uses:
            assert use.shape == built[fetch.parameter, use.rank].shape
            built[fetch.parameter, use.rank][_inside(use.start, fetch.size)] = content
            boxes[fetch.parameter, use.rank, use.start] += 1
    for key, each in built.items():
        assert np.array_equal(each, wanted[key])
    assert set(boxes.values()) <= {1}
    assert fetched == _needed(parameters, target, here)


def _needed(parameters: list[Parameter], target: Sharding, here: set[int]) -> int:
    """Distinct bytes that these target ranks hold."""
    needed = 0
    for parameter in parameters:
        mask = np.zeros(parameter.shape, dtype=bool)
        for rank, shard in holdings(parameter, target).items():
            if rank in here:
                indices = [[i for i in held.indices if i is not None] for held in shard.dims]
                mask[np.ix_(*indices) if indices else ()] = True
        needed += int(mask.sum()) * np.dtype(DTYPES[parameter.dtype]).itemsize
    return needed


def _inside(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))


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


def _runs(fetch: Fetch, part_shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    (use,) = fetch.uses
    return [*byte_runs(fetch.size, 4, (fetch.start, part_shape), (use.start, use.shape))]


def test_runs_are_as_long_as_both_sides_allow() -> None:
    """Rows that are whole on both sides are one run; a column is one for each row."""
    column, row = Sharding(Layout(tp=2), 1), Sharding(Layout(tp=4), 1)
    parameters = [Parameter("w", (8, 6), "float32", 0, Along(0))]
    made = plan(parameters, column, row)
    runs = [_runs(fetch, (4, 6)) for rank in range(4) for fetch in node_fetches(made, [rank])]
    assert runs == [[(0, 0, 48)], [(48, 0, 48)], [(0, 0, 48)], [(48, 0, 48)]]
    turned = Sharding(Layout(tp=2), 1, rules={Along(0): Along(1)})
    (first, *_) = node_fetches(plan(parameters, turned, column), [0])
    assert _runs(first, (8, 3)) == [(12 * i, 24 * i, 12) for i in range(4)]


def test_adjacent_slices_are_one() -> None:
    """Half as many target ranks: each fetches one slice from each of two ranks, and no more."""
    parameters = [Parameter("w", (64, 8), "bfloat16", 0, Along(0))]
    made = plan(parameters, Sharding(Layout(tp=8), 1), Sharding(Layout(tp=4), 1))
    slices = [(f.part, rank, f.size) for rank in range(4) for f in node_fetches(made, [rank])]
    assert slices == [(2 * t + i, t, (8, 8)) for t in range(4) for i in range(2)]
    # Gate and up are two pieces, and lie end to end on both sides.
    gated = [Parameter("g", (8, 8), "int8", 0, GatedMlp())]
    one = Sharding(Layout(), 1)
    assert [fetch.size for fetch in node_fetches(plan(gated, one, one), [0])] == [(8, 8)]


@pytest.mark.parametrize(
    ("parameter", "sharding", "complaint"),
    [
        (Parameter("w", (4,), "float32", 0, Along(1)), Sharding(Layout(), 1), "no dim 1"),
        (Parameter("w", (4,), "str", 0), Sharding(Layout(), 1), "no dtype"),
        (Parameter("w", (5,), "int8", 0, GatedMlp()), Sharding(Layout(), 1), "does not fit"),
        (Parameter("w", (4,), "int8", 0, QKV), Sharding(Layout(), 1), "does not fit"),
        (Parameter("w", (4,), "int8", 0), Sharding(Layout(dp=2), 1, fsdp=3), "does not divide"),
        (Parameter("w", (4,), "int8", 0), Sharding(Layout(tp=2), 1, expert_tp=4), "not divide"),
        (Parameter("w", (4,), "int8", 0, expert=2), Sharding(Layout(), 1, 2), "expert 2 of 2"),
        (Parameter("w", (4,), "int8", 3), Sharding(Layout(), 2), "layer 3 of 2"),
        (Parameter("w", (4,), "int8", -1), Sharding(Layout(), 2), "layer -1 of 2"),
    ],
)
def test_what_cannot_be_is_refused(
    parameter: Parameter, sharding: Sharding, complaint: str
) -> None:
    with pytest.raises(CallerError, match=complaint):
        plan([parameter], sharding, sharding)


def test_the_plan_is_made_once_for_what_is_alike() -> None:
    """Layers of a stage share one group, whatever their number."""
    parameters = [Parameter(f"w{i}", (8, 8), "int8", i, Along(0)) for i in range(100)]
    made = plan(parameters, Sharding(Layout(tp=2, pp=2), 100), Sharding(Layout(), 100))
    assert len(made.groups) == 2
    assert all(a.cells is b.cells for a, b in pairwise(made.groups))


@given(_shardings())
def test_ranks_are_those_of_layouts(sharding: Sharding) -> None:
    """The numbering of ranks is one and the same wherever it is used."""
    assume(sharding.expert_tp == 1)
    expert = Parameter("e", (4,), "int8", 2, None, expert=1)
    dense = Parameter("d", (4, 4), "int8", 2, Along(0))
    stages, ep = sharding.place(expert)
    places = [coordinates(rank, sharding.layout) for rank in range(sharding.layout.num_ranks)]
    holders = {rank for ranks in sharding.ranks(stages, ep) for rank in ranks}
    assert holders == {r for r, c in enumerate(places) if c.ep == ep and c.pp == stages[0]}
    for number, ranks in enumerate(sharding.ranks(*sharding.place(dense))):
        assert {places[rank].tp for rank in ranks} == {number % sharding.layout.tp}
