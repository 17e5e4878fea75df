"""Copies of seals and versions on other nodes: real daemons, real sockets, real files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from phaseloom.common.contract.commands import FilesTicket, Ticket
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.common.contract.specs import Durability
from phaseloom.common.contract.state_agent import FetchState
from phaseloom.common.transport.tickets import signed
from phaseloom.statemgr.transfer.fetching import call_once
from phaseloom.statemgr.transfer.wire import FilesKept, KeepFiles
from tests.support.meshcerts import SECRET
from tests.support.peerfetch import home
from tests.support.readversions import load_version
from tests.support.slowlink import GOODBYES_BYTES, link
from tests.support.statedaemon import (
    OTHER,
    POLICY,
    Daemon,
    MiB,
    Rank,
    daemon,
    files_of,
    is_empty,
    names,
    start,
)

SIZE = 10 * MiB
VERSION = VersionKey(POLICY, 2)
_CONTROL = SIZE // 25
"""More than the control messages of a fetch take."""


def ticket(*nodes: str, incarnation: int = 1, secret: str = SECRET) -> FilesTicket:
    return signed(FilesTicket(POLICY, incarnation, list(nodes)), secret)


@asynccontextmanager
async def nodes(
    directory: Path, *extra: str, peer_timeout_s: int = 10, size: int = SIZE
) -> AsyncIterator[list[Daemon]]:
    """Some daemons, each of a node of its own."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                daemon(
                    directory / name,
                    devices=[2 * size],
                    NODE=name,
                    PEER_TIMEOUT_S=f"{peer_timeout_s}",
                )
            )
            for name in extra
        ]


async def sealed(d: Daemon, seq: int = 3) -> Rank:
    """A policy whose seal, and a version with it, lie on its node's disk."""
    policy = await start(d, POLICY, SIZE)
    await d.agent.switch_in(POLICY, 1, 1, [])
    policy.run(2)
    await policy.client.versions.create(VERSION, policy.slots)
    policy.run(seq)
    await d.agent.prepare_seal(POLICY, 1, seq)
    await d.agent.write_seal(POLICY, 1, seq, [VERSION.seq])
    return policy


def asked(*sources: str, node: str, seq: int = 3, versions: tuple[int, ...] = (2,)) -> FetchState:
    return FetchState(POLICY, seq, list(versions), list(sources), ticket(node))


def files(d: Daemon) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(d.files.rglob("*.state"))}


async def test_another_node_restores_a_seal_that_it_brought(short_dir: Path) -> None:
    async with nodes(short_dir, "a", "b") as (a, b):
        policy = await sealed(a)
        await b.agent.fetch_state(asked(await a.endpoint(), node="b"))
        assert names(b) == ["seal-3.state", "version-2.state"]
        assert files(b) == files(a)
        restored = await start(b, POLICY, SIZE, incarnation=2, seal_seq=3)
        await b.agent.switch_in(POLICY, 2, 2, [])
        assert (restored.seq, restored.digest()) == (3, policy.digest())
        assert VERSION in (await b.agent.status()).versions


async def test_what_is_here_is_not_fetched_again(short_dir: Path) -> None:
    async with nodes(short_dir, "a", "b") as (a, b), link(await a.endpoint()) as wire:
        await sealed(a)
        await b.agent.fetch_state(asked(wire.endpoint, node="b"))
        crossed = wire.passed_bytes
        assert 2 * SIZE <= crossed < 2 * (SIZE + _CONTROL)
        await b.relaunch()
        await b.agent.fetch_state(asked(wire.endpoint, node="b"))
        assert wire.passed_bytes < crossed + GOODBYES_BYTES


async def test_a_cut_link_costs_the_blocks_that_were_under_way(short_dir: Path) -> None:
    async with nodes(short_dir, "a", "b") as (a, b), link(await a.endpoint()) as wire:
        await sealed(a)
        wire.hold_after_bytes = SIZE // 2
        request = asked(wire.endpoint, node="b", versions=())
        fetching = asyncio.create_task(b.agent.fetch_state(request))
        await wire.held.wait()
        wire.cut()
        wire.release()
        await fetching
        assert files(b)["seal-3.state"] == files(a)["seal-3.state"]
        assert wire.passed_bytes < 2 * SIZE


async def test_a_block_that_is_bad_at_one_source_comes_from_the_next(short_dir: Path) -> None:
    async with nodes(short_dir, "a", "b", "c") as (a, b, c):
        await sealed(a)
        await b.agent.fetch_state(asked(await a.endpoint(), node="b"))
        good = files(a)
        flip(a, "seal-3.state", SIZE // 2)
        sources = [await a.endpoint(), await b.endpoint()]
        await c.agent.fetch_state(asked(*sources, node="c"))
        assert files(c) == good


async def test_a_seal_that_went_bad_here_is_fetched_again_when_it_is_read(short_dir: Path) -> None:
    async with nodes(short_dir, "a", "b") as (a, b):
        policy = await sealed(a)
        await b.agent.fetch_state(asked(await a.endpoint(), node="b"))
        flip(b, "seal-3.state", SIZE // 2)
        restored = await start(b, POLICY, SIZE, incarnation=2, seal_seq=3)
        await b.agent.switch_in(POLICY, 2, 2, [])
        assert restored.digest() == policy.digest()
        assert files(b)["seal-3.state"] == files(a)["seal-3.state"]


async def test_other_nodes_part_of_a_seal_is_replaced_by_the_own(short_dir: Path) -> None:
    """Parts of a seal have one name and one size; a node may have had another one before."""
    async with nodes(short_dir, "a", "b", "c", size=MiB) as (a, b, c):
        parts = []
        for rank, d in enumerate((a, b)):
            part = await start(
                d, POLICY, MiB, content=rank, applied=3, rank_offset=rank, num_ranks=2
            )
            await d.agent.switch_in(POLICY, 1, 1, [])
            await d.agent.prepare_seal(POLICY, 1, 3)
            await d.agent.write_seal(POLICY, 1, 3, [])
            parts.append(part)
        assert parts[0].digest() != parts[1].digest()
        sources = [await a.endpoint(), await b.endpoint()]

        def of_rank(rank_offset: int) -> FetchState:
            request = asked(*sources, node="c", versions=())
            return msgspec.structs.replace(request, rank_offset=rank_offset, num_ranks=2)

        await c.agent.fetch_state(of_rank(0))
        assert files(c) == files(a)
        # What it fetched was for another part than the one that it is to run.
        await c.agent.fetch_state(of_rank(1))
        assert files(c) == files(b)
        restored = await start(
            c, POLICY, MiB, incarnation=2, seal_seq=3, rank_offset=1, num_ranks=2
        )
        await c.agent.switch_in(POLICY, 2, 2, [])
        assert restored.digest() == parts[1].digest()
        await c.agent.drop_wpg(POLICY, 2)
        with pytest.raises(
            ResourceError, match="ranks 0 and up of 2; this node has ranks 1 and up"
        ) as bad:
            await start(a, POLICY, MiB, incarnation=2, seal_seq=3, rank_offset=1, num_ranks=2)
        assert bad.value.info.code is Code.DATA_LOSS


async def test_a_seal_that_nobody_has_whole_is_lost_and_one_out_of_reach_is_not(
    short_dir: Path,
) -> None:
    async with nodes(short_dir, "a", "b", peer_timeout_s=3) as (a, b):
        await sealed(a)
        endpoint = await a.endpoint()
        with pytest.raises(ResourceError, match="seal 9 of") as caught:
            await b.agent.fetch_state(asked(endpoint, node="b", seq=9))
        assert caught.value.info.code is Code.DATA_LOSS
        await a.kill()
        with pytest.raises(ResourceError) as caught:
            await b.agent.fetch_state(asked(endpoint, node="b"))
        assert caught.value.info.code is Code.UNAVAILABLE
        assert names(b) == []


async def test_files_go_to_those_only_whom_a_ticket_names(short_dir: Path) -> None:
    async with nodes(short_dir, "a", "b", peer_timeout_s=3) as (a, b):
        await sealed(a)
        endpoint = await a.endpoint()
        for bad in (
            ticket("c"),
            ticket("b", secret="a guess"),
            signed(FilesTicket(OTHER, 1, ["b"]), SECRET),
        ):
            with pytest.raises(ResourceError, match="ticket"):
                await b.agent.fetch_state(FetchState(POLICY, 3, [], [endpoint], bad))
        await b.agent.fetch_state(FetchState(POLICY, 3, [], [endpoint], ticket("b", incarnation=4)))
        with pytest.raises(ResourceError, match="which is at 4"):
            await b.agent.fetch_state(FetchState(POLICY, 9, [], [endpoint], ticket("b")))


async def test_a_remote_seal_is_on_the_other_disk_before_it_is_told(short_dir: Path) -> None:
    async with nodes(short_dir, "a", "b", peer_timeout_s=3) as (a, b):
        policy = await sealed(a)
        replicas = {NodeId("b"): await b.endpoint()}
        for seq in (4, 5, 6):
            policy.run(seq)
            await a.agent.prepare_seal(POLICY, 1, seq)
            await a.agent.write_seal(
                POLICY,
                1,
                seq,
                [VERSION.seq],
                committed=seq - 1,
                durability=Durability.REMOTE,
                replicas=replicas,
                ticket=ticket("b"),
            )
            assert f"seal-{seq}.state" in names(b)
        assert names(b) == ["seal-5.state", "seal-6.state", "version-2.state"]
        await b.kill()
        policy.run(7)
        await a.agent.prepare_seal(POLICY, 1, 7)
        with pytest.raises(ResourceError):
            await a.agent.write_seal(
                POLICY, 1, 7, [], committed=6, replicas=replicas, ticket=ticket("b")
            )
        assert "seal-6.state" in names(a), "the committed one stands"


async def test_a_version_that_is_to_be_kept_is_on_the_other_disk_though_it_was_in_memory_only(
    short_dir: Path,
) -> None:
    """Of a deleted policy, whose node is left: nobody makes it again."""
    async with nodes(short_dir, "a", "b") as (a, b):
        policy = await start(a, POLICY, SIZE)
        await a.agent.switch_in(POLICY, 1, 1, [])
        policy.run(2)
        await policy.client.versions.create(VERSION, policy.slots)
        assert names(a) == []
        keeps = signed(Ticket(VERSION, POLICY, 1, ["b"]), SECRET)
        request = FetchState(POLICY, 0, [], [await a.endpoint()], ticket("b"), keeps=keeps)
        await b.agent.fetch_state(request)
        assert names(b) == ["version-2.state"]
        await a.kill()
        reader = DeploymentKey(POLICY.tenant, POLICY.job, "sampler")
        sampler = await start(b, reader, SIZE, slots=policy.slots, content=9)
        await b.agent.switch_in(reader, 1, 1, [])
        await load_version(sampler.client, VERSION, [], sampler.slots)
        assert sampler.digest() == policy.digest()
        await b.agent.drop_versions([VERSION])
        with pytest.raises(PhaseloomError):
            await b.agent.fetch_state(request)


async def test_a_replica_keeps_the_newest_seal_and_the_committed_one(short_dir: Path) -> None:
    size = 32 * MiB
    async with nodes(short_dir, "a", "b", size=size) as (a, b):
        policy = await start(a, POLICY, size)
        await a.agent.switch_in(POLICY, 1, 1, [])
        replicas = {NodeId("b"): await b.endpoint()}

        async def seal(seq: int) -> None:
            policy.run(seq)
            await a.agent.prepare_seal(POLICY, 1, seq)
            await a.agent.write_seal(
                *(POLICY, 1, seq, []),
                committed=seq - 1,
                durability=Durability.REMOTE,
                replicas=replicas,
                ticket=ticket("b"),
            )

        for seq in (1, 2, 3, 4):
            await seal(seq)
            await b.logged(f"fetched seal {seq} of {POLICY}: {size} bytes")
        assert list(files(b)) == ["seal-3.state", "seal-4.state"]
        await b.relaunch()  # nothing that it needs is taken for litter
        again = await start(b, POLICY, size, incarnation=2, seal_seq=4)
        await b.agent.switch_in(POLICY, 2, 2, [])
        assert again.digest() == policy.digest()


async def test_a_kill_of_the_receiver_leaves_nothing_and_it_begins_afresh(short_dir: Path) -> None:
    async with nodes(short_dir, "a", "b") as (a, b), link(await a.endpoint()) as wire:
        await sealed(a)
        wire.hold_after_bytes = SIZE // 2
        fetching = asyncio.create_task(b.agent.fetch_state(asked(wire.endpoint, node="b")))
        await wire.held.wait()
        await b.kill()
        wire.release()
        await b.launch()
        await fetching
        assert files(b) == files(a)
        assert not list(b.files.rglob("*.partial"))


async def test_a_full_disk_is_told_and_leaves_nothing(short_dir: Path) -> None:
    limited = ("prlimit", f"--fsize={SIZE // 2}")
    async with (
        daemon(short_dir / "a", devices=[2 * SIZE], NODE="a") as a,
        daemon(short_dir / "b", devices=[2 * SIZE], launcher=limited, NODE="b") as b,
    ):
        await sealed(a)
        with pytest.raises((ResourceError, CallerError)) as caught:
            await b.agent.fetch_state(asked(await a.endpoint(), node="b"))
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        assert names(b) == []


@pytest.mark.parametrize("versions", [(), (2,)])
async def test_a_replica_that_is_to_forget_a_seal_on_its_way_keeps_nothing_of_it(
    versions: tuple[int, ...], short_dir: Path
) -> None:
    """Its job has ended, or the seal is given up: the node hears of that before the seal is there,
    or between the seal and the version that comes with it."""
    async with nodes(short_dir, "a", "b") as (a, b), link(await a.endpoint()) as wire:
        await sealed(a)
        wire.hold_after_bytes = SIZE + SIZE // 2 if versions else SIZE // 2
        asked = KeepFiles(POLICY, 3, list(versions), 0, wire.endpoint, ticket("b"))
        at = home(node="a", timeout_s=60.0)
        keeping = asyncio.create_task(call_once(await b.endpoint(), asked, FilesKept, at))
        await wire.held.wait()
        await b.agent.drop_wpg(POLICY, 1, forget=True)
        wire.release()
        with pytest.raises(ResourceError, match="has ended"):
            await keeping
        assert files_of(b) == []
        assert is_empty(await b.agent.status())


async def test_a_seal_that_comes_after_its_deployment_was_forgotten_is_kept(
    short_dir: Path,
) -> None:
    """The deployment came back; the fetch of before takes nothing away."""
    async with nodes(short_dir, "a", "b") as (a, b), link(await a.endpoint()) as wire:
        await sealed(a)
        wire.hold_after_bytes = SIZE // 2
        at = home(node="a", timeout_s=60.0)
        asked = KeepFiles(POLICY, 3, [], 0, wire.endpoint, ticket("b"))
        endpoint = await b.endpoint()
        first = asyncio.create_task(call_once(endpoint, asked, FilesKept, at))
        await wire.held.wait()
        await b.agent.drop_wpg(POLICY, 1, forget=True)
        second = asyncio.create_task(call_once(endpoint, asked, FilesKept, at))
        wire.release()
        with pytest.raises(ResourceError, match="has ended"):
            await first
        await second
        assert files(b)["seal-3.state"] == files(a)["seal-3.state"]


def flip(d: Daemon, name: str, offset: int) -> None:
    """One bit of a file."""
    (path,) = d.files.rglob(name)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
