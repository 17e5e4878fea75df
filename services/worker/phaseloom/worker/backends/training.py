"""Parts that training backends have in common: masters, AdamW over flat regions, checks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import AdamParams
from phaseloom.worker.backends.layout import Region, TrainingLayout
from phaseloom.worker.backends.model import HeapTensors
from phaseloom.worker.backends.optimizer import Hyperparameters, Moments, take_step


@dataclass(frozen=True)
class Masters:
    """Weights and the masters that they are rounded from, tensor by tensor; empty where the weights
    are their own masters."""

    weights: list[torch.Tensor]
    masters: list[torch.Tensor]

    @staticmethod
    def of(tensors: HeapTensors, weights: Region, masters: Region | None) -> Masters:
        if masters is None:
            return Masters([], [])
        made = Masters([*tensors.views(weights).values()], [*tensors.views(masters).values()])
        made.round()
        return made

    def round(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)

    def fill(self) -> None:
        """Make masters of weights that came without any: all masters are zero then."""
        if not any(master.any() for master in self.masters):
            for weight, master in zip(self.weights, self.masters, strict=True):
                master.copy_(weight)


@dataclass
class Training:
    """The flat float32 regions that the optimizer works on, padding included (it stays zero)."""

    weights: torch.Tensor
    """The masters or, where the weights are float32, the weights."""
    gradients: torch.Tensor
    masters: Masters
    moments: Moments | None = None
    """The moments; None: their host memory is not there yet (`Backend.use_host_memory`)."""

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
        """Take a step and zero the gradients. Args: norm: the norm of all ranks' gradients
        together."""
        assert self.moments is not None
        if 0 < adam.grad_clip_norm < norm:
            self.gradients.mul_(adam.grad_clip_norm / norm)
        hyperparameters = Hyperparameters(
            adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay
        )
        with torch.no_grad():
            take_step(self.weights, self.gradients, self.moments, hyperparameters)
            self.masters.round()
        self.gradients.zero_()


def check_adam(adam: AdamParams) -> None:
    """Check AdamW's hyperparameters. Raises: CallerError: one is out of range."""
    limits = {"beta1": 1.0, "beta2": 1.0}
    for name in adam.__struct_fields__:
        value = getattr(adam, name)
        if not 0 <= value < limits.get(name, math.inf):
            raise CallerError(
                f"{value} is out of range",
                field=f"args.adam.{name}",
                remedy="use a finite number from 0 on, below 1 for betas",
            )


def not_trainable() -> CallerError:
    return CallerError(
        "the deployment is not trainable",
        field="args.type",
        remedy="declare it with trainable = true",
    )


def not_finite(loss: float) -> CallerError:
    return CallerError(
        f"the loss ({loss}) or a gradient of it is not finite",
        field="args.batch",
        remedy="bound the advantages, and check logprobs: exp(lp - logprobs) overflows",
    )


def recompute(layers: Iterable[nn.Module]) -> None:
    """Have each layer keep its inputs only, and compute the rest again in the backward pass, within
    the hooks by which a runtime gathers its weights."""
    for layer in layers:
        # There is no dropout, so no random state to restore.
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
