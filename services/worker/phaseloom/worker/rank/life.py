"""One rank of a WPG. It runs one backend on one device until its agent ends it.

The event loop talks to the agent, the state manager and, in the leader, the bus. The backend and
the copies of its heap run in a separate thread, so that the loop stays responsive during a long
step. A rank ends when it loses its agent, because it could no longer be fenced, or when its state
manager is permanently gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
from blake3 import blake3

from phaseloom.common.contract.errors import (
    Code,
    InternalError,
    PhaseloomError,
    ResourceError,
    unexpected_error,
)
from phaseloom.common.contract.specs import ModelSpec
from phaseloom.common.contract.state_rank import Done
from phaseloom.common.observability import telemetry
from phaseloom.common.process import config, lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import SERVICE_CONNECT_S, BusConfig, connect
from phaseloom.common.transport.framing import Peer, close_fds
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import Backend, Divides, Memory, RankGroup
from phaseloom.worker.rank.computeshare import ComputeShare
from phaseloom.worker.rank.devicequeue import DeviceQueue
from phaseloom.worker.rank.executor import Executor
from phaseloom.worker.rank.follower import Follower
from phaseloom.worker.rank.group import WpgRanks
from phaseloom.worker.rank.leader import Leader
from phaseloom.worker.rank.wire import (
    AdjustShare,
    CancelRun,
    MeetAt,
    MeetRanks,
    PrefetchWeights,
    RankConfig,
    RankFailed,
    RankMessage,
    RankUp,
    RollCall,
    RunPermits,
    RunShare,
    StopShare,
    TailReached,
    TokensDrawn,
)
from phaseloom.worker.state import devicememory
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.devicememory import DeviceMemory

log = logging.getLogger(__name__)

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

Answer = Callable[[RankMessage], Awaitable[RankMessage]]


class ProcessResources:
    """Resources shared by the ranks of a process."""

    def __init__(self, name: str) -> None:
        self.building = threading.Lock()
        """Held while a model is built, because `transformers` temporarily replaces functions of
        torch."""
        self._name = name
        self._opening = asyncio.Lock()
        self._bus: Bus | None = None

    async def bus(self) -> Bus:
        """The bus, connected at the first call."""
        async with self._opening:
            if self._bus is None:
                bus_config = config.load(BusConfig, "bus")
                user, password = bus_config.user, bus_config.password
                client = await connect(
                    bus_config.url, self._name, user, password, timeout_s=SERVICE_CONNECT_S
                )
                self._bus = Bus(client, bus_config.replicas)
            return self._bus


class RankRunner:
    """One rank. Call `run`, and then `end` if the process continues."""

    def __init__(self, settings: RankConfig, resources: ProcessResources) -> None:
        self._settings = settings
        self._resources = resources
        self._name = f"worker:{settings.deployment}"
        self._device_thread = ThreadPoolExecutor(
            1, thread_name_prefix="device", initializer=lifecycle.log_as, initargs=(self._name,)
        )
        self._agent: Peer[RankMessage] | None = None
        self._state: RankStateClient | None = None
        self._leader: Leader | None = None
        self._heap: DeviceMemory | None = None

    async def run(self) -> None:
        """Serve the agent until the agent or the state manager is gone, or the rank has failed."""
        settings = self._settings
        lifecycle.log_as(self._name)
        log.info("rank of incarnation %d starts, pid %d", settings.incarnation, os.getpid())
        self._agent = agent = await Peer[RankMessage].connect(settings.agent_socket, RankMessage)
        try:
            await self._serve(agent)
        except PhaseloomError as error:
            await agent.call(RankFailed(settings.token, error.info))
        except Exception as error:
            log.exception("rank failed")
            await agent.call(RankFailed(settings.token, unexpected_error(error)))

    async def stop(self) -> None:
        """Disconnect from the agent, so that `run` ends. A running `generate` stops at its next
        token."""
        if self._agent is not None:
            await self._agent.close()
        if self._leader is not None:
            self._leader.queue.abandon_all()

    async def end(self) -> None:
        """Free all resources after `run` has ended and the device thread is idle."""
        await self.stop()
        if self._state is not None:
            await self._state.close(self._free)
        else:
            await asyncio.get_running_loop().run_in_executor(self._device_thread, self._free)
        self._device_thread.shutdown(wait=False)  # the thread is idle

    def _free(self) -> None:
        if self._heap is not None:
            devicememory.close(self._heap)

    async def _serve(self, agent: Peer[RankMessage]) -> None:
        settings = self._settings
        ranks = WpgRanks(self._device_thread, agent, settings.num_ranks)
        executor = await self._build(ranks, await _group(settings, agent))
        heap, backend = self._heap, executor.backend
        assert heap is not None
        ranks = replace(ranks, share=_compute_share(settings, backend))
        self._state = state = await RankStateClient.connect(
            settings.state_socket,
            settings.token,
            applied=lambda: executor.applied,
            on_loaded=executor.weights_changed,
            executor=self._device_thread,
        )
        executor.applied = await state.register_heap(
            heap,
            backend.slots,
            backend.host_bytes,
            frozen=not settings.spec.trainable,
            model=_identity(settings.spec.model),
        )
        if backend.host_bytes:
            await ranks.on_device_thread(lambda: backend.use_host_memory(state.host_memory))
        if executor.applied == 0:
            await _fill(settings, heap, executor, state, ranks)
        async with asyncio.TaskGroup() as tasks:
            answer: Answer
            running: list[asyncio.Task[None]] = []
            if settings.rank == 0:
                queue = DeviceQueue(executor, ranks, settings.spec.batching)
                bus = await self._resources.bus()
                self._leader = leader = Leader(settings, bus, state, executor, ranks, queue)
                running.append(tasks.create_task(queue.serve()))
                running.append(tasks.create_task(leader.report_progress()))
                running.append(tasks.create_task(leader.publish_tokens()))
                running.append(tasks.create_task(leader.log_gathered_tails()))
                answer = _leader_answers(leader)
            else:
                answer = _follower_answers(Follower(settings, state, executor, ranks))

            async def handle(body: RankMessage, fds: list[int]) -> tuple[RankMessage, list[int]]:
                close_fds(fds)
                return await answer(body), []

            agent.handler = handle
            started_s = time.time()
            num_bytes = heap.num_bytes + heap.scratch_bytes
            await agent.call(RankUp(settings.token, num_bytes, executor.applied))
            log.info("up with %d bytes, applied %d", num_bytes, executor.applied)
            await asyncio.wait([agent.closed, state.closed], return_when=asyncio.FIRST_COMPLETED)
            log.info("agent or state manager gone after %.1f s", time.time() - started_s)
            await lifecycle.end(running)

    async def _build(self, ranks: WpgRanks, group: RankGroup) -> Executor:
        """Build the backend on its heap, initialised from the spec's seeds.

        The weights of a registered model are filled in later.
        """
        settings = self._settings
        factory, spec = backend_factory(settings.spec.backend), settings.spec

        def build() -> Backend:
            with self._resources.building:
                memory = factory.plan(spec, group)
                _check_room(settings, memory)
                self._heap = devicememory.allocate(
                    settings.device_kind,
                    settings.device,
                    memory.heap_bytes,
                    memory.scratch_bytes,
                )
                return factory(spec, self._heap, group)

        return Executor(settings, await ranks.on_device_thread(build))


def _check_room(settings: RankConfig, memory: Memory) -> None:
    """Check that a rank fits on its device before building a model of that size in host memory.

    Raises: ResourceError: RESOURCE_EXHAUSTED, with the numbers.
    """
    needed, budget = memory.heap_bytes + memory.scratch_bytes, settings.device_bytes
    if budget and needed > budget:
        raise ResourceError(
            f"{settings.deployment} needs {needed} bytes of device {settings.device}, which has "
            f"{budget}",
            code=Code.RESOURCE_EXHAUSTED,
            remedy="raise `devices` of the node (of `phaseloom up`: in its mesh file), or use "
            "less memory: an adapter, a lower adapter rank, optimizer_on HOST, or a layout with "
            "more ranks",
            details={"needed_bytes": needed, "used_bytes": 0, "budget_bytes": budget},
        )


def _compute_share(settings: RankConfig, backend: Backend) -> ComputeShare:
    """The rank's share of its device: all of it until the scheduler changes the share."""
    key = settings.deployment

    def record_interval(start_s: float, end_s: float, units: Sequence[int]) -> None:
        telemetry.record(
            "share",
            start_s,
            end_s,
            tenant=key.tenant,
            job=key.job,
            deployment=key.deployment,
            node=settings.node,
            device=settings.device,
            units=len(units),
        )

    use = backend.use_threads if isinstance(backend, Divides) else _keep_threads
    share = ComputeShare(settings.device, settings.num_units, use, record_interval)
    if isinstance(backend, Divides):
        backend.at_boundary = share.apply_request
    return share


def _keep_threads(count: int) -> None:
    """Do nothing. Used for a backend that cannot set its number of threads. It is still pinned to
    the cores of its share."""


def _identity(model: ModelSpec) -> str:
    """The digest of everything that determines a model's initial weights, regardless of
    training."""
    identity: tuple[object, ...] = (model.config, model.init_seed)
    if model.pinned is not None:
        identity = (model.config, [(file.name, file.blake3) for file in model.pinned.files])
    if model.adapter is not None:
        identity = (*identity, model.adapter)
    return blake3(msgspec.json.encode(identity, order="deterministic")).hexdigest()


async def _group(settings: RankConfig, agent: Peer[RankMessage]) -> RankGroup:
    """This rank's position in its WPG, and the address where the ranks meet.

    Raises: PhaseloomError: the incarnation is over.
    """
    group = RankGroup(
        settings.rank,
        settings.num_ranks,
        settings.store_path,
        device_kind=settings.device_kind,
        num_units=settings.num_units,
        node_directory=str(Path(settings.agent_socket).parent),
    )
    if not settings.is_over_nodes:
        return group
    if settings.interface:
        # gloo and NCCL accept the interface only through the environment.
        os.environ |= dict.fromkeys(_INTERFACE_VARIABLES, settings.interface)
    meeting, fds = await agent.call(MeetRanks(settings.token))
    assert isinstance(meeting, MeetAt), meeting
    return replace(
        group,
        store_path="",
        store_address=meeting.address,
        store_fd=fds[0] if fds else -1,
        store_prefix=f"{settings.deployment}/{settings.incarnation}",
    )


async def _fill(
    settings: RankConfig,
    heap: DeviceMemory,
    executor: Executor,
    state: RankStateClient,
    ranks: WpgRanks,
) -> None:
    """Fill the state if no seal was restored: from the job's checkpoint, the files of a registered
    model, or the seeds."""
    executor.applied = settings.applied
    if settings.checkpoint:
        await state.commit_checkpoint(
            settings.checkpoint, settings.applied, executor.adapter_config, executor.locate
        )
        return
    model = settings.spec.model
    # an adapter starts from its seed on the registered base
    if model.pinned is not None and model.adapter is None:
        await ranks.on_device_thread(lambda: _read_files(heap, executor.backend, model))
    await state.commit_initial(settings.applied)


def _read_files(heap: DeviceMemory, backend: Backend, model: ModelSpec) -> None:
    from phaseloom.worker.backends import pretrained  # imports torch

    pretrained.fill(heap, backend.slots, model)
    backend.weights_changed()


def _leader_answers(leader: Leader) -> Answer:
    async def answer(body: RankMessage) -> RankMessage:
        match body:
            case RunPermits():
                await leader.run(body)
            case CancelRun():
                leader.cancel(body)
            case AdjustShare():
                await leader.adjust(body)
            case PrefetchWeights():
                await leader.prefetch(body)
            case TailReached():
                leader.queue.tail_reached(body)
            case TokensDrawn():
                leader.queue.queue_tokens(body.operation, body.tokens)
            case _:
                raise InternalError(f"unexpected message for a leader: {type(body).__name__}")
        return Done()

    return answer


def _follower_answers(follower: Follower) -> Answer:
    async def answer(body: RankMessage) -> RankMessage:
        match body:
            case RunShare():
                with telemetry.use_context(telemetry.extract({"traceparent": body.traceparent})):
                    return await follower.run(body)
            case CancelRun():
                follower.cancel(body)
            case PrefetchWeights():
                await follower.weights.prefetch(body)
            case StopShare():
                follower.stop(body)
            case RollCall():
                return Done()
            case _:
                raise InternalError(f"unexpected message for a rank: {type(body).__name__}")
        return Done()

    return answer
