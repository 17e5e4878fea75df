"""Expert weights: fused into one tensor per layer in memory, one tensor per expert and projection
in files.

A fused tensor holds its experts one after another, and each expert its projections, so each tensor
of a file is one contiguous run of it. Ranks split a fused tensor between experts, so each rank
holds whole tensors of files. States, versions and checkpoints use the files' names only. Pure; no
torch.

Shapes: E experts, I intermediate, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.worker.state.heap import ALIGNMENT_BYTES

if TYPE_CHECKING:
    import torch

_FUSED = {
    ".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".mlp.experts.down_proj": ("down_proj",),
}
"""Suffix of a fused tensor's name → an expert's projections, in their order along dim 1."""


def file_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the shapes of the files' tensors, by name, from those of a model's parameters."""
    return {part: size for name, shape in shapes.items() for part, size in _parts(name, shape)}


def file_tensors(name: str, fused: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return views of a parameter as the tensors of files, with their names."""
    parts = _parts(name, fused.shape)
    if not is_fused(name):
        return [(name, fused)]
    views = fused.detach().reshape(len(parts), *parts[0][1])
    return [(part, view) for (part, _), view in zip(parts, views, strict=True)]


def is_fused(name: str) -> bool:
    return any(name.endswith(end) for end in _FUSED)


def file_slots(slots: Mapping[str, TensorSlot]) -> list[TensorSlot]:
    """Return the slots of the files' tensors, sorted by name, from the slots of parameters.

    Raises: CallerError: FAILED_PRECONDITION: a tensor's offset is not a multiple of 64 bytes.
    """
    if not any(map(is_fused, slots)):
        return [*slots.values()]
    return sorted(
        (part for name, slot in slots.items() for part in _part_slots(name, slot)),
        key=lambda slot: slot.name,
    )


def _parts(name: str, shape: Sequence[int], first: int = 0) -> list[tuple[str, Sequence[int]]]:
    """Return the files' tensors that a parameter consists of, in their order in memory.

    Args: shape: the parameter's shape, or that of a rank's slice that starts at expert `first`.
    """
    end = next((end for end in _FUSED if name.endswith(end)), None)
    if end is None:
        return [(name, shape)]
    prefix = name[: -len(end)] + ".mlp.experts"
    num_experts, num_rows, num_columns = shape
    projections = _FUSED[end]
    size = [num_rows // len(projections), num_columns]
    return [
        (f"{prefix}.{expert}.{projection}.weight", size)
        for expert in range(first, first + num_experts)
        for projection in projections
    ]


def _part_slots(name: str, slot: TensorSlot) -> list[TensorSlot]:
    if not is_fused(name):
        return [slot]
    parts = _parts(name, slot.shape, slot.start[0] if slot.start else 0)
    suffix, num_bytes = slot.name.removeprefix(name), slot.num_bytes // max(1, len(parts))
    if num_bytes % ALIGNMENT_BYTES:
        raise CallerError(
            f"the bytes of an expert's projection must be a multiple of {ALIGNMENT_BYTES}, got "
            f"{num_bytes}",
            code=Code.FAILED_PRECONDITION,
            field="model.config.moe_intermediate_size",
            remedy="use a multiple of 32",
        )
    slots = []
    for number, (part, shape) in enumerate(parts):
        assert prod(shape) * len(parts) == prod(slot.shape)
        offset = slot.offset + number * num_bytes
        slots.append(TensorSlot(part + suffix, slot.role, slot.dtype, [*shape], offset, num_bytes))
    return slots
