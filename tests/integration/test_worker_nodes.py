"""What agents of one WPG's nodes ask of one another, over a real server: once, in chunks, or not at
all where one is gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from phaseloom.common.contract import streams
from phaseloom.common.contract.agents import (
    CallRoll,
    CancelPart,
    FindStore,
    IncarnationOver,
    NodeReply,
    NodeRequest,
    NotYet,
    Present,
    StoreFound,
    TakePart,
)
from phaseloom.common.contract.commands import Permit, StartWpg, Ticket
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    ErrorInfo,
    PhaseloomError,
    ResourceError,
)
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.operations import (
    Generate,
    GenerateResult,
    Operation,
    SamplingParams,
    Sequence,
)
from phaseloom.common.contract.specs import CommandId
from phaseloom.common.contract.state_rank import Done
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.framing import Peer
from phaseloom.worker.agent.interpreters import Interpreters
from phaseloom.worker.agent.nodes import (
    MAX_CHUNK_BYTES,
    IncarnationEnded,
    LeaderShares,
    PeerAgents,
    serve_nodes,
    with_payloads,
)
from phaseloom.worker.agent.processes import Processes
from phaseloom.worker.agent.wpg import LocalWpg
from phaseloom.worker.config import WorkerConfig
from phaseloom.worker.rank.wire import (
    Payload,
    PrefetchWeights,
    RankMessage,
    RankUp,
    RunShare,
    SharesDone,
)
from tests.support.node import policy_spec

KEY = DeploymentKey("acme", "sums", "sampler")
OPERATION = OperationKey("acme", "sums", "sampler", "1")
HERE, THERE, NOWHERE = NodeId("n0"), NodeId("n1"), NodeId("n2")
PERMIT = Permit(
    id=CommandId(1, 0),
    node=HERE,
    revision=1,
    operation=OPERATION,
    operation_id="id",
    kind="generate",
    incarnation=1,
    epoch=1,
    prev=0,
)
SHARE = RunShare([Payload(OPERATION, b"a batch", "application/msgpack")], PERMIT)


@dataclass
class Node:
    """Another node's agent, whose ranks answer what a test wants."""

    parts: LeaderShares
    result: SharesDone | PhaseloomError = field(default_factory=lambda: SharesDone([[None]]))
    over: ErrorInfo | None = None
    """Its life is."""
    asked: list[NodeRequest] = field(default_factory=list)
    ran: list[RunShare] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: NodeRequest) -> NodeReply:
        self.asked.append(request)
        if self.over is not None:
            return IncarnationOver(self.over)
        match request:
            case FindStore():
                return NotYet() if len(self.asked) < 3 else StoreFound("10.0.0.1:4711")
            case TakePart():
                return await self.parts.answer(request, self._run)
        return Present()

    async def _run(self, share: RunShare) -> SharesDone:
        self.ran.append(share)
        await self.may_end.wait()
        if isinstance(self.result, PhaseloomError):
            raise self.result
        return self.result


@asynccontextmanager
async def two(
    bus: Bus, nodes: list[NodeId] | None = None
) -> AsyncIterator[tuple[PeerAgents, Node]]:
    """The other nodes as the first sees them, and the one that is there."""
    async with asyncio.TaskGroup() as tasks:
        node = Node(LeaderShares(tasks))
        serving = tasks.create_task(serve_nodes(bus, THERE, node.answer))
        yield PeerAgents(bus, KEY, 1, nodes or [THERE], lambda: False), node
        node.may_end.set()
        await lifecycle.end([serving])


async def test_share_begins_once_however_often_it_is_asked_for(bus: Bus) -> None:
    async with two(bus) as (others, node):
        node.result = SharesDone([[None], [None]])
        taking = asyncio.create_task(others.run_share(SHARE))
        async with asyncio.timeout(30):
            while not node.asked:
                await asyncio.sleep(0.01)
        again = await asyncio.gather(*(node.answer(node.asked[0]) for _ in range(3)))
        assert again == [NotYet()] * 3
        node.may_end.set()
        assert await taking == [[None], [None]]
        assert len(node.ran) == 1
        assert node.ran[0].operations[0].payload == b"", "the payload went over the bus again"
        await others.run_share(SHARE)
        assert len(node.ran) == 2
        # What is asked again of the one before was lost on the way, and is too late.
        assert await node.answer(node.asked[0]) == NotYet()
        assert len(node.ran) == 2


async def test_large_results_come_in_chunks(bus: Bus) -> None:
    async with two(bus) as (others, node):
        tokens = bytes(range(256)) * (2 * MAX_CHUNK_BYTES // 256 + 1)
        result = GenerateResult([[Sequence(tokens, b"", "length")]])
        node.result = SharesDone([[result]])
        node.may_end.set()
        assert await others.run_share(SHARE) == [[result]]
        assert [r.offset for r in node.asked if isinstance(r, TakePart)][:3] == [
            0,
            MAX_CHUNK_BYTES,
            2 * MAX_CHUNK_BYTES,
        ]
        assert len(node.ran) == 1


async def test_results_that_fit_in_no_frame_are_refused(bus: Bus) -> None:
    async with two(bus) as (others, node):
        node.result = SharesDone([[GenerateResult([[Sequence(bytes(2**24), b"", "stop")]])]])
        node.may_end.set()
        with pytest.raises(ResourceError, match="results of one node") as caught:
            await others.run_share(SHARE)
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED


async def test_part_that_failed_says_why(bus: Bus) -> None:
    async with two(bus) as (others, node):
        node.result = CallerError("not finite", field="args.batch")
        node.may_end.set()
        with pytest.raises(CallerError, match="not finite") as caught:
            await others.run_share(SHARE)
        assert caught.value.info.field == "args.batch"


async def test_life_that_is_over_there_ends_whatever_is_asked(bus: Bus) -> None:
    async with two(bus) as (others, node):
        node.over = ErrorInfo(Code.UNAVAILABLE, "the worker process died")
        for asked in (
            others.run_share(SHARE),
            others.call_roll(),
            others.cancel(OPERATION, keeps_partial=False),
            others.find_store(THERE),
        ):
            with pytest.raises(IncarnationEnded, match="on n1: the worker process died"):
                await asked


async def test_store_is_asked_for_until_it_is_open(bus: Bus) -> None:
    async with two(bus) as (others, node):
        assert await others.find_store(THERE) == "10.0.0.1:4711"
        assert len(node.asked) == 3


async def test_node_that_does_not_answer_the_roll_is_lost(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is there; of the other nobody knows."""
    monkeypatch.setattr("phaseloom.worker.agent.nodes.SILENCE_S", 0.3)
    async with two(bus, [THERE]) as (others, node):
        await others.call_roll()
        await others.cancel(OPERATION, keeps_partial=False)
        assert node.asked == [CallRoll(KEY, 1), CancelPart(OPERATION, 1)]
    async with two(bus, [THERE, NOWHERE]) as (others, _):
        with pytest.raises(IncarnationEnded, match="n2 has not answered"):
            await others.call_roll()


async def test_nobody_waits_for_another_node_once_its_own_ranks_are_killed(bus: Bus) -> None:
    is_over = asyncio.Event()
    others = PeerAgents(bus, KEY, 1, [NOWHERE], is_over.is_set)
    asking = asyncio.create_task(others.run_share(SHARE))
    try:
        await asyncio.wait([asking], timeout=0.3)
        assert not asking.done()
        is_over.set()
        with pytest.raises(IncarnationEnded, match=r"incarnation 1 of acme\.sums\.sampler is over"):
            await asking
    finally:
        await lifecycle.end([asking])


async def test_payloads_are_read_where_they_are_needed(bus: Bus) -> None:
    bare = msgspec.structs.replace(SHARE, operations=[Payload(OPERATION, b"", "")])
    with pytest.raises(ResourceError, match="is not in its stream") as caught:
        await with_payloads(bus, bare)
    assert caught.value.info.code is Code.DATA_LOSS
    operation = Operation("id", 1, Generate([], SamplingParams(1)))
    await bus.publish(streams.op_subject(OPERATION), operation)
    (payload,) = (await with_payloads(bus, bare)).operations
    assert msgspec.msgpack.decode(payload.payload, type=Operation) == operation


def part_of(
    settings: WorkerConfig, bus: Bus, tasks: asyncio.TaskGroup, num_devices: int = 1
) -> LocalWpg:
    """The leader's node's part of a WPG, not started."""
    command = StartWpg(
        id=CommandId(1, 0),
        node=HERE,
        revision=1,
        deployment=KEY,
        incarnation=1,
        spec=policy_spec(),
        devices=list(range(num_devices)),
        seal_seq=0,
        nodes=[HERE, THERE],
    )
    return LocalWpg(command, settings, "agent.sock", bus, tasks)


def settings(directory: Path, rank_host: str) -> WorkerConfig:
    return WorkerConfig(
        node=str(HERE),
        pool="train",
        devices=[2**20],
        host_memory_bytes=2**20,
        state_socket="state.sock",
        state_secret="",
        runtime_directory=str(directory),
        rank_host=rank_host,
    )


async def test_each_life_meets_at_an_address_of_its_own(bus: Bus, tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        first, second = (part_of(settings(tmp_path, "127.0.0.1"), bus, tasks) for _ in range(2))
        assert first.store_address == ""
        for wpg in (first, second):
            wpg.open_store()
            met, fds = await wpg.meet(wpg.tokens[0])
            assert met.address == wpg.store_address
            assert len(fds) == 1
        assert first.store_address != second.store_address
        for wpg in (first, second):
            # Where it ends, so does its port.
            wpg.kill()
            with closing(Interpreters({}, preload=False)) as interpreters:
                await wpg.start(Processes(interpreters, tasks))
            await wpg.ended()
            assert wpg.store_address == ""
        elsewhere = part_of(settings(tmp_path, "192.0.2.1"), bus, tasks)
        with pytest.raises(ResourceError, match=r"192\.0\.2\.1.*set the worker's rank_host"):
            elsewhere.open_store()


async def test_share_waits_for_the_seal_that_was_asked_for_before_it(
    bus: Bus, tmp_path: Path
) -> None:
    async with asyncio.TaskGroup() as tasks:
        wpg = part_of(settings(tmp_path, "127.0.0.1"), bus, tasks)
        await wpg.until_sealed(0)
        waiting = asyncio.create_task(wpg.until_sealed(4))
        wpg.record_sealed(2)
        await asyncio.sleep(0)
        assert not waiting.done()
        wpg.record_sealed(4)
        await waiting
        await wpg.until_sealed(4)


async def test_fetch_ahead_has_ended_once_no_rank_is_at_it(bus: Bus, tmp_path: Path) -> None:
    """One rank cannot have its part. A version that is dropped meanwhile is dropped again once the
    others have theirs."""
    go_on = asyncio.Event()

    async def refuses(_: RankMessage, fds: list[int]) -> tuple[RankMessage, list[int]]:
        raise ResourceError("nobody has it")

    async def is_slow(_: RankMessage, fds: list[int]) -> tuple[RankMessage, list[int]]:
        await go_on.wait()
        return Done(), []

    async with asyncio.TaskGroup() as tasks:
        wpg = part_of(settings(tmp_path, "127.0.0.1"), bus, tasks, num_devices=2)
        peers: list[Peer[RankMessage]] = []
        for token, answer in zip(wpg.tokens, (refuses, is_slow), strict=True):
            agents, ranks = socket.socketpair()
            ours: Peer[RankMessage] = Peer(agents, RankMessage)
            peers += [ours, Peer(ranks, RankMessage, answer)]
            wpg.connected(ours, RankUp(token, 0, 0))
        for peer in peers:
            peer.start()
        version = VersionKey(KEY, 1)
        asked = PrefetchWeights([], Ticket(version, KEY, 1, []), CommandId(1, 1))
        fetching = asyncio.create_task(wpg.prefetch_version(asked))
        await asyncio.wait([fetching], timeout=0.3)
        assert not fetching.done()
        go_on.set()
        with pytest.raises(ResourceError, match="nobody has it"):
            await fetching
        for peer in peers:
            await peer.close()
