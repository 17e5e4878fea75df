"""A rank's pipeline stage, built from Megatron-core's layers, and a pass of packed rows through it.

The layers follow Megatron's own specification without Transformer Engine, with three changes:

- Attention reads the rows of queries, keys and values one after another (`slices`), and accepts any
  mask (a branch of a packed row sees its prefix and itself) and any positions.
- The last stage applies the head only at the requested positions.
- Token ids that pad the vocabulary have probability 0.

Under context parallelism a rank has some columns of each row, and gathers keys and values of all
columns (`context`). With tensor parallelism, each rank holds one contiguous part of those columns
between layers; the layers gather and reduce-scatter them (sequence parallelism).

Shapes: B rows, T columns of this rank, S columns of all ranks, N requested positions, H hidden, V
this rank's part of the vocabulary, n heads, D dimensions of a head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn

from phaseloom.common.contract.specs import Layout
from phaseloom.worker.backends.megatron.context import Share
from phaseloom.worker.backends.megatron.slices import Experts, Place, Sizes, token_ids
from phaseloom.worker.backends.scoring import ENTROPY_ROWS


class Attention(SelfAttention):  # type: ignore[misc]
    """Self-attention whose fused rows are this rank's queries, then its keys, then its values."""

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (T, B, n, D) queries, keys and values."""
        fused, _ = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        query, key, value = fused.unflatten(-1, (-1, self.hidden_size_per_attention_head)).split(
            [self.num_attention_heads_per_partition, groups, groups], dim=2
        )
        return self.q_layernorm(query), self.k_layernorm(key), value


class Norm(nn.RMSNorm):
    """torch's RMSNorm, which treats each position alone and so can run on part of the columns."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)


class _Gathered(torch.autograd.Function):
    """Gathers the columns of all ranks in rank order. Backward sums the gradients of this rank's
    own."""

    @staticmethod
    def forward(ctx: Any, own_TBnD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.num_columns = group, own_TBnD.shape[0]
        parts = [torch.empty_like(own_TBnD) for _ in range(group.size())]
        dist.all_gather(parts, own_TBnD.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient_SBnD = gradients[0].contiguous()
        dist.all_reduce(gradient_SBnD, group=ctx.group)
        start = ctx.group.rank() * ctx.num_columns
        return gradient_SBnD[start : start + ctx.num_columns].clone(), None


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """torch's attention with any mask, or plainly causal without one."""

    def __init__(self, config: TransformerConfig, *_: Any, pg_collection: Any, **__: Any) -> None:
        super().__init__(config=config)
        self._ranks: dist.ProcessGroup = pg_collection.cp

    def forward(
        self,
        query_TBnD: torch.Tensor,
        key_TBnD: torch.Tensor,
        value_TBnD: torch.Tensor,
        visible_B1TS: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if self._ranks.size() > 1:
            gather: Any = _Gathered.apply
            key_TBnD, value_TBnD = gather(key_TBnD, self._ranks), gather(value_TBnD, self._ranks)
        # The number of query heads that share a key-value head.
        repeated = query_TBnD.shape[2] // key_TBnD.shape[2]
        query, key, value = (
            tensor.permute(1, 2, 0, 3) for tensor in (query_TBnD, key_TBnD, value_TBnD)
        )
        mixed_BnTD = nn.functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(repeated, 1),
            value.repeat_interleave(repeated, 1),
            visible_B1TS,
            is_causal=visible_B1TS is None,
        )
        return mixed_BnTD.permute(2, 0, 1, 3).flatten(2)


class Stage(GPTModel):  # type: ignore[misc]
    """The layers of one pipeline stage. The first stage has the embedding, the last one the
    head."""

    def __init__(
        self, config: TransformerConfig, sizes: Sizes, place: Place, frequencies: torch.Tensor
    ) -> None:
        """Args: frequencies: (D/2,) rotary frequencies."""
        super().__init__(
            config,
            _layers(sizes, sizes.num_layers // place.layout.pp),
            vocab_size=sizes.padded_vocab(place.layout.tp),
            max_sequence_length=0,
            pre_process=place.is_first,
            post_process=place.is_last,
            share_embeddings_and_output_weights=sizes.is_tied,
            position_embedding_type="none",
        )
        if place.is_last:
            # The head gets only the requested positions, and sums their gradients over ranks.
            self.output_layer.sequence_parallel = False
        self._frequencies = frequencies
        self._num_ids = len(token_ids(sizes, place))

    def setup_embeddings_and_output_layer(self) -> None:
        """Do nothing. The weights of a tied embedding are views of the heap, and `gradients` sums
        its gradients."""

    def forward(self, share: Share, *, with_entropy: bool = False) -> torch.Tensor:
        """Run the stage.

        Returns: on the last stage, the log-probabilities (N,) of the targets, or (2, N): these and
                 the entropies of the distributions; otherwise the next stage's input (T / tp, B,
                 H).
        """
        hidden_TBH: Any = None
        if self.pre_process:
            hidden_TBH = self.embedding(self._here(share.tokens_BT), None)
        visible_BTS = share.visible_BTS
        hidden_TBH = self.decoder(
            hidden_states=hidden_TBH,
            attention_mask=None if visible_BTS is None else self._here(visible_BTS)[:, None],
            rotary_pos_emb=self._angles(self._here(share.positions_BT)),
        )
        if not self.post_process:
            passed_on: torch.Tensor = hidden_TBH
            return passed_on
        if self.config.sequence_parallel:
            hidden_TBH = gather_from_sequence_parallel_region(
                hidden_TBH, tensor_parallel_output_grad=False
            )
        asked_NH = hidden_TBH.transpose(0, 1).flatten(0, 1)[self._here(share.index_N)]
        is_tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if is_tied else None
        logits_N1V, _ = self.output_layer(asked_NH[:, None], weight=weight)
        logits_NV = self._masked(logits_N1V[:, 0].float())
        # The cross-entropy changes the logits in place.
        entropy_N = _entropies(logits_NV) if with_entropy else None
        nll_N: torch.Tensor = vocab_parallel_cross_entropy(logits_NV, self._here(share.targets_N))
        return -nll_N if entropy_N is None else torch.stack([-nll_N, entropy_N])

    def _here(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._frequencies.device)

    def _angles(self, positions_BT: torch.Tensor) -> torch.Tensor:
        """Return the (T, B, 1, D) angles of the rotary embedding."""
        angles_TBD = positions_BT.t()[..., None].float() * self._frequencies
        return torch.cat([angles_TBD, angles_TBD], -1)[:, :, None]

    def _masked(self, logits_NV: torch.Tensor) -> torch.Tensor:
        if self._num_ids == logits_NV.shape[1]:
            return logits_NV
        padding_V = torch.arange(logits_NV.shape[1], device=logits_NV.device) >= self._num_ids
        return logits_NV.masked_fill(padding_V, -torch.inf)


@torch.no_grad()
def _entropies(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return the entropies (N,) of distributions whose vocabulary is spread over ranks. Collective
    among them."""
    group = parallel_state.get_tensor_model_parallel_group()
    entropies = []
    for block in torch.split(logits_NV, ENTROPY_ROWS):
        top = block.amax(-1, keepdim=True)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        weights = (block - top).exp()
        total = weights.sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        entropy = torch.special.entr(weights / total).sum(-1)
        dist.all_reduce(entropy, group=group)
        entropies.append(entropy)
    return torch.cat(entropies)


def _expert_settings(experts: Experts | None, layout: Layout) -> dict[str, Any]:
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num,
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.is_normalized,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
    }


def transformer_config(
    sizes: Sizes, layout: Layout, epsilon: float, dtype: torch.dtype
) -> TransformerConfig:
    """Return Megatron's config of a model. Args: epsilon: epsilon of the norms."""
    return TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.groups(layout.tp),
        kv_channels=sizes.head,
        normalization="RMSNorm",
        layernorm_epsilon=epsilon,
        qk_layernorm=sizes.has_qk_norm,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=sizes.has_qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        # Weights come from elsewhere, so initialization must neither draw nor write anything.
        use_cpu_initialization=True,
        perform_initialization=False,
        # Losses are sums, so gradients are not divided by the number of passes.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        deallocate_pipeline_outputs=False,
        # These fusions need Transformer Engine or Apex.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_expert_settings(sizes.experts, layout),
    )


def _layers(sizes: Sizes, num_layers: int) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(
        num_experts=sizes.experts.num if sizes.experts else None,
        qk_layernorm=sizes.has_qk_norm,
        normalization="RMSNorm",
    )
    attention = layer.submodules.self_attention
    attention.module = Attention
    attention.submodules.core_attention = CoreAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if sizes.has_qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=Norm)
