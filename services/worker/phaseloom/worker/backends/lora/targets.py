"""Which layers of a model an adapter's targets name. Pure."""

from __future__ import annotations

from collections.abc import Collection

from phaseloom.common.contract.specs import (
    ALL_ATTENTION,
    ALL_LINEAR,
    ALL_MLP,
    TARGET_GROUPS,
    UNEMBED,
)


def is_target(layer: str, targets: Collection[str]) -> bool:
    """Whether targets name a linear layer. Args: layer: its name in the model."""
    ends = (layer == target or layer.endswith(f".{target}") for target in targets)
    return not _groups(layer).isdisjoint(targets) or any(ends)


def names_group(target: str) -> bool:
    return target in TARGET_GROUPS


def _groups(layer: str) -> set[str]:
    parts = layer.split(".")
    if not any(map(str.isdecimal, parts)):  # in no decoder layer
        return {UNEMBED}
    is_attention = any("attn" in part or "attention" in part for part in parts)
    return {ALL_LINEAR, ALL_ATTENTION if is_attention else ALL_MLP}
