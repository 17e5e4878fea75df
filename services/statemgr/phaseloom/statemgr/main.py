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
from phaseloom.statemgr import capacity, observing
from phaseloom.statemgr.files import StateDirectory
from phaseloom.statemgr.hierarchy import Hierarchy
from phaseloom.statemgr.node import Node
from phaseloom.statemgr.sealing import Sealer
from phaseloom.statemgr.serving import VersionServer
from phaseloom.statemgr.shell import StateManager
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
    nvme_bytes: int | None = None
    """Budget of host copies that are on disk instead of in the arena; 0: none ever is; None: as
    much as the disk takes. Seals and versions are not counted."""
    host: str = "127.0.0.1"
    """Address where weights versions are served to other nodes' daemons."""
    port: int = 0
    """TCP port of that; 0: any. StatusReport.endpoint has the real one."""
    site: str = ""
    """What fast links join: a weights version crosses to each other site once, and nodes there
    bring it to one another. Empty: every node fetches its own."""
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
    capacity.check_host(config.host_memory_bytes)
    node = Node(config.node, config.devices, config.host_memory_bytes, config.transfer_timeout_s)
    observing.register(node)
    directory = await asyncio.to_thread(StateDirectory, Path(config.directory))
    disk = directory.disk.path
    log.info("%s is written and read %s: %s", config.directory, disk.method, disk.why)
    nvme_bytes = capacity.nvme_budget(Path(config.directory), config.nvme_bytes)
    hierarchy = Hierarchy(node, directory, nvme_bytes)
    sealer = Sealer(node, directory, hierarchy)
    weights = Weights(
        node, directory, hierarchy, config.secret, config.peer_timeout_s, site=config.site
    )
    for path, header in await asyncio.to_thread(lambda: list(directory.scan())):
        if header.kind == "version":
            weights.found(header)
        else:
            sealer.found(header, str(path))
    peers = socket.create_server((config.host, config.port))
    peers.setblocking(False)
    node.endpoint = f"{config.host}:{peers.getsockname()[1]}"
    server = VersionServer(config.secret, config.peer_timeout_s, weights.reading, site=config.site)
    local = framing.listen(config.socket)
    listeners = [peers]
    try:
        async with asyncio.TaskGroup() as tasks:
            hierarchy.start(tasks)
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
                hierarchy,
                disk,
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
            hierarchy.stop()
    finally:
        hierarchy.stop()
        local.close()
        for listener in listeners:
            listener.close()
        node.keeper.close()
        node.memory.close()


def main() -> None:
    lifecycle.run("statemgr", serve)


if __name__ == "__main__":
    main()
