"""Megatron-core where there is no GPU, which it names on its own in a few places.

Its pipeline's schedule counts on a tensor on `cuda` and receives into memory of the current CUDA
device. Where the heap is in host memory, these modules of Megatron's see a torch whose CUDA device
is the processor; torch itself stays as it is. Nothing of this runs on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import torch
from megatron.core.pipeline_parallel import p2p_communication, schedules

_CPU: Final = torch.device("cpu")
_FACTORIES: Final = frozenset({"empty", "ones", "tensor", "zeros"})


class _TorchOnCpu:
    """torch, but what is made or asked of `cuda` is of the processor."""

    cuda = SimpleNamespace(current_device=lambda: _CPU, synchronize=lambda: None)

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in _FACTORIES:
            return found

        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            made: torch.Tensor = found(*args, **{**kwargs, "device": _CPU})
            return made

        return make


def use(device: torch.device) -> None:
    """Let Megatron work on this kind of device from now on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    seen = _TorchOnCpu() if device.type == "cpu" else torch
    for module in (p2p_communication, schedules):
        module.torch = seen
