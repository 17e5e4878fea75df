"""A backend that computes nothing and returns valid, trivial results, for benchmarks of the mesh.

The model's config may set the size of its state and the duration of operations, so that switches
and gaps resemble those of a real model:

  {"num_floats": 16, "seconds": {"generate": 0.5, "forward_backward": 0.3}}

With `decode` instead of the seconds of `generate`, rows end one after another (see `noopdecode`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import prod
from typing import TYPE_CHECKING, Any

from msgspec import convert
from msgspec.structs import replace

from phaseloom.common.contract.arrays import Float32s, length, pack_float32s, pack_int32s
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.kinds import MUTATING_KINDS, READING_KINDS
from phaseloom.common.contract.operations import (
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    Generate,
    GenerateResult,
    OptimStep,
    OptimStepResult,
    Sequence,
)
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.resharding import Holding, holding_of
from phaseloom.worker.backends.base import ALONE, Memory, RankGroup, Watch, nothing
from phaseloom.worker.backends.digest import weights_sha256
from phaseloom.worker.backends.layout import Layout, plan
from phaseloom.worker.backends.noopdecode import Decoding, decode
from phaseloom.worker.state.devicememory import DeviceMemory
from phaseloom.worker.state.heap import Heap

if TYPE_CHECKING:
    import numpy as np


_PASS_S = 0.01
"""Seconds between two boundaries of an operation, at which its device share may change."""


class NoopBackend:
    """A `Backend` whose state never changes."""

    def __init__(self, spec: DeploymentSpec, heap: DeviceMemory, ranks: RankGroup = ALONE) -> None:
        """Start on an emulated device.

        Raises: CallerError: FAILED_PRECONDITION: the device is not emulated.
        """
        if not isinstance(heap, Heap):
            raise CallerError(
                "the noop backend needs an emulated device, got a GPU",
                code=Code.FAILED_PRECONDITION,
                field="backend",
                remedy="use a pool of emulated devices, or another backend",
            )
        self._buffer = heap.buffer
        self._seconds = spec.model.config.get("seconds", {})
        decoding = spec.model.config.get("decode")
        self._decoding = convert(decoding, Decoding) if decoding else None
        self.slots = _layout(spec).slots
        self.version_slots = self.slots
        self.holdings: Seq[Holding] = [holding_of(self.slots)] * ranks.world_size
        self.host_bytes = 0
        self.config: dict[str, Any] = {}
        self.kinds = MUTATING_KINDS | READING_KINDS
        self.at_boundary: Callable[[], None] = nothing

    @staticmethod
    def plan(spec: DeploymentSpec, ranks: RankGroup = ALONE) -> Memory:
        return Memory(_layout(spec).heap_bytes)

    def use_host_memory(self, buffer: memoryview) -> None:
        """Do nothing: no state lives in host memory."""

    def check_generate(self, args: Generate) -> None:
        """Accept every request."""

    def generate(self, requests: Seq[Generate], watch: Watch) -> None:
        """Answer every prompt with one token 0 that ends by length. If the config has `decode`,
        follow it instead."""
        if self._decoding is not None:
            decode(self._decoding, requests, watch, self.at_boundary)
            return
        self._take("generate")
        for i, args in enumerate(requests):
            sequence = Sequence(pack_int32s([0]), pack_float32s([0.0]), "length")
            if num_top := args.sampling.top_logprobs:
                top = bytes(4 * num_top)
                sequence = replace(sequence, top_tokens=top, top_logprobs=top)
            groups = [[sequence] * args.num_samples for _ in args.prompts]
            logprobs: list[Float32s] = [
                bytes(4 * length(p.tokens)) for p in args.prompts if args.prompt_logprobs
            ]
            zeroes = [
                bytes(4 * args.prompt_top_logprobs * length(p.tokens))
                for p in args.prompts
                if args.prompt_top_logprobs
            ]
            watch.ended(i, GenerateResult(groups, logprobs, [*zeroes], [*zeroes]))

    def check_forward(self, args: Forward) -> None:
        """Accept every request."""

    def forward(self, args: Forward) -> ForwardResult:
        self._take("forward")
        return ForwardResult([bytes(4 * length(datum.targets)) for datum in args.batch])

    def check_forward_backward(self, args: ForwardBackward) -> None:
        """Accept every request."""

    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult:
        self._take("forward_backward")
        return ForwardBackwardResult(
            {"loss:sum": 0.0, "num_tokens:sum": 0.0},
            [bytes(4 * length(datum.targets)) for datum in args.batch if args.logprobs],
        )

    def check_optim_step(self, args: OptimStep) -> None:
        """Accept every request."""

    def optim_step(self, args: OptimStep) -> OptimStepResult:
        self._take("optim_step")
        return OptimStepResult({"grad_norm:mean": 0.0})

    def zero_gradients(self) -> None:
        """Do nothing: there are no gradients."""

    def nonfinite_weights(self) -> list[str]:
        return []  # the weights are bytes without a meaning

    def weights_sha256(self) -> str:
        return weights_sha256(
            (slot.name, self._array(slot)) for slot in sorted(self.slots, key=lambda s: s.name)
        )

    def weights_changed(self) -> None:
        """Do nothing: nothing is derived from the weights."""

    def close(self) -> None:
        """Do nothing: there is no process group."""

    def _array(self, slot: TensorSlot) -> np.ndarray[Any, Any]:
        import numpy as np  # imported late: hundreds of noop ranks on one machine need no numpy

        flat = np.frombuffer(self._buffer, "<f4", count=prod(slot.shape), offset=slot.offset)
        return flat.reshape(slot.shape)

    def use_threads(self, count: int) -> None:
        """Do nothing: it computes nothing."""

    def _take(self, kind: str) -> None:
        ends_s = time.monotonic() + self._seconds.get(kind, 0.0)
        while (left_s := ends_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _PASS_S))
            self.at_boundary()


def _layout(spec: DeploymentSpec) -> Layout:
    return plan({"noop": [spec.model.config.get("num_floats", 16)]}, trainable=False)
