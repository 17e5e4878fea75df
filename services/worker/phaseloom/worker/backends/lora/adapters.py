"""Low-rank adapters (LoRA) on the linear layers of a frozen base model.

The state of a deployment with an adapter consists of the matrices A and B only. Their names are
those of `peft`, so `peft` can load a checkpoint as an adapter.

Shapes: R rows of a pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import Adapter, ModelSpec
from phaseloom.worker.backends.lora.targets import is_target, names_group

_PREFIX = "base_model.model."
"""Prefix of parameter names in `peft`'s files."""


@dataclass(frozen=True)
class Matrices:
    """The matrices of an adapter for one layer."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def added(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y + scale·B·A·x."""
        return torch.add(y, F.linear(F.linear(x, self.a), self.b), alpha=self.scale)


Layers = Mapping[str, Matrices]
"""The matrices of an adapter, by layer name."""


@dataclass
class RowAdapters:
    """The adapters of the rows of the next pass. All layers of a model share one object.

    A layer computes the base's part for all rows at once, then each adapter's part for its own
    rows.
    """

    groups: Sequence[tuple[torch.Tensor | None, Layers | None]] = field(default_factory=list)
    """(rows, adapter) pairs. Rows None stands for all rows, adapter None for the model's own. If
    empty, all rows use the model's own adapter."""

    @contextmanager
    def of(self, groups: Sequence[tuple[torch.Tensor | None, Layers | None]]) -> Iterator[None]:
        """Use these groups for passes within the block."""
        self.groups = groups
        try:
            yield
        finally:
            self.groups = []


class LowRank(nn.Module):
    """A linear layer of the base with its adapter: W·x + b + (alpha / rank)·B·A·x."""

    def __init__(
        self, name: str, base: nn.Linear | Conv1D, adapter: Adapter, rows: RowAdapters
    ) -> None:
        """Args: name: the layer's name in the model."""
        super().__init__()
        self.name, self.rows = name, rows
        # The same parameter objects, so that weights tied to another layer stay tied.
        self.weight, self.bias = base.weight, base.bias
        self.is_transposed = isinstance(base, Conv1D)
        """Whether W is stored as (inputs, outputs), as GPT-2 does."""
        sizes = base.weight.shape if self.is_transposed else base.weight.shape[::-1]
        self.lora_A = nn.Linear(sizes[0], adapter.rank, bias=False)
        self.lora_B = nn.Linear(adapter.rank, sizes[1], bias=False)
        self.scale = adapter.alpha / adapter.rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_transposed:  # the same product as `Conv1D`'s, to the bit
            flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
            y = flat.view(*x.shape[:-1], -1)
        else:
            y = F.linear(x, self.weight, self.bias)
        own_matrices = Matrices(self.lora_A.weight, self.lora_B.weight, self.scale)
        if not self.rows.groups:
            return own_matrices.added(x, y)
        for index_R, layers in self.rows.groups:
            matrices = own_matrices if layers is None else layers.get(self.name)
            if matrices is None:
                continue
            if index_R is None:
                y = matrices.added(x, y)
            else:
                y[index_R] = matrices.added(x[index_R], y[index_R])
        return y


def adapt(model: PreTrainedModel, adapter: Adapter) -> None:
    """Put an adapter on a model's layers. A is drawn from the adapter's seed; B is zero.

    Raises: CallerError: a name matches no linear layer of the model, or all groups are empty.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    adapted = [name for name in sorted(layers) if is_target(name, adapter.targets)]
    for target in adapter.targets:
        # A model may lack a group: fused experts are not linear layers, for example.
        is_used = any(is_target(name, [target]) for name in adapted)
        if not adapted or not (is_used or names_group(target)):
            raise CallerError(
                f"the model has no linear layer named {target!r}",
                field="model.adapter.targets",
                remedy=f"choose from {', '.join(sorted({_last(name) for name in layers}))}",
            )
    # Drawn in order of names by a generator of its own: the same adapter on every backend.
    generator = torch.Generator().manual_seed(adapter.seed)
    rows = RowAdapters()
    for name in adapted:
        added = LowRank(name, layers[name], adapter, rows)
        model.set_submodule(name, added)
        if not added.lora_A.weight.is_meta:
            bound = 1 / math.sqrt(added.lora_A.in_features)
            with torch.no_grad():
                added.lora_A.weight.uniform_(-bound, bound, generator=generator)
                added.lora_B.weight.zero_()


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are a deployment's state, by their names in files.

    These are the adapter's parameters if the model has one, otherwise all. Tied ones occur once.
    """
    adapted = {
        file_name(name, part): getattr(module, part).weight
        for name, module in model.named_modules()
        if isinstance(module, LowRank)
        for part in ("lora_A", "lora_B")
    }
    return adapted or dict(model.named_parameters())


def rows_of(model: nn.Module) -> RowAdapters:
    """Return the `RowAdapters` that the layers of an adapted model share."""
    return next(module.rows for module in model.modules() if isinstance(module, LowRank))


def file_name(layer: str, part: str) -> str:
    """Return the name in files of a layer's `lora_A` or `lora_B`."""
    return f"{_PREFIX}{layer}.{part}.weight"


def layer_and_part(name: str) -> tuple[str, str]:
    """Split a tensor's name in files into the layer and `lora_A` or `lora_B`. The second part is
    empty if the tensor belongs to no adapter."""
    layer, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
    return (layer, part) if part in ("lora_A", "lora_B") else (name, "")


def adapter_config(spec: ModelSpec, model: nn.Module) -> dict[str, Any]:
    """Return the content of the `adapter_config.json` that belongs to an adapter's weights.

    Args: model: the model with the adapter; may be without content.
    """
    adapter = spec.adapter
    assert adapter is not None
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.registered,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _layer_names(model, adapter),
        "fan_in_fan_out": any(
            module.is_transposed for module in model.modules() if isinstance(module, LowRank)
        ),
        "inference_mode": True,
    }


def _layer_names(model: nn.Module, adapter: Adapter) -> list[str]:
    """Return the targets as `peft` knows them, without groups."""
    if not any(map(names_group, adapter.targets)):
        return [*adapter.targets]
    others = {_last(name) for name, module in model.named_modules() if _is_plain(name, module)}
    adapted = [name for name, module in model.named_modules() if isinstance(module, LowRank)]
    names = {
        ".".join(name.split(".")[-2:]) if _last(name) in others else _last(name) for name in adapted
    }
    return sorted(names)


def _is_plain(name: str, module: nn.Module) -> bool:
    """Whether a module is a linear layer without an adapter."""
    return isinstance(module, nn.Linear | Conv1D) and not layer_and_part(name)[1]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
