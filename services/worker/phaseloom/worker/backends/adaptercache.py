"""Versions of other adapters that a sampler generates with, beside its own on the same base.

Each lies in a place of the rank's scratch memory that is as large as the deployment's own adapter;
when all are taken, the version that was used longest ago goes. A version never changes, so what is
there under its name is right until the scratch memory itself is given back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import Adapter
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.worker.backends.adapters import Layers, Matrices, layer_and_part, rows_of
from phaseloom.worker.backends.base import AdapterVersion
from phaseloom.worker.backends.model import TORCH_DTYPES
from phaseloom.worker.state.heap import align


class AdapterCache:
    """A cache of versions of other adapters; see the module. All calls come from the device
    thread."""

    def __init__(
        self, model: nn.Module, slots: Sequence[TensorSlot], scratch: torch.Tensor
    ) -> None:
        """Start empty.

        Args: slots: the tensors of a version of the deployment's own adapter.
              scratch: memory with a place for each version to be kept, one behind the other; maybe
                  none.
        """
        self._own = {slot.name: slot for slot in slots}
        self._num_bytes = place_bytes(slots)
        self._rows = rows_of(model)
        self._device = scratch.device
        count = scratch.numel() // self._num_bytes
        self._places = [
            scratch[i * self._num_bytes : (i + 1) * self._num_bytes] for i in range(count)
        ]
        self._free = [*range(count)]
        self._kept: OrderedDict[str, tuple[int, Layers]] = OrderedDict()
        """The place and the matrices of each version, the one used longest ago first."""

    @property
    def num_places(self) -> int:
        return len(self._places)

    def shapes_of(self, adapter: Adapter) -> dict[str, list[int]]:
        """See `shapes_of`."""
        return shapes_of([*self._own.values()], adapter)

    def check(self, version: AdapterVersion) -> None:
        """Check that a version can be generated with here. Raises: CallerError: why not."""
        if not self._places:
            raise _refused(
                "this deployment keeps no adapters beside its own",
                "declare it with max_adapters, the number that it is to keep",
            )
        check_version(version, [*self._own.values()])

    def hold(self, version: AdapterVersion, others: Collection[str]) -> Layers:
        """The matrices of a version, which is copied to the device unless it is there.

        Args: others: versions that must stay, fewer than there are places.
        """
        if version.name in self._kept:
            self._kept.move_to_end(version.name)
            return self._kept[version.name][1]
        if not self._free:
            oldest = next(name for name in self._kept if name not in others)
            self._free.append(self._kept.pop(oldest)[0])
        place = self._free.pop()
        memory, start, views = self._places[place], 0, {}
        for name, tensor in tensors_of(version).items():
            num_bytes = tensor.numel() * tensor.itemsize
            view = memory[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
            views[name] = view.copy_(tensor)
            start = align(start + num_bytes)
        layers = _layers(version, views)
        self._kept[version.name] = place, layers
        return layers

    @contextmanager
    def rows(self, versions: Sequence[AdapterVersion | None]) -> Iterator[None]:
        """Run passes, within the block, whose rows have the adapters of these versions.

        Args: versions: one for each row; None: the model's own adapter. No more different ones than
              there are places.
        """
        by_name = {each.name: each for each in versions if each is not None}
        held = {name: self.hold(each, by_name) for name, each in by_name.items()}
        names = [None if each is None else each.name for each in versions]
        groups: list[tuple[torch.Tensor | None, Layers | None]] = []
        for name in dict.fromkeys(names):
            rows = [i for i, each in enumerate(names) if each == name]
            is_all = len(rows) == len(names)
            index_R = None if is_all else torch.tensor(rows, device=self._device)
            groups.append((index_R, None if name is None else held[name]))
        with self._rows.of(groups):
            yield

    @contextmanager
    def alone(self, version: AdapterVersion | None) -> Iterator[None]:
        """Run passes, within the block, all of whose rows have the adapter of this version, which
        takes no place."""
        if version is None:
            yield
            return
        tensors = {name: each.to(self._device) for name, each in tensors_of(version).items()}
        with self._rows.of([(None, _layers(version, tensors))]):
            yield

    def forget(self) -> None:
        """Drop all versions, because the memory was given back."""
        self._kept.clear()
        self._free = [*range(self.num_places)]


def shapes_of(own: Sequence[TensorSlot], adapter: Adapter) -> dict[str, list[int]]:
    """The shapes of an adapter's tensors on a deployment's base, by the names of files.

    Args: own: of a version of the deployment's own adapter.
    """
    own_rank = _rank_of(own)
    return {
        slot.name: _of_rank(slot, adapter.rank, own_rank)
        for slot in own
        if layer_and_part(slot.name)[0].rpartition(".")[2] in adapter.targets
    }


def check_version(version: AdapterVersion, own: Sequence[TensorSlot]) -> None:
    """Check that a deployment can read with a version in place of its own adapter.

    Args:   own: of a version of the deployment's own adapter.
    Raises: CallerError: why not.
    """
    own_rank, by_name = _rank_of(own), {slot.name: slot for slot in own}
    if version.adapter.rank > own_rank:
        raise _refused(
            f"the adapter has rank {version.adapter.rank}, this deployment has room for {own_rank}",
            "declare it with an adapter of the highest rank that it is to generate with",
        )
    for slot in version.slots:
        mine = by_name.get(slot.name)
        if mine is None:
            raise _refused(
                f"this deployment has no adapter on {layer_and_part(slot.name)[0]!r}",
                "declare it with an adapter whose targets are those of all adapters that it "
                "is to generate with",
            )
        ranks = (version.adapter.rank, own_rank)
        if (slot.dtype, slot.shape) != (mine.dtype, _of_rank(mine, *ranks)):
            raise _refused(
                f"{slot.name} is {slot.dtype}{slot.shape}: the adapter is on another base",
                "name weights of an adapter on the base that this deployment has",
            )


def _rank_of(own: Sequence[TensorSlot]) -> int:
    return max(slot.shape[0] for slot in own if ".lora_A." in slot.name)


def place_bytes(slots: Sequence[TensorSlot]) -> int:
    """The size of a version's place in bytes. Args: slots: the tensors of a version of the
    deployment's own adapter."""
    return align(max(slot.offset + slot.num_bytes for slot in slots))


def _of_rank(own: TensorSlot, rank: int, own_rank: int) -> list[int]:
    """The shape of a tensor for an adapter of another rank."""
    axis = 0 if layer_and_part(own.name)[1] == "lora_A" else 1
    assert own.shape[axis] == own_rank
    return [rank if i == axis else size for i, size in enumerate(own.shape)]


def tensors_of(version: AdapterVersion) -> dict[str, torch.Tensor]:
    """A version's tensors where they lie in host memory."""
    whole = torch.frombuffer(version.memory, dtype=torch.uint8)
    return {
        slot.name: whole[slot.offset : slot.offset + slot.num_bytes]
        .view(TORCH_DTYPES[slot.dtype])
        .view(slot.shape)
        for slot in version.slots
    }


def _layers(version: AdapterVersion, tensors: Mapping[str, torch.Tensor]) -> Layers:
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, part = layer_and_part(name)
        parts.setdefault(layer, {})[part] = tensor
    scale = version.adapter.alpha / version.adapter.rank
    return {layer: Matrices(each["lora_A"], each["lora_B"], scale) for layer, each in parts.items()}


def _refused(message: str, remedy: str) -> CallerError:
    return CallerError(message, code=Code.FAILED_PRECONDITION, field="args.weights", remedy=remedy)
