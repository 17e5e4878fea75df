"""Adapters (LoRA) on vLLM's layers, each of which may fuse several layers of the model.

vLLM's own adapters live in memory that it fills from files, in its own formats. Here A and B are
slices, in the heap, of the tensors that files name. If a layer's outputs are split over ranks, each
rank has its rows of B; if its inputs are split, its columns of A. vLLM's own reductions then
include the adapter's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phaseloom.common.contract.specs import ModelSpec
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.worker.backends.layout import Layout, Shard, lay_out
from phaseloom.worker.backends.lora.adapters import Matrices, file_name, layer_and_part
from phaseloom.worker.backends.model import adapted_weights, weights_dtype
from phaseloom.worker.backends.vllm.loader import Placement, Shapes


@dataclass(frozen=True)
class Part:
    """This rank's part of one of the model's layers."""

    weight: str
    """Name of the parameter of vLLM's model that contains its weight."""
    rows: slice
    """Its outputs among those of vLLM's layer."""
    a: str
    b: str
    """Name of its matrix B in files."""


@dataclass(frozen=True)
class Added:
    """An adapter's contribution to some of the outputs of one of vLLM's layers."""

    rows: slice
    matrices: Matrices


def plan_adapter(spec: ModelSpec, base: Placement, shapes: Shapes) -> tuple[Layout, Sequence[Part]]:
    """Plan a rank's heap for an adapter on its part of the base.

    Args: shapes: shapes of the adapter's whole tensors.
    Returns: the layout, and the layers with an adapter.
    """
    slots = {slot.name: slot for slot in base.slots}
    shards: dict[str, Shard] = {}
    parts = []
    for layer, weight in adapted_weights(spec).items():
        slot = slots.get(weight)
        if slot is None:
            continue  # it belongs to another stage
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


def _shard(shape: list[int], whole_shape: Sequence[int], start: list[int]) -> Shard:
    if shape == [*whole_shape]:
        return Shard(shape, shape)
    return Shard(shape, shape, [*whole_shape], start)


ByWeight = Mapping[str, Sequence[Added]]
"""The adapter parts that each of vLLM's layers adds, by the name of its weight."""


def parts_by_weight(
    parts: Sequence[Part], views: Mapping[str, torch.Tensor], scale: float
) -> ByWeight:
    """Return the adapter parts that each of vLLM's layers adds.

    Args: views: the rank's slices of A and B, by their names in files. A layer whose matrices are
             missing adds nothing.
          scale: scale of the adapter.
    """
    added: dict[str, list[Added]] = {}
    for part in parts:
        if part.a in views:
            matrices = Matrices(views[part.a], views[part.b], scale)
            added.setdefault(part.weight, []).append(Added(part.rows, matrices))
    return added


def put_slices(
    tensors: Mapping[str, torch.Tensor], slots: Sequence[TensorSlot], place: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Copy a rank's slices of another adapter's matrices to device memory.

    Args: tensors: the adapter's matrices, of at most the deployment's rank.
          slots: the rank's slices of its own adapter, as in the heap.
          place: uint8, of the heap's size.
    Returns: the copied slices, by name.
    """
    views = {}
    for slot in slots:
        if slot.name not in tensors:
            continue
        tensor = tensors[slot.name]
        start = slot.start or [0, 0]
        # The dimension of the adapter's rank is whole on every rank of the deployment.
        is_a = layer_and_part(slot.name)[1] == "lora_A"
        inside = (
            tensor[:, start[1] : start[1] + slot.shape[1]]
            if is_a
            else (tensor[start[0] : start[0] + slot.shape[0]])
        )
        num_bytes = inside.numel() * inside.itemsize
        target = place[slot.offset : slot.offset + num_bytes].view(inside.dtype)
        views[slot.name] = target.view(inside.shape).copy_(inside)
    return views


class AddedParts:
    """Makes the layers of a vLLM model add an adapter's output. The adapter can be exchanged."""

    def __init__(self, model: nn.Module, parts: ByWeight) -> None:
        """Patch the layers that compute with these weights. In some models a tied head is a layer
        of its own, in others it is the embedding. An embedding's lookup stays unchanged."""
        self.parts = parts
        parameters = dict(model.named_parameters())
        names = {id(parameters[name]): name for name in parts}
        seen = set()
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            name = names.get(id(getattr(module, "weight", None)))
            if name is not None and method is not None and id(method) not in seen:
                seen.add(id(method))
                method.apply = self._adding(method.apply, name)

    @contextmanager
    def exchanged(self, parts: ByWeight) -> Iterator[None]:
        """Within the block, the layers add these instead. Args: parts: for the same weights
        only."""
        previous, self.parts = self.parts, parts
        try:
            yield
        finally:
            self.parts = previous

    def _adding(
        self, apply: Callable[..., torch.Tensor], weight: str
    ) -> Callable[..., torch.Tensor]:
        def apply_both(
            layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            y = apply(layer, x, bias)
            for part in self.parts.get(weight, ()):
                y[..., part.rows] = part.matrices.added(x, y[..., part.rows])
            return y

        return apply_both
