"""Extents prefaulted while their ranks fill their heaps."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phaseloom.common.contract.ids import DeploymentKey, NodeId
from phaseloom.common.contract.state_agent import RegisterWpg
from phaseloom.common.contract.state_rank import Done, RegisterHeap, StateMessage
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.transport.framing import Peer, close_fds
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.residency.incarnations import Rank, State
from phaseloom.statemgr.tiering.prefault import Prefault
from tests.support.machine import needs_prefault
from tests.support.threads import Remembering

SIZE = 5 * 1024 * 1024 + 4096
"""More than huge pages cover."""
KEY = DeploymentKey("acme", "job", "policy")


@asynccontextmanager
async def filling(path: Path) -> AsyncIterator[tuple[Node, Prefault, Rank]]:
    """A rank that is about to fill its extent."""
    directory = await asyncio.to_thread(StateDirectory, path)
    node = Node(NodeId("n"), directory, [SIZE], 2 * SIZE, 10.0)
    prefault = Prefault(node)
    node.residency.register(RegisterWpg(["token"], KEY, 1, [0], 0))
    (rank,) = node.residency.current(KEY, 1).ranks
    extent = node.memory.reserve(SIZE, "state", may_freeze=True)
    node.residency.register_heap(rank, RegisterHeap(SIZE, b""), TensorTable.of([]), extent)
    async with asyncio.TaskGroup() as tasks:
        prefault.start(tasks)
        yield node, prefault, rank
        prefault.stop()
    node.handles.close()
    node.memory.close()


def prefaulted_bytes(node: Node, rank: Rank) -> int:
    assert rank.extent is not None
    return os.fstat(node.memory[rank.extent].fd).st_blocks * 512


@needs_prefault
async def test_all_of_an_extent_is_there_and_its_content_stays(tmp_path: Path) -> None:
    """Nothing maps it afterwards, though a thread forgets late what it was given."""
    asyncio.get_running_loop().set_default_executor(Remembering())
    async with filling(tmp_path) as (node, prefault, rank):
        assert prefaulted_bytes(node, rank) == 0
        assert rank.extent is not None
        node.memory[rank.extent].view(SIZE)[-1] = 7
        prefault.begin(rank)
        async with asyncio.timeout(30):
            while prefaulted_bytes(node, rank) < SIZE:
                await asyncio.sleep(0)
        await prefault.end(rank)
        assert node.memory[rank.extent].view(SIZE)[-1] == 7
        assert node.memory[rank.extent].freeze()


@needs_prefault
async def test_the_answer_that_brings_the_extent_goes_first(tmp_path: Path) -> None:
    """It leaves when the agent keeps the handles that it speaks of."""
    was_told, may_answer = asyncio.Event(), asyncio.Event()

    async def keep(_: StateMessage, fds: list[int]) -> tuple[StateMessage, Sequence[int]]:
        close_fds(fds)
        was_told.set()
        await may_answer.wait()
        return Done(), ()

    one, other = socket.socketpair()
    agent: Peer[StateMessage] = Peer(one, StateMessage)
    far: Peer[StateMessage] = Peer(other, StateMessage, keep)
    agent.start()
    far.start()
    async with filling(tmp_path) as (node, prefault, rank):
        node.handles.attach(agent)

        async def answer() -> None:
            prefault.begin(rank)
            await node.handles.record()

        answering = asyncio.create_task(answer())
        await was_told.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert prefaulted_bytes(node, rank) == 0
        may_answer.set()
        await answering
        async with asyncio.timeout(30):
            while prefaulted_bytes(node, rank) < SIZE:
                await asyncio.sleep(0)
        node.handles.detach(agent)
    await agent.close()
    await far.close()


@pytest.mark.parametrize("why", ["filled", "lost", "stopped"])
async def test_nothing_is_prefaulted_of_what_nobody_fills_any_more(
    why: str, tmp_path: Path
) -> None:
    async with filling(tmp_path) as (node, prefault, rank):
        assert rank.extent is not None
        extent = node.memory[rank.extent]
        kept = os.dup(extent.fd)
        prefault.begin(rank)
        match why:
            case "lost":
                node.retire(rank.wpg, "it is gone")
                assert rank.state is State.LOST
                with pytest.raises(OSError, match="Bad file"):
                    os.fstat(extent.fd)
            case "stopped":
                prefault.stop()
        await prefault.end(rank)
        assert os.fstat(kept).st_blocks == 0
        os.close(kept)
