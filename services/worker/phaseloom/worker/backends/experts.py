"""Expert weights: one fused tensor a layer in memory, a tensor an expert and projection in files.

A fused tensor has its experts one behind the other, and an expert its projections, so each tensor
of a file is a run of the fused one. Ranks share a fused tensor by its experts, so each has whole
tensors of files. States, versions and checkpoints know the files' names only. Pure; no torch.

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
"""The end of a fused tensor's name → the projections of an expert, along its dim 1."""


def file_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """The shapes of the tensors of files, by name, from those of a model's parameters."""
    return {part: size for name, shape in shapes.items() for part, size in _parts(name, shape)}


def file_tensors(name: str, fused: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors of files that a parameter is made of, by name: views of it."""
    parts = _parts(name, fused.shape)
    if not is_fused(name):
        return [(name, fused)]
    views = fused.detach().reshape(len(parts), *parts[0][1])
    return [(part, view) for (part, _), view in zip(parts, views, strict=True)]


def is_fused(name: str) -> bool:
    return any(name.endswith(end) for end in _FUSED)


def file_slots(slots: Mapping[str, TensorSlot]) -> list[TensorSlot]:
    """The slots of files' tensors, sorted by name, from slots of parameters, by name.

    Raises: CallerError: FAILED_PRECONDITION: a tensor would not lie at a multiple of 64 bytes.
    """
    if not any(map(is_fused, slots)):
        return [*slots.values()]
    return sorted(
        (part for name, slot in slots.items() for part in _part_slots(name, slot)),
        key=lambda slot: slot.name,
    )


def _parts(name: str, shape: Sequence[int], first: int = 0) -> list[tuple[str, Sequence[int]]]:
    """The tensors of files that a parameter is made of, in the order in which they lie in it.

    Args: shape: the shape of the parameter, or of a rank's slice of it, whose first expert is
          `first`.
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
            f"a projection of an expert has {num_bytes} bytes, no multiple of {ALIGNMENT_BYTES}",
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
