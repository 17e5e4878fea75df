"""Facts that several services derive from a model's config. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phaseloom.common.contract.errors import CallerError

_EXTENDING = ("linear", "dynamic", "yarn")
"""Types of rotary positions whose factor extends the context. With `llama3` and `longrope`,
`max_position_embeddings` already is the extended context."""
_ROPE_TYPES = ("default", *_EXTENDING, "llama3")


def context_tokens(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence that a model supports, in tokens.

    It is `max_position_embeddings` (`n_positions` in GPT-2) or, if rotary positions are extended by
    a factor, at least factor × `original_max_position_embeddings`. If the config does not say what
    the original context was, `max_position_embeddings` was.

    Args:    config: as in `config.json`, or as `to_dict()` of transformers returns it.
    Returns: None if the config does not say.
    """
    context = config.get("max_position_embeddings") or config.get("n_positions")
    if not isinstance(context, int):
        return None
    # Gemma 3 states a linear factor, but its max_position_embeddings already includes it.
    if str(config.get("model_type", "")).startswith("gemma3"):
        return context
    return max([context, *(_extended(config, context, rope) for rope in _ropes(config))])


def check_ropes(config: Mapping[str, Any], field: str) -> None:
    """Check the types of rotary positions. Args: config: as in `context_tokens`; field: its name.

    The frequencies of longrope depend on the longest of the samples that share a pass.
    Raises: CallerError: a type is not supported.
    """
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type")) or "default"
        if kind not in _ROPE_TYPES:
            name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
            raise CallerError(
                f"rope_type {kind} is not supported",
                field=f"{field}.{name}",
                remedy=f"use one of {', '.join(_ROPE_TYPES)}",
            )


def _ropes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parameters of the rotary positions, or those of each layer type if they differ."""
    ropes = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(ropes, Mapping):
        return []
    nested = [rope for rope in ropes.values() if isinstance(rope, Mapping)]
    return nested or [ropes]


def _extended(config: Mapping[str, Any], context: int, rope: Mapping[str, Any]) -> int:
    factor = rope.get("factor")
    original = config.get("original_max_position_embeddings")
    original = original or rope.get("original_max_position_embeddings") or context
    if rope.get("rope_type", rope.get("type")) not in _EXTENDING:
        return context
    if not isinstance(factor, int | float) or not isinstance(original, int):
        return context
    return int(factor * original)
