"""Orders to ranks, while what they are about changes."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_agent import RegisterWpg
from phaseloom.common.contract.state_rank import Copied, CopyIn, StateMessage
from phaseloom.common.transport.framing import Peer, close_fds
from tests.support.nodeparts import node_on
from tests.support.statefiles import state_directory

KEY = DeploymentKey("acme", "sums", "reference")


async def test_descriptor_beside_an_order_is_that_of_its_memory_though_it_is_given_up(
    tmp_path: Path,
) -> None:
    """Two contents may become one while the manifest is written before an order leaves."""
    inodes: list[int] = []

    async def answer(body: StateMessage, fds: list[int]) -> tuple[StateMessage, list[int]]:
        assert isinstance(body, CopyIn)
        inodes.extend(os.fstat(fd).st_ino for fd in fds)
        close_fds(fds)
        return Copied(body.digest, 0, 0, 0.0), []

    directory = await asyncio.to_thread(state_directory, tmp_path)
    node = node_on(directory, device_bytes=1, host_bytes=1 << 20)
    node.records.residency.register(RegisterWpg(["token"], KEY, 1, [0], 0))
    rank = node.records.residency.authenticate("token")
    here, there = socket.socketpair()
    peer: Peer[StateMessage] = Peer(here, StateMessage, max_fds=0)
    other: Peer[StateMessage] = Peer(there, StateMessage, answer)
    peer.start()
    other.start()
    node.ranks.connected[rank] = peer
    extent = node.memory.reserve(4096, "a content")
    inode = os.fstat(node.memory[extent].read_only_fd).st_ino
    async with node.ledger._lock:  # they are being kept
        asking = asyncio.create_task(
            node.ranks.order(rank, CopyIn("0" * 32), [node.memory[extent].read_only_fd])
        )
        await asyncio.sleep(0)
        node.memory.free(extent)
        node.memory.reserve(4096, "another tenant's")
    await asking
    assert inodes == [inode]
    await peer.close()
    await other.close()
    node.close()
