"""`Backend` for training with Megatron-core's layers and pipeline.

All ranks of a replica (one for each of its tensor-parallel, context-parallel and pipeline
coordinates) get the same samples. A pass is one micro-batch of the pipeline (1F1B). The last stage
computes each pass's loss; its first rank reports the result of the replica.

Invariants
- Weights, gradients and AdamW state are views of the heap and are never reallocated. Megatron's
  data-parallel wrapper and optimizer are not used, because they would own memory.
- Between two operations, all ranks that hold a slice have the same gradients for it.
- There is no dropout, so nothing draws from a random state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from phaseloom.common.contract.errors import CallerError, Code, InternalError
from phaseloom.common.contract.operations import (
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
)
from phaseloom.common.contract.specs import Adapter, DeploymentSpec, DeviceKind
from phaseloom.common.tensors.layouts import coordinates
from phaseloom.common.tensors.resharding import Holding, holding_of
from phaseloom.worker.backends.architectures import has_windows
from phaseloom.worker.backends.base import ALONE, Memory, RankGroup
from phaseloom.worker.backends.batch import (
    Batch,
    check_one_target,
    check_samples,
    forward_batch,
    loss_batch,
)
from phaseloom.worker.backends.capabilities import kinds_of
from phaseloom.worker.backends.gathering import owned, weights_digest
from phaseloom.worker.backends.layout import Layout, Shard, check_layout, lay_out, plan
from phaseloom.worker.backends.lora.adapters import own_parameters
from phaseloom.worker.backends.lora.sharedbase import BaseMemory
from phaseloom.worker.backends.losses import combined, loss_sum, metric_names, pass_metrics
from phaseloom.worker.backends.megatron import devices
from phaseloom.worker.backends.megatron.adapters import adapt, matrix_shards
from phaseloom.worker.backends.megatron.context import Share, share_of
from phaseloom.worker.backends.megatron.gradients import Gradients
from phaseloom.worker.backends.megatron.slices import (
    Parameters,
    Place,
    Sizes,
    adapted,
    check_sizes,
    parameters,
    sizes_of,
)
from phaseloom.worker.backends.megatron.stage import Stage, transformer_config
from phaseloom.worker.backends.model import (
    TORCH_DTYPES,
    HeapTensors,
    build_model,
    config_dict,
    max_positions,
    model_config,
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
    accumulate,
    recompute,
)
from phaseloom.worker.state.devicememory import DeviceMemory

Finish = Callable[[Share, torch.Tensor], torch.Tensor]
"""Computes the loss of a share from the last stage's output for it (`Stage.forward`)."""


class MegatronBackend(TrainingBackend):
    """The `Backend` that trains with Megatron-core."""

    _name = "megatron"

    def __init__(self, spec: DeploymentSpec, heap: DeviceMemory, ranks: RankGroup = ALONE) -> None:
        sizes = _check(spec, ranks)
        self._ranks = ranks
        self._place = _place(spec, ranks.rank)
        self._dtype = weights_dtype(spec.model)
        self._tensors = HeapTensors(heap)
        self._layout = _layout(spec, sizes, ranks.rank)
        self.slots = self._layout.slots
        self.host_bytes = self._layout.host_bytes
        self._shapes = parameter_shapes(spec.model)
        self.version_slots = plan(self._shapes.files, trainable=False, dtype=self._dtype).slots
        self.holdings: Sequence[Holding] = [
            holding_of(_layout(spec, sizes, rank).slots) for rank in range(ranks.world_size)
        ]
        self.kinds = kinds_of(spec)
        self._group = ExitStack()
        device = self._tensors.device
        join_process_group(ranks, device.type, self._group)
        devices.use(device)
        self._join_parallel_groups(spec)
        model = build_model(spec.model)
        self.vocab_size = sizes.vocab
        self._max_positions = max_positions(model.config)
        self.config = config_dict(model, spec.model)
        self._stage = self._build_stage(spec, sizes, model)
        self._base = self._place_base(spec, sizes, heap) if spec.model.adapter else None
        if spec.model.adapter is None:
            self._move_parameters(parameters(sizes, self._place))
        else:
            self._add_adapter(spec.model.adapter, sizes)
        weights, training = self._layout.weights, self._layout.training
        masters = training.masters if training else None
        if spec.model.pinned is None or self._base is not None:
            self._fill(model)
        elif masters is not None:
            # The weights will be read from files. Zero masters are then filled from them
            # (`Masters.fill`).
            self._tensors.flat(masters).zero_()
        self._masters = Masters.of(self._tensors, weights, masters)
        self._training = None
        if training is not None:
            self._training = Training.of(self._tensors, weights, training, self._masters)
            flat, views = self._training.gradients, self._tensors.views(training.gradients)
            self._gradients = Gradients(sizes, self._place, flat, views)
        # Slices that several ranks hold count once in the norm of the gradients.
        self._owned = sorted(owned(self.holdings, ranks.rank))
        del model
        return_freed_memory()

    @staticmethod
    def plan(spec: DeploymentSpec, ranks: RankGroup = ALONE) -> Memory:
        sizes = _check(spec, ranks)
        has_copy = spec.model.adapter is not None and ranks.device_kind is DeviceKind.CUDA
        base_bytes = _base_layout(spec, sizes, ranks.rank).heap_bytes if has_copy else 0
        return Memory(_layout(spec, sizes, ranks.rank).heap_bytes, base_bytes)

    def check_forward(self, args: Forward) -> None:
        check_samples(args.batch, self._max_positions)
        check_one_target(args.batch)
        forward_batch(args, self.vocab_size)

    @collective
    def forward(self, args: Forward) -> ForwardResult:
        batch = forward_batch(args, self.vocab_size)
        lp_N = np.zeros(batch.tokens_N.size, dtype="<f4")

        def keep(share: Share, passed_N: torch.Tensor) -> torch.Tensor:
            lp_N[share.source_N] = passed_N.cpu().numpy()
            return passed_N.sum()

        with torch.no_grad():
            self._run(self._passes(batch, only_used=False), keep, is_training=False)
        self._add_up_shares(torch.from_numpy(lp_N))
        return ForwardResult(
            [lp_N[start:stop].tobytes() for start, stop in pairwise(batch.starts.tolist())]
        )

    def check_forward_backward(self, args: ForwardBackward) -> None:
        self._require_training()
        check_samples(args.batch, self._max_positions)
        check_one_target(args.batch)
        loss_batch(args, self.vocab_size)

    @collective
    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult:
        """Run passes and add their gradients.

        Raises: CallerError: the loss or a gradient is not finite; the gradients are spoilt.
        """
        self._require_training()
        batch = loss_batch(args, self.vocab_size)
        packed = self._passes(batch, only_used=True)
        rows: list[torch.Tensor] = []

        def loss_of(share: Share, output: torch.Tensor) -> torch.Tensor:
            lp_N, entropy_N = output if args.entropy else (output, None)
            q_N = torch.from_numpy(share.q_N).to(lp_N.device)
            coefficient_N = torch.from_numpy(share.coefficient_N).to(lp_N.device)
            loss = loss_sum(args, lp_N, q_N, coefficient_N)
            rows.append(pass_metrics(args, loss, lp_N, q_N, coefficient_N, entropy_N=entropy_N))
            return loss

        self._gradients.begin()
        self._run(packed, loss_of, is_training=True, with_entropy=args.entropy)
        self._gradients.reduce()
        totals = self._combined_shares(metric_names(args), rows)
        return self._result(args, batch, totals, sum(item.index_N.size for item in packed))

    def grad_norm(self, training: Training) -> float:
        square = self._gradients.squared(self._owned)
        dist.all_reduce(square)
        return math.sqrt(square.item())

    @collective
    def weights_sha256(self) -> str:
        views = self._tensors.views(self._layout.weights)
        return weights_digest(
            self.version_slots, self.holdings, views, self._ranks.rank, self._dtype
        )

    def weights_exchanged(self, name: str) -> None:
        """Do nothing: passes read the weights and never their masters."""

    def _join_parallel_groups(self, spec: DeploymentSpec) -> None:
        """Make Megatron's process groups. Its order tp, cp, ep, dp, pp matches how `layouts`
        numbers ranks."""
        layout = spec.layout
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=math.ceil(self._ranks.timeout_s / 60),
            create_gloo_process_groups=False,
        )
        self._group.callback(parallel_state.destroy_model_parallel)

    def _build_stage(self, spec: DeploymentSpec, sizes: Sizes, model: PreTrainedModel) -> Stage:
        body: Any = model.base_model
        frequencies = body.rotary_emb.inv_freq.to(self._tensors.device)
        epsilon = float(model.config.rms_norm_eps)
        config = transformer_config(sizes, spec.layout, epsilon, TORCH_DTYPES[self._dtype])
        # Never train(): dropout of probability 0 would still draw from the global generator.
        stage = Stage(config, sizes, self._place, frequencies)
        stage.eval()
        stage.requires_grad_(spec.trainable and spec.model.adapter is None)
        if spec.activation_checkpointing:
            recompute(stage.decoder.layers)
        return stage

    def _place_base(self, spec: DeploymentSpec, sizes: Sizes, heap: DeviceMemory) -> BaseMemory:
        """Make every parameter of the stage a view of the node's copy of this rank's part of the
        base. Ranks of other replicas and deployments map the same copy."""
        layout = _base_layout(spec, sizes, self._ranks.rank)
        base = BaseMemory(spec.model, layout.slots, layout.heap_bytes, self._ranks, heap)
        made_of = parameters(sizes, self._place)
        dtype = TORCH_DTYPES[self._dtype]
        for name, parameter in self._stage_parameters(made_of).items():
            start = layout.weights.slots[next(iter(made_of[name]))].offset
            num_bytes = parameter.numel() * dtype.itemsize
            flat = base.tensor[start : start + num_bytes].view(dtype)
            parameter.data = flat.view(parameter.shape)
        return base

    def _add_adapter(self, adapter: Adapter, sizes: Sizes) -> None:
        """Make the layers add the adapter, whose matrices and gradients are views of the heap."""
        training = self._layout.training
        matrices: dict[str, nn.Parameter] = {}
        for name, view in self._tensors.views(self._layout.weights).items():
            matrices[name] = nn.Parameter(view.new_empty(0), requires_grad=training is not None)
            # Assigning to `data` hides later changes of the heap from autograd.
            matrices[name].data = view
        if training is not None:
            for name, gradient in self._tensors.views(training.gradients).items():
                accumulate(matrices[name], gradient)
        layers = adapted(sizes, self._place, adapter)
        scale, tp = adapter.alpha / adapter.rank, self._place.layout.tp
        adapt(self._stage, layers, matrices, scale, tp=tp)

    def _stage_parameters(self, made_of: Parameters) -> dict[str, nn.Parameter]:
        """Return the stage's parameters by name. Raises: InternalError: they are not those of the
        model."""
        stage_parameters = dict(self._stage.named_parameters())
        if stage_parameters.keys() != made_of.keys():
            raise InternalError(
                "the stage's parameters differ from the plan: "
                f"{sorted(stage_parameters.keys() ^ made_of.keys())}"
            )
        return stage_parameters

    def _move_parameters(self, made_of: Parameters) -> None:
        """Make every parameter a view of the heap, and accumulate its gradient there."""
        training = self._layout.training
        stage_parameters = self._stage_parameters(made_of)
        for name, slices in made_of.items():
            parameter = stage_parameters[name]
            weights = self._layout.weights
            first = weights.slots[next(iter(slices))]
            parameter.data = self._tensors.view(first, parameter.shape)
            if training is not None:
                place = training.gradients.slots[next(iter(slices))]
                accumulate(parameter, self._tensors.view(place, parameter.shape))

    def _fill(self, model: PreTrainedModel) -> None:
        """Fill weights and masters from a model."""
        training = self._layout.training
        regions = [self._layout.weights]
        if training is not None and training.masters is not None:
            regions.append(training.masters)
        drawn_weights = dict(
            part
            for name, parameter in own_parameters(model).items()
            for part in self._shapes.split(name, parameter)
        )
        box_of = self.holdings[self._ranks.rank]
        for region in regions:
            for name, view in self._tensors.views(region).items():
                box = box_of[name]
                inside = tuple(
                    slice(start, start + size)
                    for start, size in zip(box.start, box.size, strict=True)
                )
                view.copy_(drawn_weights[name].detach()[inside])

    def _run(
        self,
        packed: Sequence[Pass],
        finish: Finish,
        *,
        is_training: bool,
        with_entropy: bool = False,
    ) -> None:
        """Run passes through the pipeline: forward and, if training, backward. Collective in a
        replica."""
        if not packed:
            return

        at, layout = self._place.at, self._place.layout

        def end(of: Share, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            return finish(of, output), torch.ones((), dtype=torch.int), None

        def step(waiting: Iterator[Pass], stage: Stage) -> tuple[torch.Tensor, Callable[..., Any]]:
            share = share_of(next(waiting), layout.cp, at.cp, layout.tp)
            return stage(share, with_entropy=with_entropy), functools.partial(end, share)

        run = get_forward_backward_func()
        run(
            forward_step_func=step,
            data_iterator=iter(packed),
            model=[self._stage],
            num_microbatches=len(packed),
            # Passes differ in size, so stages send each other the shapes.
            seq_length=1,
            micro_batch_size=1,
            forward_only=not is_training,
        )

    def _passes(self, batch: Batch, *, only_used: bool) -> list[Pass]:
        """Return the passes over this replica's data.

        With expert parallelism, replicas send tokens to each other's experts. Idle passes then
        follow until every replica has as many passes as the busiest one. Collective in that case.
        """
        local_passes = [*passes(batch, only_used=only_used)]
        if self._place.layout.ep > 1:
            local_passes += [idle_pass()] * (
                largest(len(local_passes), self._ranks) - len(local_passes)
            )
        return local_passes

    def _combined_shares(self, names: list[str], rows: list[torch.Tensor]) -> torch.Tensor:
        """Combine the metrics of all passes of all context-parallel ranks. Collective among
        them."""
        totals = combined(names, rows)
        if self._place.layout.cp == 1:
            return totals
        shares = [torch.empty_like(totals) for _ in range(self._place.layout.cp)]
        dist.all_gather(shares, totals, group=parallel_state.get_context_parallel_group())
        return combined(names, shares)

    def _add_up_shares(self, values: torch.Tensor) -> None:
        """Sum values in host memory over the context-parallel ranks. Collective among them."""
        if self._place.layout.cp > 1:
            dist.all_reduce(values, group=parallel_state.get_context_parallel_group())


def _check(spec: DeploymentSpec, ranks: RankGroup) -> Sizes:
    """Return a model's sizes. Raises: CallerError: it cannot be trained in this layout."""
    check_layout(spec, ranks)
    config = model_config(spec.model)
    sizes = sizes_of(config)
    check_sizes(sizes, spec.layout)
    _check_positions(config)
    if spec.model.adapter is not None and sizes.experts is not None:
        raise CallerError(
            "the megatron backend does not support adapters on a model with experts",
            code=Code.FAILED_PRECONDITION,
            field="model.adapter",
            remedy="use the backend 'fsdp', with attention layers as targets",
        )
    return sizes


def _check_positions(config: PreTrainedConfig) -> None:
    """Check that the model's positions are supported.

    Raises: CallerError: attention uses windows, or the rotary embedding is more than frequencies.
    """
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    for field, feature, is_unsupported in (
        ("sliding_window", "sliding-window attention", has_windows(config)),
        ("rope_parameters", f"rope_type {kind!r}", kind not in {"default", "linear", "llama3"}),
    ):
        if is_unsupported:
            raise CallerError(
                f"the megatron backend does not support {feature}",
                code=Code.FAILED_PRECONDITION,
                field=f"model.config.{field}",
                remedy="use the backend 'fsdp'",
            )


def _place(spec: DeploymentSpec, rank: int) -> Place:
    return Place(spec.layout, coordinates(rank, spec.layout))


def _layout(spec: DeploymentSpec, sizes: Sizes, rank: int) -> Layout:
    """Lay out a rank's state: that of its adapter if it has one, otherwise of all its weights."""
    place = _place(spec, rank)
    shards = _shards(sizes, place)
    if spec.model.adapter is not None:
        shards = matrix_shards(adapted(sizes, place, spec.model.adapter))
    return lay_out(
        shards,
        trainable=spec.trainable,
        optimizer_on=spec.optimizer_on,
        dtype=weights_dtype(spec.model),
    )


def _base_layout(spec: DeploymentSpec, sizes: Sizes, rank: int) -> Layout:
    """Lay out a rank's part of an adapter's base."""
    shards = _shards(sizes, _place(spec, rank))
    return lay_out(shards, trainable=False, dtype=weights_dtype(spec.model))


def _shards(sizes: Sizes, place: Place) -> dict[str, Shard]:
    made_of = parameters(sizes, place)
    return {name: shard for slices in made_of.values() for name, shard in slices.items()}
