"""Low-rank adapters on the linear layers of a model whose own weights stay as they are (LoRA).

The state of a deployment with an adapter is that of the matrices A and B alone. They have the names
that `peft` gives them in files, so that a checkpoint is an adapter that it loads.
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

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import Adapter, ModelSpec

_PREFIX = "base_model.model."
"""The beginning of a parameter's name in `peft`'s files."""


@dataclass(frozen=True)
class Matrices:
    """An adapter's matrices for one layer."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def added(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y + scale·B·A·x."""
        return torch.add(y, F.linear(F.linear(x, self.a), self.b), alpha=self.scale)


Layers = Mapping[str, Matrices]
"""The matrices of an adapter, by the names of the layers."""


@dataclass
class RowAdapters:
    """The adapters of the rows of the next pass; all layers of a model share one.

    The base's part of a layer is computed for all rows at once, as if there were no adapters, then
    each adapter's part for its own rows.
    """

    groups: Sequence[tuple[torch.Tensor | None, Layers | None]] = field(default_factory=list)
    """(rows, adapter) pairs. Rows None: all rows; adapter None: the model's own. Empty: all rows
    have the model's own."""

    @contextmanager
    def of(self, groups: Sequence[tuple[torch.Tensor | None, Layers | None]]) -> Iterator[None]:
        """Use these groups in passes within the block."""
        self.groups = groups
        try:
            yield
        finally:
            self.groups = []


class LowRank(nn.Module):
    """A linear layer of the base, with weights W and bias b, and its adapter: it gives
    W·x + b + (alpha / rank)·B·A·x."""

    def __init__(self, name: str, base: nn.Linear, adapter: Adapter, rows: RowAdapters) -> None:
        """Args: name: the name of the layer in the model."""
        super().__init__()
        self.name, self.rows = name, rows
        # The same parameters, so that who shares them with another layer goes on to do so.
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(base.in_features, adapter.rank, bias=False)
        self.lora_B = nn.Linear(adapter.rank, base.out_features, bias=False)
        self.scale = adapter.alpha / adapter.rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
    """Put an adapter on a model's layers; A is drawn, B is zero.

    Raises: CallerError: the model has no linear layer of some target's name.
    """
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    layer_names = sorted({_last(name) for name in layers})
    for target in adapter.targets:
        if target not in layer_names:
            raise CallerError(
                f"the model has no linear layers called {target!r}",
                field="model.adapter.targets",
                remedy=f"use some of {', '.join(layer_names)}",
            )
    generator = torch.Generator().manual_seed(adapter.seed)
    rows = RowAdapters()
    for name in sorted(layers):
        if _last(name) in adapter.targets:
            added = LowRank(name, layers[name], adapter, rows)
            model.set_submodule(name, added)
            if not added.lora_A.weight.is_meta:
                bound = 1 / math.sqrt(added.lora_A.in_features)
                with torch.no_grad():
                    added.lora_A.weight.uniform_(-bound, bound, generator=generator)
                    added.lora_B.weight.zero_()


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are a deployment's state, by their names in files: the adapter's where
    the model has one, else all. Tied ones occur once."""
    adapted = {
        file_name(name, part): getattr(module, part).weight
        for name, module in model.named_modules()
        if isinstance(module, LowRank)
        for part in ("lora_A", "lora_B")
    }
    return adapted or dict(model.named_parameters())


def rows_of(model: nn.Module) -> RowAdapters:
    """The `RowAdapters` that an adapted model's layers share."""
    return next(module.rows for module in model.modules() if isinstance(module, LowRank))


def file_name(layer: str, part: str) -> str:
    """The name in files of `lora_A` or `lora_B` of a layer."""
    return f"{_PREFIX}{layer}.{part}.weight"


def layer_and_part(name: str) -> tuple[str, str]:
    """The layer, and `lora_A` or `lora_B`, of a tensor by its name in files; the part is empty
    where the tensor belongs to no adapter."""
    layer, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
    return (layer, part) if part in ("lora_A", "lora_B") else (name, "")


def adapter_config(spec: ModelSpec) -> dict[str, Any]:
    """The content of `adapter_config.json` beside an adapter's weights."""
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
        "target_modules": [*adapter.targets],
        "inference_mode": True,
    }


def _last(name: str) -> str:
    return name.rpartition(".")[2]
