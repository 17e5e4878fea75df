"""Weights of a base model, shared by all ranks of a node whose adapters use that base.

They are stored in a file in the node's runtime directory, laid out like a heap, in the dtype of
the computation. The file's name is a digest of the registered files and the layout. The first rank
writes it and all ranks map it read-only. Nothing of it is in a heap, so a switch moves none of it.

On a GPU, each rank has a copy in its scratch memory. The copy counts towards the rank's memory and
is refilled from the node's file each time the rank is switched in.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from warnings import catch_warnings, simplefilter

import msgspec
import torch
from blake3 import blake3
from msgspec.structs import replace
from torch import nn

from phaseloom.common.contract.errors import InternalError, ResourceError
from phaseloom.common.contract.specs import DeviceKind, ModelSpec
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.worker.backends import pretrained
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.layout import Layout, plan
from phaseloom.worker.backends.model import TORCH_DTYPES, parameter_shapes, weights_dtype
from phaseloom.worker.state.devicememory import DeviceMemory, scratch_tensor

DIRECTORY = "bases"
"""Name of the directory of bases in a node's runtime directory."""


class BaseMemory:
    """The weights of a base, laid out in given slots."""

    def __init__(
        self,
        spec: ModelSpec,
        slots: Sequence[TensorSlot],
        num_bytes: int,
        ranks: RankGroup,
        heap: DeviceMemory,
        *,
        scratch_start: int = 0,
    ) -> None:
        """Map the node's copy of the weights. Create it first if it does not exist.

        Args: scratch_start: offset of the device's copy in the scratch memory.
        Raises: as `pretrained.fill_memory`.
                ResourceError: the node has no room for the weights.
        """
        self._here = _mapped(spec, slots, num_bytes, ranks)
        self.tensor = self._here
        """The weights, as uint8. Read-only unless it is a device's copy."""
        if ranks.device_kind is DeviceKind.CUDA:
            self.tensor = scratch_tensor(heap)[scratch_start : scratch_start + num_bytes]
        self.refill()

    def refill(self) -> None:
        """Copy the weights to the device again, if it has its own copy."""
        if self.tensor is not self._here:
            self.tensor.copy_(self._here)


class SharedBase:
    """A base's weights, used in place by a `transformers` model with an adapter."""

    def __init__(
        self, model: nn.Module, spec: ModelSpec, ranks: RankGroup, heap: DeviceMemory
    ) -> None:
        """Point the model's base parameters at the node's weights. Raises: as `BaseMemory`."""
        layout = _layout(spec)
        memory = BaseMemory(spec, layout.slots, layout.heap_bytes, ranks, heap)
        dtype = TORCH_DTYPES[layout.weights.dtype]
        parameters = dict(model.named_parameters())
        for name, slot in layout.weights.slots.items():
            weight = memory.tensor[slot.offset : slot.offset + slot.num_bytes]
            parameters[name].data = weight.view(dtype).view(slot.shape)
        self.refill = memory.refill


def base_scratch_bytes(spec: ModelSpec, ranks: RankGroup) -> int:
    """Return the scratch bytes that a rank needs for a base; 0 without an adapter."""
    if spec.adapter is None or ranks.device_kind is not DeviceKind.CUDA:
        return 0
    return _layout(spec).heap_bytes


def _layout(spec: ModelSpec) -> Layout:
    base = replace(spec, adapter=None)
    return plan(parameter_shapes(base), trainable=False, dtype=weights_dtype(base))


def _mapped(
    spec: ModelSpec, slots: Sequence[TensorSlot], num_bytes: int, ranks: RankGroup
) -> torch.Tensor:
    """Map the node's copy of a base, as read-only uint8. Create it if it does not exist."""
    directory = Path(ranks.node_directory, DIRECTORY)
    directory.mkdir(exist_ok=True)
    path = directory / _digest(spec, slots)
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it if the rank dies
        if not path.exists():
            _write(path, spec, slots, num_bytes)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), num_bytes, prot=mmap.PROT_READ)
    with catch_warnings():
        simplefilter("ignore", UserWarning)  # torch warns that the memory is read-only
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _digest(spec: ModelSpec, slots: Sequence[TensorSlot]) -> str:
    if spec.pinned is None:
        raise InternalError("the base of an adapter must be a registered model")
    files = sorted((file.name, file.blake3) for file in spec.pinned.files)
    return blake3(msgspec.json.encode((files, slots))).hexdigest()


def _write(path: Path, spec: ModelSpec, slots: Sequence[TensorSlot], num_bytes: int) -> None:
    """Write a base under its final name atomically."""
    assert spec.pinned is not None
    draft = path.with_suffix(".draft")
    try:
        with draft.open("wb+") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            with mmap.mmap(file.fileno(), num_bytes) as mapping:
                pretrained.fill_memory(
                    torch.frombuffer(mapping, dtype=torch.uint8),
                    slots,
                    spec,
                )
        # Nothing may write to weights that other ranks have mapped.
        draft.chmod(0o400)
        draft.rename(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ResourceError(
            f"the weights of base {spec.registered!r} ({num_bytes} bytes) cannot be written to "
            f"{path.parent}: {error.strerror}",
            remedy="free space there, or set the worker's runtime_directory to another disk",
        ) from error
