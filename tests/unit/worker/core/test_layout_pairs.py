"""Weights from any layout of a real backend to any layout of another, exact to the byte, and every
byte once over a slow link.

Megatron's and FSDP2's layouts are those of the backends; vLLM's are written down again in
`tests.support.layoutpairs`, since that backend finds them by loading a model.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import Layout
from phaseloom.common.tensors.layouts import check_layout
from phaseloom.common.tensors.resharding import (
    SliceFetch,
    holding_of,
    item_bytes,
    plan_fetches,
    tensors_of,
)
from phaseloom.statemgr.transfer.assignment import Assignment, Peer
from phaseloom.statemgr.transfer.tensorslices import Box
from phaseloom.worker.backends.filetensors import ParameterShapes
from phaseloom.worker.backends.layout import plan
from phaseloom.worker.backends.megatron.slices import Sizes, check_sizes, sizes_of
from phaseloom.worker.backends.model import model_config, parameter_shapes
from tests.support.layoutpairs import (
    Slots,
    Version,
    VllmCut,
    contents_of,
    fsdp,
    megatron,
    memory_of,
    reader_of,
)
from tests.support.megatron import spec, tiny

CONFIGS: dict[str, dict[str, Any]] = {
    "tied": tiny(num_hidden_layers=4),
    "untied": tiny(num_hidden_layers=4, tie_word_embeddings=False),
    "biases": tiny("qwen2", num_hidden_layers=4),
    "experts": tiny(
        "qwen3_moe", num_hidden_layers=4, num_experts=12, moe_intermediate_size=32, hidden_size=32
    ),
}
"""Models of 29 token ids, which no layout splits evenly, and of fewer key-value heads than ranks
have."""

_SIZE = st.sampled_from([1, 2, 4])


@functools.cache
def _model(name: str) -> tuple[Sizes, ParameterShapes]:
    """A model's sizes, and its parameters' shapes in a trainer's memory."""
    model = spec(model=CONFIGS[name]).model
    return sizes_of(model_config(model)), parameter_shapes(model)


@st.composite
def _megatron(draw: st.DrawFn, name: str) -> list[Slots]:
    sizes, _ = _model(name)
    layout = Layout(dp=draw(_SIZE), tp=draw(_SIZE), pp=draw(_SIZE))
    if sizes.experts is not None:
        layout = Layout(dp=layout.dp, tp=layout.tp, pp=layout.pp, ep=draw(_SIZE))
    try:
        check_layout(layout)
        check_sizes(sizes, layout)
    except CallerError:
        layout = Layout(tp=2)
    return megatron(sizes, layout)


@st.composite
def _vllm(draw: st.DrawFn, name: str) -> list[Slots]:
    sizes, _ = _model(name)
    # Three stages leave a layer over.
    layout = Layout(tp=draw(_SIZE), pp=draw(st.integers(1, 4)))
    return VllmCut(sizes, layout, draw(st.sampled_from([4, 64])), draw(st.booleans())).slots()


@st.composite
def _fsdp(draw: st.DrawFn, name: str) -> list[Slots]:
    return fsdp(_model(name)[1], draw(st.integers(1, 5)))


PAIRS = {
    "megatron to vllm": (_megatron, _vllm),
    "megatron to fsdp": (_megatron, _fsdp),
    "fsdp to megatron": (_fsdp, _megatron),
    "megatron to megatron": (_megatron, _megatron),
}


@pytest.mark.parametrize("pair", PAIRS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_every_byte_of_any_rank_is_exact_and_crosses_to_a_site_once(
    pair: str, data: st.DataObject
) -> None:
    """One deployment reads all; another one of the site, over as many nodes, only crosses with
    it."""
    name = data.draw(st.sampled_from(sorted(CONFIGS)))
    source, target, other = (data.draw(each(name)) for each in (*PAIRS[pair], PAIRS[pair][1]))
    shapes = _model(name)[1].files
    contents, whole = contents_of(shapes), plan(shapes, trainable=False).slots
    version = Version(source, contents)
    num_nodes = data.draw(st.integers(1, 3))
    for own_boxes in nodes_of(target, num_nodes):
        for rank in own_boxes:
            reader = reader_of(target, whole, rank, own_boxes)
            assert version.read(reader) == memory_of(reader.slots, contents)
    tensors = tensors_of(whole)
    needed = [
        plan_fetches(tensors, version.held, {rank: holding_of(ranks[rank]) for rank in own_boxes})
        for ranks in (target, other)
        for own_boxes in nodes_of(ranks, num_nodes)
    ]
    whole_bytes = sum(math.prod(each.shape) * item_bytes(each.dtype) for each in tensors.values())
    assert crossing_bytes(needed) == whole_bytes


def nodes_of(ranks: Sequence[Slots], num_nodes: int) -> list[list[int]]:
    """The ranks on each node."""
    return [[rank for rank in range(len(ranks)) if rank % num_nodes == n] for n in range(num_nodes)]


def crossing_bytes(nodes: Sequence[Sequence[SliceFetch]]) -> int:
    """The bytes that sources send to a site whose nodes fetch these slices: of each part what it
    has assigned to no other node."""
    assigned: defaultdict[int, Assignment] = defaultdict(Assignment)
    crossing = 0
    for number, needed in enumerate(nodes):
        peer = Peer(f"node{number}:1", "slices")
        for fetch in needed:
            box = Box(fetch.name, [*fetch.start], [*fetch.size])
            shares = assigned[fetch.part].assign([(box, fetch.num_bytes)], 2**40, [], peer)
            elements = sum(math.prod(part.size) for _, part in shares.own_boxes)
            crossing += elements * fetch.num_bytes // math.prod(fetch.size)
    return crossing
