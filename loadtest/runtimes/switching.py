"""Switches of a runtime's ranks beside plain copies of the same bytes.

Two deployments of one backend take turns on a device that has room for one of them, through a real
state manager. After each switch the deployment that came in runs an operation, which is not timed:
so its gradients, its KV cache and whatever it keeps beside the heap are in use when it goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from loadtest.records import Record
from loadtest.runtimes import models
from loadtest.state_bench import SOCKET, daemon, switch_in_turns
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.operations import Datum, ForwardBackward, Loss
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.worker.agent.stateclient import AgentStateClient
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import Backend, Unwatched
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.heap import Heap


@dataclass(frozen=True)
class _Rank:
    key: DeploymentKey
    thread: ThreadPoolExecutor
    """Copies and operations run in it, as in a rank."""
    operate: Callable[[], object]

    async def use(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self.thread, self.operate)


async def measure(spec: DeploymentSpec, directory: Path, num_rounds: int) -> list[Record]:
    memory = backend_factory(spec.backend).plan(spec)
    num_bytes = memory.heap_bytes
    async with AsyncExitStack() as stack:
        device_bytes = num_bytes + memory.scratch_bytes
        agent = await stack.enter_async_context(daemon(directory, device_bytes))
        ranks = [await _start(agent, directory, spec, name, stack) for name in ("a", "b")]
        keys = [rank.key for rank in ranks]
        measured = await switch_in_turns(
            agent, keys, num_bytes, num_rounds, lambda i: ranks[i].use()
        )
    return [measured.whole(f"switch_{spec.backend}_{num_bytes / 2**20:.0f}_mib")]


async def _start(
    agent: AgentStateClient,
    directory: Path,
    spec: DeploymentSpec,
    name: str,
    stack: AsyncExitStack,
) -> _Rank:
    """Start a rank in this process, offloaded."""
    key = DeploymentKey("bench", "runtimes", name)
    token = f"token of {key}"
    await agent.register_wpg([token], key, 1, [0], 0)
    factory = backend_factory(spec.backend)
    memory = factory.plan(spec)
    heap = Heap(memory.heap_bytes, memory.scratch_bytes)
    backend = factory(spec, heap)
    stack.callback(backend.close)
    thread = stack.enter_context(ThreadPoolExecutor(1, f"rank {name}"))
    client = await RankStateClient.connect(
        directory / SOCKET,
        token,
        applied=lambda: 0,
        on_loaded=backend.weights_changed,
        executor=thread,
    )
    stack.push_async_callback(client.close)
    await client.register_heap(heap, backend.slots, backend.host_bytes)
    await client.commit_initial()
    return _Rank(key, thread, lambda: _operate(backend))


def _operate(backend: Backend) -> None:
    if "generate" in backend.kinds:
        backend.generate([models.request(rows=8, prompt_tokens=32, new_tokens=8)], Unwatched())
    else:
        batch = [Datum(text[:-1], text[1:], weights=[1.0] * 32) for text in models.texts(2, 33)]
        backend.forward_backward(ForwardBackward(batch, Loss.CROSS_ENTROPY))
