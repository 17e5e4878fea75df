"""Weights versions that are fetched ahead of the operation that reads them: they displace nothing,
give way to everything, and leave nothing behind. Real daemons, real sockets; a link that can be
held is between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import FetchState, StatusReport
from phaseloom.common.contract.state_layout import PartSources, Slice
from phaseloom.worker.state.versions import OpenedVersion
from tests.support.meshcerts import ticket
from tests.support.readversions import load_version
from tests.support.slowlink import Link, link
from tests.support.statedaemon import (
    OTHER,
    POLICY,
    SAMPLER,
    Daemon,
    MiB,
    Rank,
    daemon,
    names,
    sent,
    start,
)

KEY = VersionKey(POLICY, 2)
SIZE = 4 * MiB
FAR_S = 300.0
"""Longer than any test: nothing here ends because somebody has waited for long enough."""
SECOND = DeploymentKey("acme", "sums", "second")


@dataclass
class Nodes:
    """A version on one node, and a sampler that may fetch it to another."""

    train: Daemon
    rollout: Daemon
    link: Link
    policy: Rank
    sampler: Rank

    def open(self, *, is_ahead: bool = True) -> Coroutine[Any, Any, OpenedVersion]:
        versions, source = self.sampler.client.versions, self.link.endpoint
        return versions.open(KEY, [source], ticket(KEY), is_ahead=is_ahead)

    async def load(self) -> None:
        sampler = self.sampler
        source = [self.link.endpoint]
        await load_version(sampler.client, KEY, source, sampler.slots, ticket(KEY))
        assert sampler.digest() == self.policy.digest()

    async def half_fetched(self) -> asyncio.Task[OpenedVersion]:
        """A fetch ahead that gets no further until the link is released."""
        self.link.hold_after_bytes = SIZE // 2
        opening = await sent(self.open())
        await self.link.held.wait()
        return opening

    async def status(self) -> StatusReport:
        return await self.rollout.agent.status()

    async def versions(self) -> list[VersionKey]:
        return (await self.status()).versions


@asynccontextmanager
async def nodes(directory: Path, host_bytes: int = 256 * MiB) -> AsyncIterator[Nodes]:
    """Args: host_bytes: of the sampler's node."""
    far = str(FAR_S)
    async with (
        daemon(directory / "a", PEER_TIMEOUT_S=far) as train,
        daemon(directory / "b", host_bytes=host_bytes, PEER_TIMEOUT_S=far) as rollout,
        link(await train.endpoint()) as between,
    ):
        policy = await start(train, POLICY, SIZE)
        await train.agent.switch_in(POLICY, 1, 1, [])
        policy.run(1)
        await policy.client.versions.create(KEY, policy.slots)
        sampler = await start(rollout, SAMPLER, SIZE)
        await rollout.agent.switch_in(SAMPLER, 1, 1, [])
        yield Nodes(train, rollout, between, policy, sampler)
        between.release()


async def test_version_that_is_dropped_while_it_is_fetched_frees_its_memory_at_once(
    short_dir: Path,
) -> None:
    """The source says nothing more: nobody waits for it."""
    async with nodes(short_dir) as n:
        before = (await n.status()).host_used_bytes
        opening = await n.half_fetched()
        assert (await n.status()).host_used_bytes == before + SIZE
        await n.rollout.agent.drop_versions([KEY])
        with pytest.raises(ResourceError, match="was dropped") as caught:
            await opening
        assert caught.value.info.code is Code.ABORTED
        status = await n.status()
        assert (status.versions, status.host_used_bytes) == ([], before)


async def test_version_that_is_dropped_before_its_source_has_answered_does_not_come(
    short_dir: Path,
) -> None:
    async with nodes(short_dir) as n:
        before = (await n.status()).host_used_bytes
        n.link.hold_after_bytes = 0
        opening = await sent(n.open())
        await n.link.held.wait()
        await n.rollout.agent.drop_versions([KEY])
        n.link.release()
        with pytest.raises(ResourceError, match="was dropped"):
            await opening
        status = await n.status()
        assert (status.versions, status.host_used_bytes) == ([], before)


async def test_version_that_was_dropped_comes_again_where_it_is_asked_for_again(
    short_dir: Path,
) -> None:
    """As a benchmark does, and a policy that makes a version again."""
    async with nodes(short_dir) as n:
        opening = await n.half_fetched()
        await n.rollout.agent.drop_versions([KEY])
        loading = await sent(n.load())
        n.link.release()
        with pytest.raises(ResourceError, match="was dropped"):
            await opening
        await loading


async def test_what_is_fetched_ahead_displaces_nothing(short_dir: Path) -> None:
    """Its operation displaces what it must."""
    async with nodes(short_dir, host_bytes=SIZE * 5 // 2) as n:
        await start(n.rollout, OTHER, SIZE)
        with pytest.raises(ResourceError, match="host memory") as caught:
            await n.open()
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        assert names(n.rollout) == []
        await n.load()
        assert len(names(n.rollout)) == 1


@pytest.mark.parametrize("is_here", [True, False])
async def test_what_is_fetched_ahead_makes_room_for_what_is_needed_now(
    short_dir: Path, *, is_here: bool
) -> None:
    """Also in the middle; nothing is written to a disk for it, and its operation fetches it."""
    async with nodes(short_dir, host_bytes=SIZE * 5 // 2) as n:
        if is_here:
            await n.open()
            await start(n.rollout, OTHER, SIZE)
        else:
            opening = await n.half_fetched()
            await start(n.rollout, OTHER, SIZE)
            with pytest.raises(ResourceError, match="was dropped"):
                await opening
        assert names(n.rollout) == []
        assert await n.versions() == []
        n.link.release()
        await n.load()


async def test_version_that_an_operation_waits_for_by_now_is_fetched_to_its_end(
    short_dir: Path,
) -> None:
    """It was begun ahead, and is nothing that makes room any more."""
    async with nodes(short_dir, host_bytes=SIZE * 5 // 2) as n:
        opening = await n.half_fetched()
        loading = await sent(n.load())
        await start(n.rollout, OTHER, SIZE)  # without host memory
        n.link.release()
        await opening
        await loading
        assert n.link.passed_bytes < 2 * SIZE, "it came once"


async def test_frozen_rank_is_given_no_memory_for_what_is_only_fetched_ahead(
    short_dir: Path,
) -> None:
    """An operation that writes its heap needs memory for the next copy of that; a hint writes
    nothing."""
    async with nodes(short_dir) as n:
        frozen = await start(n.rollout, SECOND, SIZE, frozen=True)
        await n.rollout.agent.switch_in(SECOND, 1, 2, [SAMPLER])
        before = (await n.status()).host_used_bytes
        shown, some = ticket(KEY, SECOND.deployment), SIZE // 4
        part = Slice("", n.policy.slots[0].name, "uint8", [0], [some], 0, some)
        versions, source = frozen.client.versions, n.link.endpoint
        for is_ahead, room in ((True, 0), (False, SIZE)):
            memory, _ = await versions.open_slices(
                KEY, [part], [PartSources("", [source])], shown, is_ahead=is_ahead
            )
            assert memory == n.policy.heap.buffer[:some]
            assert (await n.status()).host_used_bytes == before + some + room


async def test_deployments_that_want_one_version_at_once_share_one_fetch(short_dir: Path) -> None:
    """Also where the one whose fetch it is dies meanwhile."""
    async with nodes(short_dir) as n:
        second = await start(n.rollout, SECOND, SIZE)
        opening = await n.half_fetched()
        shown, source = ticket(KEY, SECOND.deployment), n.link.endpoint
        other = await sent(second.client.versions.open(KEY, [source], shown, is_ahead=True))
        await n.rollout.agent.drop_wpg(SAMPLER, 1, forget=True)
        n.link.release()
        with pytest.raises(PhaseloomError):
            await opening
        assert (await other).memory == n.policy.heap.buffer
        assert n.link.passed_bytes < 2 * SIZE, "it came once"


# --- jobs that end -------------------------------------------------------------------------------


async def test_version_that_ranks_fetched_goes_with_the_last_deployment_of_its_job(
    short_dir: Path,
) -> None:
    """The node may never hear that it was released: its agent was away, or the sampler moved."""
    async with nodes(short_dir) as n:
        await n.load()
        await start(n.rollout, SECOND)
        await n.rollout.agent.drop_wpg(SAMPLER, 1, forget=True)
        assert await n.versions() == [KEY], "the job is here still"
        await n.rollout.agent.drop_wpg(SECOND, 1, forget=True)
        status = await n.status()
        assert (status.versions, status.host_used_bytes) == ([], 0)


@pytest.mark.parametrize("held_bytes", [0, SIZE // 2])
async def test_version_that_is_on_its_way_as_its_job_ends_does_not_come(
    short_dir: Path, held_bytes: int
) -> None:
    """The rank that asked is dead; what it asked for goes on without it."""
    async with nodes(short_dir) as n:
        n.link.hold_after_bytes = held_bytes
        opening = await sent(n.open())
        await n.link.held.wait()
        await n.rollout.agent.drop_wpg(SAMPLER, 1, forget=True)
        n.link.release()
        with pytest.raises(PhaseloomError):
            await opening
        while n.link.connections:
            await n.status()
        status = await n.status()
        assert (status.versions, status.host_used_bytes) == ([], 0)


async def test_version_that_the_node_was_told_to_keep_stays_when_the_job_leaves(
    short_dir: Path,
) -> None:
    """Its policy was deleted: this copy may be the last one."""
    async with nodes(short_dir) as n:
        await n.load()
        request = FetchState(POLICY, 0, [], [n.link.endpoint], keeps=ticket(KEY))
        await n.rollout.agent.fetch_state(request)
        await n.rollout.agent.drop_wpg(SAMPLER, 1, forget=True)
        assert await n.versions() == [KEY]
        assert names(n.rollout) == ["version-2.state"]
        await n.rollout.agent.drop_versions([KEY])
        assert names(n.rollout) == []
