"""The state manager as it runs: a real daemon, a real Unix socket, real memory and files."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import SwitchIn
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.contract.state_rank import (
    CommitInitial,
    Copied,
    CopyIn,
    CopyOut,
    CreateVersion,
    Done,
    OpenVersion,
    RegisterHeap,
    StateMessage,
)
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.tensortable import EMPTY, TensorTable
from phaseloom.common.transport.framing import Peer
from phaseloom.worker.agent.stateclient import AgentStateClient
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.heap import Heap
from tests.support.meshcerts import SECRET, ticket
from tests.support.peerfetch import fetch
from tests.support.readversions import load_version
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
    greeted,
    is_empty,
    memory_of,
    names,
    sent,
    start,
)
from tests.support.staterank import fill, slots_of


async def test_switch_moves_state_out_and_back_bit_equal(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[3 * MiB]) as d:
        first = await start(d, POLICY, 2 * MiB)
        second = await start(d, OTHER, 2 * MiB)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = first.run(1)
        switched = await d.agent.switch_in(OTHER, 1, 2, [POLICY])
        assert (switched.bytes_out, switched.bytes_in) == (2 * MiB, 2 * MiB)
        assert switched.displaced == [POLICY]
        assert first.heap.resident_bytes() == 0
        assert second.heap.resident_bytes() == 2 * MiB
        status = await d.agent.status()
        assert status.device_used_bytes == [2 * MiB]
        assert {s.deployment: (s.resident, s.applied) for s in status.deployments} == {
            POLICY: (False, 1),
            OTHER: (True, 0),
        }
        await d.agent.switch_in(POLICY, 1, 3, [OTHER])
        assert first.digest() == content


async def test_extent_of_a_training_rank_is_its_heap_while_it_is_resident(
    short_dir: Path,
) -> None:
    """So a switch copies nothing and needs no fresh pages."""
    async with daemon(short_dir, devices=[MiB]) as d:
        first, second = await start(d, POLICY), await start(d, OTHER)
        files: dict[DeploymentKey, set[str]] = {POLICY: set(), OTHER: set()}
        turns = [(POLICY, first, OTHER), (OTHER, second, POLICY)]
        for epoch, (key, rank, out) in enumerate(turns * 2, start=1):
            await d.agent.switch_in(key, 1, epoch, [out])
            rank.run(epoch)
            files[key].add(_memory_of(rank.heap))
        assert _memory_of(first.heap) == ""
        for key, names_of_files in files.items():
            (name,) = names_of_files
            assert f"the host copy of {key}" in name


async def test_frozen_heaps_of_one_tenant_take_turns_in_the_memory_of_their_device(
    short_dir: Path,
) -> None:
    """A rank of another tenant gets fresh memory, and so does one after a rank that died."""
    stranger = DeploymentKey("other", "sums", "sampler")
    keys = [POLICY, SAMPLER, stranger, SAMPLER]
    async with daemon(short_dir, devices=[MiB]) as d:
        ranks = {
            key: await start(d, key, frozen=True, content=content)
            for content, key in enumerate(dict.fromkeys(keys), start=1)
        }
        content: dict[DeploymentKey, str] = {}
        memory = []
        displaced: list[DeploymentKey] = []
        for epoch, key in enumerate(keys, start=1):
            content[key] = digest_of(memoryview(_filled(ranks[key].content)))
            await d.agent.switch_in(key, 1, epoch, displaced)
            assert ranks[key].digest() == content[key]
            memory.append(_memory_of(ranks[key].heap))
            displaced = [key]
        assert memory[0] == memory[1]
        assert len(set(memory)) == 3
        await ranks[SAMPLER].client.close()  # as if killed: nobody says that it unmaps its heap
        while (await d.agent.status()).device_used_bytes != [0]:
            pass
        await d.agent.switch_in(POLICY, 1, 9, [])
        assert _memory_of(ranks[POLICY].heap) not in memory
        assert ranks[POLICY].digest() == content[POLICY]


def _filled(seq: int) -> bytearray:
    heap = Heap(MiB)
    fill(heap, seq)
    return bytearray(heap.buffer)


def _memory_of(heap: Heap) -> str:
    """The file, with its inode, that is mapped where the heap begins; empty: none."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(heap.buffer))
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *fields = line.split(maxsplit=4)
        start, end = (int(place, 16) for place in span.split("-"))
        if start <= address < end:
            return fields[-1] if "memfd" in line else ""
    raise AssertionError("not mapped")


async def test_repeated_and_stale_switches_are_told_apart(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 5, [])
        again = await d.agent.switch_in(POLICY, 1, 5, [])
        assert again.bytes_in == 0
        with pytest.raises(ResourceError, match=r"epoch 4 .* is stale") as caught:
            await d.agent.switch_in(POLICY, 1, 4, [])
        assert caught.value.info.code is Code.ABORTED
        with pytest.raises(ResourceError, match="stale"):
            await d.agent.switch_out(POLICY, 1, 4)
        assert (await d.agent.switch_out(POLICY, 1, 5)).bytes_out == MiB
        assert (await d.agent.switch_out(POLICY, 1, 6)).bytes_out == 0


async def test_switch_is_refused_with_the_numbers_when_the_device_is_full(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[3 * MiB]) as d:
        first = await start(d, POLICY, 2 * MiB)
        await start(d, OTHER, 2 * MiB)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = first.run(1)
        with pytest.raises(ResourceError) as caught:
            await d.agent.switch_in(OTHER, 1, 2, [])
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        assert caught.value.info.details == {
            "needed_bytes": str(2 * MiB),
            "used_bytes": str(2 * MiB),
            "budget_bytes": str(3 * MiB),
        }
        assert first.digest() == content
        with pytest.raises(ResourceError, match="needs 4194304 bytes of device 0"):
            await start(d, SAMPLER, 4 * MiB)


async def test_heap_is_refused_with_the_numbers_when_host_memory_is_full(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=3 * MiB, NVME_BYTES="0") as d:
        await start(d, POLICY, 2 * MiB)
        with pytest.raises(ResourceError, match="2097152 of 3145728 are in use") as caught:
            await start(d, OTHER, 2 * MiB)
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        await d.agent.drop_wpg(POLICY, 1)
        await start(d, OTHER, 2 * MiB, incarnation=2)
        assert (await d.agent.status()).host_used_bytes == 2 * MiB


async def test_hello_is_refused_when_secret_or_token_is_wrong(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        with pytest.raises(CallerError) as caught:
            await AgentStateClient.connect(d.socket, "guess")
        assert caught.value.info.code is Code.PERMISSION_DENIED
        with pytest.raises(CallerError) as caught:
            await RankStateClient.connect(
                d.socket, "guess", applied=lambda: 0, on_loaded=lambda: None
            )
        assert caught.value.info.code is Code.PERMISSION_DENIED
        await start(d, POLICY)
        with pytest.raises(CallerError, match="PERMISSION_DENIED"):
            await RankStateClient.connect(
                d.socket, f"token of {POLICY} 1", applied=lambda: 0, on_loaded=lambda: None
            )


async def test_requests_are_refused_before_hello_and_out_of_role(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        nobody: Peer[StateMessage] = await Peer.connect(d.socket, StateMessage)
        with pytest.raises(CallerError, match="PERMISSION_DENIED"):
            await nobody.call(RegisterHeap(MiB, EMPTY.packed))
        await nobody.close()
        rank = await greeted(d, POLICY)
        with pytest.raises(CallerError, match="a rank does not send SwitchIn"):
            await rank.call(SwitchIn(POLICY, 1, 1, []))
        await rank.close()


async def test_older_incarnation_is_fenced_when_a_newer_registers(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        old = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        await start(d, POLICY, incarnation=2)
        await asyncio.wait_for(old.client.closed, 60)
        with pytest.raises(ResourceError, match=r"incarnation 1 .* is fenced"):
            await d.agent.switch_in(POLICY, 1, 2, [])
        with pytest.raises(ResourceError, match="fenced"):
            await d.agent.register_wpg(["late"], POLICY, 1, [0], 0)
        await d.agent.drop_wpg(POLICY, 1)  # of the old incarnation: must not touch the new one
        await d.agent.switch_in(POLICY, 2, 3, [])
        status = await d.agent.status()
        assert status.device_used_bytes == [MiB]
        assert status.host_used_bytes == MiB


async def test_switch_fails_and_accounting_is_right_when_the_displaced_rank_is_killed(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=[3 * MiB]) as d:
        rank = await start(d, OTHER, 2 * MiB)
        async with child(d, POLICY, 2 * MiB) as victim:
            await d.agent.switch_in(POLICY, 1, 1, [])
            victim.process.send_signal(signal.SIGSTOP)
            switch = await sent(d.agent.switch_in(OTHER, 1, 2, [POLICY]))
            # Answered after the switch has begun, for the daemon starts requests in order.
            assert (await d.agent.status()).device_used_bytes == [2 * MiB]
            victim.process.kill()
            # Whether or not its order to copy had been sent.
            with pytest.raises(ResourceError, match="lost"):
                await switch
        status = await d.agent.status()
        assert status.device_used_bytes == [0]
        assert status.host_used_bytes == 2 * MiB
        assert [s.deployment for s in status.deployments] == [OTHER]
        await d.agent.switch_in(OTHER, 1, 3, [POLICY])
        assert rank.heap.resident_bytes() == 2 * MiB


async def test_displaced_state_is_loaded_back_when_the_incoming_rank_is_killed(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=[3 * MiB]) as d:
        rank = await start(d, OTHER, 2 * MiB)
        await d.agent.switch_in(OTHER, 1, 1, [])
        content = rank.run(7)
        async with child(d, POLICY, 2 * MiB) as victim:
            victim.process.send_signal(signal.SIGSTOP)
            switch = asyncio.create_task(d.agent.switch_in(POLICY, 1, 2, [OTHER]))
            await asyncio.to_thread(_wait_until_released, rank.heap)
            victim.process.kill()
            # Whether or not its order to copy had been sent.
            with pytest.raises(ResourceError, match="lost"):
                await switch
        assert rank.digest() == content
        status = await d.agent.status()
        assert status.device_used_bytes == [2 * MiB]
        assert [(s.deployment, s.resident, s.applied) for s in status.deployments] == [
            (OTHER, True, 7)
        ]


def _wait_until_released(heap: Heap) -> None:
    while heap.resident_bytes():
        os.sched_yield()


async def test_switch_fails_when_the_rank_keeps_device_memory_or_loads_something_else(
    short_dir: Path,
) -> None:
    """Engines have answered a sleep with success while their memory was still held."""
    async with daemon(short_dir, devices=[3 * MiB]) as d:
        await start(d, OTHER, 2 * MiB)
        liar = await _fake_rank(d, POLICY, 2 * MiB, resident_bytes=MiB)
        await d.agent.switch_in(POLICY, 1, 1, [])
        with pytest.raises(ResourceError, match="still holds 1048576 bytes"):
            await d.agent.switch_in(OTHER, 1, 2, [POLICY])
        assert (await d.agent.status()).device_used_bytes == [2 * MiB]
        assert [type(m) for m in liar.asked] == [CopyIn, CopyOut, CopyIn]
        liar.resident_bytes, liar.digest = 0, "of something else"
        await d.agent.switch_in(OTHER, 1, 3, [POLICY])
        with pytest.raises(ResourceError, match="loaded a wrong copy"):
            await d.agent.switch_in(POLICY, 1, 4, [OTHER])
        await asyncio.wait_for(liar.peer.closed, 60)
        assert (await d.agent.status()).device_used_bytes == [2 * MiB]


@dataclass
class FakeRank:
    """Speaks the protocol and lies about its memory."""

    peer: Peer[StateMessage]
    resident_bytes: int
    digest: str
    asked: list[StateMessage] = field(default_factory=list)

    async def handle(self, body: StateMessage, _fds: list[int]) -> tuple[StateMessage, list[int]]:
        self.asked.append(body)
        return Copied(self.digest, 0, self.resident_bytes, 0.0), []


async def _fake_rank(
    d: Daemon, key: DeploymentKey, num_bytes: int, resident_bytes: int
) -> FakeRank:
    digest = digest_of(memoryview(bytes(num_bytes)))
    peer = await greeted(d, key)
    rank = FakeRank(peer, resident_bytes, digest)
    peer.handler = rank.handle
    _, fds = await peer.call(RegisterHeap(num_bytes, TensorTable.of(slots_of(num_bytes)).packed))
    os.close(fds[0])
    assert await peer.call(CommitInitial(digest)) == (Done(), [])
    return rank


async def test_rank_that_never_answers_is_cut_off_after_the_timeout(short_dir: Path) -> None:
    async with daemon(short_dir, TRANSFER_TIMEOUT_S="0.3") as d:
        async with child(d, POLICY, MiB) as hung:
            # Before it is asked for anything: so short a time may be too short for who is well.
            hung.process.send_signal(signal.SIGSTOP)
            with pytest.raises(ResourceError) as caught:
                await d.agent.switch_in(POLICY, 1, 1, [])
            assert caught.value.info.code is Code.DEADLINE_EXCEEDED
        assert (await d.agent.status()).deployments == []


async def test_dropping_a_hung_rank_ends_the_switch_that_waits_for_it(short_dir: Path) -> None:
    async with daemon(short_dir) as d, child(d, POLICY, MiB) as hung:
        await d.agent.switch_in(POLICY, 1, 1, [])
        hung.process.send_signal(signal.SIGSTOP)
        switch = await sent(d.agent.switch_out(POLICY, 1, 1))
        await d.agent.drop_wpg(POLICY, 1)
        with pytest.raises(ResourceError, match="lost"):
            await switch


async def test_offload_gives_back_the_rank_process_memory(short_dir: Path) -> None:
    """What the device budget is about: 128 MiB of state leave the process, and come back equal."""
    size = 128 * MiB
    async with (
        daemon(short_dir, devices=[size], host_bytes=size) as d,
        child(d, POLICY, size) as rank,
    ):
        await d.agent.switch_in(POLICY, 1, 1, [])
        await rank.ask("fill 3")
        content = await rank.ask("digest")
        before = await rank.ask("rss")
        await d.agent.switch_out(POLICY, 1, 1)
        after = await rank.ask("rss")
        assert before - after >= 0.9 * size
        await d.agent.switch_in(POLICY, 1, 2, [])
        assert await rank.ask("digest") == content
        assert await rank.ask("rss") >= 0.9 * size


async def test_garbage_ends_that_connection_only(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        await start(d, POLICY)
        before = _num_fds(d)
        for garbage in (
            b"\xff" * 64,  # a length of 4 GiB
            struct.pack("<I", 5) + b"hello",
            struct.pack("<I", 3) + b"\x93\x01\xc2",  # a frame cut short
        ):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(10)
                sock.connect(str(d.socket))
                sock.sendall(garbage)
                assert sock.recv(1) == b""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(d.socket))
            socket.send_fds(sock, [b"\x01"], [sock.fileno()])
            assert sock.recv(1) == b""
        await d.agent.switch_in(POLICY, 1, 1, [])
        assert _num_fds(d) == before


def _num_fds(d: Daemon) -> int:
    return len(os.listdir(f"/proc/{d.pid}/fd"))


# --- seals ---


async def test_seal_restores_the_state_in_a_new_incarnation_also_after_a_daemon_restart(
    short_dir: Path,
) -> None:
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = rank.run(4)
        await d.agent.prepare_seal(POLICY, 1, 4)
        rank.run(5)  # the deployment runs on while the seal is written
        sealed = await d.agent.write_seal(POLICY, 1, 4, [])
        assert Path(sealed.file).is_relative_to(d.files)
        assert (sealed.digest, sealed.num_bytes) == (content, MiB)
        assert await d.agent.write_seal(POLICY, 1, 4, []) == sealed
        await d.agent.prepare_seal(POLICY, 1, 4)  # sealed already: nothing to do
        reborn = await start(d, POLICY, incarnation=2, seal_seq=4)
        assert reborn.seq == 4
        await d.agent.switch_in(POLICY, 2, 2, [])
        assert reborn.digest() == content
    async with daemon(short_dir) as d:
        reborn = await start(d, POLICY, seal_seq=4)
        await d.agent.switch_in(POLICY, 1, 1, [])
        assert reborn.digest() == content


async def test_seal_of_an_offloaded_deployment_needs_no_rank(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = rank.run(2)
        await d.agent.switch_out(POLICY, 1, 1)
        await d.agent.prepare_seal(POLICY, 1, 2)
        await rank.client.close()
        sealed = await d.agent.write_seal(POLICY, 1, 2, [])
        assert sealed.digest == content
        assert (await d.agent.status()).host_used_bytes == 0


async def test_seal_of_an_offloaded_deployment_stands_while_it_runs_again(short_dir: Path) -> None:
    """Its operations write the very memory that the seal would be written from."""
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        for seq, epoch in ((1, 1), (3, 4)):
            content = rank.run(seq)
            await d.agent.switch_out(POLICY, 1, epoch)
            await d.agent.prepare_seal(POLICY, 1, seq)
            await d.agent.switch_in(POLICY, 1, epoch + 1, [])
            rank.run(seq + 1)
            if seq == 3:
                await d.relaunch()  # the next daemon has the snapshot too
            sealed = await d.agent.write_seal(POLICY, 1, seq, [])
            assert sealed.digest == content


async def test_load_waits_until_a_seal_is_written_that_reads_the_same_memory(
    short_dir: Path,
) -> None:
    size = 64 * MiB
    async with daemon(short_dir, devices=[size]) as d:
        rank = await start(d, POLICY, size)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = rank.run(1)
        await d.agent.switch_out(POLICY, 1, 1)
        await d.agent.prepare_seal(POLICY, 1, 1)
        rank.on_loaded = lambda: fill(rank.heap, 2)  # as soon as it is there
        write = await sent(d.agent.write_seal(POLICY, 1, 1, []))
        await d.agent.switch_in(POLICY, 1, 2, [])
        assert (await write).digest == content


async def test_seal_is_refused_when_another_seq_was_applied(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        rank.run(3)
        with pytest.raises(CallerError, match="has applied 3, not 2") as caught:
            await d.agent.prepare_seal(POLICY, 1, 2)
        assert caught.value.info.code is Code.FAILED_PRECONDITION
        with pytest.raises(CallerError, match=r"no seal .* is prepared"):
            await d.agent.write_seal(POLICY, 1, 2, [])
        await d.agent.switch_out(POLICY, 1, 1)  # nothing holds the copy back


async def test_offload_waits_until_the_seal_is_written(short_dir: Path) -> None:
    """The host copy that is going to disk must not change under the writer."""
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        sealed_content = rank.run(1)
        await d.agent.prepare_seal(POLICY, 1, 1)
        new_content = rank.run(2)
        offload = await sent(d.agent.switch_out(POLICY, 1, 2))
        for _ in range(20):  # each a full round trip through the daemon
            assert (await d.agent.status()).device_used_bytes == [MiB]
        assert not offload.done()
        sealed = await d.agent.write_seal(POLICY, 1, 1, [])
        assert sealed.digest == sealed_content
        await offload
        await d.agent.switch_in(POLICY, 1, 3, [])
        assert rank.digest() == new_content


async def test_prepared_seal_is_given_up_when_the_agent_is_gone(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        rank.run(1)
        await d.agent.prepare_seal(POLICY, 1, 1)
        await d.agent.close()
        d.agent = await AgentStateClient.connect(d.socket, SECRET)
        await asyncio.wait_for(d.agent.switch_out(POLICY, 1, 2), 60)


async def test_newest_seal_the_one_before_and_the_committed_one_are_kept(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        for seq, committed in ((1, 0), (2, 1), (3, 1), (4, 1), (5, 4)):
            rank.run(seq)
            await d.agent.prepare_seal(POLICY, 1, seq)
            await d.agent.write_seal(POLICY, 1, seq, [], committed=committed)
            if seq == 4:
                assert names(d) == ["seal-1.state", "seal-3.state", "seal-4.state"]
        assert names(d) == ["seal-4.state", "seal-5.state"]
        await d.agent.drop_wpg(POLICY, 1, forget=True)
        assert names(d) == []


async def test_files_of_a_job_that_ended_while_the_node_was_down_are_removed(
    short_dir: Path,
) -> None:
    async with daemon(short_dir) as d:
        for key in (POLICY, OTHER):
            rank = await start(d, key)
            await rank.client.versions.create(VersionKey(key, 1), rank.slots)
            rank.seq = 1
            await d.agent.switch_in(key, 1, 1, [])
            await d.agent.prepare_seal(key, 1, 1)
            await d.agent.write_seal(key, 1, 1, [1])
    bad = short_dir / "files" / "acme" / "sums" / "policy" / "seal-7.state"
    await asyncio.to_thread(bad.write_bytes, b"never whole")
    async with daemon(short_dir) as d:
        await d.agent.drop_wpg(POLICY, 4, forget=True)
        assert (await d.agent.status()).versions == [VersionKey(OTHER, 1)]
        left = [path.relative_to(d.files) for path in sorted(d.files.rglob("*.state"))]
        directory = Path("acme", "letters", "policy")
        assert left == [directory / "seal-1.state", directory / "version-1.state"]


async def test_forgetting_an_older_incarnation_leaves_the_newer_one_its_files(
    short_dir: Path,
) -> None:
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY, incarnation=2)
        await d.agent.switch_in(POLICY, 2, 1, [])
        rank.run(1)
        await d.agent.prepare_seal(POLICY, 2, 1)
        await d.agent.write_seal(POLICY, 2, 1, [])
        await d.agent.drop_wpg(POLICY, 1, forget=True)
        assert names(d) == ["seal-1.state"]


async def test_seals_of_an_abandoned_course_are_replaced_not_reused(short_dir: Path) -> None:
    """A job of the same name starts from nothing where another's files were left behind."""
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        for seq in (4, 8):
            rank.run(seq)
            await d.agent.prepare_seal(POLICY, 1, seq)
            await d.agent.write_seal(POLICY, 1, seq, [])
        reborn = await start(d, POLICY, incarnation=2)
        await d.agent.switch_in(POLICY, 2, 2, [])
        reborn.run(99)
        content, reborn.seq = reborn.digest(), 4
        await d.agent.prepare_seal(POLICY, 2, 4)
        assert (await d.agent.write_seal(POLICY, 2, 4, [])).digest == content
        assert names(d) == ["seal-4.state"]


@pytest.mark.parametrize("place", [20, 4096 + 1000, -1])
async def test_flipped_bit_in_a_seal_is_data_loss_naming_the_file(
    short_dir: Path, place: int
) -> None:
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        rank.run(1)
        await d.agent.prepare_seal(POLICY, 1, 1)
        sealed = await d.agent.write_seal(POLICY, 1, 1, [])
        await asyncio.to_thread(_flip_bit, Path(sealed.file), place)
        with pytest.raises(ResourceError) as caught:
            await start(d, POLICY, incarnation=2, seal_seq=1)
        assert caught.value.info.code is Code.DATA_LOSS
        assert caught.value.info.details["file"] == sealed.file
        with pytest.raises(ResourceError, match=r"seal-9\.state: No such file"):
            await start(d, POLICY, incarnation=3, seal_seq=9)


def _flip_bit(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


async def test_seal_fails_and_the_previous_one_stands_when_the_disk_is_full(
    short_dir: Path,
) -> None:
    async with daemon(short_dir) as d:
        small = await start(d, POLICY, MiB)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = small.run(1)
        await d.agent.prepare_seal(POLICY, 1, 1)
        await d.agent.write_seal(POLICY, 1, 1, [])
        large = await start(d, OTHER, 2 * MiB)
        await d.agent.switch_in(OTHER, 1, 2, [])
        large.run(1)
        await d.agent.prepare_seal(OTHER, 1, 1)
        limit = MiB + 64 * 1024
        resource.prlimit(d.pid, resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(ResourceError, match="File too large") as caught:
            await d.agent.write_seal(OTHER, 1, 1, [])
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        assert names(d) == ["seal-1.state"]
        assert not list(d.files.rglob("*.partial"))
        await d.agent.switch_out(OTHER, 1, 2)  # the copy is free again
        with pytest.raises(ResourceError, match="are not available"):
            await start(d, SAMPLER, 2 * MiB)  # the limit holds for host memory too
        reborn = await start(d, POLICY, incarnation=2, seal_seq=1)
        await d.agent.switch_in(POLICY, 2, 3, [])
        assert reborn.digest() == content


async def test_names_cannot_leave_the_directory(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        with pytest.raises(CallerError, match="not a valid name"):
            await d.agent.register_wpg(["t"], DeploymentKey("..", "..", "etc"), 1, [0], 0)


# --- weights versions ---


def _model(scale: int = 1) -> tuple[list[TensorSlot], int]:
    """Two odd-sized weights with a gap, then an optimizer tensor, as heap slots."""
    slots = [
        TensorSlot("a", Role.WEIGHT, "float32", [5, 7 * scale], 64, 140 * scale),
        TensorSlot("b", Role.WEIGHT, "float32", [3], 64 + 256 * scale, 12),
        TensorSlot("a.m", Role.OPTIMIZER, "float32", [5], 128 + 256 * scale, 20),
    ]
    return slots, 192 + 256 * scale


def _weights_of(rank: Rank) -> dict[str, bytes]:
    return {
        slot.name: bytes(rank.heap.buffer[slot.offset : slot.offset + slot.num_bytes])
        for slot in rank.slots
        if slot.role is Role.WEIGHT
    }


def _weights(slots: list[TensorSlot]) -> list[TensorSlot]:
    return [slot for slot in slots if slot.role is Role.WEIGHT]


async def _publishing(d: Daemon, scale: int = 1) -> Rank:
    """A policy, resident, with content."""
    slots, num_bytes = _model(scale)
    policy = await start(d, POLICY, num_bytes, slots=slots)
    await d.agent.switch_in(POLICY, 1, 1, [])
    policy.run(1)
    return policy


async def _sampling(d: Daemon, scale: int = 1) -> Rank:
    """A sampler on its own layout, resident."""
    slots, num_bytes = _model(scale)
    shifted = [
        TensorSlot(s.name, s.role, s.dtype, s.shape, s.offset + 320, s.num_bytes)
        for s in _weights(slots)
    ]
    sampler = await start(d, SAMPLER, num_bytes + 320, slots=shifted)
    await d.agent.switch_in(SAMPLER, 1, 1, [])
    return sampler


async def test_version_brings_weights_to_another_deployment_on_the_node(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        policy = await _publishing(d)
        sampler = await _sampling(d)
        key = VersionKey(POLICY, 2)
        made = await policy.client.versions.create(key, _weights(policy.slots))
        assert made.is_new
        weights = _weights_of(policy)
        policy.run(3)  # the version is immutable: what comes after does not change it
        again = await policy.client.versions.create(key, _weights(policy.slots))
        assert (again.digest, again.num_bytes, again.is_new) == (made.digest, made.num_bytes, False)
        assert await load_version(sampler.client, key, [], sampler.slots) == made.digest
        assert _weights_of(sampler) == weights
        assert (await d.agent.status()).versions == [key]
        await d.agent.drop_versions([key])
        with pytest.raises(CallerError, match="is not here"):
            await load_version(sampler.client, key, [], sampler.slots)


async def test_equal_weights_give_versions_of_equal_digest(short_dir: Path) -> None:
    """Also in a reused extent, whose gaps once held something else."""
    async with daemon(short_dir) as d:
        policy = await _publishing(d)
        slots = _weights(policy.slots)
        first = await policy.client.versions.create(VersionKey(POLICY, 2), slots)
        policy.run(2)
        await policy.client.versions.create(VersionKey(POLICY, 3), slots)
        await d.agent.drop_versions([VersionKey(POLICY, 3)])
        before = (await d.agent.status()).host_used_bytes
        policy.run(1)
        third = await policy.client.versions.create(VersionKey(POLICY, 4), slots)
        assert third.digest == first.digest
        assert (await d.agent.status()).host_used_bytes == before


async def test_version_of_another_tenant_or_deployment_is_denied(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        policy = await _publishing(d)
        stranger = await start(d, structs.replace(OTHER, tenant="stranger"))
        await policy.client.versions.create(VersionKey(POLICY, 2), _weights(policy.slots))
        for refused in (
            load_version(stranger.client, VersionKey(POLICY, 2), [], stranger.slots),
            stranger.client.versions.create(VersionKey(POLICY, 3), stranger.slots),
        ):
            with pytest.raises(CallerError) as caught:
                await refused
            assert caught.value.info.code is Code.PERMISSION_DENIED


async def test_version_of_another_model_is_refused_and_nothing_written(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        policy = await _publishing(d)
        sampler = await _sampling(d, scale=2)
        before = sampler.digest()
        await policy.client.versions.create(VersionKey(POLICY, 2), _weights(policy.slots))
        with pytest.raises(CallerError, match=r"a is float32\[5, 7\] in the version"):
            await load_version(sampler.client, VersionKey(POLICY, 2), [], sampler.slots)
        with pytest.raises(CallerError, match="b exists on one side only"):
            await load_version(sampler.client, VersionKey(POLICY, 2), [], sampler.slots[:1])
        assert sampler.digest() == before


async def test_readers_cannot_write_a_version(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        policy = await _publishing(d)
        key = VersionKey(POLICY, 2)
        await policy.client.versions.create(key, _weights(policy.slots))
        reader = await greeted(d, SAMPLER)
        _, fds = await reader.call(OpenVersion(key, []))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fds[0], b"x", 0)
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(fds[0], 0)
        os.close(fds[0])
        await reader.close()


async def test_uncommitted_version_is_freed_when_its_rank_dies(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        peer = await greeted(d, POLICY)
        _, fds = await peer.call(CreateVersion(VersionKey(POLICY, 1), 4096, EMPTY.packed))
        os.close(fds[0])
        assert (await d.agent.status()).host_used_bytes == 4096
        await peer.close()
        await d.agent.drop_wpg(POLICY, 1)
        assert (await d.agent.status()).host_used_bytes == 0


async def test_version_is_fetched_from_another_node_once(short_dir: Path) -> None:
    async with daemon(short_dir / "a") as train, daemon(short_dir / "b") as rollout:
        policy = await _publishing(train)
        sampler = await _sampling(rollout)
        reference = await start(
            rollout, DeploymentKey("acme", "sums", "reference"), 4096, slots=sampler.slots
        )
        key = VersionKey(POLICY, 2)
        made = await policy.client.versions.create(key, _weights(policy.slots))
        sources = [await train.endpoint()]
        digests = await asyncio.gather(
            *(
                load_version(r.client, key, sources, sampler.slots, ticket(key, name))
                for r, name in ((sampler, "sampler"), (reference, "reference"))
            )
        )
        assert digests == [made.digest, made.digest]
        assert _weights_of(sampler) == _weights_of(policy)
        assert (await rollout.agent.status()).versions == [key]
        host_bytes = (await rollout.agent.status()).host_used_bytes
        assert host_bytes == 4096 + 4096 + 4096


@pytest.mark.parametrize("is_last", ["the sampler", "the version"])
async def test_memory_of_versions_goes_with_the_last_of_their_job_here(
    short_dir: Path, is_last: str
) -> None:
    """Where the policy never was, nobody says that it is over."""
    async with daemon(short_dir / "a") as train, daemon(short_dir / "b") as rollout:
        policy = await _publishing(train)
        sampler = await _sampling(rollout)
        keys = [VersionKey(POLICY, seq) for seq in (2, 3)]
        for key in keys:
            await policy.client.versions.create(key, _weights(policy.slots))
            sources, shown = [await train.endpoint()], ticket(key, "sampler")
            await load_version(sampler.client, key, sources, sampler.slots, shown)
            policy.run(key.seq)
        await rollout.agent.drop_versions(keys[:1])
        await sampler.client.close()
        if is_last == "the version":
            await rollout.agent.drop_wpg(SAMPLER, 1, forget=True)
            await rollout.agent.drop_versions(keys[1:])
        else:
            await rollout.agent.drop_versions(keys[1:])
            await rollout.agent.drop_wpg(SAMPLER, 1, forget=True)
        report = await rollout.agent.status()
        assert is_empty(report), (report, memory_of(rollout))


async def test_fetch_goes_to_the_next_source_when_one_dies_in_the_stream(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "a") as train,
        daemon(short_dir / "b", PEER_TIMEOUT_S="4") as rollout,
    ):
        policy = await _publishing(train, scale=4096)
        sampler = await _sampling(rollout, scale=4096)
        key = VersionKey(POLICY, 2)
        await policy.client.versions.create(key, _weights(policy.slots))
        real = await train.endpoint()
        async with _cutting_proxy(real, after_bytes=30_000) as cut:
            with pytest.raises(ResourceError, match="the connection ended after"):
                await load_version(sampler.client, key, [cut], sampler.slots, ticket(key))
            assert (await rollout.agent.status()).versions == []
            await load_version(sampler.client, key, [cut, real], sampler.slots, ticket(key))
        assert _weights_of(sampler) == _weights_of(policy)


async def test_corruption_on_the_wire_is_found(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "a") as train,
        daemon(short_dir / "b", PEER_TIMEOUT_S="4") as rollout,
    ):
        policy = await _publishing(train, scale=4096)
        sampler = await _sampling(rollout, scale=4096)
        before = sampler.digest()
        key = VersionKey(POLICY, 2)
        await policy.client.versions.create(key, _weights(policy.slots))
        async with _cutting_proxy(await train.endpoint(), flip_at=30_000) as bad:
            with pytest.raises(ResourceError) as caught:
                await load_version(sampler.client, key, [bad], sampler.slots, ticket(key))
        assert caught.value.info.code is Code.DATA_LOSS
        assert sampler.digest() == before


@asynccontextmanager
async def _cutting_proxy(
    endpoint: str, *, after_bytes: int = 1 << 60, flip_at: int = -1
) -> AsyncIterator[str]:
    """A TCP proxy that breaks off, or flips a bit, at that byte of the answer."""
    host, port = endpoint.rsplit(":", 1)

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65536):
            writer.write(chunk)

    async def downstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        while chunk := await reader.read(min(65536, after_bytes - passed)):
            if 0 <= flip_at - passed < len(chunk):
                place = flip_at - passed
                chunk = chunk[:place] + bytes([chunk[place] ^ 1]) + chunk[place + 1 :]
            writer.write(chunk)
            await writer.drain()
            passed += len(chunk)

    connections: set[asyncio.Task[None]] = set()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
            request = asyncio.create_task(upstream(reader, up_writer))
            try:
                with contextlib.suppress(ConnectionError):
                    await downstream(up_reader, writer)
            finally:
                request.cancel()
                up_writer.close()
                with contextlib.suppress(ConnectionError):
                    await up_writer.wait_closed()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for task in connections:  # a peer may have opened one more as it gave up
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


async def test_fetch_is_for_who_has_a_ticket(short_dir: Path) -> None:
    async with daemon(short_dir / "a") as train:
        policy = await _publishing(train)
        key = VersionKey(POLICY, 2)
        await policy.client.versions.create(key, _weights(policy.slots))
        source = await train.endpoint()
        with pytest.raises(CallerError, match="not signed by this mesh") as caught:
            await fetch(source, key, shown=ticket(key, secret="a guess"))
        assert caught.value.info.code is Code.PERMISSION_DENIED
        _, content = await fetch(source, key)
        assert len(content) == 256
        with pytest.raises(PhaseloomError, match="NOT_FOUND"):
            await fetch(source, VersionKey(POLICY, 9))


async def test_persisted_version_survives_the_daemon_and_is_served(short_dir: Path) -> None:
    async with daemon(short_dir / "a") as train:
        policy = await _publishing(train)
        key = VersionKey(POLICY, 2)
        made = await policy.client.versions.create(key, _weights(policy.slots))
        weights = _weights_of(policy)
        await train.agent.prepare_seal(POLICY, 1, 1)
        with pytest.raises(CallerError, match=r"version acme.sums.policy.9 is not here"):
            await train.agent.write_seal(POLICY, 1, 1, [9])
        await train.agent.prepare_seal(POLICY, 1, 1)
        await train.agent.write_seal(POLICY, 1, 1, [2])
        os.kill(train.pid, signal.SIGKILL)
        await train.process.wait()
    async with daemon(short_dir / "a") as train, daemon(short_dir / "b") as rollout:
        assert (await train.agent.status()).versions == [key]
        sampler = await _sampling(rollout)
        digest = await load_version(
            sampler.client, key, [await train.endpoint()], sampler.slots, ticket(key)
        )
        assert digest == made.digest
        assert _weights_of(sampler) == weights
        await train.agent.drop_versions([key])
        assert not list(train.files.rglob("version-*"))


async def test_bad_version_file_is_replaced_from_another_node(short_dir: Path) -> None:
    async with daemon(short_dir / "a") as train, daemon(short_dir / "b") as other:
        policy = await _publishing(train)
        key = VersionKey(POLICY, 2)
        made = await policy.client.versions.create(key, _weights(policy.slots))
        sampler = await _sampling(other)
        await load_version(
            sampler.client, key, [await train.endpoint()], sampler.slots, ticket(key)
        )
        await train.agent.prepare_seal(POLICY, 1, 1)
        await train.agent.write_seal(POLICY, 1, 1, [2])
        source = await other.endpoint()
        # The node of the policy starts over, with a bad disk; nobody is left who would give the
        # next daemon the memory of this one.
        await train.leave()
        await train.kill()
        (file,) = train.files.rglob("version-2.state")
        await asyncio.to_thread(_flip_bit, file, -1)
        async with daemon(short_dir / "a") as again:
            sampler = await _sampling(again)
            before = sampler.digest()
            with pytest.raises(ResourceError, match=r"version-2\.state") as caught:
                await load_version(sampler.client, key, [], sampler.slots)
            assert caught.value.info.code is Code.DATA_LOSS
            assert sampler.digest() == before
            digest = await load_version(sampler.client, key, [source], sampler.slots, ticket(key))
            assert digest == made.digest


async def test_switch_leaves_offload_and_load_spans_in_the_caller_s_trace(short_dir: Path) -> None:
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    spans = short_dir / "spans"
    async with daemon(short_dir, PHASELOOM_TELEMETRY_SPANS_DIR=str(spans)) as d:
        await start(d, POLICY)
        await start(d, OTHER)
        await d.agent.switch_in(POLICY, 1, 1, [])
        await d.agent.switch_in(OTHER, 1, 2, [POLICY], traceparent=f"00-{trace_id}-{parent}-01")
    lines = await asyncio.to_thread(_json_lines, spans)
    traced = {line["name"]: line for line in lines if line["trace_id"] == trace_id}
    assert traced.keys() == {"offload", "load"}
    assert traced["offload"]["parent_id"] == parent
    assert traced["offload"]["attributes"]["deployment"] == "policy"
    assert traced["load"]["attributes"]["num_bytes"] == MiB
    assert traced["offload"]["end_unix_ns"] <= traced["load"]["start_unix_ns"]


def _json_lines(directory: Path) -> list[dict[str, Any]]:
    files = directory.iterdir()
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.usefixtures("cold_nodes")
async def test_daemon_imports_no_torch_and_idles_small(short_dir: Path) -> None:
    async with daemon(short_dir, DISK_METHOD="direct") as d:
        mapped = await asyncio.to_thread(Path(f"/proc/{d.pid}/maps").read_text)
        assert "torch" not in mapped
        assert "numpy" not in mapped
        status = await asyncio.to_thread(Path(f"/proc/{d.pid}/status").read_text)
        (rss_kb,) = [int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line]
        assert rss_kb < 75 * 1024  # an eighth of what eight idle services may take


async def test_socket_of_a_killed_daemon_is_taken_over(short_dir: Path) -> None:
    async with daemon(short_dir, reconnect_s=0.1) as d:
        rank = await start(d, POLICY, reconnect_s=0.1)
        await d.kill()
        await asyncio.wait_for(rank.client.closed, 60)
        await asyncio.wait_for(d.agent.closed, 60)
        with pytest.raises(ResourceError):
            await d.agent.status()
    async with daemon(short_dir) as d:
        await start(d, POLICY)


# --- memory that goes bad ---


async def test_bad_host_copy_is_found_at_the_load_and_the_switch_undone(short_dir: Path) -> None:
    """Its incarnation is over, so that it is rebuilt: no later load of it could succeed."""
    async with daemon(short_dir, devices=[MiB]) as d:
        first, second = await start(d, POLICY), await start(d, OTHER)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = first.run(1)
        flip_in_memory(d.pid, f"the host copy of {OTHER}")
        with pytest.raises(ResourceError) as caught:
            await d.agent.switch_in(OTHER, 1, 2, [POLICY])
        assert caught.value.info.code is Code.DATA_LOSS
        assert caught.value.info.details["deployment"] == str(OTHER)
        assert caught.value.info.remedy
        assert second.heap.resident_bytes() == 0
        assert first.digest() == content
        await asyncio.wait_for(second.client.closed, 60)
        status = await d.agent.status()
        assert (status.device_used_bytes, status.host_used_bytes) == ([MiB], MiB)


async def test_switch_back_at_once_waits_for_the_digest_and_brings_the_same_bytes(
    short_dir: Path,
) -> None:
    size = 40 * MiB + 5
    async with daemon(short_dir, devices=[size], host_bytes=128 * MiB) as d:
        ranks = [await start(d, key, size) for key in (POLICY, OTHER)]
        keys = [POLICY, OTHER]
        await d.agent.switch_in(POLICY, 1, 1, [])
        for number in range(4):
            rank, out, back = ranks[number % 2], keys[number % 2], keys[1 - number % 2]
            content = rank.run(number)
            await d.agent.switch_in(back, 1, 2 * number + 2, [out])
            await d.agent.switch_in(out, 1, 2 * number + 3, [back])
            assert rank.digest() == content
            switched = await d.agent.switch_in(back, 1, 2 * number + 4, [out])
            assert 0 < switched.copy_s <= switched.offload_s + switched.load_s


async def test_bad_host_copy_is_never_sealed(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        await start(d, POLICY)
        flip_in_memory(d.pid, f"the host copy of {POLICY}")
        await d.agent.prepare_seal(POLICY, 1, 0)
        with pytest.raises(ResourceError) as caught:
            await d.agent.write_seal(POLICY, 1, 0, [])
        assert caught.value.info.code is Code.DATA_LOSS
        assert names(d) == []


async def test_bad_version_is_never_loaded_and_never_persisted(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        policy, sampler = await _publishing(d), await _sampling(d)
        before = sampler.digest()
        key = VersionKey(POLICY, 2)
        await policy.client.versions.create(key, _weights(policy.slots))
        flip_in_memory(d.pid, f"version {key}")
        with pytest.raises(ResourceError) as caught:
            await load_version(sampler.client, key, [], sampler.slots)
        # No seal has it: its policy, whose incarnation is over, makes it again.
        assert caught.value.info.code is Code.UNAVAILABLE
        assert sampler.digest() == before
        await asyncio.wait_for(policy.client.closed, 60)
        assert names(d) == []


async def test_resident_rank_that_is_killed_leaves_nothing_counted(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        async with child(d, POLICY, MiB) as victim:
            await d.agent.switch_in(POLICY, 1, 1, [])
            victim.process.kill()
        with pytest.raises(ResourceError, match="lost"):
            await d.agent.switch_out(POLICY, 1, 2)
        status = await d.agent.status()
        assert (status.device_used_bytes, status.host_used_bytes) == ([0], 0)


async def test_load_that_the_backend_cannot_take_gives_its_memory_back(short_dir: Path) -> None:
    def broken() -> None:
        raise RuntimeError("derived tensors cannot be rebuilt")

    async with daemon(short_dir) as d:
        await d.agent.register_wpg(["t"], POLICY, 1, [0], 0)
        heap = Heap(MiB)
        client = await RankStateClient.connect(d.socket, "t", applied=lambda: 0, on_loaded=broken)
        d.ranks.append(client)
        await client.register_heap(heap, slots_of(MiB))
        await client.commit_initial()
        with pytest.raises(PhaseloomError, match="derived tensors"):
            await d.agent.switch_in(POLICY, 1, 1, [])
        assert heap.resident_bytes() == 0
        assert (await d.agent.status()).device_used_bytes == [0]


async def test_event_loop_of_a_rank_goes_on_while_it_copies(short_dir: Path) -> None:
    """Heartbeats, progress and cancellation must not wait for 256 MiB, nor for who stands still."""
    size = 256 * MiB
    async with daemon(short_dir, devices=[size], host_bytes=size) as d:
        rank = await start(d, POLICY, size)
        looking = threading.Event()
        looked: list[bool] = []

        def copied() -> None:
            looked.append(looking.wait(60))

        rank.on_loaded = copied
        is_seen_in_part = False
        async with asyncio.timeout(60):
            while not is_seen_in_part:
                looking.clear()
                switch = await sent(d.agent.switch_in(POLICY, 1, 1, []))
                while (there := rank.heap.resident_bytes()) < size:
                    is_seen_in_part |= there > 0
                    await asyncio.sleep(0)
                assert not switch.done()
                looking.set()
                await switch
                await d.agent.switch_out(POLICY, 1, 1)
        assert all(looked)


async def test_fetch_goes_to_the_next_source_when_one_is_silent(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "a") as train,
        daemon(short_dir / "b", PEER_TIMEOUT_S="4") as rollout,
    ):
        policy, sampler = await _publishing(train), await _sampling(rollout)
        key = VersionKey(POLICY, 2)
        made = await policy.client.versions.create(key, _weights(policy.slots))
        with socket.create_server(("127.0.0.1", 0)) as silent:
            sources = [f"127.0.0.1:{silent.getsockname()[1]}", await train.endpoint()]
            digest = await load_version(sampler.client, key, sources, sampler.slots, ticket(key))
            assert digest == made.digest
        absent = VersionKey(POLICY, 3)
        with pytest.raises(ResourceError, match="Errno 111"):
            await load_version(sampler.client, absent, sources[:1], sampler.slots, ticket(absent))
        with pytest.raises(CallerError, match="NOT_FOUND"):
            await rollout.agent.write_seal(SAMPLER, 9, 1, [])


async def test_version_that_no_source_has_is_not_found_and_nothing_is_touched(
    short_dir: Path,
) -> None:
    """A source that cannot be asked may have it: then the sync is worth another try."""
    async with daemon(short_dir / "a") as train, daemon(short_dir / "b") as rollout:
        sampler = await _sampling(rollout)
        content = sampler.run(1)
        absent, empty = VersionKey(POLICY, 9), await train.endpoint()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            nobody = f"127.0.0.1:{listener.getsockname()[1]}"
        for sources, code in (
            ([], Code.NOT_FOUND),
            ([empty], Code.NOT_FOUND),
            ([empty, empty], Code.NOT_FOUND),
            ([nobody, empty], Code.UNAVAILABLE),
        ):
            with pytest.raises(PhaseloomError) as caught:
                await load_version(sampler.client, absent, sources, sampler.slots, ticket(absent))
            assert caught.value.info.code is code
        assert sampler.digest() == content


async def test_switches_of_two_devices_do_not_wait_for_each_other(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[MiB, MiB]) as d, child(d, POLICY, MiB) as hung:
        await start(d, OTHER, device=1)
        hung.process.send_signal(signal.SIGSTOP)
        waiting = await sent(d.agent.switch_in(POLICY, 1, 1, []))
        await d.agent.switch_in(OTHER, 1, 2, [])
        assert not waiting.done()
        hung.process.send_signal(signal.SIGCONT)
        await waiting
        assert (await d.agent.status()).device_used_bytes == [MiB, MiB]
