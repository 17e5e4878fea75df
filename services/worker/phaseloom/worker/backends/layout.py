"""The layout of all managed tensors: weights, gradients, masters, AdamW moments and step counter.

The heap is in device memory. The optimizer's part may live in host memory instead, at the end of
the rank's host extent, behind the heap's copy. Offsets refer to that extent, which begins like the
heap.

All backends follow one rule. Regions follow one another, and each holds the parameters at 64-byte
offsets in the same order: by name, unless a runtime fuses parameters (see `megatron`). So the
weights region has the same bytes in a policy, a sampler and a weights version (for experts see
`filetensors`), and each region doubles as one flat tensor for elementwise work. The padding between
tensors is zero and stays zero. With several ranks, each heap holds the rank's shards, padded to the
same size on all ranks. Pure; no torch.

Weights are float32 or bfloat16; all other training state is float32. bfloat16 weights have
*masters*: float32 copies that the optimizer updates and from which the weights are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from phaseloom.common.contract.errors import CallerError, Code, InternalError
from phaseloom.common.contract.specs import DeploymentSpec, OptimizerOn
from phaseloom.common.contract.state_layout import Role, TensorSlot, host_start
from phaseloom.common.tensors import layouts
from phaseloom.common.tensors.resharding import item_bytes
from phaseloom.worker.backends.base import ALONE, RankGroup
from phaseloom.worker.backends.capabilities import CAPABILITIES
from phaseloom.worker.backends.filetensors import ParameterShapes, Parts, file_slots
from phaseloom.worker.state.heap import align

FLOAT32, BFLOAT16 = "float32", "bfloat16"
FLOAT32_BYTES = 4

MASTER = ".master"
"""Suffix of a master's slot name, after its parameter's name."""
STEP = "step"
"""Name of the slot that counts optimizer steps."""


@dataclass(frozen=True)
class Region:
    """The bytes [start, stop) of a heap, and the parameters in them, all of one dtype."""

    start: int
    stop: int
    slots: Mapping[str, TensorSlot]
    dtype: str = FLOAT32
    parts: Parts = field(default_factory=dict)

    @property
    def files(self) -> list[TensorSlot]:
        """The region's tensors, with the names and in the order of files; see `filetensors`."""
        return file_slots(self.slots, self.parts)


@dataclass(frozen=True)
class TrainingLayout:
    """The regions of training state. All have the same length and the same tensors at the same
    relative offsets."""

    masters: Region | None
    """None if the weights are float32, and so their own masters."""
    gradients: Region
    exp_avg: Region
    exp_avg_sq: Region
    step: TensorSlot
    is_on_host: bool = False
    """Whether moments and step counter live in host memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes from offset 0 to the end of the last slot."""
        return align(self.step.offset + FLOAT32_BYTES)

    @property
    def regions(self) -> list[Region]:
        masters = [self.masters] if self.masters else []
        return [*masters, self.gradients, self.exp_avg, self.exp_avg_sq]

    @property
    def slots(self) -> list[TensorSlot]:
        return [*(slot for region in self.regions for slot in region.files), self.step]


@dataclass(frozen=True)
class Layout:
    """All regions of a deployment. `training` is None unless it is trainable."""

    weights: Region
    training: TrainingLayout | None = None

    @property
    def slots(self) -> list[TensorSlot]:
        training = self.training.slots if self.training else []
        return [*self.weights.files, *training]

    @property
    def heap_bytes(self) -> int:
        """Bytes on the device."""
        if self.training is None:
            return self.weights.stop
        if self.training.is_on_host:
            return self.training.gradients.stop
        return self.training.num_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that exist in host memory only, from the heap's `host_start` on."""
        if self.training is None or not self.training.is_on_host:
            return 0
        return self.training.num_bytes - host_start(self.heap_bytes)


@dataclass(frozen=True)
class Shard:
    """A rank's slice of a parameter.

    `padded_shape` may have extra rows of padding at the end, so that all ranks' slices have one
    size.
    """

    shape: list[int]
    padded_shape: list[int]
    global_shape: list[int] = field(default_factory=list)
    """Shape of the whole parameter; empty if this slice is all of it."""
    start: list[int] = field(default_factory=list)
    """Index of the slice's first element in the parameter."""

    @property
    def rows(self) -> range:
        """The rows of the parameter that the slice covers."""
        first = self.start[0] if self.start else 0
        return range(first, first + self.shape[0])


def shard(shape: Sequence[int], ranks: RankGroup) -> Shard:
    """Shard a parameter over ranks by rows, as FSDP2 does."""
    if not shape:
        return Shard([], [])
    rows = layouts.chunk(shape[0], ranks.world_size, ranks.rank)
    largest = len(layouts.chunk(shape[0], ranks.world_size, 0))
    local_shape, padded = [len(rows), *shape[1:]], [largest, *shape[1:]]
    if len(rows) == shape[0]:
        return Shard(local_shape, padded)
    # A rank without rows starts at the parameter's end.
    return Shard(
        local_shape, padded, [*shape], [min(rows.start, shape[0]), *([0] * len(shape[1:]))]
    )


_KEEPS_ADAPTERS = frozenset({"sampler", "vllm"})
"""Backends that can read with versions of other adapters."""


def check_layout(spec: DeploymentSpec, ranks: RankGroup) -> None:
    """Check that the deployment's backend supports its layout and its options.

    Raises: CallerError: FAILED_PRECONDITION: the backend does not support an axis of the layout, or
             a training option is set on a deployment that is not trainable.
    """
    layouts.check_layout(spec.layout)
    if spec.optimizer_on is OptimizerOn.HOST and not spec.trainable:
        raise CallerError(
            "optimizer_on = host needs a trainable deployment: others have no optimizer",
            code=Code.FAILED_PRECONDITION,
            field="optimizer_on",
            remedy="omit optimizer_on, or declare the deployment with trainable = true",
        )
    if spec.activation_checkpointing and not spec.trainable:
        raise CallerError(
            "activation_checkpointing needs a trainable deployment: others have no backward pass",
            code=Code.FAILED_PRECONDITION,
            field="activation_checkpointing",
            remedy="omit activation_checkpointing, or declare the deployment with trainable = true",
        )
    capabilities = CAPABILITIES[spec.backend]
    has_room = spec.backend in _KEEPS_ADAPTERS and spec.model.adapter is not None
    if spec.max_adapters and not has_room:
        raise CallerError(
            "max_adapters needs a model.adapter and the backend 'sampler' or 'vllm'",
            code=Code.FAILED_PRECONDITION,
            field="max_adapters",
            remedy="omit max_adapters, or declare the deployment with both",
        )
    if spec.max_adapters < 0:
        raise CallerError(
            f"max_adapters must be at least 0, got {spec.max_adapters}",
            field="max_adapters",
            remedy="use 0 or more",
        )
    if spec.model.adapter is not None and not capabilities.adapters:
        raise CallerError(
            f"the {spec.backend} backend does not support adapters",
            code=Code.FAILED_PRECONDITION,
            field="model.adapter",
            remedy="use 'fsdp', 'megatron', 'sampler' or 'vllm', or omit model.adapter",
        )
    axes = capabilities.axes
    for axis in spec.layout.__struct_fields__:
        size = getattr(spec.layout, axis)
        if size > 1 and axis not in axes:
            supported = " or ".join(f"layout.{supported_axis}" for supported_axis in axes)
            raise CallerError(
                f"the {spec.backend} backend does not support layout.{axis} = {size}",
                code=Code.FAILED_PRECONDITION,
                field=f"layout.{axis}",
                remedy=f"use layout.{axis} = 1; for more ranks, raise {supported}",
            )
    if spec.layout.num_ranks != ranks.world_size:
        raise InternalError(
            f"expected {spec.layout.num_ranks} ranks for {spec.layout}, got {ranks.world_size}"
        )


def plan(
    shapes: Mapping[str, Sequence[int]],
    *,
    trainable: bool,
    ranks: RankGroup = ALONE,
    optimizer_on: OptimizerOn = OptimizerOn.DEVICE,
    dtype: str = FLOAT32,
) -> Layout:
    """Lay out a rank's shards of parameters, and their training state if `trainable`.

    Args: shapes: shapes of the whole parameters.
          dtype: dtype of the weights.
    Raises: CallerError: FAILED_PRECONDITION: a tensor of files would not be aligned.
    """
    shards = {name: shard(shapes[name], ranks) for name in sorted(shapes)}
    parts = shapes.parts if isinstance(shapes, ParameterShapes) else {}
    return lay_out(shards, trainable=trainable, optimizer_on=optimizer_on, dtype=dtype, parts=parts)


def lay_out(
    shards: Mapping[str, Shard],
    *,
    trainable: bool,
    optimizer_on: OptimizerOn = OptimizerOn.DEVICE,
    dtype: str = FLOAT32,
    parts: Parts | None = None,
) -> Layout:
    """Lay out a rank's shards in the given order, and their training state if `trainable`.

    Args: parts: the tensors that files have for some of the parameters.
    """

    def region(start: int, role: Role, suffix: str, dtype: str = FLOAT32) -> Region:
        return _region(shards, start, role, suffix, dtype=dtype, parts=parts or {})

    weights = region(0, Role.WEIGHT, "", dtype)
    file_slots(weights.slots, weights.parts)  # raises if a slot cannot be aligned
    if not trainable:
        return Layout(weights)
    masters = None
    if dtype != FLOAT32:
        masters = region(weights.stop, Role.OPTIMIZER, MASTER)
    gradients = region((masters or weights).stop, Role.GRADIENT, ".grad")
    is_on_host = optimizer_on is OptimizerOn.HOST
    # In host memory, the optimizer's part begins behind the heap's copy.
    start = host_start(gradients.stop) if is_on_host else gradients.stop
    exp_avg = region(start, Role.OPTIMIZER, ".exp_avg")
    exp_avg_sq = region(exp_avg.stop, Role.OPTIMIZER, ".exp_avg_sq")
    step = TensorSlot(STEP, Role.OPTIMIZER, FLOAT32, [], exp_avg_sq.stop, FLOAT32_BYTES)
    return Layout(
        weights, TrainingLayout(masters, gradients, exp_avg, exp_avg_sq, step, is_on_host)
    )


def _region(
    shards: Mapping[str, Shard], start: int, role: Role, suffix: str, *, dtype: str, parts: Parts
) -> Region:
    slots: dict[str, TensorSlot] = {}
    offset = start
    item = item_bytes(dtype)
    for name, part in shards.items():
        num_bytes = prod(part.shape) * item
        slots[name] = TensorSlot(
            name + suffix,
            role,
            dtype,
            part.shape,
            offset,
            num_bytes,
            global_shape=part.global_shape,
            start=part.start,
        )
        offset = align(offset + prod(part.padded_shape) * item)
    return Region(start, offset, dict(sorted(slots.items())), dtype, parts)
