"""A device queue on a real sampler, in this process: the test holds up the device thread, so that
what waits is known."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from phaseloom.common.contract.codec import MSGPACK
from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey
from phaseloom.common.contract.operations import (
    Args,
    Generate,
    Operation,
    Prompt,
    Result,
    SamplingParams,
    kind_of,
)
from phaseloom.common.contract.specs import Batching, CommandId
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.framing import Peer
from phaseloom.worker.backends.base import Watch
from phaseloom.worker.backends.sampler.backend import SamplerBackend
from phaseloom.worker.rank.calls import DeviceCall
from phaseloom.worker.rank.devicequeue import DeviceQueue
from phaseloom.worker.rank.executor import Executor
from phaseloom.worker.rank.group import WpgRanks
from phaseloom.worker.rank.wire import Payload, RankConfig, RankMessage
from phaseloom.worker.state.heap import Heap
from tests.unit.worker.backends.models import spec

KEY = DeploymentKey("acme", "job", "sampler")


class Recording(SamplerBackend):
    """A sampler that remembers what went in each of its calls or joined it, by the prompts' first
    tokens."""

    calls: list[list[int]]
    on_changed: Callable[[], None] = staticmethod(lambda: None)
    """Called in the device thread once other weights are in its heap."""

    on_taken: Callable[[], None] = staticmethod(lambda: None)
    """Called in the device thread once it has looked for requests to begin with."""

    def weights_changed(self) -> None:
        super().weights_changed()
        self.on_changed()

    def generate(self, requests: Sequence[Generate], watch: Watch) -> None:
        self.calls.append([])
        super().generate(requests, watch)

    def _add_requests(self, call: Any, requests: Sequence[Generate]) -> None:
        firsts = [args.prompts[0].tokens[0] for args in requests]
        self.calls[-1] += [first for first in firsts if isinstance(first, int)]
        super()._add_requests(call, requests)
        self.on_taken()


class Device:
    def __init__(self, executor: Executor, ranks: WpgRanks, batching: Batching, heap: Heap) -> None:
        self.executor = executor
        self.heap = heap
        self.ranks = ranks
        self.queue = DeviceQueue(executor, ranks, batching)

    @property
    def backend(self) -> Recording:
        assert isinstance(self.executor.backend, Recording)
        return self.executor.backend

    @asynccontextmanager
    async def held_up(self) -> AsyncIterator[None]:
        """In the block the thread is in the middle of something."""
        go = threading.Event()
        self.ranks.device_thread.submit(go.wait)
        try:
            yield
        finally:
            go.set()

    def give(self, slot: str, args: Args, num_bytes: int = 100) -> asyncio.Task[Result | None]:
        """It waits in the queue when this returns, or is with the thread."""
        return asyncio.create_task(self.queue.run(call(slot, args, num_bytes)))

    def cancel(self, slot: str, *, keeps_partial: bool = False) -> None:
        key = OperationKey(KEY.tenant, KEY.job, KEY.deployment, slot)
        self.queue.cancel(key, keeps_partial=keeps_partial)


def call(slot: str, args: Args, num_bytes: int = 100) -> DeviceCall:
    operation = OperationKey(KEY.tenant, KEY.job, KEY.deployment, slot)
    payload = Payload(operation, bytes(num_bytes), MSGPACK)
    return DeviceCall(permit(operation, args), Operation(slot, 1, args), payload, "")


def permit(operation: OperationKey, args: Args) -> Permit:
    return Permit(
        id=CommandId(1, 1),
        node=NodeId("n0"),
        revision=1,
        operation=operation,
        operation_id=operation.slot,
        kind=kind_of(args),
        incarnation=1,
        epoch=1,
        prev=0,
    )


@asynccontextmanager
async def device(batching: Batching) -> AsyncIterator[Device]:
    deployment = spec("sampler")
    thread = ThreadPoolExecutor(1)
    heap = Heap(Recording.plan(deployment).heap_bytes)
    backend = thread.submit(Recording, deployment, heap).result()
    backend.calls = []
    settings = RankConfig("token", KEY, 1, deployment, "n0", 0, "", "")
    executor = Executor(settings, backend)
    mine, others = socket.socketpair()
    ranks = WpgRanks(thread, Peer[RankMessage](mine, RankMessage))
    running = Device(executor, ranks, batching, heap)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(running.queue.serve())
        yield running
        await lifecycle.end([serving])
    thread.shutdown()
    mine.close()
    others.close()


def sample(first: int, max_tokens: int = 2, num_samples: int = 1) -> Generate:
    return Generate([Prompt([first, 3], seed=first)], SamplingParams(max_tokens), num_samples)
