"""Adaptation of Megatron-core to machines without a GPU or Transformer Engine, which it counts on.

Its pipeline's schedule counts on a tensor on `cuda`; stages, experts and sequence-parallel layers
receive into memory of the current CUDA device; its router moves weights there, and its dispatcher
of tokens has a CUDA stream. Where the heap is in host memory, these modules of Megatron's see a
torch whose CUDA device is the processor; torch itself stays as it is, and nothing of this runs on a
GPU. On any device Megatron's random states are none, because nothing draws from them.
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
    """A stream that is never behind; it is the only one."""

    def __eq__(self, stream: object) -> bool:
        return isinstance(stream, _Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        """Do nothing: all work that was asked for is done."""

    def wait_stream(self, stream: _Stream) -> None:
        """Do nothing: all work of the other stream is done."""


class _TorchOnCpu:
    """torch, where everything made on or asked of `cuda` is of the processor."""

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
    """A stand-in for the random states that sequence-parallel layers draw dropout from; there are
    none."""

    def fork(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()


def use(device: torch.device) -> None:
    """Let Megatron work on this kind of device from now on."""
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
    # Where there is no Transformer Engine, the router looks for a name that was not imported.
    vars(moe_utils).setdefault("te_general_gemm", None)


def _in_host_memory(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The tensor itself, which is in host memory already."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
