"""The backends by name: one module per runtime, one line here.

Importing this package imports no runtime; `backend_factory` imports the one that is asked for, so
that an agent can list and refuse backends without torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from phaseloom.worker.backends.base import BackendFactory

BACKENDS: Final[dict[str, tuple[str, str]]] = {
    "fsdp": ("phaseloom.worker.backends.fsdp.backend", "FsdpBackend"),
    "sampler": ("phaseloom.worker.backends.sampler.backend", "SamplerBackend"),
    "megatron": ("phaseloom.worker.backends.megatron.backend", "MegatronBackend"),
    "vllm": ("phaseloom.worker.backends.vllm.backend", "VllmBackend"),
    "noop": ("phaseloom.worker.backends.noop", "NoopBackend"),
}
"""name → (module, class)"""

RUNTIMES: Final[dict[str, tuple[str, ...]]] = {
    "fsdp": ("torch", "transformers"),
    "sampler": ("torch", "transformers"),
    "megatron": ("torch", "transformers", "megatron"),
    "vllm": ("torch", "transformers", "vllm"),
}
"""name → the top-level modules of its runtime; a backend that is not here needs none."""

SHARING: Final = frozenset({"fsdp", "sampler"})
"""Backends of which several may be in one process, each alone on its device thread, if each has one
rank: except while they are built, they change nothing that belongs to the process."""


def missing_modules(name: str) -> list[str]:
    """The modules of a backend's runtime that this interpreter lacks. Imports nothing."""
    return [module for module in RUNTIMES.get(name, ()) if importlib.util.find_spec(module) is None]


def backend_factory(name: str) -> BackendFactory:
    """Import the runtime of a backend.

    Raises: CallerError: there is no such backend.
            ImportError: its runtime is not installed here (`missing_modules`).
    """
    if name not in BACKENDS:
        # Not above: `make gpu-check` imports this package where only torch is installed.
        from phaseloom.common.contract.errors import CallerError

        raise CallerError(
            f"there is no backend {name!r}",
            field="deployments.backend",
            remedy=f"use one of {', '.join(sorted(BACKENDS))}",
        )
    module, attribute = BACKENDS[name]
    return cast("BackendFactory", getattr(importlib.import_module(module), attribute))
