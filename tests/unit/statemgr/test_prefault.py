"""Extents touched ahead, beside what else a node does."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phaseloom.common.contract.ids import DeploymentKey, NodeId
from phaseloom.common.contract.state_rank import Done, StateMessage
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


class Busy:
    def __init__(self) -> None:
        self.is_busy = False
        self.was_asked = False

    def __call__(self) -> bool:
        self.was_asked = True
        return self.is_busy


@asynccontextmanager
async def filling(path: Path) -> AsyncIterator[tuple[Node, Prefault, Rank, Busy]]:
    """A rank that is about to fill its extent."""
    directory = await asyncio.to_thread(StateDirectory, path)
    node, busy = Node(NodeId("n"), directory, [SIZE], 2 * SIZE, 10.0), Busy()
    touching = Prefault(node, busy)
    node.residency.register(["token"], KEY, 1, [0], 0)
    (rank,) = node.residency.current(KEY, 1).ranks
    extent = node.memory.reserve(SIZE, "state", may_freeze=True)
    node.residency.register_heap(rank, SIZE, [], extent)
    async with asyncio.TaskGroup() as tasks:
        touching.start(tasks)
        yield node, touching, rank, busy
        touching.stop()
    node.handles.close()
    node.memory.close()


def prefaulted_bytes(node: Node, rank: Rank) -> int:
    assert rank.extent is not None
    return os.fstat(node.memory[rank.extent].fd).st_blocks * 512


@needs_prefault
async def test_all_of_an_extent_is_there_and_its_content_stays(tmp_path: Path) -> None:
    """Nothing maps it afterwards, though a thread forgets late what it was given."""
    asyncio.get_running_loop().set_default_executor(Remembering())
    async with filling(tmp_path) as (node, touching, rank, _):
        assert prefaulted_bytes(node, rank) == 0
        assert rank.extent is not None
        node.memory[rank.extent].view(SIZE)[-1] = 7
        touching.begin(rank)
        async with asyncio.timeout(30):
            while prefaulted_bytes(node, rank) < SIZE:
                await asyncio.sleep(0)
        await touching.end(rank)
        assert node.memory[rank.extent].view(SIZE)[-1] == 7
        assert node.memory[rank.extent].freeze()


@needs_prefault
async def test_it_waits_for_what_is_moved(tmp_path: Path) -> None:
    async with filling(tmp_path) as (node, touching, rank, busy):
        busy.is_busy = True
        touching.begin(rank)
        for _ in range(3):
            node.announce()
            await asyncio.sleep(0)
        assert prefaulted_bytes(node, rank) == 0
        busy.is_busy = False
        node.announce()
        async with asyncio.timeout(30):
            while prefaulted_bytes(node, rank) < SIZE:
                await asyncio.sleep(0)


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
    async with filling(tmp_path) as (node, touching, rank, busy):
        node.handles.attach(agent)

        async def answer() -> None:
            touching.begin(rank)
            await node.handles.record()

        answering = asyncio.create_task(answer())
        await was_told.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not busy.was_asked
        may_answer.set()
        await answering
        async with asyncio.timeout(30):
            while prefaulted_bytes(node, rank) < SIZE:
                await asyncio.sleep(0)
        node.handles.detach(agent)
    await agent.close()
    await far.close()


@pytest.mark.parametrize("why", ["filled", "lost", "stopped"])
async def test_it_ends_though_others_are_busy(why: str, tmp_path: Path) -> None:
    async with filling(tmp_path) as (node, touching, rank, busy):
        busy.is_busy = True
        touching.begin(rank)
        await asyncio.sleep(0)
        if why == "lost":
            extent = node.memory[rank.extent or 0]
            node.retire(rank.wpg, "it is gone")
            assert rank.state is State.LOST
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(extent.fd)
        if why == "filled":
            await touching.end(rank)
            assert prefaulted_bytes(node, rank) == 0
