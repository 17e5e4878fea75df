"""Gradients in the heap: the parts that each rank adds, and their sums over ranks.

Between two operations the gradients of a slice are the same on every rank that holds it, so that
any of them may be sealed or saved. An operation begins by dropping all but one rank's (`begin`);
each rank then adds its own, in float32, and the ranks' are added up (`reduce`). So no second buffer
is needed, and gradients from before count once.

Different ranks add different parts of a gradient where a slice is

- on several data-parallel ranks, which have different samples, or context-parallel ranks, which
  have different tokens of them; of an expert only those that have it too, because the other ranks
  send their tokens to one that has;
- a norm of queries or keys, of which a tensor-parallel rank sees its own heads only;
- any other norm, or the gate of a layer of experts, of which a tensor-parallel rank sees its own
  columns only (sequence parallelism);
- the matrix of an adapter that all tensor-parallel ranks hold: A of a layer whose outputs are
  spread over them, B of one whose inputs are; each rank sees its own columns only;
- a key-value head that several tensor-parallel ranks hold for their own queries;
- a tied embedding, as the first stage's input and the last one's output.

All other slices that several ranks hold get the same gradient on each. Nothing is divided: losses
are sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from phaseloom.worker.backends.megatron.slices import (
    Place,
    Sizes,
    is_of_expert,
    key_value_heads,
)

_EMBEDDING = "model.embed_tokens.weight"
_PARTLY_SEEN = (
    "norm.weight",
    "layernorm.weight",
    "mlp.gate.weight",
    *(f"{name}_proj.lora_A.weight" for name in ("q", "k", "v", "gate", "up")),
    *(f"{name}_proj.lora_B.weight" for name in ("o", "down")),
)
"""The ends of the names of parameters that all tensor-parallel ranks hold and whose whole input
none sees."""
_KEYS_AND_VALUES = tuple(
    f"self_attn.{name}_proj.{of}" for name in "kv" for of in ("weight", "bias", "lora_B.weight")
)


def accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Have the backward pass add a parameter's gradient to this tensor, and keep none elsewhere."""

    def add(done: torch.Tensor) -> None:
        assert done.grad is not None
        gradient.add_(done.grad)
        done.grad = None

    untyped: Any = parameter
    untyped.register_post_accumulate_grad_hook(add)


class Gradients:
    """The gradients of a rank's slices, by the names of their tensors."""

    def __init__(
        self,
        sizes: Sizes,
        place: Place,
        flat: torch.Tensor,
        views: Mapping[str, torch.Tensor],
    ) -> None:
        """Args: flat: the region that all the views are of; the views of experts are behind all
        others."""
        self._sizes, self._place = sizes, place
        of_experts = [view.data_ptr() for name, view in views.items() if is_of_expert(name)]
        num_bytes = min(of_experts) - flat.data_ptr() if of_experts else 0
        num_shared = num_bytes // flat.element_size() if of_experts else flat.numel()
        self._shared, self._experts, self._views = flat[:num_shared], flat[num_shared:], views
        shares_heads = place.layout.tp > sizes.kv_heads
        self._partly_seen = self._named(_PARTLY_SEEN) if place.layout.tp > 1 else []
        self._shared_heads = self._named(_KEYS_AND_VALUES) if shares_heads else []
        is_apart = sizes.is_tied and place.layout.pp > 1
        self._embedding = views.get(_EMBEDDING) if is_apart else None

    def begin(self) -> None:
        """Drop the gradients that another rank keeps."""
        place = self._place
        if place.at.dp or place.at.cp:
            self._shared.zero_()
        if place.at.edp:
            self._experts.zero_()
        if place.at.tp:
            self._zero(self._partly_seen)
        if place.at.tp * self._sizes.kv_heads % place.layout.tp:
            self._zero(self._shared_heads)
        if self._embedding is not None and not place.is_first:
            self._embedding.zero_()

    def reduce(self) -> None:
        """Add up the gradients of the ranks. Collective."""
        if self._partly_seen:
            joined = torch.cat([gradient.flatten() for gradient in self._partly_seen])
            dist.all_reduce(joined, group=parallel_state.get_tensor_model_parallel_group())
            summed = torch.split(joined, [part.numel() for part in self._partly_seen])
            for gradient, part in zip(self._partly_seen, summed, strict=True):
                gradient.copy_(part.view_as(gradient))
        for gradient in self._shared_heads:
            self._add_up_heads(gradient)
        if self._embedding is not None:
            dist.all_reduce(self._embedding, group=parallel_state.get_embedding_group())
        layout = self._place.layout
        if layout.dp * layout.cp > 1:
            replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(self._shared, group=replicas)
        if self._experts.numel() and layout.dp * layout.cp * layout.tp > layout.ep:
            dist.all_reduce(self._experts, group=parallel_state.get_expert_data_parallel_group())

    def squared(self, names: Sequence[str]) -> torch.Tensor:
        """The sum of the squares of these slices' gradients."""
        if not names:
            return self._shared.new_zeros(())
        norms = torch._foreach_norm([self._views[name] for name in names])
        return torch.stack(list(norms)).square().sum()

    def _add_up_heads(self, gradient: torch.Tensor) -> None:
        """Add up a projection's gradients over the ranks that hold the same head."""
        heads = key_value_heads(self._sizes, self._place)
        size = self._sizes.head
        all_heads = gradient.new_zeros([self._sizes.kv_heads * size, *gradient.shape[1:]])
        local_heads = all_heads[heads.start * size : heads.stop * size]
        local_heads.copy_(gradient)
        dist.all_reduce(all_heads, group=parallel_state.get_tensor_model_parallel_group())
        gradient.copy_(local_heads)

    def _named(self, ends: tuple[str, ...]) -> list[torch.Tensor]:
        return [view for name, view in self._views.items() if name.endswith(ends)]

    @staticmethod
    def _zero(gradients: Sequence[torch.Tensor]) -> None:
        for gradient in gradients:
            gradient.zero_()
