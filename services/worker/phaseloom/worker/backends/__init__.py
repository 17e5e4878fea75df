"""The registry of backends: one module or folder per runtime, one line here.

Importing this package imports no runtime, so an agent can list and refuse backends without torch.
`backend_factory` imports the runtime of the requested backend.
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
"""Name → (module, class)."""

RUNTIMES: Final[dict[str, tuple[str, ...]]] = {
    "fsdp": ("torch", "transformers"),
    "sampler": ("torch", "transformers"),
    "megatron": ("torch", "transformers", "megatron"),
    "vllm": ("torch", "transformers", "vllm"),
}
"""Name → top-level modules of its runtime. A backend that is missing here needs none."""

SHARING: Final = frozenset({"fsdp", "sampler"})
"""Backends that can share a process: each on its own device thread, each with one rank. After their
construction they change no state that belongs to the process."""


def missing_modules(name: str) -> list[str]:
    """Return the modules of a backend's runtime that this interpreter lacks. Imports nothing."""
    return [module for module in RUNTIMES.get(name, ()) if importlib.util.find_spec(module) is None]


def backend_factory(name: str) -> BackendFactory:
    """Import a backend's runtime and return its class.

    Raises: CallerError: the name is unknown.
            ImportError: the runtime is not installed here (see `missing_modules`).
    """
    if name not in BACKENDS:
        # Imported late because `make gpu-check` imports this package with only torch installed.
        from phaseloom.common.contract.errors import CallerError

        raise CallerError(
            f"unknown backend {name!r}",
            field="deployments.backend",
            remedy=f"use one of {', '.join(sorted(BACKENDS))}",
        )
    module, attribute = BACKENDS[name]
    return cast("BackendFactory", getattr(importlib.import_module(module), attribute))
