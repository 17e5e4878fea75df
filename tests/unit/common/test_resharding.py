"""Plans of resharding, carried out on small arrays and compared with slicing the whole."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import Layout
from phaseloom.common.tensors.layouts import coordinates
from phaseloom.common.tensors.resharding import (
    Along,
    Copy,
    End,
    FusedQkv,
    GatedMlp,
    Parameter,
    Plan,
    Rule,
    Shard,
    Sharding,
    Topology,
    Vocabulary,
    missing_bytes,
    node_fetches,
    plan,
    scatter_broadcast,
    source_parts,
    traffic,
)
from phaseloom.common.tensors.resharding.planning import deal
from tests.support.sharded import DTYPES, holdings, tensors

QKV = FusedQkv(num_heads=8, num_kv_heads=2, head_size=2)
NUM_LAYERS = 4
NUM_EXPERTS = 4
_SMALL = st.integers(1, 4)


# --- A world of small arrays ---------------------------------------------------------------------


def _carry_out(made: Plan, source: Sharding, target: Sharding) -> None:
    """Every byte of every target comes once and is right; nobody relays what it has not got."""
    parameters = list(made.parameters)
    there, wanted = tensors(parameters, source), tensors(parameters, target)
    here = {key: np.zeros(each.nbytes, np.uint8) for key, each in wanted.items()}
    written = {key: np.zeros(each.nbytes, np.uint8) for key, each in wanted.items()}
    moved = 0
    for copy in made.copies():
        key = (copy.parameter, copy.target)
        sender = (copy.parameter, copy.source)
        memory = here[sender] if copy.is_relayed else there[sender].reshape(-1).view(np.uint8)
        for offset, at, length in copy.runs():
            if copy.is_relayed:
                assert written[sender][offset : offset + length].all()
            here[key][at : at + length] = memory[offset : offset + length]
            written[key][at : at + length] += 1
            moved += length
    for key, each in wanted.items():
        raw = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
        assert np.array_equal(here[key], raw)
        assert np.array_equal(written[key], (raw != 0).astype(np.uint8))
    assert moved == made.num_bytes == sum(int((w != 0).sum()) for w in written.values())


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


@st.composite
def _topologies(draw: st.DrawFn, source: Sharding, target: Sharding) -> Topology:
    nodes = {f"n{i}": draw(st.sampled_from(["east", "west"])) for i in range(4)}
    somewhere = st.sampled_from(sorted(nodes))

    def ranks(sharding: Sharding) -> list[str]:
        size = sharding.layout.num_ranks
        return draw(st.lists(somewhere, min_size=size, max_size=size))

    return Topology(ranks(source), ranks(target), nodes)


# --- Direct --------------------------------------------------------------------------------------


@given(_parameters(), _shardings(), _shardings(), st.data())
def test_every_byte_comes_once_and_is_right(
    parameters: list[Parameter], source: Sharding, target: Sharding, data: st.DataObject
) -> None:
    topology = data.draw(st.none() | _topologies(source, target))
    made = plan(parameters, source, target, topology)
    _carry_out(made, source, target)
    by_target = [copy for rank in range(target.layout.num_ranks) for copy in made.copies(rank)]
    assert Counter(by_target) == Counter(made.copies())


@given(_parameters(), _shardings(), _shardings(), st.data())
def test_every_byte_comes_from_the_nearest_that_has_it(
    parameters: list[Parameter], source: Sharding, target: Sharding, data: st.DataObject
) -> None:
    topology = data.draw(_topologies(source, target))
    for copy in plan(parameters, source, target, topology).copies():
        here = topology.targets[copy.target]
        distance = topology.distance(topology.sources[copy.source], here)
        # Element by element, from the ranks' own indices: who else has the box's first element?
        held = holdings(parameters[copy.parameter], source)
        first = _indices(held[copy.source], copy.source_start)
        others = [rank for rank, shard in held.items() if _has(shard, first)]
        assert distance == min(topology.distance(topology.sources[r], here) for r in others)


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
    nodes = [f"n{rank}" for rank in range(target.layout.num_ranks)]
    nodes = ["here" if rank in here else node for rank, node in enumerate(nodes)]
    away = Topology(
        ["away"] * source.layout.num_ranks,
        nodes,
        {**{node: node for node in nodes}, "away": "away"},
    )
    assert fetched == _needed(parameters, source, target, away).get("here", 0)


def _inside(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))


def _indices(shard: Shard, at: tuple[int, ...]) -> list[int]:
    found = [held.indices[i] for held, i in zip(shard.dims, at, strict=True)]
    return [i for i in found if i is not None]


def _has(shard: Shard, indices: list[int]) -> bool:
    return all(i in held.indices for held, i in zip(shard.dims, indices, strict=True))


@given(_parameters(), _shardings(), _shardings())
def test_replicas_send_alike(
    parameters: list[Parameter], source: Sharding, target: Sharding
) -> None:
    """Ranks that hold the same are at most one parameter's cell apart."""
    made = plan(parameters, source, target)
    held: dict[int, list[tuple[int, Shard]]] = {}
    for number, parameter in enumerate(parameters):
        for rank, shard in holdings(parameter, source).items():
            held.setdefault(rank, []).append((number, shard))
    largest = max((_num_bytes(copy) for copy in made.copies()), default=0)
    for rank, other in product(held, held):
        if held[rank] == held[other]:
            assert abs(made.sent_bytes[rank] - made.sent_bytes[other]) <= largest


def _num_bytes(copy: Copy) -> int:
    return sum(length for _, _, length in copy.runs())


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=5),
    st.lists(st.integers(0, 30), min_size=1, max_size=5),
)
def test_dealing_is_one_by_one_to_the_least_loaded(
    items: list[tuple[int, int]], loads: list[int]
) -> None:
    dealt, by_hand = Counter(dict(enumerate(loads))), [*loads]
    for count, size in items:
        runs = deal(range(10, 10 + count), size, range(len(loads)), dealt)
        assert [i for _, run in runs for i in run] == [*range(10, 10 + count)]
        for _ in range(count):
            by_hand[by_hand.index(min(by_hand))] += size
        assert sorted(dealt.values()) == sorted(by_hand)


def test_runs_are_as_long_as_both_sides_allow() -> None:
    """Rows that are whole on both sides are one run; a column is one for each row."""
    column, row = Sharding(Layout(tp=2), 1), Sharding(Layout(tp=4), 1)
    parameters = [Parameter("w", (8, 6), "float32", 0, Along(0))]
    copies = [*plan(parameters, column, row).copies()]
    assert [[*copy.runs()] for copy in copies] == [
        [(0, 0, 48)],
        [(48, 0, 48)],
        [(0, 0, 48)],
        [(48, 0, 48)],
    ]
    turned = Sharding(Layout(tp=2), 1, rules={Along(0): Along(1)})
    (first, *_) = plan(parameters, turned, column).copies()
    assert [*first.runs()] == [(12 * i, 24 * i, 12) for i in range(4)]


def test_adjacent_boxes_are_one() -> None:
    """Half as many target ranks: each fetches one box from each of two ranks, and no more."""
    parameters = [Parameter("w", (64, 8), "bfloat16", 0, Along(0))]
    made = plan(parameters, Sharding(Layout(tp=8), 1), Sharding(Layout(tp=4), 1))
    boxes = [(copy.source, copy.target, copy.size) for copy in made.copies()]
    assert boxes == [(2 * t + i, t, (8, 8)) for t in range(4) for i in range(2)]
    # Gate and up are two pieces, and lie end to end on both sides.
    gated = [Parameter("g", (8, 8), "int8", 0, GatedMlp())]
    one = Sharding(Layout(), 1)
    assert [copy.size for copy in plan(gated, one, one).copies()] == [(8, 8)]


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


# --- Over a slow link ----------------------------------------------------------------------------


@given(_parameters(), _shardings(), _shardings(), st.data())
def test_scattering_brings_the_same_and_each_byte_crosses_once(
    parameters: list[Parameter], source: Sharding, target: Sharding, data: st.DataObject
) -> None:
    topology = data.draw(_topologies(source, target))
    direct = plan(parameters, source, target, topology)
    made = scatter_broadcast(direct, topology)
    _carry_out(made, source, target)
    needed = _needed(parameters, source, target, topology)
    assert missing_bytes(direct, topology) == Counter(needed)
    crossed: Counter[str] = Counter()
    for (_, site), num_bytes in traffic(made, topology).crossing.items():
        crossed[site] += num_bytes
    assert crossed == Counter(needed)
    assert sum(traffic(direct, topology).crossing.values()) >= sum(needed.values())


def _needed(
    parameters: list[Parameter], source: Sharding, target: Sharding, topology: Topology
) -> dict[str, int]:
    """By site: distinct bytes that its target ranks hold and its source ranks do not."""
    needed: Counter[str] = Counter()
    for parameter, site in product(parameters, set(topology.sites.values())):
        here, there = (np.zeros(parameter.shape, dtype=bool) for _ in range(2))
        for mask, nodes, sharding in (
            (here, topology.targets, target),
            (there, topology.sources, source),
        ):
            for rank, shard in holdings(parameter, sharding).items():
                if topology.sites[nodes[rank]] == site:
                    indices = [[i for i in held.indices if i is not None] for held in shard.dims]
                    mask[np.ix_(*indices) if indices else ()] = True
        size = np.dtype(DTYPES[parameter.dtype]).itemsize
        needed[site] += int((here & ~there).sum()) * size
    return {site: count for site, count in needed.items() if count}


@given(_shardings(), st.integers(1, 6), st.integers(1, 4))
def test_parts_that_cross_are_alike(source: Sharding, num_nodes: int, size: int) -> None:
    """Many equal parameters, a replica a node: nodes receive alike over the slow link."""
    parameters = [Parameter(f"w{i}", (size,), "int8", 0) for i in range(20)]
    target = Sharding(Layout(dp=num_nodes), NUM_LAYERS)
    sites = {"trainer": "east"} | {f"n{i}": "west" for i in range(num_nodes)}
    topology = Topology(
        ["trainer"] * source.layout.num_ranks, [f"n{i}" for i in range(num_nodes)], sites
    )
    made = scatter_broadcast(plan(parameters, source, target, topology), topology)
    received: Counter[int] = Counter(dict.fromkeys(range(num_nodes), 0))
    for copy in made.copies():
        if not copy.is_relayed:
            received[copy.target] += _num_bytes(copy)
    assert max(received.values()) - min(received.values()) <= size
    assert sum(received.values()) == 20 * size


def test_figure_9_of_weave() -> None:
    """TP 2, DP 2 to DP 4: the baseline sends four copies over the slow link, scattering one."""
    parameters = [
        Parameter(f"layer{i}.w", (8, 8), "bfloat16", i, Along(0)) for i in range(NUM_LAYERS)
    ]
    source = Sharding(Layout(dp=2, tp=2), NUM_LAYERS)
    target = Sharding(Layout(dp=4), NUM_LAYERS)
    topology = Topology(
        ["train"] * 4,
        [f"rollout{i}" for i in range(4)],
        {"train": "east"} | {f"rollout{i}": "west" for i in range(4)},
    )
    model = NUM_LAYERS * 8 * 8 * 2
    direct = plan(parameters, source, target, topology)
    made = scatter_broadcast(direct, topology)
    link = ("east", "west")
    assert traffic(direct, topology).crossing == {link: 4 * model}
    assert traffic(made, topology).crossing == {link: model}
    assert traffic(made, topology).within_sites == 3 * model
    assert made.sent_bytes == dict.fromkeys(range(4), model // 4)
    # A slow link of one model a second, nodes with a hundred times that.
    assert traffic(direct, topology).seconds(model, 100 * model) == 4.0
    assert traffic(made, topology).seconds(model, 100 * model) == 1.0


def test_neighbours_on_a_node_share_what_comes_to_it() -> None:
    parameters = [Parameter(f"w{i}", (4,), "int8", 0) for i in range(4)]
    source, target = Sharding(Layout(), 1), Sharding(Layout(dp=4), 1)
    sites = {"far": "east", "a": "west", "b": "west"}
    topology = Topology(["far"], ["a", "a", "b", "b"], sites)
    cost = traffic(scatter_broadcast(plan(parameters, source, target), topology), topology)
    assert cost.crossing == {("east", "west"): 16}
    assert (cost.within_sites, cost.within_nodes) == (16, 32)


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
