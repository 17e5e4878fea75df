"""One rank of a WPG: a process that runs one backend on one device.

The event loop speaks with the agent, the state manager and the bus; the backend runs in one thread
beside it, as do the copies of its heap, so that the loop stays free during a long step. A rank that
loses its agent or its state manager exits at once: nobody could fence it any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import uvloop

from phaseloom.common import config, lifecycle, telemetry
from phaseloom.common.bus import Bus, BusConfig, connect
from phaseloom.common.errors import Code, ErrorInfo, PhaseloomError
from phaseloom.common.framing import Peer
from phaseloom.common.statewire import Done
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.executor import Executor
from phaseloom.worker.heap import Heap
from phaseloom.worker.leader import Leader
from phaseloom.worker.rankwire import RankConfig, RankFailed, RankMessage, RankUp, RunPermit
from phaseloom.worker.stateclient import RankStateClient

log = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005
"""How long the backend's Python code may keep the interpreter from the event loop."""


def main(config_json: str) -> None:
    """Entry point of the process; returns only by exiting."""
    settings = msgspec.json.decode(config_json, type=RankConfig)
    lifecycle.log_to_stderr(f"worker:{settings.deployment}", "INFO")
    log.info("rank of incarnation %d starts, pid %d", settings.incarnation, os.getpid())
    flush = telemetry.setup("worker")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)

    async def run_and_exit() -> None:
        try:
            await _run(settings)
        finally:
            flush()
            # Nothing may keep a rank whose agent is gone: not the device thread, which may be in a
            # long call, nor the bus connection, whose reconnecting can outlast a cancellation.
            os._exit(0)

    uvloop.run(run_and_exit())


async def _run(settings: RankConfig) -> None:
    agent = await Peer[RankMessage].connect(settings.agent_socket, RankMessage)
    try:
        await _serve(settings, agent)
    except PhaseloomError as error:
        await agent.call(RankFailed(settings.token, error.info))
    except Exception as error:
        log.exception("rank failed")
        info = ErrorInfo(Code.INTERNAL, f"{type(error).__name__}: {error}")
        await agent.call(RankFailed(settings.token, info))


async def _serve(settings: RankConfig, agent: Peer[RankMessage]) -> None:
    loop = asyncio.get_running_loop()
    device_thread = ThreadPoolExecutor(1, thread_name_prefix="device")
    factory = backend_factory(settings.spec.backend)
    heap = Heap(factory.heap_bytes(settings.spec))
    backend = await loop.run_in_executor(device_thread, factory, settings.spec, heap)
    executor = Executor(settings, backend)
    state = await RankStateClient.connect(
        settings.state_socket,
        settings.token,
        applied=lambda: executor.applied,
        on_loaded=backend.weights_changed,
        executor=device_thread,
    )
    bus_config = config.load(BusConfig, "bus")
    name = f"worker {settings.deployment}"
    bus = Bus(await connect(bus_config.url, name, bus_config.user, bus_config.password))
    executor.applied = await state.register_heap(heap, backend.slots)
    if executor.applied == 0:
        await state.commit_initial()
    leader = Leader(settings, bus, state, executor, device_thread)

    async def answer(body: RankMessage, fds: list[int]) -> tuple[RankMessage, list[int]]:
        assert isinstance(body, RunPermit), body
        await leader.run(body.permit, body.traceparent)
        return Done(), []

    agent.handler = answer
    started_s = time.time()
    await agent.call(RankUp(settings.token, heap.num_bytes, executor.applied))
    log.info("up with %d bytes, applied %d", heap.num_bytes, executor.applied)
    await asyncio.wait([agent.closed, state.closed], return_when=asyncio.FIRST_COMPLETED)
    log.info("agent or state manager gone after %.1f s: exiting", time.time() - started_s)
