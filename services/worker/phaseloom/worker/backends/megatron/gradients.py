"""Gradients in the heap: each rank's contributions and their sums over ranks.

Between two operations, every rank that holds a slice has the same gradients for it, so any of them
can be sealed or saved. At the start of an operation, all ranks but one zero the gradients that they
share (`begin`). Each rank then adds its contribution in float32, and the contributions are summed
(`reduce`). So there is no second buffer, and earlier gradients count once.

Ranks contribute different parts of a gradient if a slice is

- on several data-parallel ranks, which have different samples, or context-parallel ranks, which
  have different tokens. For an expert, only ranks that hold it contribute: the others send their
  tokens to one of these;
- a norm of queries or keys: a tensor-parallel rank sees only its own heads;
- any other norm, or the gate of an expert layer: a tensor-parallel rank sees only its own columns
  (sequence parallelism);
- an adapter matrix that all tensor-parallel ranks hold (A of a layer with split outputs, B of one
  with split inputs): each rank sees only its own columns;
- a key-value head that several tensor-parallel ranks hold for their own queries;
- a tied embedding: it is the first stage's input and the last stage's output.

All other slices that several ranks hold get the same gradient on each. Nothing is divided, because
losses are sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
"""Suffixes of parameters that all tensor-parallel ranks hold whole, while each rank sees only part
of their input."""
_KEYS_AND_VALUES = tuple(
    f"self_attn.{name}_proj.{of}" for name in "kv" for of in ("weight", "bias", "lora_B.weight")
)


class Gradients:
    """The gradients of a rank's slices, by tensor name."""

    def __init__(
        self,
        sizes: Sizes,
        place: Place,
        flat: torch.Tensor,
        views: Mapping[str, torch.Tensor],
    ) -> None:
        """Args: flat: the region of all views. Views of experts lie behind all others."""
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
        """Zero the gradients that another rank keeps."""
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
        """Sum the gradients over ranks. Collective."""
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
        """Sum the squares of the gradients of these slices."""
        if not names:
            return self._shared.new_zeros(())
        norms = torch._foreach_norm([self._views[name] for name in names])
        return torch.stack(list(norms)).square().sum()

    def _add_up_heads(self, gradient: torch.Tensor) -> None:
        """Sum a projection's gradients over the ranks that hold the same head."""
        heads = key_value_heads(self._sizes, self._place)
        size = self._sizes.head
        # Each rank adds its head in its place, so the sum adds up only equal heads.
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
