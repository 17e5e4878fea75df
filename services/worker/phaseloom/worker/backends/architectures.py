"""Similarities and differences of the supported model architectures.

A body computes hidden states; a head turns them into logits, which the config may scale and cap.
Each layer attends to all earlier positions, or to a sliding window of them. Architectures that
differ in any other way (recurrent state, chunked attention, a cache format of their own) are not in
`MODEL_TYPES`. Tests compare each supported architecture with `transformers`.

Shapes: B rows, T query columns, S key columns, N requested positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.modelconfig import check_ropes, context_tokens
from phaseloom.worker.backends.capabilities import MODEL_TYPES

FULL, SLIDING = "full_attention", "sliding_attention"

Masks = torch.Tensor | dict[str, torch.Tensor]
"""An additive mask (B, 1, T, S) for all layers, or one for each layer type."""


def check_model_type(model_type: object) -> None:
    """Check that our backends support this model type. Raises: CallerError: they do not."""
    if model_type not in MODEL_TYPES:
        raise CallerError(
            f"model type {model_type!r} is not supported",
            field="model.config.model_type",
            remedy=f"use one of {', '.join(MODEL_TYPES)}",
        )


def check_attention(config: PreTrainedConfig) -> None:
    """Check that our backends support the attention of every layer. Raises: CallerError: they do
    not."""
    unsupported = sorted({*_layer_types(config)} - {FULL, SLIDING})
    if unsupported:
        raise CallerError(
            f"layer types {', '.join(unsupported)} are not supported",
            field="model.config.layer_types",
            remedy=f"use {FULL} or {SLIDING} in every layer",
        )
    check_ropes(config.to_dict(), "model.config")


def has_dynamic_rope(config: PreTrainedConfig) -> bool:
    """Return whether rotary frequencies depend on the length of a sequence that exceeds the
    original context."""
    return "dynamic" in _rope_types(getattr(config, "rope_parameters", None) or {})


def separate_lengths(model: PreTrainedModel) -> None:
    """Let the length of a row alone decide about its dynamic rotary frequencies.

    `transformers` would use those of the longest row in a pass for all of them, and keep them for
    later passes.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.forward = partial(_rowwise_rotary, module)


def _rowwise_rotary(
    module: Any, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    original = module.original_max_seq_len
    last_B = position_ids.amax(dim=-1).clamp(min=original - 1).broadcast_to(x.shape[:1])
    position_ids = position_ids.broadcast_to(len(last_B), position_ids.shape[-1])
    groups = [(last_B == last).nonzero().flatten() for last in sorted({*last_B.tolist()})]
    parts = []
    for rows in groups:
        # start from the original frequencies, whatever an earlier pass left behind
        module.max_seq_len_cached = original
        module.inv_freq = module.original_inv_freq.to(x.device)
        parts.append(type(module).forward(module, x[rows], position_ids[rows]))
    order = torch.cat(groups).argsort()
    cos, sin = (torch.cat(values)[order] for values in zip(*parts, strict=True))
    return cos, sin


def attention_kernel(config: PreTrainedConfig) -> str:
    """Return the attention implementation for `transformers`.

    `sdpa` is about 10 % faster than `eager` on a CPU thread and just as reproducible, but it cannot
    cap attention logits.
    """
    return "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"


def has_windows(config: PreTrainedConfig) -> bool:
    """Return whether some layer attends to fewer positions than the model has."""
    types = _layer_types(config)
    if types and SLIDING not in types:
        return False
    window = getattr(config, "sliding_window", None)
    return window is not None and int(window) < (context_tokens(config.to_dict()) or 0)


def attention_masks(
    config: PreTrainedConfig,
    visible_BTS: torch.Tensor,
    distance_BTS: torch.Tensor,
    dtype: torch.dtype,
) -> Masks:
    """Build a body's attention masks from the positions that each query may see.

    Args: visible_BTS: True where a query sees a key, causality included.
          distance_BTS: the query's position minus the key's.
    """
    types = {*_layer_types(config)}
    window = getattr(config, "sliding_window", None)
    full = _additive(visible_BTS, dtype)
    if window is None or types == {FULL}:
        return {FULL: full} if types else full
    sliding = _additive(visible_BTS & (distance_BTS < window), dtype)
    return {FULL: full, SLIDING: sliding} if types else sliding


def logits(model: PreTrainedModel, hidden_NH: torch.Tensor) -> torch.Tensor:
    """Compute the logits (N, V) of a body's hidden states (N, H)."""
    untyped_model: Any = model
    logits_NV: torch.Tensor = untyped_model.get_output_embeddings()(hidden_NH)
    config = model.config
    divisor, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    cap = getattr(config, "final_logit_softcapping", None)
    if divisor is not None:
        logits_NV = logits_NV / divisor
    if factor is not None:
        logits_NV = logits_NV * factor
    if cap is not None:
        logits_NV = torch.tanh(logits_NV / cap) * cap
    return logits_NV


def _layer_types(config: PreTrainedConfig) -> list[str]:
    return getattr(config, "layer_types", None) or []


def _rope_types(parameters: dict[str, Any]) -> set[object]:
    """Return the type of a rope, or of each layer type's rope if they differ."""
    nested = [rope for rope in parameters.values() if isinstance(rope, dict)]
    return {rope.get("rope_type") for rope in nested or [parameters]}


def _additive(visible_BTS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(visible_BTS.shape, dtype=dtype, device=visible_BTS.device)
    return mask.masked_fill_(~visible_BTS, -torch.inf)[:, None]
