"""Imports of a fork server, made once so that a rank starts in a fraction of a second.

Nothing here may initialise CUDA: a forked child could not use it then. Imported code may ask
whether there is a GPU, which initialises CUDA in torch unless `QUIET_CHECK` is set.
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
"""Modules that a backend's runtime imports only once it is used. Those of Qwen3 stand for the
modules that architectures have in common."""


def preload(backends: Sequence[str]) -> None:
    """Import these backends' runtimes, for every process that is forked afterwards."""
    config.set_for_children(*QUIET_CHECK)
    # Nothing of this is garbage: looking for some takes a fifth of the time.
    gc.disable()
    importlib.import_module("phaseloom.worker.rank.process")
    for backend in backends:
        module, _ = BACKENDS[backend]
        for name in (module, *_LAZY.get(backend, ())):
            importlib.import_module(name)
    # Ranks neither scan these objects in their collections nor copy their pages for it.
    gc.freeze()
    gc.enable()
