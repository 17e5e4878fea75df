"""A sampler's versions of adapters other than its own, on the same base.

Each version is stored in a slot of the rank's scratch memory that is as large as the deployment's
own adapter. If all slots are in use, the least recently used version is evicted. Versions never
change, so an entry stays valid until the scratch memory itself is given back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from phaseloom.common.contract.specs import Adapter
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.worker.backends.base import AdapterVersion
from phaseloom.worker.backends.lora.adapters import Layers, Matrices, layer_and_part, rows_of
from phaseloom.worker.backends.lora.versions import check_version, refused, shapes_of, tensors_of
from phaseloom.worker.state.heap import align


class AdapterCache:
    """An LRU cache of adapter versions. Call it from the device thread only."""

    def __init__(
        self, model: nn.Module, slots: Sequence[TensorSlot], scratch: torch.Tensor
    ) -> None:
        """Start empty.

        Args: slots: the tensors of a version of the deployment's own adapter.
              scratch: memory for the versions, one after another; may be empty.
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
        """Memory index and matrices of each version, least recently used first."""

    @property
    def num_places(self) -> int:
        return len(self._places)

    def shapes_of(self, adapter: Adapter) -> dict[str, list[int]]:
        return shapes_of([*self._own.values()], adapter)

    def check(self, version: AdapterVersion) -> None:
        """Check that requests can use a version here. Raises: CallerError: they cannot."""
        if not self._places:
            raise refused(
                "this deployment has no room for adapters other than its own",
                "declare it with max_adapters, the number of other adapters to keep on the device",
            )
        check_version(version, [*self._own.values()])

    def load(self, version: AdapterVersion, needed: Collection[str]) -> Layers:
        """Return the matrices of a version. Copy it to the device if it is not there yet.

        Args: needed: versions that must not be evicted; fewer than there are slots.
        """
        if version.name in self._kept:
            self._kept.move_to_end(version.name)
            return self._kept[version.name][1]
        if not self._free:
            oldest = next(name for name in self._kept if name not in needed)
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
        """Run passes within the block with one adapter version per row.

        Args: versions: one per row; None stands for the model's own adapter. They must not be more
                 different versions than there are slots.
        """
        by_name = {version.name: version for version in versions if version is not None}
        layers_by_name = {name: self.load(version, by_name) for name, version in by_name.items()}
        names = [None if version is None else version.name for version in versions]
        groups: list[tuple[torch.Tensor | None, Layers | None]] = []
        for name in dict.fromkeys(names):
            rows = [i for i, row_name in enumerate(names) if row_name == name]
            is_all = len(rows) == len(names)
            index_R = None if is_all else torch.tensor(rows, device=self._device)
            groups.append((index_R, None if name is None else layers_by_name[name]))
        with self._rows.of(groups):
            yield

    @contextmanager
    def alone(self, version: AdapterVersion | None) -> Iterator[None]:
        """Run passes within the block with this adapter version for all rows. It uses no slot."""
        if version is None:
            yield
            return
        tensors = {name: tensor.to(self._device) for name, tensor in tensors_of(version).items()}
        with self._rows.of([(None, _layers(version, tensors))]):
            yield

    def forget(self) -> None:
        """Drop all versions, because the memory was given back."""
        self._kept.clear()
        self._free = [*range(self.num_places)]


def place_bytes(slots: Sequence[TensorSlot]) -> int:
    """Return the bytes that one version needs.

    Args: slots: the tensors of a version of the deployment's own adapter.
    """
    return align(max(slot.offset + slot.num_bytes for slot in slots))


def _layers(version: AdapterVersion, tensors: Mapping[str, torch.Tensor]) -> Layers:
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, part = layer_and_part(name)
        parts.setdefault(layer, {})[part] = tensor
    scale = version.adapter.alpha / version.adapter.rank
    return {
        layer: Matrices(matrices["lora_A"], matrices["lora_B"], scale)
        for layer, matrices in parts.items()
    }
