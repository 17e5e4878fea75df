"""Parameters and gradients as views of the heap: whole tensors, or FSDP2's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from phaseloom.worker.backends import scoring
from phaseloom.worker.backends.layout import (
    Region,
)
from phaseloom.worker.backends.lora.adapters import own_parameters
from phaseloom.worker.backends.training import accumulate

Views = Mapping[str, torch.Tensor]
"""Tensors by parameter name."""


def transformer_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer layers, by the class names that `transformers` lists."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def shard_modules(
    root: scoring.Scorer,
    layers: list[nn.Module],
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
) -> None:
    """Shard each layer, then the root with everything else. An adapter's frozen base stays whole on
    every rank."""
    state = {*own_parameters(root.model).values()}
    frozen = {*root.parameters()} - state
    for module in [*layers, root]:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=precision,
            ignored_params=frozen,
        )
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Losses are sums, so FSDP2 must sum gradients over ranks and never average them.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def round_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Round parameters to a dtype. Buffers, such as rotary frequencies, keep theirs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def use_heap(model: nn.Module, filled: Views, used: Views, gradients: Views) -> None:
    """Make whole parameters views into the heap, and accumulate their gradients there.

    Args: filled: receives the parameters' values: the masters if there are any, from which the
             caller rounds the weights; otherwise the weights.
          used: the weights that the model computes with.
          gradients: empty if nothing is trained.
    """
    for name, parameter in own_parameters(model).items():
        filled[name].copy_(parameter.data)
        parameter.data = used[name]
        if name not in gradients:
            continue
        if gradients[name].dtype == parameter.dtype:
            parameter.grad = gradients[name]
        else:
            # Autograd cannot add to a float32 gradient of a bfloat16 parameter.
            accumulate(parameter, gradients[name])


def precision(masters: Region | None, dtype: torch.dtype) -> MixedPrecisionPolicy:
    if masters is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)


def preset_gradients(model: nn.Module, gradients: Views, mesh: DeviceMesh) -> None:
    """Make every shard's gradient a view into the heap. FSDP2 then adds to it in place."""
    for name, parameter in own_parameters(model).items():
        if name not in gradients:
            continue
        assert isinstance(parameter, DTensor)
        parameter.grad = DTensor.from_local(
            gradients[name],
            mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def move_parameters(scorer: scoring.Scorer, views: Views, padded: Views) -> None:
    """Make every local shard a view into the heap, then let FSDP2 rebuild its derived tensors.

    FSDP2 gathers from padded shards. It uses a tensor that already has the padding in place, but
    would copy an unpadded one out of the heap.
    """
    parameters = own_parameters(scorer.model)
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        views[name].copy_(parameter.to_local().detach())
        parameter._local_tensor = padded[name]
    # FSDP2 overrides `_apply` to rebuild its sharded parameters, so the identity is enough.
    apply: Callable[..., nn.Module] = scorer._apply
    apply(lambda tensor: tensor)
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        parameter._local_tensor = views[name]
