"""Low-rank adapters on the linear layers of a model whose own weights stay as they are (LoRA).

The state of a deployment with an adapter is that of the matrices A and B alone. They have the names
that `peft` gives them in files, so that a checkpoint is an adapter that it loads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import Adapter, ModelSpec

_PREFIX = "base_model.model."
"""Before a parameter's name, in the names of `peft`."""


class LowRank(nn.Module):
    """A linear layer of the base, with weights W and bias b, and its adapter: it gives
    W·x + b + (alpha / rank)·B·A·x."""

    def __init__(self, base: nn.Linear, adapter: Adapter) -> None:
        super().__init__()
        # The same parameters, so that who shares them with another layer goes on to do so.
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(base.in_features, adapter.rank, bias=False)
        self.lora_B = nn.Linear(adapter.rank, base.out_features, bias=False)
        self.scale = adapter.alpha / adapter.rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(F.linear(x, self.lora_A.weight), self.lora_B.weight)
        return torch.add(F.linear(x, self.weight, self.bias), low, alpha=self.scale)


def adapt(model: PreTrainedModel, adapter: Adapter) -> None:
    """Put an adapter on a model's layers; A is drawn, B is zero.

    Raises: CallerError: the model has no linear layer of some target's name.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    known = sorted({_last(name) for name in layers})
    for target in adapter.targets:
        if target not in known:
            raise CallerError(
                f"the model has no linear layers called {target!r}",
                field="model.adapter.targets",
                remedy=f"use some of {', '.join(known)}",
            )
    generator = torch.Generator().manual_seed(adapter.seed)
    for name in sorted(layers):
        if _last(name) in adapter.targets:
            added = LowRank(layers[name], adapter)
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
        f"{_PREFIX}{name}.{part}.weight": getattr(module, part).weight
        for name, module in model.named_modules()
        if isinstance(module, LowRank)
        for part in ("lora_A", "lora_B")
    }
    return adapted or dict(model.named_parameters())


def adapter_config(spec: ModelSpec) -> dict[str, Any]:
    """What `adapter_config.json` has beside an adapter's weights."""
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
