"""Backend that answers at once with well-formed, trivial results: for benches of the mesh alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

from phaseloom.common.arrays import length, pack_float32s, pack_int32s
from phaseloom.common.messages import (
    MUTATING_KINDS,
    READING_KINDS,
    AdamParams,
    DeploymentSpec,
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    Generate,
    GenerateResult,
    OptimStepResult,
    Sequence,
)
from phaseloom.worker.backends.layout import Layout, plan
from phaseloom.worker.heap import Heap

STATE_FILE = "state.bin"


class NoopBackend:
    """See `Backend`. Its state is 64 bytes that stay as they are."""

    def __init__(self, spec: DeploymentSpec, heap: Heap) -> None:
        self._buffer = heap.buffer
        self.slots = _layout().slots
        self.kinds = MUTATING_KINDS | READING_KINDS

    @staticmethod
    def heap_bytes(spec: DeploymentSpec) -> int:
        return _layout().num_bytes

    def generate(self, args: Generate) -> GenerateResult:
        """Every continuation is the one token 0, cut off by length."""
        sequence = Sequence(pack_int32s([0]), pack_float32s([0.0]), "length")
        return GenerateResult([[sequence] * args.num_samples for _ in args.prompts])

    def forward(self, args: Forward) -> ForwardResult:
        return ForwardResult([bytes(4 * length(datum.targets)) for datum in args.batch])

    def check_forward_backward(self, args: ForwardBackward) -> None:
        """Everything is accepted: nothing is computed."""

    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult:
        return ForwardBackwardResult({"loss:sum": 0.0, "num_tokens:sum": 0.0})

    def optim_step(self, adam: AdamParams) -> OptimStepResult:
        return OptimStepResult({"grad_norm:mean": 0.0})

    def weights_sha256(self) -> str:
        return hashlib.sha256(self._buffer).hexdigest()

    def save(self, directory: Path) -> None:
        (directory / STATE_FILE).write_bytes(self._buffer)

    def load(self, directory: Path) -> None:
        self._buffer[:] = (directory / STATE_FILE).read_bytes()

    def weights_changed(self) -> None:
        """Nothing is derived."""

    def close(self) -> None:
        """Nothing to end."""


def _layout() -> Layout:
    return plan({"noop": [16]}, trainable=False)
