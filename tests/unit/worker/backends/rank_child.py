"""One rank of a process group, driven by lines of JSON: run by `ranks.Ranks`.

Whatever is called between two operations of the backend, the heap is offloaded and loaded again:
copied out, released, copied in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from phaseloom.common.contract.codec import Message
from phaseloom.common.contract.errors import Code, ErrorInfo, PhaseloomError
from phaseloom.common.contract.operations import (
    Forward,
    ForwardBackward,
    Generate,
    GenerateResult,
    OptimStep,
    Result,
)
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.resharding import Box
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import Backend, RankGroup
from phaseloom.worker.state.heap import Heap
from tests.support.looker import Looker
from tests.support.versions import take, written


class Setup(msgspec.Struct):
    spec: DeploymentSpec
    ranks: RankGroup


class Score(Message, frozen=True):
    args: Forward


class Train(Message, frozen=True):
    args: ForwardBackward


class Step(Message, frozen=True):
    args: OptimStep


class Digest(Message, frozen=True):
    pass


class Fill(Message, frozen=True):
    """Replace the heap's bytes."""

    content: bytes


class Publish(Message, frozen=True):
    """Answer: the bytes of the rank's part."""


class Sync(Message, frozen=True):
    version: bytes


class Heaped(Message, frozen=True):
    """Answer: the heap's bytes."""


class Offload(Message, frozen=True):
    """From now on, or no longer, between any two calls."""

    is_on: bool


class Decode(Message, frozen=True):
    """Answer: the results of these requests and of those that join them; None: cancelled.

    What happens on the way, happens to the watch of this rank once so many tokens are done: see
    `Looker`.
    """

    requests: list[Generate]
    cancel_at: Mapping[int, int] = msgspec.field(default_factory=dict)
    stop_at: Mapping[int, int] = msgspec.field(default_factory=dict)
    join_at: Mapping[int, list[Generate]] = msgspec.field(default_factory=dict)


Call = Score | Train | Step | Digest | Fill | Publish | Sync | Heaped | Offload | Decode


class Answer(msgspec.Struct, omit_defaults=True):
    result: Result | None = None
    digest: str = ""
    content: bytes = b""
    slots: list[TensorSlot] = []
    config: dict[str, Any] = {}
    generated: list[GenerateResult | None] = []
    holdings: list[dict[str, Box]] = []
    error: ErrorInfo | None = None


def main() -> None:
    torch.set_num_threads(1)
    setup = msgspec.json.decode(sys.stdin.readline(), type=Setup)
    factory = backend_factory(setup.spec.backend)
    try:
        memory = factory.plan(setup.spec, setup.ranks)
        heap = Heap(memory.heap_bytes, memory.scratch_bytes)
        backend = factory(setup.spec, heap, setup.ranks)
    except PhaseloomError as error:
        tell(Answer(error=error.info))
        return
    holdings = [dict(holding) for holding in backend.holdings]
    tell(Answer(slots=backend.slots, config=backend.config, holdings=holdings))
    offloads = False
    for line in sys.stdin:
        call = msgspec.json.decode(line, type=Call)
        if isinstance(call, Offload):
            offloads = call.is_on
            tell(Answer())
            continue
        if offloads:
            content = bytes(heap.buffer)
            heap.release()
            heap.buffer[:] = content
            backend.weights_changed()
        try:
            tell(answer(call, backend, heap, setup.ranks))
        except PhaseloomError as error:
            tell(Answer(error=error.info))
        except Exception as error:
            tell(Answer(error=ErrorInfo(Code.INTERNAL, repr(error))))
    backend.close()


def answer(call: Call, backend: Backend, heap: Heap, ranks: RankGroup) -> Answer:
    result = Answer()
    match call:
        case Score(args):
            result.result = backend.forward(args)
        case Train(args):
            result.result = backend.forward_backward(args)
        case Step(args):
            result.result = backend.optim_step(args)
        case Fill(content):
            heap.buffer[:] = content
            backend.weights_changed()
        case Publish():
            result.content = written(backend, heap)
        case Sync(version):
            take(backend, heap, ranks.rank, version)
        case Heaped():
            result.content = bytes(heap.buffer)
        case Decode(requests):
            looker = Looker(call.cancel_at, stop_at=call.stop_at, join_at=call.join_at)
            backend.generate(requests, looker)
            result.generated = looker.ordered
        case Digest():
            result.digest = backend.weights_sha256()
    return result


def tell(message: Answer) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
