"""The worker service: one agent per node."""

from __future__ import annotations

import phaseloom.common.process.tcponly  # noqa: F401

# isort: split
import asyncio
import logging
from pathlib import Path

from phaseloom.common.contract import streams
from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.contract.events import NodeUp
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import DeviceSpec
from phaseloom.common.process import config, lifecycle
from phaseloom.common.transport import framing
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.leases import Lease, node_lease_key
from phaseloom.common.transport.logmark import LogMark
from phaseloom.common.transport.retry import until_done
from phaseloom.common.transport.serving import service_bus
from phaseloom.worker.agent.checkpoints import remove_expired, serve_checkpoints
from phaseloom.worker.agent.interpreters import Interpreters
from phaseloom.worker.agent.nodes import serve_nodes
from phaseloom.worker.agent.processes import Processes
from phaseloom.worker.agent.shell import ACK_WAIT_S, Agent
from phaseloom.worker.agent.stateclient import AgentStateClient, serve_state
from phaseloom.worker.agent.wpg import remove_old_stores
from phaseloom.worker.backends.capabilities import CAPABILITIES
from phaseloom.worker.config import EXACT_MATH, WorkerConfig
from phaseloom.worker.rank.wire import RankMessage

log = logging.getLogger(__name__)

_CONNECT_PAUSE_S = 0.1
_CONNECT_TRIES = 600
"""A machine that starts all services at once is slow, so allow a minute."""


async def serve(stop: asyncio.Event) -> None:
    settings = config.load(WorkerConfig, "worker")
    settings.check()
    # Ranks are forked from a child process and must not inherit the agents' secret.
    config.unset_for_children("worker", "state_secret")
    if settings.cores_per_device > 1:
        for variable, value in EXACT_MATH.items():
            config.set_for_children(variable, value)
    agent_socket = str(Path(settings.runtime_directory) / f"agent-{settings.node}.sock")
    async with service_bus(f"agent {settings.node}", stop) as bus:
        mark = LogMark(bus, Path(settings.directory)) if settings.directory else None
        if mark is not None:
            # Check before the node has a lease and the scheduler can make decisions about it.
            await lifecycle.unless_stopped(stop, until_done(mark.check, "the log's end"))
        state = await lifecycle.unless_stopped(stop, _connect_state(settings))
        ttl_s = settings.lease_ttl_s
        acquiring = Lease.acquire(bus, node_lease_key(settings.node), b"agent", ttl_s)
        lease = await lifecycle.unless_stopped(stop, acquiring)
        remove_old_stores(settings)
        node = NodeId(settings.node)
        # The state manager must be reachable before the node is announced.
        await serve_state(bus, node, state)
        listener = framing.LocalListener(agent_socket)
        interpreters = Interpreters(settings.interpreters, preload=settings.preload)
        async with asyncio.TaskGroup() as tasks:
            agent = Agent(
                settings,
                revision=lease.revision,
                bus=bus,
                state=state,
                processes=Processes(interpreters, tasks),
                agent_socket=agent_socket,
                tasks=tasks,
                mark=mark,
            )
            agent.register_metrics()
            running = [
                tasks.create_task(lease.keep()),
                tasks.create_task(framing.serve(listener, RankMessage, agent.wpgs.serve_rank)),
                tasks.create_task(agent.keep_alive()),
                tasks.create_task(serve_nodes(bus, node, agent.node_requests.answer)),
                tasks.create_task(serve_checkpoints(bus, node, state)),
                tasks.create_task(remove_expired(bus, state)),
                tasks.create_task(_until_state_lost(state)),
                tasks.create_task(_announce(settings, bus, state, lease.revision, interpreters)),
            ]
            if mark is not None:
                running.append(tasks.create_task(mark.keep()))
            await bus.consume(
                streams.PERMITS,
                streams.permit_subject(node),
                f"node-{node}",
                agent.receive,
                ack_wait_s=ACK_WAIT_S,
            )
            await stop.wait()
            await agent.wpgs.stop_all()
            await lifecycle.end(running)
        interpreters.close()
        await lease.release()


async def _connect_state(settings: WorkerConfig) -> AgentStateClient:
    """Connect to this node's state manager, which starts at the same time as the agent."""
    for number in range(_CONNECT_TRIES):
        try:
            return await AgentStateClient.connect(settings.state_socket, settings.state_secret)
        except ResourceError as error:
            failure = error
            log.log(logging.DEBUG if number else logging.INFO, "waiting: %s", error)
            await asyncio.sleep(_CONNECT_PAUSE_S)
    raise failure


async def _until_state_lost(state: AgentStateClient) -> None:
    """Fail when the state manager is gone, because the node's state is unknown without it.

    Agent and state manager then both restart.
    """
    reason = await asyncio.shield(state.closed)
    raise ResourceError(
        f"the state manager is gone: {reason}", remedy="wait until it has restarted"
    )


async def _announce(
    settings: WorkerConfig,
    bus: Bus,
    state: AgentStateClient,
    revision: int,
    interpreters: Interpreters,
) -> None:
    status = await state.status()
    backends = await asyncio.to_thread(interpreters.backends)
    up = NodeUp(
        node=NodeId(settings.node),
        pool=settings.pool,
        devices=[
            DeviceSpec(memory_bytes, settings.cores_per_device) for memory_bytes in settings.devices
        ],
        host_memory_bytes=settings.host_memory_bytes,
        revision=revision,
        state_endpoint=status.endpoint,
        exclusive_residency=settings.exclusive_residency,
        price_per_hour=settings.price,
        backends={name: CAPABILITIES[name] for name in backends},
    )
    msg_id = f"node-up:{settings.node}:{revision}"
    await until_done(lambda: bus.log.append(up, msg_id=msg_id), "append")


def main() -> None:
    lifecycle.run("worker", serve)


if __name__ == "__main__":
    main()
