"""Models of small arrays, and what each rank of a layout holds of them, as Megatron-core, FSDP2 and
vLLM cut models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaseloom.common.contract.specs import Layout
from phaseloom.common.tensors.layouts import chunk, coordinates
from phaseloom.common.tensors.resharding import Box, Holding, Tensor

Array = np.ndarray[Any, Any]
DTYPES = {"float32": np.uint32, "bfloat16": np.uint16, "int8": np.uint8}


@dataclass(frozen=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    dtype: str
    stage: float
    """Where in the model it is, from 0 to 1: which pipeline stage has it."""
    cut: int | None = None
    """The dim that tensor parallelism cuts; None: every rank has all of it."""
    heads: int | None = None
    """Its cut dim is so many heads, which several ranks have whole where there are more ranks."""
    expert: int | None = None

    @property
    def tensor(self) -> Tensor:
        return Tensor(self.shape, self.dtype)


@dataclass(frozen=True)
class Sharded:
    """How a deployment cuts its model; expert parallelism keeps experts whole."""

    layout: Layout
    num_experts: int = 4
    is_fsdp: bool = False
    """Whether the data-parallel replicas share the rows of each parameter."""

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks

    def holding(self, model: Sequence[Parameter], rank: int) -> dict[str, Box]:
        boxes = {each.name: self._box(each, rank) for each in model}
        return {name: box for name, box in boxes.items() if box is not None}

    def holdings(self, model: Sequence[Parameter]) -> list[dict[str, Box]]:
        return [self.holding(model, rank) for rank in range(self.num_ranks)]

    def _box(self, each: Parameter, rank: int) -> Box | None:
        layout, at = self.layout, coordinates(rank, self.layout)
        if min(int(each.stage * layout.pp), layout.pp - 1) != at.pp:
            return None
        if each.expert is not None and each.expert * layout.ep // self.num_experts != at.ep:
            return None
        rows = [range(size) for size in each.shape]
        if each.expert is not None and layout.ep > 1:
            return Box(tuple(run.start for run in rows), each.shape)
        if each.cut is not None:
            parts = min(layout.tp, each.heads or layout.tp)
            rows[each.cut] = chunk(each.shape[each.cut], parts, at.tp * parts // layout.tp)
        if self.is_fsdp and rows:
            cut = chunk(len(rows[0]), layout.dp, at.dp)
            rows[0] = rows[0][cut.start : cut.stop]
        return Box(tuple(run.start for run in rows), tuple(len(run) for run in rows))


def whole(parameter: Parameter, number: int) -> Array:
    """Neighbours differ in every byte, and no byte is zero."""
    dtype = np.dtype(DTYPES[parameter.dtype])
    size = int(np.prod(parameter.shape)) * dtype.itemsize
    raw = (np.arange(size) + 7 * number) % 251 + 1
    return raw.astype(np.uint8).view(dtype).reshape(parameter.shape)


def inside(start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))


def arrays(model: Sequence[Parameter], holding: Holding) -> dict[str, Array]:
    """What somebody with this holding has."""
    return {
        each.name: whole(each, number)[inside(*holding[each.name])]
        for number, each in enumerate(model)
        if each.name in holding
    }


def tensors(model: Sequence[Parameter]) -> Mapping[str, Tensor]:
    return {each.name: each.tensor for each in model}
