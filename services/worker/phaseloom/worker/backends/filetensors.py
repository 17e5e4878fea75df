"""The tensors of model files, and the runs of parameters that they are.

`transformers` keeps some tensors in another form in memory than in files: all experts of a layer in
one parameter, or a head under another name. States, versions and checkpoints use the files' names
only. Each tensor of files is one contiguous run of a parameter, so it needs no copy. `modelnames`
finds the runs. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.worker.state.heap import ALIGNMENT_BYTES

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FileTensor:
    """A tensor of files."""

    name: str
    shape: list[int]
    first: int = 0
    """Index of its first element among the elements of its parameter."""


Parts = Mapping[str, Sequence[FileTensor]]
"""The tensors of files, in their order in memory, of each parameter that files name otherwise or
split."""


class ParameterShapes(dict[str, list[int]]):
    """The shapes of parameters, by name, and how files hold them."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], parts: Parts | None = None) -> None:
        super().__init__({name: [*shape] for name, shape in shapes.items()})
        self.parts: Parts = parts or {}

    @property
    def files(self) -> dict[str, list[int]]:
        """The shapes of the tensors of files, by name."""
        return {part.name: part.shape for name in self for part in self.parts_of(name)}

    @property
    def splits_parameters(self) -> bool:
        return any(len(parts) > 1 for parts in self.parts.values())

    def parts_of(self, name: str) -> Sequence[FileTensor]:
        return self.parts.get(name) or [FileTensor(name, self[name])]

    def split(self, name: str, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return views of a parameter as the tensors of files, with their names."""
        flat = parameter.detach().reshape(-1)
        return [
            (part.name, flat[part.first : part.first + prod(part.shape)].view(part.shape))
            for part in self.parts_of(name)
        ]


def file_slots(slots: Mapping[str, TensorSlot], parts: Parts) -> list[TensorSlot]:
    """Return the slots of the files' tensors, sorted by name, from the slots of parameters.

    Raises: CallerError: FAILED_PRECONDITION: a tensor's offset is not a multiple of 64 bytes.
    """
    if parts.keys().isdisjoint(slots):
        return [*slots.values()]
    files: list[TensorSlot] = []
    for name, slot in slots.items():
        files += _part_slots(name, slot, parts[name]) if name in parts else [slot]
    return sorted(files, key=lambda slot: slot.name)


def _part_slots(name: str, slot: TensorSlot, parts: Sequence[FileTensor]) -> list[TensorSlot]:
    """Return the slots of the tensors that a rank's slice of a parameter holds elements of.

    A slice consists of whole rows of its parameter, hence of whole rows of each tensor.
    """
    suffix, num_elements = slot.name.removeprefix(name), prod(slot.shape)
    if not num_elements:
        return []
    item_bytes = slot.num_bytes // num_elements
    first = slot.start[0] * prod(slot.shape[1:]) if slot.start else 0
    slots = []
    for part in parts:
        begin = max(first, part.first)
        end = min(first + num_elements, part.first + prod(part.shape))
        if begin >= end:
            continue
        offset = slot.offset + (begin - first) * item_bytes
        if offset % ALIGNMENT_BYTES:
            raise CallerError(
                f"the offset of {part.name} must be a multiple of {ALIGNMENT_BYTES} bytes, got "
                f"{offset}",
                code=Code.FAILED_PRECONDITION,
                field="model.config",
                remedy="use sizes, such as moe_intermediate_size, that are multiples of 32",
            )
        num_bytes = (end - begin) * item_bytes
        shape, start = part.shape, (begin - part.first) // prod(part.shape[1:])
        rows = (end - begin) // prod(part.shape[1:])
        place = TensorSlot(part.name + suffix, slot.role, slot.dtype, shape, offset, num_bytes)
        if rows < shape[0]:
            place = TensorSlot(
                part.name + suffix,
                slot.role,
                slot.dtype,
                [rows, *shape[1:]],
                offset,
                num_bytes,
                global_shape=shape,
                start=[start, *([0] * len(shape[1:]))],
            )
        slots.append(place)
    return slots
