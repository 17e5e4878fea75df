"""Hostile clients on both of a state manager's sockets: each is refused or cut off, nothing of its
leaks, and the daemon goes on serving the others."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from phaseloom.cli.certs import make_certificates
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import AgentHello, RegisterWpg, StatusRequest
from phaseloom.common.contract.state_layout import PartSources, Role, Slice, TensorSlot
from phaseloom.common.contract.state_rank import (
    CommitInitial,
    CommitVersion,
    Copied,
    CopyIn,
    CopyOut,
    CreateVersion,
    OpenSlices,
    OpenVersion,
    RankHello,
    RegisterHeap,
    StateMessage,
)
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.tensortable import EMPTY, TensorTable
from phaseloom.common.transport.certificates import directory_of
from phaseloom.common.transport.framing import Frame, Peer, close_fds
from phaseloom.statemgr.transfer import tls, wire
from phaseloom.statemgr.transfer.fetching import Home
from phaseloom.statemgr.transfer.tensorslices import Box
from tests.support.meshcerts import SECRET, identity, ticket
from tests.support.peerfetch import fetch, home
from tests.support.statedaemon import (
    OTHER,
    POLICY,
    SAMPLER,
    Daemon,
    MiB,
    child,
    daemon,
    greeted,
    names,
    start,
)

KEY = VersionKey(POLICY, 2)
ESCAPES = ("..", "../x", "/etc/passwd", "a/b", "", ".", "a\0b", "x" * 65, "*", ">")
ABSURD = (2**63, 2**64 - 1, 2**62, -1, -(2**63))


@asynccontextmanager
async def _serving(
    directory: Path, *, peer_timeout_s: float = 10.0, kept_bytes: int = 0
) -> AsyncIterator[Daemon]:
    """A daemon with a policy and its version; what it serves is the same after the test, and it
    holds no byte and no descriptor more, except for `kept_bytes` that it keeps for reuse."""
    async with daemon(directory, PEER_TIMEOUT_S=str(peer_timeout_s)) as d:
        policy = await start(d, POLICY)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = policy.run(1)
        await policy.client.versions.create(KEY, policy.slots)
        await fetch(await d.endpoint(), KEY)  # who reads it first has it opened and verified
        before = await d.agent.status()
        yield d
        after = await d.agent.status()  # fails where its records contradict themselves
        assert after.host_used_bytes == before.host_used_bytes + kept_bytes
        assert after.versions == [KEY]
        _, served = await fetch(await d.endpoint(), KEY)
        assert served == bytes(policy.heap.buffer)
        assert policy.digest() == content
        await d.agent.switch_out(POLICY, 1, 2)


def _num_fds(d: Daemon) -> int:
    return len(os.listdir(f"/proc/{d.pid}/fd"))


async def _until(d: Daemon, num_fds: int) -> None:
    """The daemon has closed what it was sent, and the connections that are gone."""
    async with asyncio.timeout(30):
        while _num_fds(d) > num_fds:
            await d.agent.status()


async def _cut_off(reader: asyncio.StreamReader) -> bytes:
    """What comes before the other end hangs up."""
    async with asyncio.timeout(30):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


# --- The Unix socket -----------------------------------------------------------------------------


async def _peer(d: Daemon) -> Peer[StateMessage]:
    return await Peer.connect(d.socket, StateMessage)


async def _refused(peer: Peer[StateMessage], message: StateMessage) -> PhaseloomError:
    with pytest.raises(PhaseloomError) as caught:
        await peer.call(message)
    return caught.value


async def test_who_proves_nothing_gets_nothing(short_dir: Path) -> None:
    async with _serving(short_dir) as d:
        for message in (
            AgentHello(""),
            AgentHello(SECRET[:-1]),
            RankHello(""),
            RankHello(f"token of {POLICY} 1"),  # its rank is here
            RankHello(SECRET),
            StatusRequest(),
            RegisterWpg(["t"], SAMPLER, 1, [0], 0),
            OpenVersion(KEY, []),
            CommitVersion(KEY, "0" * 32),
            CopyOut(release=True),
        ):
            peer = await _peer(d)
            error = await _refused(peer, message)
            assert error.info.code is Code.PERMISSION_DENIED, message
            assert SECRET not in str(error)
            await peer.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(("mode", "expected"), [(0o600, "refused"), (0o666, "cut off")])
async def test_another_user_s_process_gets_no_connection(
    short_dir: Path, mode: int, expected: str
) -> None:
    """Not even where somebody has given the socket away, and the secret."""
    async with _serving(short_dir) as d:
        await asyncio.to_thread(short_dir.chmod, 0o755)  # so that the socket's own mode decides
        await asyncio.to_thread(d.socket.chmod, mode)
        payload = msgspec.msgpack.encode(Frame(1, False, AgentHello(SECRET)))
        hello = struct.pack("<I", len(payload)) + payload
        program = f"""
import os, socket
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect({str(d.socket)!r})
    sock.sendall({hello!r})
    print("heard" if sock.recv(1) else "cut off")
except PermissionError:
    print("refused")
except (BrokenPipeError, ConnectionResetError):
    print("cut off")
"""
        ran = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-I", "-c", program],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert ran.stdout == f"{expected}\n", ran.stderr


async def test_names_that_lead_elsewhere_are_refused(short_dir: Path) -> None:
    async with _serving(short_dir) as d:
        agent = d.agent
        files = names(d)
        for name in ESCAPES:
            for key in (
                DeploymentKey(name, "sums", "policy"),
                DeploymentKey("acme", name, "policy"),
                DeploymentKey("acme", "sums", name),
            ):
                with pytest.raises(CallerError):
                    await agent.register_wpg(["t"], key, 1, [0], 0)
                with pytest.raises(PhaseloomError):
                    await agent.prepare_seal(key, 1, 1)
        reader = await greeted(d, SAMPLER)
        for name in ESCAPES:
            there = VersionKey(DeploymentKey("acme", "sums", name), 2)
            messages: list[StateMessage] = [
                OpenVersion(there, []),
                OpenVersion(VersionKey(DeploymentKey("acme", name, "policy"), 2), []),
                OpenSlices(there, 64, [], []),
                CreateVersion(VersionKey(SAMPLER, 2, name or "."), 64, EMPTY.packed),
            ]
            for message in messages:
                assert (await _refused(reader, message)).info.code in {
                    Code.INVALID_ARGUMENT,
                    Code.PERMISSION_DENIED,
                }, message
        await reader.close()
        assert names(d) == files


async def test_absurd_sizes_are_refused_with_the_numbers(short_dir: Path) -> None:
    async with _serving(short_dir) as d:
        rank = await greeted(d, SAMPLER)
        codes = {Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED}
        for size in ABSURD:
            slot = TensorSlot("w", Role.WEIGHT, "uint8", [size], 0, size)
            far = TensorSlot("w", Role.WEIGHT, "uint8", [1], size, 1)
            slices = [Slice("", "w", "uint8", [0], [max(1, size)], 0, size)]
            mine = VersionKey(SAMPLER, 1)
            # No table can say more than 64 bits.
            tables = [TensorTable.of([each]).packed for each in (slot, far) if size < 2**63]
            messages: list[StateMessage] = [
                RegisterHeap(size, EMPTY.packed),
                CreateVersion(mine, size, EMPTY.packed),
                *(RegisterHeap(4096, table) for table in tables),
                *(CreateVersion(mine, 4096, table) for table in tables),
                OpenSlices(KEY, size, slices, [PartSources("", [])]),
                OpenSlices(KEY, size, [], []),
                OpenSlices(KEY, 64, [Slice("", "w", "uint8", [size], [1], 0, 1)], []),
                OpenSlices(KEY, 64, [Slice("", "w", "uint8", [0], [1], size, 1)], []),
            ]
            for message in messages:
                error = await _refused(rank, message)
                assert error.info.code in codes, (message, error)
        many = [TensorSlot("w", Role.WEIGHT, "uint8", [0], 0, 0)] * 200_000
        assert (
            await _refused(rank, RegisterHeap(4096, TensorTable.of(many).packed))
        ).info.code in codes
        await rank.close()


async def test_what_is_no_table_of_tensors_is_refused(short_dir: Path) -> None:
    async with _serving(short_dir) as d:
        rank = await greeted(d, SAMPLER)
        good = TensorTable.of([TensorSlot("w", Role.WEIGHT, "uint8", [64], 0, 64)]).packed
        longer = msgspec.msgpack.encode([["w", "v"], *msgspec.msgpack.decode(good)[1:]])
        for packed in (b"", b"\xc1", good[:-1], good + b"\0", longer, os.urandom(4096)):
            for message in (
                RegisterHeap(4096, packed),
                CreateVersion(VersionKey(SAMPLER, 1), 4096, packed),
            ):
                error = await _refused(rank, message)
                assert error.info.code is Code.INVALID_ARGUMENT, (message, error)
                assert error.info.field == "tensors"
        # It does not lie where it may, the second time neither.
        for message in [RegisterHeap(63, good)] * 2:
            assert "must end within 63 bytes" in str(await _refused(rank, message))
        _, (fd,) = await rank.call(RegisterHeap(64, good))
        close_fds([fd])
        await rank.close()
        await d.agent.drop_wpg(SAMPLER, 1)


def _frame(body: StateMessage, num_fds: int) -> bytes:
    payload = msgspec.msgpack.encode(Frame(1, False, body, num_fds))
    return struct.pack("<I", len(payload)) + payload


async def test_descriptors_that_nobody_asked_for_are_closed(short_dir: Path) -> None:
    async with _serving(short_dir) as d:
        before = _num_fds(d)
        hello = _frame(RankHello("guess"), 1)
        for payload, num_fds in ((hello, 1), (hello, 253), (hello[:5], 3), (b"\0", 1)):
            with ExitStack() as stack:
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.connect(str(d.socket))
                sent = [stack.enter_context(socket.socket()) for _ in range(num_fds)]
                rights = array("i", [each.fileno() for each in sent])
                sock.sendmsg([payload], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                reader, writer = await asyncio.open_unix_connection(sock=sock)
                assert await _cut_off(reader) == b""
                writer.close()
        await _until(d, before)


async def test_garbage_and_half_frames_end_their_own_connection(short_dir: Path) -> None:
    async with _serving(short_dir) as d:
        before = _num_fds(d)
        deep = b"\x91" * 100_000
        for garbage in (
            struct.pack("<I", 2**32 - 1),
            struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
            struct.pack("<I", len(deep)) + deep,
            struct.pack("<I", 0),
            os.urandom(4096) + b"\xff" * 4,
            b"GET / HTTP/1.1\r\n\r\n",
        ):
            reader, writer = await asyncio.open_unix_connection(str(d.socket))
            writer.write(garbage)
            assert await _cut_off(reader) == b""
            writer.close()
        for half in (_frame(AgentHello(SECRET), 0)[:-1], b"\x01", b""):
            _, writer = await asyncio.open_unix_connection(str(d.socket))
            writer.write(half)
            writer.close()
            await writer.wait_closed()
        await _until(d, before)


async def test_a_client_that_dies_with_a_mapping_leaves_nothing(short_dir: Path) -> None:
    """Its pages go with it; the records have them back as soon as its connection ends."""
    async with _serving(short_dir) as d:
        before = await d.agent.status()
        async with child(d, SAMPLER, 4 * MiB) as held:
            during = await d.agent.status()
            assert during.host_used_bytes == before.host_used_bytes + 4 * MiB
            held.process.kill()
            await held.process.wait()
            await d.agent.drop_wpg(SAMPLER, 1)
            assert (await d.agent.status()).host_used_bytes == before.host_used_bytes
        writer = await greeted(d, SAMPLER, incarnation=2)
        _, fds = await writer.call(CreateVersion(VersionKey(SAMPLER, 1), 4 * MiB, EMPTY.packed))
        await writer.close()
        await d.agent.drop_wpg(SAMPLER, 2)
        assert (await d.agent.status()).host_used_bytes == before.host_used_bytes
        os.close(fds[0])


# --- The socket for other nodes ------------------------------------------------------------------


async def _connected(d: Daemon) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = (await d.endpoint()).rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


async def test_plain_tcp_is_cut_off(short_dir: Path) -> None:
    async with _serving(short_dir) as d:
        before = _num_fds(d)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\x16\x03\x01" + b"\0" * 512):
            reader, writer = await _connected(d)
            writer.write(garbage)
            # At most an alert of TLS, which is never longer.
            assert len(await _cut_off(reader)) <= 7
            writer.close()
        await _until(d, before)


async def test_who_begins_and_says_no_more_is_cut_off(short_dir: Path) -> None:
    """In the clear, in the middle of a handshake, and after one."""
    async with _serving(short_dir, peer_timeout_s=3.0) as d:
        before = _num_fds(d)
        silent = [await _connected(d) for _ in range(2)]
        silent[1][1].write(b"\x16\x03\x01\x02")
        stream = await tls.connect(await d.endpoint(), identity(), 10.0)
        with pytest.raises(ConnectionError):
            await stream.receive(1024)
        stream.close()
        for reader, writer in silent:
            assert await _cut_off(reader) == b""
            writer.close()
        await _until(d, before)


async def test_a_crowd_that_proves_nothing_keeps_nobody_out(short_dir: Path) -> None:
    """The oldest of them go; their time is not up before the test's is."""
    async with _serving(short_dir, peer_timeout_s=300.0) as d:
        crowd = [await _connected(d) for _ in range(200)]
        _, served = await fetch(await d.endpoint(), KEY)
        assert len(served) == MiB
        for _, writer in crowd:
            writer.close()


def _elsewhere(directory: Path) -> tls.Identity:
    """Of a node of the same name, of another mesh."""
    make_certificates(directory, ["node0"])
    return tls.Identity.load(directory_of(directory, "node0"))


async def test_a_certificate_of_another_authority_is_refused_on_both_sides(
    short_dir: Path,
) -> None:
    async with _serving(short_dir) as d:
        endpoint = await d.endpoint()
        stranger = _elsewhere(short_dir / "elsewhere")
        trusting = tls.Identity(stranger.server, _careless(short_dir / "elsewhere"))
        for who, says in (
            (stranger, "is not of this mesh"),
            (trusting, "rejected this node's certificate"),
            (tls.Identity(stranger.server, _careless(None)), "rejected this node's"),
        ):
            with pytest.raises(CallerError, match=says) as caught:
                await fetch(endpoint, KEY, Home(who, "", "", 10.0))
            assert caught.value.info.code is Code.PERMISSION_DENIED
            assert "phaseloom certs" in caught.value.info.remedy


def _careless(certificates: Path | None) -> ssl.SSLContext:
    """A client that verifies nobody, with a certificate of elsewhere, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificates is not None:
        own = directory_of(certificates, "node0")
        context.load_cert_chain(own / "node.pem", own / "node.key")
    return context


async def test_old_tls_is_refused(short_dir: Path) -> None:
    async with _serving(short_dir) as d:
        old = _careless(None)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(PhaseloomError):
            await tls.connect(await d.endpoint(), tls.Identity(old, old), timeout_s=10.0)


async def test_a_ticket_is_for_one_version_one_node_and_one_life(short_dir: Path) -> None:
    async with _serving(short_dir) as d:
        endpoint = await d.endpoint()
        good = ticket(KEY)
        later = msgspec.structs.replace(good, incarnation=2)
        other_job = VersionKey(DeploymentKey("acme", "letters", "policy"), 2)
        for shown, at, says in (
            (ticket(VersionKey(POLICY, 3)), home(), "not acme.sums.policy.2"),
            (ticket(other_job), home(), "not acme.sums.policy.2"),
            (later, home(), "not signed"),
            (msgspec.structs.replace(good, nodes=["node1"]), home(), "not signed"),
            (msgspec.structs.replace(good, mac=b""), home(), "not signed"),
            (ticket(KEY, secret=""), home(), "not signed"),
            (good, home(node="node1"), "shown by node 'node1'"),
        ):
            with pytest.raises(CallerError, match=says) as caught:
                await fetch(endpoint, KEY, at, shown)
            assert caught.value.info.code is Code.PERMISSION_DENIED
            assert caught.value.info.remedy
        await fetch(endpoint, KEY, shown=ticket(KEY, "critic", incarnation=3))
        with pytest.raises(CallerError, match="which is at 3"):
            await fetch(endpoint, KEY, shown=ticket(KEY, "critic", incarnation=2))
        await fetch(endpoint, KEY, shown=ticket(KEY, "critic", incarnation=4))


async def _send_raw(stream: tls.Stream, message: bytes) -> None:
    framed = struct.pack("<I", len(message)) + message
    await stream.send_bytes(memoryview(framed), 10.0)


async def test_a_node_of_the_mesh_that_talks_nonsense_is_cut_off(short_dir: Path) -> None:
    """It has a certificate, and a ticket."""
    async with _serving(short_dir) as d:
        before = _num_fds(d)
        endpoint = await d.endpoint()
        slices = wire.OpenVersion(KEY, ticket(KEY), [""])
        for first, then in (
            (b"\xc1", None),
            (b"\x91" * 50_000, None),
            (b"\x82\xa7service\xa5files\xa1x" + b"\x91" * 50_000 + b"\xc0", None),
            (msgspec.msgpack.encode(slices), b"\xc1"),
            (msgspec.msgpack.encode(slices), b"\x91" * 50_000),
        ):
            stream = await tls.connect(endpoint, identity(), 10.0)
            await _send_raw(stream, first)
            if then is not None:
                await stream.receive(wire.MAX_REPLY_BYTES)
                await _send_raw(stream, then)
            with pytest.raises(ConnectionError):
                await stream.receive(wire.MAX_REPLY_BYTES)
            stream.close()
        await _until(d, before)


async def test_boxes_that_are_none_are_refused(short_dir: Path) -> None:
    async with _serving(short_dir) as d:
        stream = await tls.connect(await d.endpoint(), identity(), 10.0)

        async def ask(message: msgspec.Struct) -> wire.Reply:
            await stream.send(message)
            payload = await stream.receive(wire.MAX_REPLY_BYTES)
            reply: wire.Reply = msgspec.msgpack.decode(payload, type=wire.Reply)
            return reply

        assert isinstance(await ask(wire.OpenVersion(KEY, ticket(KEY), [""])), wire.Opened)
        for start_at, size in (
            ([-1], [1]),
            ([MiB], [1]),
            ([0], [MiB + 1]),
            ([0], [0]),
            ([0], [-1]),
            ([2**62], [2**62]),
            ([0, 0], [1, 1]),
            ([], []),
        ):
            give = wire.Give("", [Box("w", start_at, size)], 1)
            assert isinstance(await ask(give), wire.Refusal), (start_at, size)
        twice = [Box("w", [0], [MiB])] * 9
        for give in (
            wire.Give("", twice, 9 * MiB),
            wire.Give("", twice, 2**63),
            wire.Give("", twice[:1], -1),
            wire.Give("../0of1", twice[:1], MiB),
            wire.Give("", [Box("v", [0], [1])], 1),
        ):
            assert isinstance(await ask(give), wire.Refusal), give
        good = await ask(wire.Give("", twice[:1], MiB))
        assert isinstance(good, wire.Given)
        await stream.receive_into(memoryview(bytearray(MiB)), 10.0)
        stream.close()


async def test_a_source_that_is_none_harms_nobody(short_dir: Path) -> None:
    """What a reader is told to fetch from may be anything."""
    async with _serving(short_dir) as d, daemon(short_dir / "b") as rollout:
        rank = await greeted(rollout, SAMPLER)
        for source in ("", ":", "x", "127.0.0.1", "127.0.0.1:99999999", "127.0.0.1:-1", "\0:1"):
            error = await _refused(rank, OpenVersion(KEY, [source], ticket(KEY)))
            assert isinstance(error, CallerError | ResourceError), source
        _, fds = await rank.call(OpenVersion(KEY, [await d.endpoint()], ticket(KEY)))
        os.close(fds[0])
        await rank.close()


async def test_a_seal_of_an_absurd_seq_is_not_prepared(short_dir: Path) -> None:
    async with _serving(short_dir, kept_bytes=MiB) as d:  # of a snapshot
        for seq in (-1, 2**63, 0):
            with pytest.raises(CallerError):
                await d.agent.prepare_seal(POLICY, 1, seq)
        assert names(d) == []


@pytest.mark.parametrize("is_resident", [True, False])
async def test_memory_of_a_dead_rank_is_never_seen_by_another(
    short_dir: Path, is_resident: bool
) -> None:
    """Neither its heap nor its host copy nor the snapshot for its seal."""
    async with daemon(short_dir, devices=[MiB], host_bytes=2 * MiB) as d:
        async with child(d, POLICY, MiB) as rank:
            await d.agent.switch_in(POLICY, 1, 1, [])
            await rank.ask("fill 3")
            await d.agent.prepare_seal(POLICY, 1, 3)
            await d.agent.write_seal(POLICY, 1, 3, [])  # now its snapshot is idle
            if not is_resident:
                await d.agent.switch_out(POLICY, 1, 1)
            rank.process.kill()
            await rank.process.wait()
        peer = await greeted(d, OTHER)
        slots = [TensorSlot("w", Role.WEIGHT, "uint8", [MiB], 0, MiB)]
        heap = RegisterHeap(MiB, TensorTable.of(slots).packed, emulated=True)
        _, (fd,) = await peer.call(heap)
        assert os.pread(fd, MiB, 0) == bytes(MiB)
        os.close(fd)
        await peer.close()


async def test_descriptors_beside_a_rank_s_answers_are_closed(short_dir: Path) -> None:
    """One that pins its pages may send one: memory to share, in a request."""

    async def answer(body: StateMessage, fds: list[int]) -> tuple[StateMessage, list[int]]:
        close_fds(fds)
        if isinstance(body, CopyIn):
            return Copied(body.digest, 0, MiB, 0.0), [own]
        assert isinstance(body, CopyOut)
        return Copied("", 0, 0, 0.0), [own]

    own = os.memfd_create("mine")
    async with _serving(short_dir) as d:
        peer = await greeted(d, SAMPLER, handler=answer)
        slots = [TensorSlot("w", Role.WEIGHT, "uint8", [MiB], 0, MiB)]
        _, (fd,) = await peer.call(RegisterHeap(MiB, TensorTable.of(slots).packed, pins=True))
        os.close(fd)
        await peer.call(CommitInitial(digest_of(memoryview(bytes(MiB)))))
        await d.agent.switch_in(SAMPLER, 1, 1, [])
        await d.agent.switch_out(SAMPLER, 1, 1)
        before = _num_fds(d)
        for epoch in range(2, 6):
            await d.agent.switch_in(SAMPLER, 1, epoch, [])
            await d.agent.switch_out(SAMPLER, 1, epoch)
        assert _num_fds(d) == before
        await peer.close()
        await d.agent.drop_wpg(SAMPLER, 1)
    os.close(own)
