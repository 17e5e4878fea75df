"""The base class of backends that train: masters, AdamW over flat regions, and shared `Backend`
calls."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from phaseloom.common.contract.checks import check_adam
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.kinds import MAX_NONFINITE
from phaseloom.common.contract.operations import (
    AdamParams,
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    Generate,
    OptimStep,
    OptimStepResult,
)
from phaseloom.worker.backends.base import RankGroup, Watch
from phaseloom.worker.backends.batch import Batch, logprobs_request, staleness_metrics
from phaseloom.worker.backends.layout import Layout, Region, TrainingLayout
from phaseloom.worker.backends.losses import metric_names
from phaseloom.worker.backends.model import HeapTensors, is_finite
from phaseloom.worker.backends.optimizer import Hyperparameters, Moments, take_step
from phaseloom.worker.backends.processgroup import Member, collective, largest


@dataclass(frozen=True)
class Masters:
    """Weights and the masters that they are rounded from, tensor by tensor. Empty if the weights
    are their own masters."""

    weights: list[torch.Tensor]
    masters: list[torch.Tensor]

    @staticmethod
    def of(tensors: HeapTensors, weights: Region, masters: Region | None) -> Masters:
        if masters is None:
            return Masters([], [])
        pairs = Masters([*tensors.views(weights).values()], [*tensors.views(masters).values()])
        pairs.round()
        return pairs

    def round(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)

    def fill(self) -> None:
        """If all masters are zero, fill them from the weights, which came without masters."""
        if not any(master.any() for master in self.masters):
            for weight, master in zip(self.weights, self.masters, strict=True):
                master.copy_(weight)


@dataclass
class Training:
    """The flat float32 regions for the optimizer. They include padding, which stays zero."""

    weights: torch.Tensor
    """The masters; the weights themselves if they are float32."""
    gradients: torch.Tensor
    masters: Masters
    moments: Moments | None = None
    """None until their host memory is there (`Backend.use_host_memory`)."""

    @staticmethod
    def of(
        tensors: HeapTensors, weights: Region, layout: TrainingLayout, masters: Masters
    ) -> Training:
        training = Training(
            tensors.flat(layout.masters or weights), tensors.flat(layout.gradients), masters
        )
        if not layout.is_on_host:
            training.find_moments(tensors, layout)
        return training

    def find_moments(self, tensors: HeapTensors, layout: TrainingLayout) -> None:
        flat = tensors.flat
        step = tensors.view(layout.step)
        self.moments = Moments(flat(layout.exp_avg), flat(layout.exp_avg_sq), step)

    def take_step(self, adam: AdamParams, norm: float) -> None:
        """Update the weights and zero the gradients. Args: norm: over the gradients of all
        ranks."""
        assert self.moments is not None
        # 0 stands for no clipping.
        if 0 < adam.grad_clip_norm < norm:
            self.gradients.mul_(adam.grad_clip_norm / norm)
        hyperparameters = Hyperparameters(
            adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay
        )
        with torch.no_grad():
            take_step(self.weights, self.gradients, self.moments, hyperparameters)
            self.masters.round()
        self.gradients.zero_()


class Base(Protocol):
    """The frozen weights under an adapter, which lie outside every heap."""

    def refill(self) -> None:
        """Copy the weights to the device again, if it has its own copy."""


class TrainingBackend(Member, ABC):
    """The part of a training `Backend` that does not depend on its runtime.

    The subclass sets the attributes, runs passes, and computes the norm of the gradients.
    """

    _name: str
    """The backend's name, for refusals."""
    _ranks: RankGroup
    _tensors: HeapTensors
    _layout: Layout
    _masters: Masters
    _training: Training | None
    """None if the deployment is not trainable."""
    _base: Base | None
    """The base of an adapter; None if all weights are in the heap."""
    _group: ExitStack
    """Leaves the process group."""

    @abstractmethod
    def forward(self, args: Forward) -> ForwardResult:
        """As `Backend.forward`."""

    @abstractmethod
    def grad_norm(self, training: Training) -> float:
        """Return the norm of all ranks' gradients together. Collective."""

    def use_host_memory(self, buffer: memoryview) -> None:
        self._tensors.use_host_memory(buffer)
        assert self._layout.training is not None
        self._require_training().find_moments(self._tensors, self._layout.training)

    def check_generate(self, args: Generate) -> None:
        raise CallerError(
            f"the {self._name} backend does not generate",
            field="args.type",
            remedy="send generate to a deployment with the backend 'sampler' or 'vllm'",
        )

    def generate(self, requests: Sequence[Generate], watch: Watch) -> None:
        for args in requests:
            self.check_generate(args)

    def check_optim_step(self, args: OptimStep) -> None:
        self._require_training()
        check_adam(args.adam)

    @collective
    def optim_step(self, args: OptimStep) -> OptimStepResult:
        """Update the weights. Raises: CallerError: the step cannot run; nothing has changed."""
        training = self._require_training()
        check_adam(args.adam)
        norm = self.grad_norm(training)
        training.take_step(args.adam, norm)
        return OptimStepResult({"grad_norm:mean": norm}, self.nonfinite_weights()[:MAX_NONFINITE])

    def nonfinite_weights(self) -> list[str]:
        weights = self._layout.weights
        # One sum over all of them, since models have thousands of tensors.
        if is_finite(self._tensors.flat(weights)):
            return []
        return self._tensors.nonfinite(weights.slots.values())

    def zero_gradients(self) -> None:
        if self._training is not None:
            self._training.gradients.zero_()

    def weights_changed(self) -> None:
        """Refill what depends on the weights: masters, if a version or checkpoint came without
        them, and the base's copy on the device."""
        if self._base is not None:
            self._base.refill()
        with torch.no_grad():
            self._masters.fill()

    def close(self) -> None:
        self._group.close()

    def _require_training(self) -> Training:
        """Return the training state. Raises: CallerError: there is none."""
        if self._training is None:
            raise CallerError(
                "the deployment is not trainable",
                field="args.type",
                remedy="declare the deployment with trainable = true",
            )
        return self._training

    def _result(
        self, args: ForwardBackward, batch: Batch, totals: torch.Tensor, num_tokens: int
    ) -> ForwardBackwardResult:
        """Check the accumulated gradients and build the result. Collective.

        Args: batch, totals, num_tokens: this rank's share, with the metrics of all its passes.
        Raises: CallerError: on some rank the loss or a gradient is not finite.
        """
        metrics = dict(zip(metric_names(args), totals.tolist(), strict=True))
        loss = metrics["loss:sum"]
        is_finite = math.isfinite(loss)
        # A single sum is enough: any inf or nan makes it non-finite.
        is_finite &= math.isfinite(self._require_training().gradients.sum().item())
        if largest(not is_finite, self._ranks):
            raise CallerError(
                f"the loss ({loss}) or one of its gradients is not finite",
                field="args.batch",
                remedy="bound the advantages, and check logprobs: the ratio "
                "exp(lp - logprobs) may overflow",
            )
        request = logprobs_request(args)
        return ForwardBackwardResult(
            {
                **metrics,
                "num_tokens:sum": float(num_tokens),
                **staleness_metrics(args, batch),
            },
            self.forward(request).logprobs if request else [],
        )


def accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Make the backward pass add a parameter's gradient to this tensor and free its own."""

    def add(done: torch.Tensor) -> None:
        assert done.grad is not None
        gradient.add_(done.grad)
        done.grad = None

    untyped: Any = parameter
    untyped.register_post_accumulate_grad_hook(add)


def recompute(layers: Iterable[nn.Module]) -> None:
    """Make each layer keep only its inputs and recompute the rest in the backward pass.

    The recomputation runs inside the hooks with which a runtime gathers the layer's weights.
    """
    for layer in layers:
        # There is no dropout, so no random state needs restoring.
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
