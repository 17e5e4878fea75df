"""The state manager of one node: configuration, wiring, life."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import msgspec

from phaseloom.common import framing, lifecycle
from phaseloom.common.config import load
from phaseloom.common.ids import NodeId
from phaseloom.common.statewire import StateMessage
from phaseloom.statemgr import observing
from phaseloom.statemgr.files import StateDirectory
from phaseloom.statemgr.node import Node
from phaseloom.statemgr.sealing import Sealer
from phaseloom.statemgr.shell import StateManager
from phaseloom.statemgr.transfer import VersionServer
from phaseloom.statemgr.weights import Weights

log = logging.getLogger(__name__)


class StateManagerConfig(msgspec.Struct, frozen=True):
    node: NodeId
    """The node whose memory this daemon keeps; for logs and spans."""
    socket: str
    """Path of the Unix socket for the node's agent and ranks."""
    secret: str
    """The mesh's: the agent proves it here, and state managers to one another."""
    directory: str
    """Where seals and persisted weights versions lie."""
    devices: list[int]
    """Bytes of managed state that each device may hold."""
    host_memory_bytes: int
    """Budget of the host arena."""
    host: str = "127.0.0.1"
    """Address where weights versions are served to other nodes' daemons."""
    port: int = 0
    """TCP port of that; 0: any. StatusReport.endpoint has the real one."""
    transfer_timeout_s: float = 120.0
    """A rank that takes longer to copy its heap out or in counts as lost."""
    resume_timeout_s: float = 10.0
    """After a kill: ranks that have not come back by then are lost."""
    peer_timeout_s: float = 10.0
    """A pause of another node's daemon, after which the next source is tried."""


async def serve(stop: asyncio.Event) -> None:
    await run(load(StateManagerConfig, "statemgr"), stop)


async def run(config: StateManagerConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. The socket file stays: the next life replaces it."""
    node = Node(config.node, config.devices, config.host_memory_bytes, config.transfer_timeout_s)
    observing.register(node)
    directory = StateDirectory(Path(config.directory))
    sealer = Sealer(node, directory)
    weights = Weights(node, directory, config.secret, config.peer_timeout_s)
    for path, header in await asyncio.to_thread(lambda: list(directory.scan())):
        if header.kind == "version":
            weights.found(header)
        else:
            sealer.found(header, str(path))
    peers = socket.create_server((config.host, config.port))
    peers.setblocking(False)
    node.endpoint = f"{config.host}:{peers.getsockname()[1]}"
    server = VersionServer(config.secret, config.peer_timeout_s, weights.reading)
    local = framing.listen(config.socket)
    listeners = [peers]
    try:
        async with asyncio.TaskGroup() as tasks:
            serving: list[asyncio.Task[None]] = []

            def serve_versions_at(endpoint: str) -> None:
                host, _, port = endpoint.rpartition(":")
                again = socket.create_server((host, int(port)))
                again.setblocking(False)
                listeners.append(again)
                serving.append(tasks.create_task(server.serve(again)))
                node.endpoint = endpoint

            manager = StateManager(
                node,
                sealer,
                weights,
                secret=config.secret,
                resume_timeout_s=config.resume_timeout_s,
                serve_versions_at=serve_versions_at,
            )
            serving += [
                tasks.create_task(framing.serve(local, StateMessage, manager.session, max_fds=0)),
                tasks.create_task(server.serve(peers)),
            ]
            log.info("%s serves at %s and %s", config.node, config.socket, node.endpoint)
            await stop.wait()
            for task in serving:
                task.cancel()
    finally:
        local.close()
        for listener in listeners:
            listener.close()
        node.keeper.close()
        node.memory.close()


def main() -> None:
    lifecycle.run("statemgr", serve)


if __name__ == "__main__":
    main()
