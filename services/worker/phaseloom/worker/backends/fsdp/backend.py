"""Training backend: a Hugging Face causal LM under FSDP2, with all its state in the heap.

Invariants
- Parameters, gradients and AdamW state are views into the heap and are never reallocated. Autograd
  adds in place to preset gradients, and the optimizer works on flat regions. Between two calls the
  heap's bytes are therefore the whole state.
- A rank that is alone has nothing to gather. Its parameters are the heap's whole tensors, without
  FSDP2 or a process group, which would copy them around. The bits are the same.
- Parameters are sharded again after every pass, so FSDP2 keeps no copy that would be stale after a
  load.
- bfloat16 weights are rounded masters. FSDP2 shards the masters, rounds them as it gathers them,
  and reduces gradients in float32.
- Losses are sums, so gradients are summed over ranks too, never averaged.
- All ranks enter the same collectives in the same order. Each runs as many passes as the busiest
  rank. A rank that fails by itself between two collectives first tells the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phaseloom.common.contract.operations import (
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
)
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.common.tensors.resharding import Holding, holding_of
from phaseloom.worker.backends import scoring
from phaseloom.worker.backends.base import ALONE, Memory, RankGroup, nothing
from phaseloom.worker.backends.batch import (
    Batch,
    check_samples,
    forward_batch,
    loss_batch,
)
from phaseloom.worker.backends.capabilities import kinds_of
from phaseloom.worker.backends.fsdp.parameters import (
    move_parameters,
    precision,
    preset_gradients,
    round_parameters,
    shard_modules,
    transformer_layers,
    use_heap,
)
from phaseloom.worker.backends.gathering import weights_digest
from phaseloom.worker.backends.layout import (
    Layout,
    Region,
    check_layout,
    plan,
    shard,
)
from phaseloom.worker.backends.lora.adapters import own_parameters
from phaseloom.worker.backends.lora.sharedbase import SharedBase, base_scratch_bytes
from phaseloom.worker.backends.losses import combined, loss_sum, metric_names, pass_metrics
from phaseloom.worker.backends.model import (
    TORCH_DTYPES,
    HeapTensors,
    build_model,
    config_dict,
    max_positions,
    parameter_shapes,
    return_freed_memory,
    weights_dtype,
)
from phaseloom.worker.backends.packing import Pass, idle_pass, passes
from phaseloom.worker.backends.processgroup import (
    collective,
    join_process_group,
    largest,
)
from phaseloom.worker.backends.training import (
    Masters,
    Training,
    TrainingBackend,
    recompute,
)
from phaseloom.worker.state.devicememory import DeviceMemory

DIVISIBLE_COLUMNS = 64
"""On a device of several compute units, a pass is padded to a multiple of this many columns.
Otherwise the number of threads decides how an odd row is split over vector registers, and with it
the last bits."""

NORM_BLOCK = 4096
"""On a device of several compute units, the norm is summed in blocks of this many elements, so the
order of additions does not depend on the number of threads."""


class FsdpBackend(TrainingBackend):
    """The FSDP2 `Backend`. The heap holds the rank's shards; with one rank, whole tensors."""

    _name = "fsdp"

    def __init__(self, spec: DeploymentSpec, heap: DeviceMemory, ranks: RankGroup = ALONE) -> None:
        check_layout(spec, ranks)
        self._ranks = ranks
        self._shapes = parameter_shapes(spec.model)
        self._layout = _layout(spec, self._shapes, ranks)
        self._dtype = weights_dtype(spec.model)
        self._tensors = HeapTensors(heap)
        self.slots = self._layout.slots
        self.host_bytes = self._layout.host_bytes
        self.version_slots = plan(self._shapes.files, trainable=False, dtype=self._dtype).slots
        self.holdings: Sequence[Holding] = [
            holding_of(_layout(spec, self._shapes, replace(ranks, rank=rank)).slots)
            for rank in range(ranks.world_size)
        ]
        self.kinds = kinds_of(spec)
        self.at_boundary: Callable[[], None] = nothing
        self._columns = DIVISIBLE_COLUMNS if ranks.num_units > 1 else 1
        self._group = ExitStack()
        self._model = build_model(spec.model)
        self._base = None
        if spec.model.adapter is not None:
            self._base = SharedBase(self._model, spec.model, ranks, heap)
        self._model.requires_grad_(False)
        for parameter in own_parameters(self._model).values():
            parameter.requires_grad_(spec.trainable)
        self.vocab_size = int(self._model.config.vocab_size)
        self._max_positions = max_positions(self._model.config)
        self.config = config_dict(self._model, spec.model)
        dtype = TORCH_DTYPES[self._dtype]
        self._scorer = scoring.Scorer(self._model, dtype)
        masters = self._layout.training.masters if self._layout.training else None
        if masters is None:
            round_parameters(self._model, dtype)
        layers = transformer_layers(self._model)
        if spec.activation_checkpointing:
            recompute(layers)
        moved = self._tensors.views(masters or self._layout.weights)
        training = self._layout.training
        gradients = self._tensors.views(training.gradients) if training else {}
        if ranks.world_size == 1:
            used = self._tensors.views(self._layout.weights)
            use_heap(self._model, moved, used, gradients)
        else:
            mesh = self._join()
            shard_modules(self._scorer, layers, mesh, precision(masters, dtype))
            move_parameters(self._scorer, moved, self._padded(masters or self._layout.weights))
            preset_gradients(self._model, gradients, mesh)
        if masters is not None and spec.model.pinned is not None and self._base is None:
            # The weights will be read from files. Zero masters are then filled from them
            # (`Masters.fill`).
            self._tensors.flat(masters).zero_()
        self._masters = Masters.of(self._tensors, self._layout.weights, masters)
        self._training = None
        if self._layout.training is not None:
            self._training = Training.of(
                self._tensors, self._layout.weights, self._layout.training, self._masters
            )
        return_freed_memory()

    @staticmethod
    def plan(spec: DeploymentSpec, ranks: RankGroup = ALONE) -> Memory:
        check_layout(spec, ranks)
        heap_bytes = _layout(spec, parameter_shapes(spec.model), ranks).heap_bytes
        return Memory(heap_bytes, base_scratch_bytes(spec.model, ranks))

    def check_forward(self, args: Forward) -> None:
        check_samples(args.batch, self._max_positions)
        forward_batch(args, self.vocab_size)

    @collective
    def forward(self, args: Forward) -> ForwardResult:
        batch = forward_batch(args, self.vocab_size)
        with torch.no_grad():
            packed = self._passes(batch, only_used=False)
            return ForwardResult([*scoring.logprobs(self._scorer, batch, packed)])

    def check_forward_backward(self, args: ForwardBackward) -> None:
        self._require_training()
        check_samples(args.batch, self._max_positions)
        loss_batch(args, self.vocab_size)

    @collective
    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult:
        """Run passes and add their gradients.

        Raises: CallerError: the loss or a gradient is not finite; the gradients are spoilt.
        """
        self._require_training()
        batch = loss_batch(args, self.vocab_size)
        rows: list[torch.Tensor] = []
        num_tokens = 0
        for packed in self._passes(batch, only_used=True):
            num_tokens += packed.index_N.size
            rows.append(self._backward(args, packed))
        return self._result(args, batch, combined(metric_names(args), rows), num_tokens)

    @collective
    def weights_sha256(self) -> str:
        views = {slot.name: self._tensors.view(slot) for slot in self._layout.weights.files}
        return weights_digest(
            self.version_slots, self.holdings, views, self._ranks.rank, self._dtype
        )

    @property
    def exchanged_bytes(self) -> int:
        masters = self._layout.training.masters if self._layout.training else None
        return (masters if masters and self._exchanges_masters else self._layout.weights).stop

    @property
    def _exchanges_masters(self) -> bool:
        """Whether FSDP2 gathers the masters, which lie behind the weights in the heap. A rank that
        is alone computes with the weights themselves."""
        return self._ranks.world_size > 1

    def weights_exchanged(self, name: str) -> None:
        """If FSDP2 gathers the masters, fill them from the exchanged weights."""
        if name and self._exchanges_masters:
            pairs = zip(self._masters.weights, self._masters.masters, strict=True)
            with torch.no_grad():
                for weight, master in pairs:
                    master.copy_(weight)

    def use_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def _padded(self, region: Region) -> dict[str, torch.Tensor]:
        """Return the rank's shards of a region with their padding, which gives all ranks equal
        sizes."""
        return {
            name: self._tensors.view(slot, shard(self._shapes[name], self._ranks).padded_shape)
            for name, slot in region.slots.items()
        }

    def _passes(self, batch: Batch, *, only_used: bool) -> Iterator[Pass]:
        """Yield passes over this rank's data, then idle ones until it has as many as the busiest
        rank."""
        shares = self._scorer.shares_prefixes
        if self._ranks.world_size == 1:
            for packed in passes(batch, only_used=only_used, columns=self._columns, shares=shares):
                self.at_boundary()
                yield packed
            return
        local_passes = [*passes(batch, only_used=only_used, shares=shares)]
        num_idle = largest(len(local_passes), self._ranks) - len(local_passes)
        yield from local_passes
        for _ in range(num_idle):
            yield idle_pass()

    def _join(self) -> DeviceMesh:
        """Join the process group of all ranks."""
        kind = self._tensors.device.type
        join_process_group(self._ranks, kind, self._group)
        return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp",))

    def _backward(self, args: ForwardBackward, packed: Pass) -> torch.Tensor:
        """Add the gradients of a pass. Return its metrics."""
        lp_N, entropy_N = self._scorer(packed, with_entropy=args.entropy)
        q_N, coefficient_N = torch.from_numpy(packed.q_N), torch.from_numpy(packed.coefficient_N)
        q_N, coefficient_N = q_N.to(lp_N.device), coefficient_N.to(lp_N.device)
        loss = loss_sum(args, lp_N, q_N, coefficient_N)
        torch.autograd.backward(loss)
        return pass_metrics(args, loss, lp_N, q_N, coefficient_N, entropy_N=entropy_N)

    def grad_norm(self, training: Training) -> float:
        # Ranks hold disjoint shards, so their squares add up.
        if self._ranks.num_units > 1:
            square = _blockwise_square(training.gradients)
        else:
            square = training.gradients.square().sum()
        if self._ranks.world_size > 1:
            dist.all_reduce(square)
        return math.sqrt(square.item())


def _blockwise_square(flat: torch.Tensor) -> torch.Tensor:
    """Sum squares with the same bits for any number of threads."""
    num_blocked = flat.numel() // NORM_BLOCK * NORM_BLOCK
    # Each row of a row-wise sum runs on one thread. The rows are then summed exactly, by fsum.
    sums = flat[:num_blocked].view(-1, NORM_BLOCK).square().sum(dim=1).double()
    remainder = flat[num_blocked:].square().sum().double()
    return torch.tensor(math.fsum([*sums.tolist(), remainder.item()]), dtype=torch.float64)


def _layout(spec: DeploymentSpec, shapes: Mapping[str, Sequence[int]], ranks: RankGroup) -> Layout:
    return plan(
        shapes,
        trainable=spec.trainable,
        ranks=ranks,
        optimizer_on=spec.optimizer_on,
        dtype=weights_dtype(spec.model),
    )
