"""What a runtime adapter must do: one module per runtime, one line in the registry.

A backend owns no memory of its own state: every weight, gradient and optimizer tensor is a view
into the `Heap`, whose bytes the state manager moves. It is called from one thread, one call at a
time, never from the event loop. It uses no global random state: what it draws comes from seeds that
the operation names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from phaseloom.common.messages import (
    AdamParams,
    DeploymentSpec,
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    Generate,
    GenerateResult,
    OptimStepResult,
)
from phaseloom.common.statewire import TensorSlot
from phaseloom.worker.heap import Heap


class Backend(Protocol):
    kinds: frozenset[str]
    """Operation kinds that it can do; another is refused at admission."""
    slots: list[TensorSlot]
    """What lies where in the heap: weights first, contiguous, sorted by name."""

    def generate(self, args: Generate) -> GenerateResult:
        """Raises: CallerError, before anything happened."""
        ...

    def forward(self, args: Forward) -> ForwardResult: ...

    def check_forward_backward(self, args: ForwardBackward) -> None:
        """Raises: CallerError: what `forward_backward` could not do. Touches no state."""
        ...

    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult: ...

    def optim_step(self, adam: AdamParams) -> OptimStepResult: ...

    def weights_sha256(self) -> str: ...

    def save(self, directory: Path) -> None:
        """Write the whole state as safetensors files into an existing empty directory."""
        ...

    def load(self, directory: Path) -> None: ...

    def weights_changed(self) -> None:
        """The heap's bytes were replaced (load, sync): drop what was derived from them."""
        ...

    def close(self) -> None: ...


class BackendFactory(Protocol):
    @staticmethod
    def heap_bytes(spec: DeploymentSpec) -> int:
        """Bytes of managed state, alignment included."""
        ...

    def __call__(self, spec: DeploymentSpec, heap: Heap) -> Backend:
        """Build the model on the heap and fill it from the spec's seeds."""
        ...
