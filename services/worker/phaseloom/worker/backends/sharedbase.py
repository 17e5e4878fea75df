"""The weights of a base, which all ranks of a node that run it have in common.

They lie in a file of the node's runtime directory, laid out as a heap has them, in the dtype that
the ranks compute with. Its name is a digest of the registered files and of that dtype. The first
rank writes it, all map it read-only, and nothing of it is in a heap: a switch moves none of it.

A GPU's ranks each have a copy in their scratch memory, which counts as theirs and is filled again
from the node's whenever they come back.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from warnings import catch_warnings, simplefilter

import msgspec
import torch
from blake3 import blake3
from msgspec.structs import replace
from torch import nn

from phaseloom.common.contract.errors import InternalError, ResourceError
from phaseloom.common.contract.specs import DeviceKind, ModelSpec
from phaseloom.worker.backends import pretrained
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.layout import Layout, plan
from phaseloom.worker.backends.model import TORCH_DTYPES, parameter_shapes, weights_dtype
from phaseloom.worker.state.devicememory import DeviceMemory, scratch_tensor

DIRECTORY = "bases"
"""Where bases are in a node's runtime directory."""


class SharedBase:
    """The weights of a model under an adapter."""

    def __init__(
        self, model: nn.Module, spec: ModelSpec, ranks: RankGroup, heap: DeviceMemory
    ) -> None:
        """Have the model use the node's weights, which are made if they are not there.

        Raises: as `pretrained.fill_memory`; ResourceError: no room for them.
        """
        layout = _layout(spec)
        self._here = _mapped(spec, layout, ranks)
        self._there = self._here
        if ranks.device_kind is DeviceKind.CUDA:
            self._there = scratch_tensor(heap)[: layout.heap_bytes]
        dtype = TORCH_DTYPES[layout.weights.dtype]
        parameters = dict(model.named_parameters())
        for name, slot in layout.weights.slots.items():
            weight = self._there[slot.offset : slot.offset + slot.num_bytes]
            parameters[name].data = weight.view(dtype).view(slot.shape)
        self.refill()

    def refill(self) -> None:
        """Copy the weights to the device again, where it has a copy of its own."""
        if self._there is not self._here:
            self._there.copy_(self._here)


def base_scratch_bytes(spec: ModelSpec, ranks: RankGroup) -> int:
    """Bytes of scratch memory that a rank needs for a base; 0 where there is no adapter."""
    if spec.adapter is None or ranks.device_kind is not DeviceKind.CUDA:
        return 0
    return _layout(spec).heap_bytes


def _layout(spec: ModelSpec) -> Layout:
    base = replace(spec, adapter=None)
    return plan(parameter_shapes(base), trainable=False, dtype=weights_dtype(base))


def _mapped(spec: ModelSpec, layout: Layout, ranks: RankGroup) -> torch.Tensor:
    """The node's copy of a base, uint8, read-only; it is made if it is not there."""
    directory = Path(ranks.node_directory, DIRECTORY)
    directory.mkdir(exist_ok=True)
    path = directory / _digest(spec, layout)
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the kernel if the rank dies
        if not path.exists():
            _write(path, spec, layout)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), layout.heap_bytes, prot=mmap.PROT_READ)
    with catch_warnings():
        simplefilter("ignore", UserWarning)  # that it must not be written to
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _digest(spec: ModelSpec, layout: Layout) -> str:
    if spec.pinned is None:
        raise InternalError("an adapter's base is no registered model")
    files = sorted((file.name, file.blake3) for file in spec.pinned.files)
    return blake3(msgspec.json.encode((files, layout.weights.dtype))).hexdigest()


def _write(path: Path, spec: ModelSpec, layout: Layout) -> None:
    """Write a base under its name, whole or not at all."""
    assert spec.pinned is not None
    draft = path.with_suffix(".draft")
    try:
        with draft.open("wb+") as file:
            os.posix_fallocate(file.fileno(), 0, layout.heap_bytes)
            with mmap.mmap(file.fileno(), layout.heap_bytes) as mapping:
                pretrained.fill_memory(
                    torch.frombuffer(mapping, dtype=torch.uint8),
                    layout.slots,
                    spec.pinned,
                    ties_embeddings=bool(spec.config.get("tie_word_embeddings")),
                )
        draft.chmod(0o400)
        draft.rename(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ResourceError(
            f"the base {spec.registered!r} takes {layout.heap_bytes} bytes of {path.parent}: "
            f"{error.strerror}",
            remedy="free space there, or give the worker another runtime_directory",
        ) from error
