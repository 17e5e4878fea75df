"""Reads a rank's weights from the safetensors files of a registered model.

A rank reads only the rows that it holds, a few megabytes at a time, straight into its heap. No
process ever has a copy of the whole model. If the file system allows it, reads bypass the page
cache (`O_DIRECT`), so a large model does not push other data out of memory. The node's agent has
verified the files.

torch converts dtypes. bfloat16 and float16 become float32 exactly. float32 is rounded if the rank
holds bfloat16; values that were bfloat16 before come back exactly. The float32 masters of bfloat16
weights are read from the files too, so they lose nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.specs import ModelDirectory, ModelSpec
from phaseloom.common.contract.state_layout import Role, StoredTensor, TensorSlot
from phaseloom.common.tensors.uncachedfile import UncachedFile
from phaseloom.worker.backends.layout import FLOAT32_BYTES, MASTER
from phaseloom.worker.backends.model import model_names
from phaseloom.worker.backends.modelnames import ModelNames
from phaseloom.worker.state.devicememory import DeviceMemory, as_tensor

_PIECE_BYTES = 16 * 2**20
_SUFFIX = ".safetensors"
_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The dtypes that can be read, by their names in safetensors."""


def fill(heap: DeviceMemory, slots: Iterable[TensorSlot], model: ModelSpec) -> None:
    """Fill the weights of a heap and their masters. Gradients and moments stay unchanged.

    Args and Raises: as `fill_memory`.
    """
    fill_memory(as_tensor(heap), slots, model)


def fill_memory(memory: torch.Tensor, slots: Iterable[TensorSlot], model: ModelSpec) -> None:
    """Fill the weights in this memory and their masters.

    Args: memory: uint8.
          slots: the tensors in it.
          model: the registered model. An adapter is ignored.
    Raises: CallerError: the files belong to another model: a tensor is missing, is not a parameter,
             or has another shape or an unreadable dtype.
            ResourceError: DATA_LOSS: a file cannot be read, or changed while it was read.
    """
    directory, names = model.pinned, model_names(model)
    assert directory is not None
    before = _identities(directory)
    all_slots = [*slots]
    weights = [slot for slot in all_slots if slot.role is Role.WEIGHT]
    masters = {
        slot.name.removesuffix(MASTER): slot for slot in all_slots if slot.name.endswith(MASTER)
    }
    with ExitStack() as stack:
        matched = _matched(names, _open(directory, stack))
        try:
            for slot in weights:
                source, *copies = matched[slot.name]
                _read(slot, source, memory)
                if slot.name in masters:
                    _read(masters[slot.name], source, memory)
                for copy in copies:
                    _check_equal(slot, source, copy)
            if _identities(directory) != before:
                raise OSError("it changed while it was read")
        except OSError as error:
            raise _unreadable(Path(directory.path), error) from error


@dataclass(frozen=True)
class _Source:
    """One tensor of a file."""

    file: UncachedFile
    offset: int
    """Offset of its bytes in the file."""
    shape: list[int]
    dtype: str
    """The dtype's name in safetensors."""

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Read a slice of the tensor. Reads whole rows, even if only some columns are needed."""
        dtype = _DTYPES[self.dtype]
        if not index:
            return torch.frombuffer(self.file.read(self.offset, dtype.itemsize), dtype=dtype).view(
                ()
            )
        rows, row_shape = index[0], self.shape[1:]
        row_bytes = prod(row_shape) * dtype.itemsize
        content = self.file.read(
            self.offset + rows.start * row_bytes, (rows.stop - rows.start) * row_bytes
        )
        return torch.frombuffer(content, dtype=dtype).view(-1, *row_shape)[:, *index[1:]]

    def part(self, first: int, shape: list[int]) -> _Source:
        """Return a run of the tensor as a tensor. Args: first: index of the run's first element."""
        item_bytes = _DTYPES[self.dtype].itemsize
        return replace(self, offset=self.offset + first * item_bytes, shape=shape)


def _open(directory: ModelDirectory, stack: ExitStack) -> dict[str, _Source]:
    """Return the tensors in the model's files, by name. Does not read their bytes yet."""
    sources: dict[str, _Source] = {}
    for file in directory.files:
        if not file.name.endswith(_SUFFIX):
            continue
        path = Path(directory.path) / file.name
        try:
            sources |= _tensors_in(path, stack.enter_context(UncachedFile(path)))
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error) from error
    return sources


def _identities(directory: ModelDirectory) -> list[tuple[int, ...]]:
    """What differs once a file with weights is changed or replaced."""
    paths = [Path(directory.path) / file.name for file in directory.files]
    try:
        stats = [path.stat() for path in paths if path.suffix == _SUFFIX]
    except OSError as error:
        raise _unreadable(Path(directory.path), error) from error
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats]


def _unreadable(path: Path, error: Exception) -> ResourceError:
    return ResourceError(
        f"file {path} of the registered model cannot be read: {error}",
        code=Code.DATA_LOSS,
        field="model.registered",
        remedy="restore the file, or register the directory under another name",
    )


def _tensors_in(path: Path, file: UncachedFile) -> dict[str, _Source]:
    with safe_open(path, framework="pt") as opened:  # raises if the file is malformed
        names = [*opened.keys()]
        slices = {name: opened.get_slice(name) for name in names}
    start = 8 + int.from_bytes(file.read(0, 8), "little")
    header = msgspec.json.decode(file.read(8, start - 8))
    return {
        name: _Source(
            file, start + header[name]["data_offsets"][0], [*tensor.get_shape()], tensor.get_dtype()
        )
        for name, tensor in slices.items()
    }


def _matched(names: ModelNames, sources: Mapping[str, _Source]) -> dict[str, list[_Source]]:
    """Return where each tensor is stored in the files. Tied tensors may be stored twice.

    Raises: CallerError: a tensor is missing, or belongs to no parameter.
    """
    try:
        places = names.locate(sources)
    except ValueError as error:
        raise _another_model(str(error)) from None
    matched: dict[str, list[_Source]] = {}
    for name, shape in names.shapes.files.items():
        for place in places[name]:
            source = sources[place.name]
            _check_stored(place, source)
            matched.setdefault(name, []).append(source.part(place.first, shape))
    return matched


def _check_stored(place: StoredTensor, source: _Source) -> None:
    if source.shape != place.shape:
        raise _another_model(f"expected {place.name} with shape {place.shape}, got {source.shape}")
    if source.dtype not in _DTYPES:
        raise _another_model(
            f"{place.name} has the unsupported dtype {source.dtype}",
            remedy=f"convert it to one of {', '.join(_DTYPES)}",
        )


def _check_equal(slot: TensorSlot, source: _Source, copy: _Source) -> None:
    """Check that the files have the same values twice for tied tensors. `transformers` would not
    tie others, whatever the config says."""
    for piece in _pieces(slot, FLOAT32_BYTES):
        index = _index(slot, piece)
        # Both files may be one, whose next read overwrites what the last one returned.
        if not torch.equal(source.read(index).clone(), copy.read(index)):
            raise _another_model(
                f"the config ties two tensors, but the files have different values for {slot.name}",
                remedy="set tie_word_embeddings to false in config.json, and register it again",
            )


def _read(slot: TensorSlot, source: _Source, memory: torch.Tensor) -> None:
    """Read a rank's slice of a tensor into its slot, piece by piece."""
    dtype: torch.dtype = getattr(torch, slot.dtype)
    view = memory[slot.offset : slot.offset + slot.num_bytes].view(dtype).view(slot.shape)
    for piece in _pieces(slot, dtype.itemsize):
        view[piece].copy_(source.read(_index(slot, piece)))


def _index(slot: TensorSlot, piece: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return where the whole tensor has a piece of a rank's slice."""
    start = slot.start or [0] * len(piece)
    return tuple(
        slice(first + dimension.start, first + dimension.stop)
        for first, dimension in zip(start, piece, strict=True)
    )


def _pieces(slot: TensorSlot, item_bytes: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cover a slot. Reading one reads whole rows of about `_PIECE_BYTES` in
    total."""
    if not slot.shape:
        yield ()
        return
    if not prod(slot.shape):
        return
    row_bytes = prod((slot.global_shape or slot.shape)[1:]) * item_bytes
    step = max(1, _PIECE_BYTES // max(1, row_bytes))
    whole_dimensions = tuple(slice(0, size) for size in slot.shape[1:])
    for row in range(0, slot.shape[0], step):
        yield slice(row, min(row + step, slot.shape[0])), *whole_dimensions


def _another_model(
    problem: str,
    remedy: str = "register a directory whose config.json and safetensors belong together",
) -> CallerError:
    return CallerError(
        f"the registered model does not match its config: {problem}",
        field="model.registered",
        remedy=remedy,
    )
