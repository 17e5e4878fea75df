"""Layouts of real backends for small models, and a rank's way of reading a version in parts, on
arrays of which no two elements are alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phaseloom.common.contract.specs import Layout
from phaseloom.common.contract.state_layout import TensorSlot, VersionPart, VersionParts
from phaseloom.common.tensors.layouts import coordinates
from phaseloom.common.tensors.resharding import Holding, holding_of, parts_of, tensors_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import part_name
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.layout import Shard, lay_out, plan
from phaseloom.worker.backends.megatron.slices import Place, Sizes, parameters
from phaseloom.worker.core.reading import (
    Reader,
    Runs,
    plan_node_fetches,
    runs_from_part,
    runs_from_slices,
)
from phaseloom.worker.state.layouts import packed
from tests.support.sharded import Array, inside

Slots = list[TensorSlot]


def megatron(sizes: Sizes, layout: Layout) -> list[Slots]:
    """What the ranks of the backend `megatron` hold."""
    return [
        _slots(
            {
                name: shard
                for slices in parameters(sizes, Place(layout, coordinates(rank, layout))).values()
                for name, shard in slices.items()
            }
        )
        for rank in range(layout.num_ranks)
    ]


def fsdp(shapes: Mapping[str, Sequence[int]], dp: int) -> list[Slots]:
    """What the ranks of the backend `fsdp` hold of parameters of these shapes."""
    return [plan(shapes, trainable=False, ranks=RankGroup(rank, dp)).slots for rank in range(dp)]


@dataclass(frozen=True)
class VllmCut:
    """How vLLM cuts a model of the Llama family."""

    sizes: Sizes
    layout: Layout
    vocabulary_unit: int = 64
    """The vocabulary is padded to a multiple of it."""
    keeps_experts_whole: bool = False

    def slots(self) -> list[Slots]:
        """What the ranks hold."""
        return [_slots(self._shards(rank)) for rank in range(self.layout.num_ranks)]

    def _shards(self, rank: int) -> dict[str, Shard]:
        whole = parameters(self.sizes, Place(Layout(), coordinates(0, Layout())))
        shapes = {name: each.shape for slices in whole.values() for name, each in slices.items()}
        at = coordinates(rank, self.layout)
        found: dict[str, Shard] = {}
        for name, shape in shapes.items():
            cut = self._cut(name, shape, at.tp)
            if self._is_on(name, at.pp) and cut is not None and all(cut.shape):
                found[name] = cut
        return found

    def _is_on(self, name: str, stage: int) -> bool:
        last = self.layout.pp - 1
        if name.startswith("model.layers."):
            return int(name.split(".")[2]) in self._layers(stage)
        if "embed" in name:
            return stage == 0 or (self.sizes.is_tied and stage == last)
        return stage == last

    def _layers(self, stage: int) -> range:
        """The layers of a stage; what is left over goes to those before the last one."""
        pp, rest = self.layout.pp, self.sizes.num_layers % self.layout.pp
        counts = [self.sizes.num_layers // pp] * pp
        for back in range(2, rest + 2):
            counts[-back] += 1
        first = sum(counts[:stage])
        return range(first, first + counts[stage])

    def _cut(self, name: str, shape: list[int], rank: int) -> Shard | None:
        tp = self.layout.tp
        if "embed" in name or "lm_head" in name:
            unit = self.vocabulary_unit
            each = -(-shape[0] // unit) * unit // tp if tp > 1 else shape[0]
            return _part(shape, 0, range(rank * each, min((rank + 1) * each, shape[0])))
        if ".mlp.experts." in name and self.keeps_experts_whole:
            expert, experts = int(name.split(".")[5]), self.sizes.experts
            assert experts is not None
            return _part(shape, 0, range(shape[0])) if expert * tp // experts.num == rank else None
        if ".k_proj." in name or ".v_proj." in name:
            parts = min(tp, self.sizes.kv_heads)
            return _part(shape, 0, _even(shape[0], rank * parts // tp, parts))
        if any(each in name for each in (".q_proj.", ".gate_proj.", ".up_proj.")):
            return _part(shape, 0, _even(shape[0], rank, tp))
        if ".o_proj." in name or ".down_proj." in name:
            return _part(shape, 1, _even(shape[1], rank, tp))
        return Shard(shape, shape)


def _even(size: int, rank: int, parts: int) -> range:
    return range(rank * size // parts, (rank + 1) * size // parts)


def _part(shape: list[int], dim: int, run: range) -> Shard:
    size, start = [*shape], [0] * len(shape)
    size[dim], start[dim] = len(run), run.start
    return Shard(shape, shape) if size == shape else Shard(size, size, shape, start)


def _slots(shards: Mapping[str, Shard]) -> Slots:
    return lay_out(shards, trainable=False).slots


@dataclass(frozen=True)
class Version:
    """A version in parts, as the ranks of a policy write it."""

    ranks: Sequence[Slots]
    contents: Mapping[str, Array]
    """The whole tensors."""

    @cached_property
    def tables(self) -> list[Slots]:
        """What lies where in each part."""
        parts = parts_of([holding_of(slots) for slots in self.ranks])
        return [packed(self.ranks[shared[0]])[0] for shared in parts]

    @cached_property
    def memories(self) -> list[bytearray]:
        return [memory_of(table, self.contents) for table in self.tables]

    @cached_property
    def held(self) -> list[Holding]:
        return [holding_of(table) for table in self.tables]

    @cached_property
    def manifest(self) -> VersionParts:
        return manifest_of(self.tables)

    def read(self, reader: Reader) -> bytearray:
        """The heap of a rank that has read the version, of zeroes before.

        Raises: AssertionError: a byte of the heap comes twice.
        """
        needed = plan_node_fetches(self.manifest, reader)
        came = bytearray(max((s.offset + s.num_bytes for s in needed.slices), default=0))
        for each, fetch in zip(needed.slices, needed.fetches, strict=True):
            (slot,) = [s for s in self.tables[fetch.part] if s.name == each.name]
            tensor = np.frombuffer(
                self.memories[fetch.part], np.float32, slot.num_bytes // 4, slot.offset
            ).reshape(slot.shape)
            box = tensor[inside(each.start, each.size)]
            came[each.offset : each.offset + each.num_bytes] = box.tobytes()
        heap = bytearray(max(s.offset + s.num_bytes for s in reader.slots))
        written = bytearray(len(heap))
        for table, memory, part in zip(
            self.tables, self.memories, self.manifest.parts, strict=True
        ):
            if part.part in needed.whole_parts:
                runs = runs_from_part(table, needed.whole_parts[part.part], reader)
                copy(runs, memory, heap, written)
        copy(runs_from_slices(needed.slices, needed.fetches, reader), came, heap, written)
        return heap


def manifest_of(tables: Sequence[Slots]) -> VersionParts:
    """The manifest of parts in which tensors lie so."""
    parts = [
        VersionPart(part_name(i, len(tables)), 0, "", TensorTable.of(table).packed)
        for i, table in enumerate(tables)
    ]
    return VersionParts("", parts)


def reader_of(ranks: Sequence[Slots], whole: Slots, rank: int, here: Collection[int]) -> Reader:
    """A rank that reads versions, with the ranks of its node."""
    held = [holding_of(slots) for slots in ranks]
    return Reader(held, rank, here, tensors_of(whole), ranks[rank])


def contents_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    """Whole tensors of which no two elements are alike, and none is zero."""
    contents: dict[str, Array] = {}
    first = 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        contents[name] = np.arange(first, first + size, dtype=np.float32).reshape(shape)
        first += size
    assert first < 2**24, "float32 tells no more whole numbers apart"
    return contents


def memory_of(slots: Sequence[TensorSlot], contents: Mapping[str, Array]) -> bytearray:
    """Memory in which these slots of the tensors lie, with zeroes between them."""
    memory = bytearray(max(slot.offset + slot.num_bytes for slot in slots))
    for slot in slots:
        start = slot.start or [0] * len(slot.shape)
        content: np.ndarray[Any, Any] = contents[slot.name][inside(start, slot.shape)]
        memory[slot.offset : slot.offset + slot.num_bytes] = content.tobytes()
    return memory


def copy(runs: Runs, source: bytearray, target: bytearray, written: bytearray) -> None:
    for there, here, num_bytes in (run for rows in runs for run in rows.runs()):
        span = slice(here, here + num_bytes)
        target[span] = source[there : there + num_bytes]
        assert not any(written[span]), "a byte comes twice"
        written[span] = b"\1" * num_bytes
