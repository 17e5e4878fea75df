"""Backend that answers at once with well-formed, trivial results: for benches of the mesh alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
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
from phaseloom.worker.backends.base import ALONE, RankGroup, Watch
from phaseloom.worker.backends.layout import Layout, plan
from phaseloom.worker.heap import Heap

STATE_FILE = "state.bin"


class NoopBackend:
    """See `Backend`. Its state is 64 bytes that stay as they are."""

    def __init__(self, spec: DeploymentSpec, heap: Heap, ranks: RankGroup = ALONE) -> None:
        self._buffer = heap.buffer
        self._rank = ranks.rank
        self.slots = _layout().slots
        self.version_slots = self.slots
        self.kinds = MUTATING_KINDS | READING_KINDS

    @staticmethod
    def heap_bytes(spec: DeploymentSpec, ranks: RankGroup = ALONE) -> int:
        return _layout().num_bytes

    def check_generate(self, args: Generate) -> None:
        """Everything is accepted: nothing is computed."""

    def generate(self, requests: Seq[Generate], watch: Watch) -> list[GenerateResult | None]:
        """Every continuation is the one token 0, cut off by length."""
        sequence = Sequence(pack_int32s([0]), pack_float32s([0.0]), "length")
        return [
            GenerateResult(
                [[sequence] * args.num_samples for _ in args.prompts],
                [bytes(4 * length(p.tokens)) for p in args.prompts if args.prompt_logprobs],
            )
            for args in requests
        ]

    def check_forward(self, args: Forward) -> None:
        """Everything is accepted: nothing is computed."""

    def forward(self, args: Forward) -> ForwardResult:
        return ForwardResult([bytes(4 * length(datum.targets)) for datum in args.batch])

    def check_forward_backward(self, args: ForwardBackward) -> None:
        """Everything is accepted: nothing is computed."""

    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult:
        return ForwardBackwardResult({"loss:sum": 0.0, "num_tokens:sum": 0.0})

    def check_optim_step(self, adam: AdamParams) -> None:
        """Everything is accepted: nothing is computed."""

    def optim_step(self, adam: AdamParams) -> OptimStepResult:
        return OptimStepResult({"grad_norm:mean": 0.0})

    def zero_gradients(self) -> None:
        """It has none."""

    def weights_sha256(self) -> str:
        return hashlib.sha256(self._buffer).hexdigest()

    def save(self, directory: Path) -> None:
        if self._rank == 0:
            (directory / STATE_FILE).write_bytes(self._buffer)

    def load(self, directory: Path) -> None:
        self._buffer[:] = (directory / STATE_FILE).read_bytes()

    def write_weights(self, buffer: memoryview | None) -> None:
        if buffer is not None:
            buffer[:] = self._buffer

    def read_weights(self, buffer: memoryview) -> None:
        self._buffer[:] = buffer

    def weights_changed(self) -> None:
        """Nothing is derived."""

    def close(self) -> None:
        """Nothing to end."""


def _layout() -> Layout:
    return plan({"noop": [16]}, trainable=False)
