"""The place of an adapter in vLLM's layers, each of which may be several layers of the model.

vLLM's own adapters lie in memory that it fills from files, in forms of its own. Here A and B are
slices of the tensors that files name, in the heap: for a layer whose outputs are spread over ranks
the rows of B, for one whose inputs are spread the columns of A. The ranks' sums include them.
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


def _shard(shape: list[int], whole_shape: Sequence[int], start: list[int]) -> Shard:
    if shape == [*whole_shape]:
        return Shard(shape, shape)
    return Shard(shape, shape, [*whole_shape], start)


ByWeight = Mapping[str, Sequence[Added]]
"""What each of vLLM's layers adds, by the name of its weight."""


def parts_by_weight(
    parts: Sequence[Part], views: Mapping[str, torch.Tensor], scale: float
) -> ByWeight:
    """What each of vLLM's layers adds.

    Args: views: of the rank's slices of A and B, by the names of files; a layer whose matrices are
              not among them adds nothing.
          scale: of the adapter.
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
    """Copy a rank's slices of another adapter's matrices to memory of the device.

    Args:    whole: the adapter's matrices, of the deployment's rank at most. slots: the rank's
             slices of its own adapter, as they lie in the heap. place: uint8, of the heap's size.
    Returns: the slices there, by name.
    """
    views = {}
    for slot in slots:
        if slot.name not in tensors:
            continue
        tensor = tensors[slot.name]
        start = slot.start or [0, 0]
        # The side of the adapter's rank is whole on every rank of the deployment.
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
    """What the layers of a model of vLLM's add to what they compute; it can be exchanged."""

    def __init__(self, model: nn.Module, parts: ByWeight) -> None:
        """Have the layers that compute with these weights add this. A tied head is another layer
        than the embedding in some models, the same in others; an embedding's lookup stays as it
        is."""
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
        """Within this, the layers add these. Args: parts: of no other weights."""
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
