"""Imports of a fork server, made once so that a rank starts in a fraction of a second.

Nothing here may initialise CUDA, because forked children could not use it. Imported code may check
for a GPU, which initialises CUDA in torch unless `QUIET_CHECK` is set.
"""

from __future__ import annotations

import phaseloom.common.process.tcponly  # noqa: F401

# isort: split
import gc
import importlib
from collections.abc import Sequence
from typing import Final

from phaseloom.common.process import config
from phaseloom.worker.backends import BACKENDS
from phaseloom.worker.cuda.driver import QUIET_CHECK

_LAZY: Final = {
    "fsdp": ("torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3"),
    "sampler": ("transformers.models.qwen3.modeling_qwen3",),
    "megatron": ("transformers.models.qwen3.modeling_qwen3",),
    "vllm": (
        "transformers.models.qwen3.modeling_qwen3",
        "vllm.v1.engine.core",
        "vllm.v1.worker.gpu_worker",
        "vllm.model_executor.models.qwen3",
    ),
}
"""Modules that a backend's runtime imports only when it is used. The modules of Qwen3 stand for
those that all architectures share."""


def preload(backends: Sequence[str]) -> None:
    """Import these backends' runtimes for all processes that are forked afterwards."""
    config.set_for_children(*QUIET_CHECK)
    # Imports create no garbage, and searching for it takes a fifth of the time.
    gc.disable()
    importlib.import_module("phaseloom.worker.rank.process")
    for backend in backends:
        module, _ = BACKENDS[backend]
        for name in (module, *_LAZY.get(backend, ())):
            importlib.import_module(name)
    # Keep these objects out of the ranks' collections, which would also copy their pages.
    gc.freeze()
    gc.enable()
