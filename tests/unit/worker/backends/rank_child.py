"""One rank of a process group, driven by lines of JSON: run by `ranks.Ranks`.

Whatever is called between two operations of the backend, the heap is offloaded and loaded again:
copied out, released, copied in.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import torch

from phaseloom.common.contract.codec import Message
from phaseloom.common.contract.errors import Code, ErrorInfo, PhaseloomError
from phaseloom.common.contract.operations import Forward, ForwardBackward, OptimStep, Result
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import Backend, RankGroup
from phaseloom.worker.state.heap import Heap
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


Call = Score | Train | Step | Digest | Fill | Publish | Sync | Heaped | Offload


class Answer(msgspec.Struct, omit_defaults=True):
    result: Result | None = None
    digest: str = ""
    content: bytes = b""
    slots: list[TensorSlot] = []
    config: dict[str, Any] = {}
    error: ErrorInfo | None = None


def main() -> None:
    torch.set_num_threads(1)
    setup = msgspec.json.decode(sys.stdin.readline(), type=Setup)
    factory = backend_factory(setup.spec.backend)
    heap = Heap(factory.plan(setup.spec, setup.ranks).heap_bytes)
    try:
        backend = factory(setup.spec, heap, setup.ranks)
    except PhaseloomError as error:
        tell(Answer(error=error.info))
        return
    tell(Answer(slots=backend.slots, config=backend.config))
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
        case Digest():
            result.digest = backend.weights_sha256()
    return result


def tell(message: Answer) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
