"""Adapts Megatron-core to machines without a GPU and without Transformer Engine.

Megatron assumes both. Its pipeline schedule creates a tensor on `cuda`. Stages, experts and
sequence-parallel layers receive into memory of the current CUDA device, the router moves weights
there, and the token dispatcher uses a CUDA stream. If the heap is in host memory, these modules of
Megatron's see a stand-in for torch whose CUDA device is the CPU. torch itself is not changed, and
the stand-in is never used on a GPU. On every device, Megatron's random states are replaced by empty
ones, because nothing draws from them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Final

import torch
from megatron.core import utils
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.tensor_parallel import layers, mappings, random
from megatron.core.transformer.moe import moe_utils, router, token_dispatcher

_CPU: Final = torch.device("cpu")
_FACTORIES: Final = frozenset({"empty", "ones", "tensor", "zeros"})


class _Stream:
    """A CUDA stream on the CPU. Its work is always done, and all instances are the same stream."""

    def __eq__(self, stream: object) -> bool:
        return isinstance(stream, _Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        """Do nothing: all work is done already."""

    def wait_stream(self, stream: _Stream) -> None:
        """Do nothing: all work is done already."""


class _TorchOnCpu:
    """A stand-in for torch that puts everything meant for `cuda` on the CPU."""

    cuda = SimpleNamespace(
        current_device=lambda: _CPU,
        synchronize=lambda: None,
        Stream=_Stream,
        current_stream=_Stream,
        stream=nullcontext,
    )

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch, name)
        if name not in _FACTORIES:
            return attribute

        def make_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = attribute(*args, **{**kwargs, "device": _CPU})
            return tensor

        return make_on_cpu


class _NoRandomStates(random.CudaRNGStatesTracker):  # type: ignore[misc]
    """A stand-in for the random states from which sequence-parallel layers would draw dropout."""

    def fork(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()


def use(device: torch.device) -> None:
    """Make Megatron work on this kind of device from now on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    seen = _TorchOnCpu() if device.type == "cpu" else torch
    for module in (
        layers,
        mappings,
        p2p_communication,
        router,
        schedules,
        token_dispatcher,
        utils,
    ):
        module.torch = seen
    random._CUDA_RNG_STATE_TRACKER = _NoRandomStates()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    to_host = _in_host_memory if device.type == "cpu" else moe_utils.maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    # Without Transformer Engine, the router looks up a name that was never imported.
    vars(moe_utils).setdefault("te_general_gemm", None)


def _in_host_memory(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the tensor itself, because it is in host memory already."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
