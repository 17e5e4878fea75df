"""Who keeps the manifest and the handles, where agents come and go while they are told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.state_agent import KeepHandles
from phaseloom.common.contract.state_rank import Done, StateMessage
from phaseloom.common.transport.framing import MAX_FDS, Peer, close_fds
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.ledger import INDEX_HANDLES, Ledger
from phaseloom.statemgr.records.manifest import Manifest

SIZE = 4096


@dataclass
class Agent:
    """Keeps handles as an agent does, once it may."""

    peer: Peer[StateMessage]
    """The daemon's end."""
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    was_told: asyncio.Event = field(default_factory=asyncio.Event)
    indexes: set[str] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)

    async def answer(
        self, body: StateMessage, fds: list[int]
    ) -> tuple[StateMessage, Sequence[int]]:
        assert isinstance(body, KeepHandles)
        close_fds(fds)
        self.was_told.set()
        await self.may_answer.wait()
        self.indexes.add(body.index)
        self.kept |= set(body.keep)
        self.kept -= set(body.drop)
        return Done(), ()


@asynccontextmanager
async def agent() -> AsyncIterator[Agent]:
    one, other = socket.socketpair()
    peer: Peer[StateMessage] = Peer(one, StateMessage)
    far: Peer[StateMessage] = Peer(other, StateMessage)
    running = Agent(peer)
    far.handler = running.answer
    peer.start()
    far.start()
    try:
        yield running
    finally:
        await peer.close()
        await far.close()


@pytest.mark.parametrize("is_before_gone", [False, True])
async def test_agent_that_comes_while_another_is_told_gets_all(*, is_before_gone: bool) -> None:
    """What the one before has said that it keeps, or never will, is not with this one."""
    memory = HostMemory(64 * SIZE)
    manifest = Manifest("", [], [], [], [], [], [])
    handles = Ledger(NodeId("n"), memory, lambda: manifest)
    extents = {memory.reserve(SIZE, "state") for _ in range(2 * MAX_FDS)}
    async with agent() as first, agent() as second:
        handles.attach(first.peer)
        telling = asyncio.create_task(handles._record())
        await first.was_told.wait()
        handles.attach(second.peer)
        index = handles.index
        second.may_answer.set()
        if is_before_gone:
            first.peer.cut("it is gone")
        else:
            first.may_answer.set()
        await telling
        assert second.kept == {*extents, *INDEX_HANDLES}
        assert second.indexes == {index}
        # As it is told by the next one who records.
        freed = extents.pop()
        memory.free(freed)
        await handles._record()
        assert second.kept == {*extents, *INDEX_HANDLES}
    handles.close()
    memory.close()
