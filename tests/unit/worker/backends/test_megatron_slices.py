"""What Megatron's ranks hold of a model, and what context-parallel ranks see of a pass: every
tensor and every position exactly once, whatever the layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from phaseloom.common.contract.operations import ForwardBackward, Loss
from phaseloom.common.contract.specs import Adapter, Layout
from phaseloom.common.tensors.layouts import coordinates
from phaseloom.worker.backends import pretrained
from phaseloom.worker.backends.batch import loss_batch
from phaseloom.worker.backends.layout import Shard, lay_out
from phaseloom.worker.backends.lora.adapters import file_name
from phaseloom.worker.backends.megatron.context import columns, share_of
from phaseloom.worker.backends.megatron.slices import (
    Place,
    adapted,
    check_sizes,
    parameters,
    sizes_of,
)
from phaseloom.worker.backends.model import HeapTensors, model_config, parameter_shapes
from phaseloom.worker.backends.packing import passes
from phaseloom.worker.state.heap import Heap
from tests.support.megatron import spec, tiny
from tests.support.pretrained import loaded, pinned, save_model
from tests.support.tinymodel import VOCAB
from tests.unit.worker.backends.models import batch

CONFIGS = {
    "tied": tiny(num_hidden_layers=4),
    "untied": tiny(num_hidden_layers=4, tie_word_embeddings=False),
    "biases": tiny("qwen2", num_hidden_layers=4),
}


def layouts() -> Iterator[Layout]:
    for dp, tp, pp, cp in itertools.product((1, 2), (1, 2, 4), (1, 2, 4), (1, 2)):
        yield Layout(dp=dp, tp=tp, pp=pp, cp=cp)


EXPERTS = tiny("qwen3_moe", num_hidden_layers=4, num_experts=12, moe_intermediate_size=32)


def expert_layouts() -> Iterator[Layout]:
    for dp, ep, pp in itertools.product((1, 2, 4), (1, 2, 4), (1, 2)):
        if dp % ep == 0:
            yield Layout(dp=dp, ep=ep, pp=pp)


def count_elements(held: Iterable[tuple[str, Shard]], seen: dict[str, Any]) -> None:
    """Add one for each element that a rank holds. Args: seen: of each whole tensor."""
    for tensor, shard in held:
        assert [*(shard.global_shape or shard.shape)] == [*seen[tensor].shape]
        start = shard.start or [0] * len(shard.shape)
        where = zip(start, shard.shape, strict=True)
        seen[tensor][tuple(slice(at, at + size) for at, size in where)] += 1


@pytest.mark.parametrize("name", [*CONFIGS, "experts"])
def test_ranks_together_hold_every_element_and_no_other(name: str) -> None:
    model = spec(model=CONFIGS.get(name, EXPERTS)).model
    sizes, shapes = sizes_of(model_config(model)), parameter_shapes(model).files
    for layout in layouts() if name in CONFIGS else expert_layouts():
        check_sizes(sizes, layout)
        seen = {each: np.zeros(shape, dtype=int) for each, shape in shapes.items()}
        for rank in range(layout.num_ranks):
            held = parameters(sizes, Place(layout, coordinates(rank, layout)))
            named = [pair for slices in held.values() for pair in slices.items()]
            assert len(dict(named)) == len(named), "one slice of a tensor a rank"
            count_elements(named, seen)
        for tensor, count in seen.items():
            assert count.min() >= 1, (layout, tensor)
            # More ranks may hold a slice of it, but all its slices are held as often.
            assert count.max() == count.min() or "embed" in tensor, (layout, tensor)


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_together_hold_every_element_of_an_adapter(name: str) -> None:
    adapter = Adapter(rank=3, targets=("q_proj", "k_proj", "o_proj", "up_proj", "lm_head"))
    model = replace(spec(model=CONFIGS[name]).model, adapter=adapter)
    sizes, shapes = sizes_of(model_config(model)), parameter_shapes(model)
    for layout in layouts():
        seen = {each: np.zeros(shape, dtype=int) for each, shape in shapes.items()}
        for rank in range(layout.num_ranks):
            place = Place(layout, coordinates(rank, layout))
            for part in (each for layer in adapted(sizes, place, adapter) for each in layer.parts):
                if part.a is not None and part.b is not None:
                    names = [file_name(part.layer, kind) for kind in ("lora_A", "lora_B")]
                    count_elements(zip(names, (part.a, part.b), strict=True), seen)
        for tensor, count in seen.items():
            assert count.max() == count.min() >= 1, (layout, tensor)


def test_slices_of_a_fused_parameter_lie_one_behind_the_other() -> None:
    sizes = sizes_of(model_config(spec().model))
    for layout in layouts():
        if layout.pp == 4:
            continue
        for rank in range(layout.num_ranks):
            held = parameters(sizes, Place(layout, coordinates(rank, layout)))
            region = lay_out(
                {name: shard for slices in held.values() for name, shard in slices.items()},
                trainable=False,
            ).weights
            for slices in held.values():
                slots = [region.slots[name] for name in slices]
                for one, following in itertools.pairwise(slots):
                    assert one.offset + one.num_bytes == following.offset
            assert [*region.slots] == sorted(region.slots)


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(tp=4)], ids=str)
def test_rank_reads_its_slices_of_a_registered_model(layout: Layout, tmp_path: Path) -> None:
    """A stage has some of the tensors; the files' others are not strange to the model."""
    directory = save_model(tmp_path / "model", **tiny())
    model = pinned(directory)
    assert model.pinned is not None
    expected = loaded(directory).state_dict()
    sizes = sizes_of(model_config(model))
    for rank in range(layout.num_ranks):
        held = parameters(sizes, Place(layout, coordinates(rank, layout)))
        shards = {name: shard for slices in held.values() for name, shard in slices.items()}
        region = lay_out(shards, trainable=False).weights
        heap = Heap(region.stop)
        slots = [*region.slots.values()]
        pretrained.fill(heap, slots, model)
        for name, view in HeapTensors(heap).views(region).items():
            start = shards[name].start or [0] * len(shards[name].shape)
            where = zip(start, shards[name].shape, strict=True)
            inside = tuple(slice(at, at + size) for at, size in where)
            assert torch.equal(view, expected[name][inside]), name


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_shares_have_every_position_once_and_see_what_the_pass_sees(cp: int) -> None:
    args = ForwardBackward(batch(1), Loss.PPO)
    for packed in passes(loss_batch(args, VOCAB), only_used=True):
        shares = [share_of(packed, cp, rank) for rank in range(cp)]
        sources = np.concatenate([share.source_N for share in shares])
        assert sorted(sources) == sorted(packed.source_N)
        pairs: set[tuple[int, int]] = set()
        num_rows, num_columns = packed.tokens_BT.shape
        length = num_columns + -num_columns % (2 * cp if cp > 1 else 1)
        visible = packed.visible_BTT
        if visible is None:
            visible = np.broadcast_to(
                np.tri(num_columns, dtype=bool), (num_rows, *[num_columns] * 2)
            )
        own = [columns(length, cp, r) if cp > 1 else np.arange(length) for r in range(cp)]
        order = np.concatenate(own)
        assert sorted(order) == [*range(length)]
        assert len({each.size for each in own}) == 1
        for share, columns_T in zip(shares, own, strict=True):
            row, column = np.divmod(share.index_N, columns_T.size)
            there = row * num_columns + columns_T[column]
            pairs |= {*zip(there.tolist(), share.source_N.tolist(), strict=True)}
            seen = share.visible_BTS
            if seen is None:
                continue
            for local, here in enumerate(columns_T):
                if here < num_columns:
                    real = order < num_columns
                    expected = visible[:, here][:, order[real]]
                    found = np.broadcast_to(seen, (num_rows, *seen.shape[1:]))[:, local][:, real]
                    assert np.array_equal(found, expected)
        assert pairs == {*zip(packed.index_N.tolist(), packed.source_N.tolist(), strict=True)}
