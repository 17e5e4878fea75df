"""Checks of adapter versions that a deployment reads with instead of its own adapter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import Adapter
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.worker.backends.base import AdapterVersion
from phaseloom.worker.backends.lora.adapters import layer_and_part
from phaseloom.worker.backends.lora.targets import is_target
from phaseloom.worker.backends.model import TORCH_DTYPES


def shapes_of(own_slots: Sequence[TensorSlot], adapter: Adapter) -> dict[str, list[int]]:
    """Return the shapes of an adapter's tensors on a deployment's base, by their names in files.

    Args: own_slots: the tensors of a version of the deployment's own adapter.
    """
    own_rank = _rank_of(own_slots)
    return {
        slot.name: _of_rank(slot, adapter.rank, own_rank)
        for slot in own_slots
        if is_target(layer_and_part(slot.name)[0], adapter.targets)
    }


def check_version(version: AdapterVersion, own_slots: Sequence[TensorSlot]) -> None:
    """Check that a deployment can read with a version instead of its own adapter.

    Args: own_slots: the tensors of a version of the deployment's own adapter.
    Raises: CallerError: states what differs.
    """
    own_rank, by_name = _rank_of(own_slots), {slot.name: slot for slot in own_slots}
    if version.adapter.rank > own_rank:
        raise refused(
            f"the adapter has rank {version.adapter.rank}, but this deployment has room for rank "
            f"{own_rank} only",
            "declare the deployment with the highest rank of all adapters that it must use",
        )
    for slot in version.slots:
        own_slot = by_name.get(slot.name)
        if own_slot is None:
            raise refused(
                f"the adapter changes layer {layer_and_part(slot.name)[0]!r}, which is not a "
                "target of this deployment's own adapter",
                "declare the deployment with the targets of all adapters that it must use",
            )
        ranks = (version.adapter.rank, own_rank)
        if (slot.dtype, slot.shape) != (own_slot.dtype, _of_rank(own_slot, *ranks)):
            raise refused(
                f"the adapter belongs to another base: expected {slot.name} as "
                f"{own_slot.dtype}{_of_rank(own_slot, *ranks)}, got {slot.dtype}{slot.shape}",
                "use weights of an adapter on this deployment's base",
            )


def _rank_of(own_slots: Sequence[TensorSlot]) -> int:
    return max(slot.shape[0] for slot in own_slots if ".lora_A." in slot.name)


def _of_rank(own_slot: TensorSlot, rank: int, own_rank: int) -> list[int]:
    axis = 0 if layer_and_part(own_slot.name)[1] == "lora_A" else 1
    assert own_slot.shape[axis] == own_rank
    return [rank if i == axis else size for i, size in enumerate(own_slot.shape)]


def tensors_of(version: AdapterVersion) -> dict[str, torch.Tensor]:
    """Return views of a version's tensors in host memory."""
    memory = torch.frombuffer(version.memory, dtype=torch.uint8)
    return {
        slot.name: memory[slot.offset : slot.offset + slot.num_bytes]
        .view(TORCH_DTYPES[slot.dtype])
        .view(slot.shape)
        for slot in version.slots
    }


def refused(message: str, remedy: str) -> CallerError:
    return CallerError(message, code=Code.FAILED_PRECONDITION, field="args.weights", remedy=remedy)
