"""Where every managed tensor lies in a heap: weights, gradients, AdamW's moments and step counter.

One layout rule for all backends: regions follow one another, each holds the parameters sorted by
name at 64-byte offsets. So the weights region has the same bytes in a policy, a sampler and a
weights version, and each region doubles as one flat tensor for elementwise work; the padding
between tensors is zero and stays zero. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from phaseloom.common.statewire import Role, TensorSlot
from phaseloom.worker.heap import align

FLOAT32_BYTES = 4

STEP = "step"
"""Name of the slot that counts optimizer steps."""


@dataclass(frozen=True)
class Region:
    """Bytes [start, stop) of a heap and the tensors in it, by parameter name."""

    start: int
    stop: int
    slots: Mapping[str, TensorSlot]


@dataclass(frozen=True)
class TrainingLayout:
    """Regions as long as that of the weights, each tensor where its weight is in that one."""

    gradients: Region
    exp_avg: Region
    exp_avg_sq: Region
    step: TensorSlot

    @property
    def slots(self) -> list[TensorSlot]:
        regions = (self.gradients, self.exp_avg, self.exp_avg_sq)
        return [*(slot for region in regions for slot in region.slots.values()), self.step]


@dataclass(frozen=True)
class Layout:
    """Everything that one deployment keeps; `training` is None unless it is trainable."""

    weights: Region
    training: TrainingLayout | None = None

    @property
    def slots(self) -> list[TensorSlot]:
        training = self.training.slots if self.training else []
        return [*self.weights.slots.values(), *training]

    @property
    def num_bytes(self) -> int:
        last = self.slots[-1]
        return align(last.offset + last.num_bytes)


def plan(shapes: Mapping[str, Sequence[int]], *, trainable: bool) -> Layout:
    """Lay out float32 parameters of these shapes, and their training state if `trainable`."""
    weights = _region(shapes, 0, Role.WEIGHT, "")
    if not trainable:
        return Layout(weights)
    gradients = _region(shapes, weights.stop, Role.GRADIENT, ".grad")
    exp_avg = _region(shapes, gradients.stop, Role.OPTIMIZER, ".exp_avg")
    exp_avg_sq = _region(shapes, exp_avg.stop, Role.OPTIMIZER, ".exp_avg_sq")
    step = TensorSlot(STEP, Role.OPTIMIZER, "float32", [], exp_avg_sq.stop, FLOAT32_BYTES)
    return Layout(weights, TrainingLayout(gradients, exp_avg, exp_avg_sq, step))


def _region(shapes: Mapping[str, Sequence[int]], start: int, role: Role, suffix: str) -> Region:
    slots: dict[str, TensorSlot] = {}
    offset = start
    for name in sorted(shapes):
        shape = list(shapes[name])
        num_bytes = prod(shape) * FLOAT32_BYTES
        slots[name] = TensorSlot(name + suffix, role, "float32", shape, offset, num_bytes)
        offset = align(offset + num_bytes)
    return Region(start, offset, slots)
