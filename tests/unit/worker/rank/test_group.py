"""Calls on all ranks of a WPG: what a failure or a death in one of them means for the others."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from phaseloom.common.contract.codec import MSGPACK
from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.ids import NodeId, OperationKey
from phaseloom.common.contract.operations import ForwardBackwardResult
from phaseloom.common.contract.specs import CommandId
from phaseloom.common.contract.state_rank import Done
from phaseloom.common.transport.framing import Peer
from phaseloom.worker.backends.base import GroupBroken
from phaseloom.worker.rank.group import GroupLost, RanksDiverged, WpgRanks
from phaseloom.worker.rank.wire import (
    Payload,
    RankMessage,
    RollCall,
    RunShare,
    ShareDone,
    SharesDone,
)

KEY = OperationKey("acme", "job", "policy", "1")
SHARE = RunShare(
    [Payload(KEY, b"", MSGPACK)],
    Permit(
        id=CommandId(1, 1),
        node=NodeId("n0"),
        revision=1,
        operation=KEY,
        operation_id="id",
        kind="forward_backward",
        incarnation=1,
        epoch=1,
        prev=0,
    ),
)
THEIRS = ForwardBackwardResult({"loss:sum": 2.0})


@dataclass
class AgentEnd:
    """What the agent answers for the other ranks."""

    share: asyncio.Future[RankMessage] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    roll_call: asyncio.Future[RankMessage] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    was_called: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, body: RankMessage, fds: list[int]) -> tuple[RankMessage, list[int]]:
        if isinstance(body, RollCall):
            self.was_called.set()
            return await self.roll_call, []
        assert isinstance(body, RunShare)
        return await self.share, []


@asynccontextmanager
async def two_ranks() -> AsyncIterator[tuple[WpgRanks, AgentEnd]]:
    mine, theirs = socket.socketpair()
    end = AgentEnd()
    agent = Peer[RankMessage](theirs, RankMessage, end.answer)
    leader = Peer[RankMessage](mine, RankMessage)
    agent.start()
    leader.start()
    thread = ThreadPoolExecutor(1)
    try:
        yield WpgRanks(thread, leader, 2), end
    finally:
        await leader.close()
        await agent.close()
        thread.shutdown(wait=False)


async def test_results_of_all_ranks_come_together() -> None:
    async with two_ranks() as (ranks, end):
        end.share.set_result(SharesDone([[THEIRS]]))
        own, others = await ranks.on_all_ranks(lambda: "mine", SHARE)
        assert (own, others) == ("mine", [[THEIRS]])
        assert not end.was_called.is_set()


async def test_failure_elsewhere_ends_the_call_though_the_leader_never_returns() -> None:
    """It waits in a collective for a rank that has given up."""
    go = threading.Event()
    async with two_ranks() as (ranks, end):
        no_memory = ResourceError("no memory there", code=Code.RESOURCE_EXHAUSTED)
        end.share.set_exception(no_memory)
        end.roll_call.set_result(Done())
        with pytest.raises(RanksDiverged) as broken:
            await ranks.on_all_ranks(go.wait, SHARE)
        assert "no memory there" in str(broken.value.__cause__)
        go.set()


async def test_call_is_not_at_fault_where_ranks_that_live_cannot_reach_one_another() -> None:
    """The network between two nodes breaks: the next life runs it again."""

    def fail() -> None:
        raise GroupBroken("connection reset by peer")

    async with two_ranks() as (ranks, end):
        end.roll_call.set_result(Done())
        with pytest.raises(GroupLost) as lost:
            await ranks.on_all_ranks(fail, SHARE)
        assert "connection reset" in str(lost.value.__cause__)
        end.share.set_exception(GroupBroken("another rank is late"))
        with pytest.raises(GroupLost):
            await ranks.on_all_ranks(lambda: None, SHARE)


async def test_failure_of_the_leader_ends_the_call_though_the_others_never_answer() -> None:
    def fail() -> None:
        raise MemoryError("none here")

    async with two_ranks() as (ranks, end):
        end.roll_call.set_result(Done())
        with pytest.raises(RanksDiverged) as broken:
            await ranks.on_all_ranks(fail, SHARE)
        assert isinstance(broken.value.__cause__, MemoryError)


async def test_failure_is_not_told_while_nobody_knows_that_all_ranks_are_alive() -> None:
    """The leader's collective fails because another rank was killed: no failed operation."""

    def fail() -> None:
        raise RuntimeError("connection closed by peer")

    async with two_ranks() as (ranks, end):
        call = asyncio.create_task(ranks.on_all_ranks(fail, SHARE))
        await end.was_called.wait()
        assert not call.done()
        call.cancel()
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError)


async def test_leader_that_is_alone_asks_nobody() -> None:
    async with two_ranks() as (ranks, end):
        alone = WpgRanks(ranks.device_thread, ranks.agent)
        assert await alone.on_all_ranks(lambda: 7, SHARE) == (7, [])

        def fail() -> None:
            raise ValueError("plain")

        with pytest.raises(ValueError, match="plain"):
            await alone.on_all_ranks(fail, SHARE)
        assert not end.was_called.is_set()


def test_answer_of_a_rank_survives_the_wire() -> None:
    import msgspec

    packed = msgspec.msgpack.encode(ShareDone([THEIRS, None]))
    assert msgspec.msgpack.decode(packed, type=RankMessage) == ShareDone([THEIRS, None])
