"""Weights versions that several ranks write in parts: readable when all parts are committed, as
durable as whole ones, and the same to the bit for whoever reads them. Real daemons and sockets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.commands import FilesTicket
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.common.contract.specs import Durability
from phaseloom.common.contract.state_agent import FetchState
from phaseloom.common.contract.state_layout import PartSources, Slice
from phaseloom.common.contract.state_rank import CommitVersion, Done
from phaseloom.common.tensors.versionparts import part_of
from phaseloom.common.transport.tickets import signed
from tests.support.meshcerts import SECRET, ticket
from tests.support.partranks import (
    SHAPES,
    VERSION,
    PartRank,
    arrays,
    publish,
    start_part_ranks,
    switch_in,
    write,
)
from tests.support.slowlink import link
from tests.support.statedaemon import OTHER, POLICY, SAMPLER, Daemon, MiB, daemon, names, start

DEVICES = [4 * MiB] * 3
ONE = arrays(1)
NUM_BYTES = sum(each.nbytes for each in ONE.values())
REFERENCE = DeploymentKey(POLICY.tenant, POLICY.job, "reference")
FILES = ["version-2-0of2.state", "version-2-1of2.state", "version-2.state"]


async def _policy(*daemons: Daemon, num_ranks: int = 2, incarnation: int = 1) -> list[PartRank]:
    ranks = await start_part_ranks(daemons, POLICY, num_ranks, incarnation=incarnation)
    for d in daemons:
        await switch_in(d, POLICY, incarnation=incarnation)
    return ranks


async def _sampler(*daemons: Daemon, num_ranks: int = 1) -> list[PartRank]:
    """All ranks hold everything."""
    ranks = await start_part_ranks(daemons, SAMPLER, num_ranks, is_sharded=False)
    for d in daemons:
        await d.agent.switch_in(SAMPLER, 1, 9, [POLICY])
    return ranks


def _files_ticket(*nodes: str) -> FilesTicket:
    return signed(FilesTicket(POLICY, 1, list(nodes)), SECRET)


async def _seal(d: Daemon, seq: int, **more: object) -> None:
    await d.agent.prepare_seal(POLICY, 1, seq)
    await d.agent.write_seal(POLICY, 1, seq, [VERSION.seq], **more)  # type: ignore[arg-type]


async def _nothing_is_readable(reader: PartRank, sources: list[str]) -> None:
    for key in (VERSION, part_of(VERSION, "0of2"), part_of(VERSION, "1of2")):
        with pytest.raises(CallerError) as caught:
            await reader.client.versions.open(
                key, sources, ticket(VERSION, "sampler", "node0", "b")
            )
        assert caught.value.info.code is Code.NOT_FOUND
    some = Slice("0of2", "a", "float32", [0, 0], [1, 64], 0, 256)
    held = [PartSources("0of2", sources)]
    shown = ticket(VERSION, "sampler", "node0", "b")
    with pytest.raises(CallerError) as caught:
        await reader.client.versions.open_slices(VERSION, [some], held, shown)
    assert caught.value.info.code is Code.NOT_FOUND


# --- Publishing -----------------------------------------------------------------------------------


async def test_equal_weights_of_one_layout_are_one_version_and_of_another_layout_another(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=DEVICES) as d:
        two = await _policy(d)
        digest = await publish(two, VERSION, ONE)
        assert await publish(two, VERSION, ONE) == digest
        assert await publish(two, VersionKey(POLICY, 3), ONE) == digest
        assert await publish(two, VersionKey(POLICY, 4), arrays(2)) != digest
        three = await _policy(d, num_ranks=3, incarnation=2)
        assert await publish(three, VersionKey(POLICY, 5), ONE) != digest
        (reader,) = await _sampler(d)
        for seq in (2, 5):
            reader.backend.fill(arrays(9))
            await reader.sync(VersionKey(POLICY, seq))
            assert reader.backend.holds(ONE)


async def test_nothing_is_readable_before_all_parts_are_and_a_dead_incarnation_s_are_gone(
    short_dir: Path,
) -> None:
    """One of two ranks dies when the other has committed its part."""
    async with (
        daemon(short_dir / "a", devices=DEVICES, NODE="a") as train,
        daemon(short_dir / "b", devices=DEVICES, NODE="b") as rollout,
    ):
        first, second = await _policy(train)
        (local,), source = await _sampler(train), await train.endpoint()
        (there,) = await start_part_ranks([rollout], SAMPLER, 1, is_sharded=False)
        before = (await train.agent.status()).host_used_bytes
        first.backend.fill(ONE)
        await first.weights.write(VERSION)
        await _nothing_is_readable(local, [])
        await _nothing_is_readable(there, [source])
        await second.client.close()
        while POLICY in [each.deployment for each in (await train.agent.status()).deployments]:
            pass
        await _nothing_is_readable(there, [source])
        status = await train.agent.status()
        assert status.versions == []
        assert status.host_used_bytes < before
        # The next incarnation makes it again, whatever the one before had.
        again = await _policy(train, incarnation=2)
        await publish(again, VERSION, arrays(2))
        await there.sync(VERSION, source)
        assert there.backend.holds(arrays(2))


async def test_parts_of_a_publish_that_failed_go_with_the_next_one(short_dir: Path) -> None:
    async with daemon(short_dir, devices=DEVICES) as d:
        ranks = await _policy(d)
        await ranks[0].weights.write(VERSION)
        await publish(ranks, VersionKey(POLICY, 3), ONE)
        assert {key.seq for key in (await d.agent.status()).versions} == {3}


async def test_manifest_that_is_not_of_the_parts_here_is_refused(short_dir: Path) -> None:
    async with daemon(short_dir, devices=DEVICES) as d:
        ranks = await _policy(d)
        manifest = await write(ranks, VERSION)
        first, second = manifest.parts
        other = replace(manifest, parts=[first, replace(second, digest=first.digest)])
        with pytest.raises(CallerError) as caught:
            await ranks[1].client.versions.commit_parts(VERSION, other)
        assert caught.value.info.code is Code.FAILED_PRECONDITION
        await ranks[1].client.versions.commit_parts(VERSION, manifest)
        with pytest.raises(CallerError) as caught:
            await ranks[0].client.versions.commit_parts(VERSION, replace(manifest, tensors=""))
        assert caught.value.info.code is Code.ALREADY_EXISTS
        (reader,) = await _sampler(d)
        with pytest.raises(CallerError) as caught:
            await reader.client.versions.commit_parts(VERSION, manifest)
        assert caught.value.info.code is Code.PERMISSION_DENIED


# --- Syncing --------------------------------------------------------------------------------------


async def test_parts_on_several_nodes_come_to_readers_of_any_layout(short_dir: Path) -> None:
    """Whoever needs all of a part brings it whole; whoever needs some of it, slices."""
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(daemon(short_dir / name, devices=DEVICES, NODE=name))
            for name in "abcd"
        ]
        policy = await _policy(*nodes[:2], num_ranks=4)
        await publish(policy, VERSION, ONE)
        sources = [await node.endpoint() for node in nodes[:2]]
        for readers in (
            await _sampler(nodes[2]),
            # Three rows of four cut otherwise, each on a node of its own.
            await start_part_ranks([nodes[2], nodes[3], nodes[1]], REFERENCE, 3),
        ):
            digests = await asyncio.gather(*(r.sync(VERSION, *sources) for r in readers))
            assert len(set(digests)) == 1
            for reader in readers:
                assert reader.backend.holds(ONE), reader.settings
        await nodes[2].logged("fetched version acme.sums.policy.2/3of4")
        await nodes[3].logged("fetched slices of version acme.sums.policy.2")
        for node in nodes:
            await node.agent.drop_versions([VERSION])
            assert (await node.agent.status()).versions == []


async def test_parts_of_another_model_are_refused(short_dir: Path) -> None:
    """With more rows, of which those that the reader has would be there."""
    async with daemon(short_dir, devices=DEVICES) as d:
        ranks = await start_part_ranks([d], POLICY, 2, shapes={**SHAPES, "z": [4096, 128]})
        await switch_in(d, POLICY)
        await publish(ranks, VERSION, arrays(1, {**SHAPES, "z": [4096, 128]}))
        (reader,) = await _sampler(d)
        reader.backend.fill(ONE)
        with pytest.raises(CallerError, match="of another model") as caught:
            await reader.sync(VERSION)
        assert caught.value.info.code is Code.FAILED_PRECONDITION
        assert reader.backend.holds(ONE)


async def test_a_source_is_killed_in_the_middle_and_goes_on(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "a", devices=DEVICES, NODE="a") as train,
        # It may take the source that long to come back.
        daemon(short_dir / "b", devices=DEVICES, NODE="b", PEER_TIMEOUT_S="60") as rollout,
        link(await train.endpoint()) as slow,
    ):
        await publish(await _policy(train), VERSION, ONE)
        (reader,) = await start_part_ranks([rollout], SAMPLER, 1, is_sharded=False)
        shown = ticket(VERSION, "sampler", "b")
        for key in (VERSION, part_of(VERSION, "0of2")):
            await reader.client.versions.open(key, [slow.endpoint], shown)
        # More than the first blocks of all streams: some has come whole of what is under way.
        slow.hold_after_bytes = slow.passed_bytes + NUM_BYTES // 4
        fetching = asyncio.create_task(reader.bring(VERSION, slow.endpoint))
        await slow.held.wait()
        await train.kill()
        slow.cut()
        await train.launch()
        slow.source = await train.endpoint()
        slow.release()
        await reader.weights.apply(await fetching)
        assert reader.backend.holds(ONE)


async def test_a_source_that_is_gone_is_told_as_that_and_nothing_has_changed(
    short_dir: Path,
) -> None:
    async with (
        daemon(short_dir / "a", devices=DEVICES, NODE="a") as one,
        daemon(short_dir / "b", devices=DEVICES, NODE="b") as other,
        daemon(short_dir / "c", devices=DEVICES, NODE="c") as rollout,
    ):
        await publish(await _policy(one, other), VERSION, ONE)
        sources = [await one.endpoint(), await other.endpoint()]
        (reader,) = await start_part_ranks([rollout], SAMPLER, 1, is_sharded=False)
        reader.backend.fill(arrays(9))
        await other.kill()
        with pytest.raises(PhaseloomError, match="1of2 of version") as caught:
            await reader.sync(VERSION, *sources)
        assert caught.value.info.code is Code.UNAVAILABLE
        assert reader.backend.holds(arrays(9))
        await other.launch()
        assert await other.endpoint() == sources[1]
        await reader.sync(VERSION, *sources)
        assert reader.backend.holds(ONE)


async def test_a_part_that_went_bad_at_its_source_is_never_taken(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "a", devices=DEVICES, NODE="a") as train,
        daemon(short_dir / "b", devices=DEVICES, NODE="b") as rollout,
    ):
        ranks = await _policy(train)
        await publish(ranks, VERSION, ONE)
        (local,), (there,) = (
            await _sampler(train),
            await start_part_ranks([rollout], SAMPLER, 1, is_sharded=False),
        )
        _flip(ranks[1], 5)
        # Who finds it out tells the source, which has it no more: its policy makes it again.
        for reader in (there, local):
            reader.backend.fill(arrays(9))
            with pytest.raises(PhaseloomError) as caught:
                await reader.sync(VERSION, await train.endpoint())
            assert caught.value.info.code is Code.UNAVAILABLE
            assert reader.backend.holds(arrays(9))
        held = [key.part for key in (await rollout.agent.status()).versions]
        assert "1of2" not in held


def _flip(writer: PartRank, at: int) -> None:
    """One bit of the part that this rank has written, in its own mapping."""
    (mapping,) = writer.client.versions._mapped._mappings.values()
    mapping.buffer[at] ^= 1


# --- What they survive ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_committed", [False, True])
async def test_parts_survive_a_kill_of_the_daemon(short_dir: Path, *, is_committed: bool) -> None:
    async with daemon(short_dir, devices=DEVICES) as d:
        ranks = await _policy(d)
        for rank in ranks:
            rank.backend.fill(ONE)
        manifest = await write(ranks, VERSION)
        if is_committed:
            await ranks[0].client.versions.commit_parts(VERSION, manifest)
        await d.relaunch()
        (reader,) = await _sampler(d)
        if not is_committed:
            await _nothing_is_readable(reader, [])
            assert await write(ranks, VERSION) == manifest
            await ranks[0].client.versions.commit_parts(VERSION, manifest)
        await reader.sync(VERSION)
        assert reader.backend.holds(ONE)


async def test_sealed_parts_are_on_disk_and_other_nodes_bring_them(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "a", devices=DEVICES, NODE="a") as train,
        daemon(short_dir / "b", devices=DEVICES, NODE="b") as other,
        daemon(short_dir / "c", devices=DEVICES, NODE="c") as rollout,
    ):
        digest = await publish(await _policy(train), VERSION, ONE)
        await _seal(train, 0)
        assert [name for name in names(train) if name.startswith("version")] == FILES
        source = await train.endpoint()
        await other.agent.fetch_state(
            FetchState(POLICY, 0, [VERSION.seq], [source], _files_ticket("b"))
        )
        assert names(other) == FILES
        # Neither agent nor daemon of the first one are left, and the second one starts anew.
        await train.kill()
        await other.relaunch()
        (reader,) = await start_part_ranks([rollout], SAMPLER, 1, is_sharded=False)
        assert await reader.sync(VERSION, await other.endpoint()) == digest
        assert reader.backend.holds(ONE)
        for node in (other, rollout):
            await node.agent.drop_versions([VERSION])
            assert (await node.agent.status()).versions == []
        assert names(other) == []


async def test_parts_are_replicated_before_the_seal_is_told(short_dir: Path) -> None:
    """A policy on two nodes: each hands over what it has."""
    async with (
        daemon(short_dir / "a", devices=DEVICES, NODE="a") as one,
        daemon(short_dir / "b", devices=DEVICES, NODE="b") as two,
        daemon(short_dir / "c", devices=DEVICES, NODE="c") as replica,
    ):
        await publish(await _policy(one, two), VERSION, ONE)
        replicas = {NodeId("c"): await replica.endpoint()}
        await _seal(
            one, 0, durability=Durability.REMOTE, replicas=replicas, ticket=_files_ticket("c")
        )
        kept = [name for name in names(replica) if name.startswith("version")]
        assert kept == ["version-2-0of2.state", "version-2.state"]
        assert [n for n in names(two) if n.startswith("version")] == []
        await _seal(two, 0)
        assert [n for n in names(two) if n.startswith("version")] == [
            "version-2-1of2.state",
            "version-2.state",
        ]


async def test_a_full_disk_while_parts_are_persisted_loses_nothing(short_dir: Path) -> None:
    """A file of one part is larger than a file may be here; its memory is not."""
    shapes = {"a": [3, 256 * 1024]}
    content = arrays(1, shapes)
    limited = ("prlimit", f"--fsize={2 * MiB}")
    async with (
        daemon(short_dir / "a", devices=DEVICES, launcher=limited, NODE="a") as d,
        daemon(short_dir / "b", devices=DEVICES, NODE="b") as rollout,
    ):
        ranks = await start_part_ranks([d], POLICY, 2, shapes=shapes)
        await switch_in(d, POLICY)
        await publish(ranks, VERSION, content)
        await d.agent.prepare_seal(POLICY, 1, 0)
        with pytest.raises(ResourceError) as caught:
            await d.agent.write_seal(POLICY, 1, 0, [VERSION.seq])
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        # A manifest is there only where all parts are.
        assert names(d) == ["version-2-1of2.state"]
        (reader,) = await start_part_ranks([rollout], SAMPLER, 1, is_sharded=False, shapes=shapes)
        await reader.sync(VERSION, await d.endpoint())
        assert reader.backend.holds(content)


async def test_parts_make_room_and_come_back_from_disk(short_dir: Path) -> None:
    shapes = {"a": [512, 1024]}
    content = arrays(1, shapes)
    host_bytes = 6 * MiB + 65536
    async with daemon(short_dir, devices=DEVICES, host_bytes=host_bytes, NVME_BYTES="0") as d:
        ranks = await start_part_ranks([d], POLICY, 2, shapes=shapes)
        await switch_in(d, POLICY)
        await publish(ranks, VERSION, content)
        await start(d, OTHER, 2 * MiB)
        (reader,) = await start_part_ranks([d], SAMPLER, 1, is_sharded=False, shapes=shapes)
        states = {s.version.part: s for s in (await d.agent.status()).version_states}
        assert [states[part].on_nvme for part in ("0of2", "1of2")] == [True, True]
        assert [states[part].in_host for part in ("0of2", "1of2")] == [False, False]
        await d.agent.drop_wpg(OTHER, 1)
        await d.agent.switch_in(SAMPLER, 1, 9, [POLICY])
        await reader.sync(VERSION)
        assert reader.backend.holds(content)


async def test_parts_that_do_not_fit_together_are_written_one_after_another(
    short_dir: Path,
) -> None:
    """Host memory has room for one of them: the one that is committed goes to disk for the next."""
    shapes = {"a": [512, 1024]}
    content = arrays(1, shapes)
    host_bytes = 3 * MiB + 65536
    async with daemon(short_dir, devices=DEVICES, host_bytes=host_bytes, NVME_BYTES="0") as d:
        ranks = await start_part_ranks([d], POLICY, 2, shapes=shapes)
        await switch_in(d, POLICY)
        digest = await publish(ranks, VERSION, content)
        states = {s.version.part: s for s in (await d.agent.status()).version_states}
        assert [states[part].in_host for part in ("0of2", "1of2", "")] == [False, True, True]
        # As a rank does whose answer was lost.
        again = await ranks[0].weights.write(VERSION)
        assert again is not None
        committed = CommitVersion(part_of(VERSION, "0of2"), again.digest)
        await ranks[0].client._link.ask(committed, Done)
        with pytest.raises(CallerError) as caught:
            await ranks[0].client._link.ask(replace(committed, digest=digest), Done)
        assert caught.value.info.code is Code.ALREADY_EXISTS
        assert await publish(ranks, VERSION, content) == digest
        await d.relaunch()
        opened = await ranks[1].client.versions.open(part_of(VERSION, "0of2"), [])
        assert opened.described.digest == again.digest
