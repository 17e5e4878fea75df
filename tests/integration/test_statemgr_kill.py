"""kill -9 of the state manager: what host memory holds is there for the next one, or is given up.

The agent's and the ranks' connections of a test outlive the daemon, as they do on a node.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import (
    AgentHello,
    FinishHandover,
    HandOver,
    HandoverFinished,
    StatusReport,
    StatusRequest,
    Welcome,
)
from phaseloom.common.contract.state_rank import Done, RankResume, StateMessage
from phaseloom.common.tensors.blockhash import digest_in_threads
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.transport.framing import Peer, close_fds
from phaseloom.worker.agent.stateclient import AgentStateClient
from tests.support.meshcerts import SECRET
from tests.support.peerfetch import fetch
from tests.support.readversions import load_version, open_version
from tests.support.statedaemon import (
    OTHER,
    POLICY,
    SAMPLER,
    Daemon,
    MiB,
    Rank,
    child,
    daemon,
    flip_in_memory,
    names,
    open_memory,
    real_memory,
    sent,
    start,
    start_ranks,
)

VERSION = VersionKey(POLICY, 2)


async def test_idle_daemon_is_killed_and_every_tier_is_there_afterwards(short_dir: Path) -> None:
    """Host copies, device residents, versions in memory, fences, epochs; and a second kill too."""
    async with daemon(short_dir, devices=[3 * MiB]) as d:
        offloaded, resident = await start(d, OTHER, 2 * MiB), await start(d, POLICY, MiB)
        await d.agent.switch_in(OTHER, 1, 3, [])
        content = offloaded.run(4)
        await d.agent.switch_in(POLICY, 1, 5, [OTHER])
        other_content = resident.run(1)
        made = await resident.client.versions.create(VERSION, resident.slots)
        await d.digested()
        before = await d.agent.status()
        for _ in range(2):
            await d.relaunch()
            assert await d.agent.status() == before
            assert resident.digest() == other_content
            with pytest.raises(ResourceError, match=r"epoch 4 .* is stale"):
                await d.agent.switch_in(POLICY, 1, 4, [])
        await d.agent.switch_in(OTHER, 1, 6, [POLICY])
        assert offloaded.digest() == content
        sampler = await start(d, SAMPLER, MiB)
        assert await load_version(sampler.client, VERSION, [], sampler.slots) == made.digest
        with pytest.raises(ResourceError, match="fenced"):
            await d.agent.register_wpg(["late"], OTHER, 0, [0], 0)


async def test_resident_rank_goes_on_while_the_daemon_is_away(short_dir: Path) -> None:
    """Its heap is the truth: what it computes meanwhile is what is offloaded later."""
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        rank.run(1)
        await d.kill()
        content = rank.run(2)
        switch = asyncio.create_task(d.agent.switch_out(POLICY, 1, 2))
        await d.launch()
        await switch
        assert rank.heap.resident_bytes() == 0
        status = await d.agent.status()
        assert [(s.resident, s.applied) for s in status.deployments] == [(False, 2)]
        await d.agent.switch_in(POLICY, 1, 3, [])
        assert rank.digest() == content


@pytest.mark.parametrize("moment", ["as the copy begins", "between the copy and its booking"])
async def test_switch_is_completed_when_the_daemon_dies_in_a_copy_out(
    short_dir: Path, moment: str
) -> None:
    async with daemon(short_dir, devices=[MiB]) as d:
        first, second = await start(d, POLICY), await start(d, OTHER)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = first.run(7)
        how = signal.SIGKILL if moment == "as the copy begins" else signal.SIGSTOP
        first.on_copy = lambda: os.kill(d.pid, how)
        switch = asyncio.create_task(d.agent.switch_in(OTHER, 1, 2, [POLICY]))
        await asyncio.to_thread(_wait_until_released, first)
        first.on_copy = lambda: None
        await d.relaunch()
        switched = await switch
        assert switched.bytes_in == MiB
        assert second.heap.resident_bytes() == MiB
        await d.agent.switch_in(POLICY, 1, 3, [OTHER])
        assert first.digest() == content


def _wait_until_released(rank: Rank) -> None:
    while rank.heap.resident_bytes():
        os.sched_yield()


async def test_switch_is_completed_when_the_daemon_dies_in_a_copy_in(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[MiB]) as d, child(d, POLICY, MiB) as rank:
        await d.agent.switch_in(POLICY, 1, 1, [])
        await rank.ask("fill 3")
        content = await rank.ask("digest")
        await d.agent.switch_out(POLICY, 1, 1)
        await d.digested()
        rank.process.send_signal(signal.SIGSTOP)
        switch = await sent(d.agent.switch_in(POLICY, 1, 2, []))
        assert (await d.agent.status()).device_used_bytes == [MiB]
        await d.kill()
        rank.process.send_signal(signal.SIGCONT)
        await d.launch()
        await switch
        assert (await d.agent.status()).device_used_bytes == [MiB]
        assert await rank.ask("digest") == content


async def test_seal_is_written_by_the_next_daemon_when_the_daemon_dies_before(
    short_dir: Path,
) -> None:
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = rank.run(4)
        made = await rank.client.versions.create(VERSION, rank.slots)
        await d.agent.prepare_seal(POLICY, 1, 4)
        rank.run(5)  # the deployment runs on
        await d.relaunch()
        sealed = await d.agent.write_seal(POLICY, 1, 4, [2])
        assert sealed.digest == content
        assert names(d) == ["seal-4.state", "version-2.state"]
        await d.relaunch()
        assert await d.agent.write_seal(POLICY, 1, 4, [2]) == sealed  # it is sealed already
        reborn = await start(d, POLICY, incarnation=2, seal_seq=4)
        await d.agent.switch_in(POLICY, 2, 2, [])
        assert reborn.digest() == content
        sampler = await start(d, SAMPLER)
        assert await load_version(sampler.client, VERSION, [], sampler.slots) == made.digest


async def test_half_written_seal_is_written_again_when_the_daemon_dies_in_it(
    short_dir: Path,
) -> None:
    size = 64 * MiB
    async with daemon(short_dir, devices=[size]) as d:
        rank = await start(d, POLICY, size)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = rank.run(4)
        await d.agent.prepare_seal(POLICY, 1, 4)
        write = asyncio.create_task(d.agent.write_seal(POLICY, 1, 4, []))
        await asyncio.to_thread(_wait_for_a_partial, d)
        await d.relaunch()
        assert (await write).digest == content
        assert names(d) == ["seal-4.state"]


def _wait_for_a_partial(d: Daemon) -> None:
    while not list(d.files.rglob("*.partial")) and not names(d):
        os.sched_yield()


async def test_prepare_of_a_seal_is_repeated_when_the_daemon_dies_in_it(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = rank.run(4)
        kill = asyncio.Event()
        loop = asyncio.get_running_loop()

        def die() -> None:
            os.kill(d.pid, signal.SIGKILL)
            loop.call_soon_threadsafe(kill.set)

        rank.on_copy = die
        prepare = asyncio.create_task(d.agent.prepare_seal(POLICY, 1, 4))
        await kill.wait()
        rank.on_copy = lambda: None
        await d.relaunch()
        await prepare
        assert (await d.agent.write_seal(POLICY, 1, 4, [])).digest == content


async def test_version_is_made_when_the_daemon_dies_while_it_is_written(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        policy, sampler = await start(d, POLICY), await start(d, SAMPLER)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = policy.run(1)
        buffer = await policy.client.versions.reserve(VERSION, policy.slots)
        assert isinstance(buffer, memoryview)
        buffer[:] = policy.heap.buffer
        await d.kill()
        commit = asyncio.create_task(
            policy.client.versions.commit(VERSION, buffer, digest_in_threads(buffer))
        )
        await d.launch()
        assert (await commit).digest == content
        _, digest = await open_version(sampler.client, VERSION, [], sampler.slots)
        assert digest == content


async def test_rank_that_starts_meanwhile_is_waited_for(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        await d.agent.register_wpg(["early"], OTHER, 1, [0], 0)
        await d.kill()
        register = asyncio.create_task(start(d, POLICY))
        await d.launch()
        rank = await register
        await d.agent.switch_in(POLICY, 1, 1, [])
        assert rank.heap.resident_bytes() == MiB
        assert {s.deployment for s in (await d.agent.status()).deployments} == {POLICY, OTHER}


async def test_deployment_whose_rank_died_meanwhile_is_lost_and_nothing_else(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, RESUME_TIMEOUT_S="5") as d:
        kept = await start(d, OTHER)
        async with child(d, POLICY, MiB) as victim:
            await d.agent.switch_in(POLICY, 1, 1, [])
            await d.kill()
            victim.process.kill()
            await victim.process.wait()
        await d.launch()
        status = await d.agent.status()
        assert [s.deployment for s in status.deployments] == [OTHER]
        assert (status.device_used_bytes, status.host_used_bytes) == ([0], MiB)
        with pytest.raises(PhaseloomError, match="has lost its rank"):
            await d.agent.switch_in(POLICY, 1, 2, [])
        await d.agent.switch_in(OTHER, 1, 2, [])
        assert kept.heap.resident_bytes() == MiB


async def test_daemon_that_is_killed_while_it_takes_over_is_replaced_by_the_next(
    short_dir: Path,
) -> None:
    """What the first successor had begun is void: the agent hands the same over again."""
    async with daemon(short_dir, RESUME_TIMEOUT_S="60") as d, child(d, POLICY, MiB) as slow:
        quick = await start(d, OTHER)
        made = await quick.client.versions.create(VersionKey(OTHER, 1), quick.slots)
        await d.agent.switch_in(POLICY, 1, 1, [])
        await slow.ask("fill 3")
        content = await slow.ask("digest")
        await d.kill()
        slow.process.send_signal(signal.SIGSTOP)
        await d.launch()
        await asyncio.to_thread(_wait_for_extents, d, 7)  # two indexes, three extents, or more
        await d.kill()
        slow.process.send_signal(signal.SIGCONT)
        await d.launch()
        await d.agent.switch_out(POLICY, 1, 1)
        await d.agent.switch_in(POLICY, 1, 2, [])
        assert await slow.ask("digest") == content
        reader = await start(d, DeploymentKey("acme", "letters", "sampler"))
        digest = await load_version(reader.client, VersionKey(OTHER, 1), [], reader.slots)
        assert digest == made.digest


def _wait_for_extents(d: Daemon, number: int) -> None:
    """Until it has taken that many over."""
    while len(open_memory(d.pid)) < number:
        os.sched_yield()


async def test_deployment_with_several_ranks_comes_back_whole_or_not_at_all(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=[MiB, MiB], RESUME_TIMEOUT_S="5") as d:
        ranks = await start_ranks(d, POLICY, [MiB, MiB])
        await d.agent.switch_in(POLICY, 1, 1, [])
        digests = [rank.run(1 + index) for index, rank in enumerate(ranks)]
        await d.relaunch()
        await d.agent.switch_out(POLICY, 1, 1)
        await d.agent.switch_in(POLICY, 1, 2, [])
        assert [rank.digest() for rank in ranks] == digests
        await d.kill()
        await ranks[1].client.close()
        await d.launch()
        await asyncio.wait_for(ranks[0].client.closed, 60)
        assert (await d.agent.status()).deployments == []


async def test_bad_host_copy_is_never_taken_over(short_dir: Path) -> None:
    """A stray write while nobody watches: that deployment is lost, the rest goes on."""
    async with daemon(short_dir) as d:
        bad, good = await start(d, POLICY), await start(d, OTHER)
        await good.client.versions.create(VersionKey(OTHER, 1), good.slots)
        flip_in_memory(d.pid, f"the host copy of {POLICY}")
        await d.relaunch()
        await asyncio.wait_for(bad.client.closed, 60)
        assert "DATA_LOSS" in bad.client.closed.result()
        status = await d.agent.status()
        assert [s.deployment for s in status.deployments] == [OTHER]
        assert status.versions == [VersionKey(OTHER, 1)]
        assert status.host_used_bytes == 2 * MiB
        await d.agent.switch_in(OTHER, 1, 1, [])


async def test_digest_of_an_offload_outlives_the_daemon(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        bad, good = await start(d, POLICY), await start(d, OTHER)
        for key, rank in ((POLICY, bad), (OTHER, good)):
            await d.agent.switch_in(key, 1, 1, [])
            content = rank.run(3)
            await d.agent.switch_out(key, 1, 1)
        await d.digested()
        flip_in_memory(d.pid, f"the host copy of {POLICY}")
        await d.relaunch()
        await asyncio.wait_for(bad.client.closed, 60)
        assert "DATA_LOSS" in bad.client.closed.result()
        assert [s.dirty_bytes for s in (await d.agent.status()).deployments] == [0]
        await d.agent.switch_in(OTHER, 1, 2, [])
        assert good.digest() == content


async def test_digest_of_a_copy_that_was_dirty_at_the_kill_is_taken_by_the_next_life(
    short_dir: Path,
) -> None:
    """The daemon stands still as the copy goes out, so that it cannot have hashed it."""
    async with daemon(short_dir, devices=[MiB]) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = rank.run(7)
        rank.on_copy = lambda: os.kill(d.pid, signal.SIGSTOP)
        switch = asyncio.create_task(d.agent.switch_out(POLICY, 1, 2))
        await asyncio.to_thread(_wait_until_released, rank)
        rank.on_copy = lambda: None
        await d.relaunch()
        await switch
        await d.digested()
        await d.agent.prepare_seal(POLICY, 1, 7)
        assert (await d.agent.write_seal(POLICY, 1, 7, [])).digest == content
        flip_in_memory(d.pid, f"the host copy of {POLICY}")
        with pytest.raises(ResourceError, match="DATA_LOSS"):
            await d.agent.switch_in(POLICY, 1, 3, [])


async def test_policy_whose_version_went_bad_is_lost_so_that_it_is_made_again(
    short_dir: Path,
) -> None:
    async with daemon(short_dir) as d:
        policy, sampler = await start(d, POLICY), await start(d, SAMPLER)
        await policy.client.versions.create(VERSION, policy.slots)
        flip_in_memory(d.pid, f"version {VERSION}")
        await d.relaunch()
        await asyncio.wait_for(policy.client.closed, 60)
        assert [s.deployment for s in (await d.agent.status()).deployments] == [SAMPLER]
        with pytest.raises(CallerError, match="is not here"):
            await load_version(sampler.client, VERSION, [], sampler.slots)


async def test_rank_cannot_come_back_as_what_it_was_not(short_dir: Path) -> None:
    async with daemon(short_dir, RESUME_TIMEOUT_S="60") as d:
        rank = await start(d, POLICY)
        await rank.client.close()
        await d.agent.drop_wpg(POLICY, 1)
        held = await start(d, OTHER)
        await d.kill()
        await held.client.close()
        await d.launch()
        for token, slots, code in (
            (f"token of {POLICY} 1", rank.slots, Code.PERMISSION_DENIED),
            ("guess", rank.slots, Code.PERMISSION_DENIED),
            (f"token of {OTHER} 1", [], Code.FAILED_PRECONDITION),
            (f"token of {OTHER} 1", held.slots, Code.PERMISSION_DENIED),
        ):
            peer: Peer[StateMessage] = await Peer.connect(d.socket, StateMessage)
            with pytest.raises(CallerError) as caught:
                await peer.call(
                    RankResume(token, MiB, TensorTable.of(slots).packed, True, True, 1, "")
                )
            assert caught.value.info.code is code
            await peer.close()
        assert (await d.agent.status()).deployments == []


async def test_other_nodes_find_versions_at_the_same_address_afterwards(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        made = await rank.client.versions.create(VERSION, rank.slots)
        endpoint = await d.endpoint()
        await d.relaunch()
        assert await d.endpoint() == endpoint
        digest, _ = await fetch(endpoint, VERSION)
        assert digest == made.digest


async def test_agent_keeps_no_more_than_the_daemon_has(short_dir: Path) -> None:
    """Freed memory must be free: a handle that is kept would hold it."""
    async with daemon(short_dir) as d:
        for number in range(1, 4):
            rank = await start(d, POLICY, incarnation=number)
            await rank.client.versions.create(VersionKey(POLICY, number), rank.slots)
        extents = _extents(d.pid)
        assert extents & _extents(os.getpid())
        for client in d.ranks:
            await client.close()
        d.ranks.clear()
        del client, rank  # and with them their mappings
        await d.agent.drop_wpg(POLICY, 3)
        await d.agent.drop_versions([VersionKey(POLICY, number) for number in range(1, 4)])
        assert (await d.agent.status()).host_used_bytes == 0
        await d.agent.status()  # what the one before has freed is told before this is answered
        gc.collect()
        assert not extents & _extents(os.getpid())


def _extents(pid: int) -> set[int]:
    """Inodes of those that a process has open: of this one its agent's handles, and its ranks'
    mappings, which may be those of another test."""
    return {*real_memory(pid), *real_memory(pid, "version")}


async def test_both_are_killed_and_nothing_of_that_incarnation_is_left_but_files(
    short_dir: Path,
) -> None:
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        rank.run(1)
        await d.agent.prepare_seal(POLICY, 1, 1)
        await d.agent.write_seal(POLICY, 1, 1, [])
        await d.kill()
        await d.agent.close()
    async with daemon(short_dir) as d:
        status = await d.agent.status()
        assert (status.deployments, status.host_used_bytes) == ([], 0)
        assert names(d) == ["seal-1.state"]


async def test_daemon_begins_afresh_when_its_agent_leaves_while_handing_over(
    short_dir: Path,
) -> None:
    async with daemon(short_dir) as d:
        await d.agent.close()
        await d.relaunch()
        agent: Peer[StateMessage] = await Peer.connect(d.socket, StateMessage)
        assert await agent.call(AgentHello(SECRET, "an index")) == (Welcome(needs_handles=True), [])
        await agent.close()
        assert await asyncio.wait_for(d.ended(), 60) != 0
        assert "the agent left during the handover" in d.text()
        d.log.clear()
        await d.launch()
        d.agent = await AgentStateClient.connect(d.socket, SECRET)
        assert (await d.agent.status()).deployments == []


async def test_nothing_is_taken_over_from_an_index_that_cannot_be_read(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        await d.agent.close()
        await d.relaunch()
        agent: Peer[StateMessage] = await Peer.connect(d.socket, StateMessage, _keep_nothing)
        await agent.call(AgentHello(SECRET, "an index"))
        fds = [os.memfd_create(name) for name in ("first", "second", "extent")]
        os.write(fds[0], b"PLBOOKS1 and then nothing")
        await agent.call(HandOver([-1, -2, 1]), fds)
        with pytest.raises(CallerError, match="expected one descriptor for each"):
            await agent.call(HandOver([1]), fds[2:])
        assert await agent.call(FinishHandover()) == (HandoverFinished([]), [])
        report, _ = await agent.call(StatusRequest())
        assert isinstance(report, StatusReport)
        assert report.host_used_bytes == 0
        await agent.close()
        for fd in fds:
            os.close(fd)
        d.agent = await AgentStateClient.connect(d.socket, SECRET)


async def _keep_nothing(_body: StateMessage, fds: list[int]) -> tuple[StateMessage, list[int]]:
    close_fds(fds)
    return Done(), []


async def test_second_state_manager_on_a_directory_is_refused_and_takes_nothing(
    short_dir: Path,
) -> None:
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = rank.run(1)
        await d.agent.switch_out(POLICY, 1, 2)
        second = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "phaseloom.statemgr.main"),
            env=d.environment,
            stderr=asyncio.subprocess.PIPE,
        )
        _, log = await second.communicate()
        assert second.returncode
        assert b"another state manager uses" in log
        assert b"give this one its own directory" in log
        await d.agent.switch_in(POLICY, 1, 3, [])
        assert rank.digest() == content


async def test_removed_socket_is_there_again_for_the_next_agent(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        await start(d, POLICY)
        before = await d.agent.status()
        d.socket.unlink()
        await d.agent.close()
        d.agent = await _connected(d)
        assert {state.deployment for state in before.deployments} == {POLICY}
        assert await d.agent.status()


async def _connected(d: Daemon) -> AgentStateClient:
    """The next agent, which tries until the socket is there."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await AgentStateClient.connect(d.socket, SECRET, reconnect_s=30.0)
            except ResourceError:
                await asyncio.sleep(0.05)
