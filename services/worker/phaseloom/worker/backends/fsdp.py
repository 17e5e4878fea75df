"""Training backend: a Hugging Face causal LM under FSDP2, all of whose state lives in the heap.

Invariants
- Parameters, gradients and AdamW state are views into the heap and never re-allocated: FSDP2 adds
  gradients in place to the ones preset here, the optimizer works on the flat regions. So the heap's
  bytes are the whole state, at any moment between two calls.
- After every pass parameters are sharded again, so FSDP2 keeps no copy that a load would leave
  stale.
- Losses are sums, so gradients are summed over ranks too, never averaged.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from phaseloom.common.errors import CallerError
from phaseloom.common.messages import (
    AdamParams,
    DeploymentSpec,
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    Generate,
    GenerateResult,
    OptimStepResult,
)
from phaseloom.worker.backends import checkpoint, scoring
from phaseloom.worker.backends.batch import loss_batch
from phaseloom.worker.backends.digest import weights_sha256
from phaseloom.worker.backends.layout import Layout, plan
from phaseloom.worker.backends.losses import loss_sum
from phaseloom.worker.backends.model import (
    HeapTensors,
    as_arrays,
    build_model,
    parameter_shapes,
    return_freed_memory,
)
from phaseloom.worker.backends.packing import Pass, passes
from phaseloom.worker.heap import Heap

READING = frozenset({"forward", "save_state"})
TRAINING = frozenset({"forward_backward", "optim_step"})
STATE = frozenset({"load_state", "publish_weights", "sync_weights"})


@dataclass(frozen=True)
class _Training:
    """The flat regions that the optimizer works on, padding included (it stays zero)."""

    weights: torch.Tensor
    gradients: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor


class FsdpBackend:
    """See `Backend`. One rank, world size 1: the heap holds the one shard, hence whole tensors."""

    def __init__(self, spec: DeploymentSpec, heap: Heap) -> None:
        self._layout = _layout(spec)
        self._tensors = HeapTensors(heap)
        self.slots = self._layout.slots
        self.kinds = READING | STATE | (TRAINING if spec.trainable else frozenset())
        self._store = _join_process_group()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        self._model = build_model(spec.model)
        self._model.requires_grad_(spec.trainable)
        self.vocab_size = int(self._model.config.vocab_size)
        self._scorer = scoring.Scorer(self._model)
        _shard(self._scorer, self._model._no_split_modules or (), mesh)
        _move_parameters(self._scorer, self._tensors.views(self._layout.weights))
        self._training = self._prepare_training(mesh) if spec.trainable else None
        return_freed_memory()

    @staticmethod
    def heap_bytes(spec: DeploymentSpec) -> int:
        return _layout(spec).num_bytes

    def generate(self, args: Generate) -> GenerateResult:
        raise CallerError(
            "the fsdp backend does not generate",
            field="args.type",
            remedy="send generate to a deployment with the backend 'sampler'",
        )

    def forward(self, args: Forward) -> ForwardResult:
        with torch.no_grad():
            return scoring.forward(self._scorer, args, self.vocab_size)

    def check_forward_backward(self, args: ForwardBackward) -> None:
        self._trained()
        loss_batch(args, self.vocab_size)

    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult:
        """Raises: CallerError: loss or gradients are not finite; the gradients are spoilt then."""
        training = self._trained()
        loss = 0.0
        num_tokens = 0
        for packed in passes(loss_batch(args, self.vocab_size), only_used=True):
            num_tokens += packed.index_N.size
            loss += self._backward(args, packed)
        if not (math.isfinite(loss) and math.isfinite(training.gradients.sum().item())):
            raise CallerError(
                f"the loss ({loss}) or a gradient of it is not finite",
                field="args.batch",
                remedy="bound the advantages, and check logprobs: exp(lp - logprobs) overflows",
            )
        return ForwardBackwardResult({"loss:sum": loss, "num_tokens:sum": float(num_tokens)})

    def optim_step(self, adam: AdamParams) -> OptimStepResult:
        """Raises: CallerError, before anything happened."""
        training = self._trained()
        _check_adam(adam)
        norm = self._grad_norm(training.gradients)
        if 0 < adam.grad_clip_norm < norm:
            training.gradients.mul_(adam.grad_clip_norm / norm)
        with torch.no_grad():
            adamw(
                [training.weights],
                [training.gradients],
                [training.exp_avg],
                [training.exp_avg_sq],
                [],
                [training.step],
                fused=True,
                amsgrad=False,
                beta1=adam.beta1,
                beta2=adam.beta2,
                lr=adam.learning_rate,
                weight_decay=adam.weight_decay,
                eps=adam.eps,
                maximize=False,
            )
        training.gradients.zero_()
        return OptimStepResult({"grad_norm:mean": norm})

    def weights_sha256(self) -> str:
        return weights_sha256(as_arrays(self._tensors.views(self._layout.weights)))

    def save(self, directory: Path) -> None:
        checkpoint.save(directory, self._model.config, self._layout, self._tensors)

    def load(self, directory: Path) -> None:
        checkpoint.load(directory, self._layout, self._tensors)

    def weights_changed(self) -> None:
        """Nothing is derived from the weights: FSDP2 re-shards after every pass."""

    def close(self) -> None:
        if self._store:
            dist.destroy_process_group()
            self._store.cleanup()
            self._store = None

    def _trained(self) -> _Training:
        if self._training is None:
            raise CallerError(
                "the deployment is not trainable",
                field="args.type",
                remedy="declare it with trainable = true",
            )
        return self._training

    def _prepare_training(self, mesh: DeviceMesh) -> _Training:
        weights, layout, tensors = self._layout.weights, self._layout.training, self._tensors
        assert layout is not None
        gradients = tensors.views(layout.gradients)
        for name, parameter in self._model.named_parameters():
            assert isinstance(parameter, DTensor)
            parameter.grad = DTensor.from_local(
                gradients[name], mesh, parameter.placements, run_check=False
            )
        return _Training(
            tensors.flat(weights),
            tensors.flat(layout.gradients),
            tensors.flat(layout.exp_avg),
            tensors.flat(layout.exp_avg_sq),
            tensors.view(layout.step),
        )

    def _backward(self, args: ForwardBackward, packed: Pass) -> float:
        lp_N = self._scorer(packed)
        q_N, coefficient_N = torch.from_numpy(packed.q_N), torch.from_numpy(packed.coefficient_N)
        loss = loss_sum(args, lp_N, q_N, coefficient_N)
        torch.autograd.backward(loss)
        return loss.item()

    def _grad_norm(self, gradients: torch.Tensor) -> float:
        """Over all ranks; each holds a shard, so squares add up."""
        square = gradients.square().sum()
        dist.all_reduce(square)
        return math.sqrt(square.item())


def _check_adam(adam: AdamParams) -> None:
    limits = {"beta1": 1.0, "beta2": 1.0}
    for name in adam.__struct_fields__:
        value = getattr(adam, name)
        if not 0 <= value < limits.get(name, math.inf):
            raise CallerError(
                f"{value} is out of range",
                field=f"args.adam.{name}",
                remedy="use a finite number from 0 on, below 1 for betas",
            )


def _layout(spec: DeploymentSpec) -> Layout:
    return plan(parameter_shapes(spec.model), trainable=spec.trainable)


def _join_process_group() -> tempfile.TemporaryDirectory[str] | None:
    """Make the process's group if there is none yet; the directory of its store, owned by us.

    A store in a file needs no port that could collide.
    """
    if dist.is_initialized():
        return None
    directory = tempfile.TemporaryDirectory(prefix="phaseloom-store-")
    init_method = (Path(directory.name) / "store").as_uri()
    dist.init_process_group("gloo", init_method=init_method, rank=0, world_size=1)
    return directory


def _shard(root: nn.Module, blocks: Iterable[str], mesh: DeviceMesh) -> None:
    """Shard each block (a transformer layer, by class name) and the root with the rest."""
    names = set(blocks)
    layers = [module for module in root.modules() if type(module).__name__ in names]
    for module in [*layers, root]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _move_parameters(scorer: scoring.Scorer, views: dict[str, torch.Tensor]) -> None:
    """Make every local shard a view into the heap, then let FSDP2 rebuild what it derives."""
    for name, parameter in scorer.model.named_parameters():
        assert isinstance(parameter, DTensor)
        views[name].copy_(parameter.to_local().detach())
        parameter._local_tensor = views[name]
    apply: Callable[..., nn.Module] = scorer._apply
    apply(lambda tensor: tensor)
