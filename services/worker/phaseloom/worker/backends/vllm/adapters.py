"""The place of an adapter in vLLM's layers, each of which may be several layers of the model.

vLLM's own adapters lie in memory that it fills from files, in forms of its own. Here A and B are
slices of the tensors that files name, in the heap: for a layer whose outputs are spread over ranks
the rows of B, for one whose inputs are spread the columns of A. The ranks' sums include them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phaseloom.common.contract.specs import ModelSpec
from phaseloom.worker.backends.adapters import Matrices, file_name
from phaseloom.worker.backends.layout import Layout, Shard, lay_out
from phaseloom.worker.backends.model import adapted_weights, weights_dtype
from phaseloom.worker.backends.vllm.loader import Placement, Shapes


@dataclass(frozen=True)
class Part:
    """The part of one of the model's layers that this rank has."""

    weight: str
    """The name of the parameter of vLLM's model that has its weight."""
    rows: slice
    """The slice's outputs among those of vLLM's layer."""
    a: str
    b: str
    """The name of its matrix B in files."""


@dataclass(frozen=True)
class Added:
    """The part of an adapter that one of vLLM's layers adds to some of its outputs."""

    rows: slice
    matrices: Matrices


def plan_adapter(spec: ModelSpec, base: Placement, shapes: Shapes) -> tuple[Layout, Sequence[Part]]:
    """The heap of a rank for an adapter on its part of the base, and the layers that the adapter is
    on.

    Args: shapes: the shapes of the adapter's whole tensors.
    """
    slots = {slot.name: slot for slot in base.slots}
    shards: dict[str, Shard] = {}
    parts = []
    for layer, weight in adapted_weights(spec).items():
        slot = slots.get(weight)
        if slot is None:
            continue  # another stage's
        owner = max(
            (name for name, offset in base.offsets.items() if offset <= slot.offset),
            key=lambda name: base.offsets[name],
        )
        first = (slot.offset - base.offsets[owner]) // (slot.num_bytes // slot.shape[0])
        a, b = file_name(layer, "lora_A"), file_name(layer, "lora_B")
        parts.append(Part(owner, slice(first, first + slot.shape[0]), a, b))
        row, column = slot.start or [0, 0]
        rank = shapes[a][0]
        shards[a] = _shard([rank, slot.shape[1]], shapes[a], [0, column])
        shards[b] = _shard([slot.shape[0], rank], shapes[b], [row, 0])
    sizes = {name: shards[name] for name in sorted(shards)}
    return lay_out(sizes, trainable=False, dtype=weights_dtype(spec)), parts


def _shard(shape: list[int], whole: Sequence[int], start: list[int]) -> Shard:
    if shape == [*whole]:
        return Shard(shape, shape)
    return Shard(shape, shape, [*whole], start)


def parts_by_weight(
    spec: ModelSpec, parts: Sequence[Part], views: Mapping[str, torch.Tensor]
) -> dict[str, list[Added]]:
    """The adapter's part for each of vLLM's layers, by the name of its weight. Args: views: the
    tensors of the heap."""
    assert spec.adapter is not None
    scale = spec.adapter.alpha / spec.adapter.rank
    added: dict[str, list[Added]] = {}
    for part in parts:
        matrices = Matrices(views[part.a], views[part.b], scale)
        added.setdefault(part.weight, []).append(Added(part.rows, matrices))
    return added


def add_adapter(model: nn.Module, parts: Mapping[str, Sequence[Added]]) -> None:
    """Have the layers that compute with these weights add an adapter's parts.

    A tied head is another layer than the embedding in some models, the same in others; an
    embedding's lookup stays as it is.
    """
    parameters = dict(model.named_parameters())
    added = {id(parameters[name]): each for name, each in parts.items()}
    seen = set()
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        wanted = added.get(id(getattr(module, "weight", None)))
        if wanted is not None and method is not None and id(method) not in seen:
            seen.add(id(method))
            method.apply = _adding(method.apply, wanted)


def _adding(
    apply: Callable[..., torch.Tensor], added: Sequence[Added]
) -> Callable[..., torch.Tensor]:
    def apply_both(
        layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = apply(layer, x, bias)
        for each in added:
            y[..., each.rows] = each.matrices.added(x, y[..., each.rows])
        return y

    return apply_both
