"""The embedded server: accounts keep tenants apart, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import APIError, NoStreamResponseError

from phaseloom import client as phaseloom
from phaseloom.common.contract import streams
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.events import TimerFired
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.operations import Completion, Outcome
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import connect
from phaseloom.common.transport.natsserver import EmbeddedServer, check_version, find_binary
from phaseloom.common.transport.serving import service_bus
from tests.support.processes import child_pids, gone, until_gone

SUBJECT = "pl.v1.op.acme.sums.policy.1"


@asynccontextmanager
async def tenant(
    server: EmbeddedServer, name: str
) -> AsyncIterator[tuple[Client, asyncio.Queue[str]]]:
    """A tenant's connection, and the errors that reach its error callback."""
    errors: asyncio.Queue[str] = asyncio.Queue()

    async def on_error(error: Exception) -> None:
        await errors.put(str(error).lower())

    client = await nats.connect(
        server.credentials.url,
        user=name,
        password=server.credentials.tenants[name],
        inbox_prefix=f"_INBOX_{name}",
        error_cb=on_error,
    )
    yield client, errors
    await client.close()


async def test_tenant_gets_an_acknowledgement_for_its_own_operation(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    async with tenant(nats_server, "acme") as (client, errors):
        ack = await client.jetstream().publish(SUBJECT, b"payload")
        assert (ack.stream, ack.seq) == ("OPS_acme", 1)
        with pytest.raises(APIError, match="maximum messages per subject"):
            await client.jetstream().publish(SUBJECT, b"again")
        assert errors.empty()
    stored = await bus.stored.get("OPS_acme", SUBJECT)
    assert stored is not None
    assert stored.payload == b"payload"


async def test_tenant_hears_its_own_completions_only(nats_server: EmbeddedServer, bus: Bus) -> None:
    async with (
        tenant(nats_server, "acme") as (acme, _),
        tenant(nats_server, "globex") as (globex, errors),
    ):
        own = await acme.subscribe("pl.v1.out.acme.>")
        other = await globex.subscribe("pl.v1.out.globex.>")
        await globex.subscribe("pl.v1.out.acme.>")
        await acme.flush()
        await globex.flush()
        for name in ("acme", "globex"):
            key = OperationKey(name, "sums", "policy", "1")
            await bus.publish(streams.done_subject(key), Completion(name, Outcome.COMPLETED))
        assert (await own.next_msg(timeout=30)).subject == "pl.v1.out.acme.sums.policy.1"
        assert (await other.next_msg(timeout=30)).subject == "pl.v1.out.globex.sums.policy.1"
        assert "permissions violation" in await errors.get()


async def test_tenant_calls_the_api_and_gets_the_answer(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    async def answer(message: Msg) -> None:
        await message.respond(b"answer to " + message.data)

    await bus.client.subscribe("pl.v1.api.acme.job.status", cb=answer)
    await bus.client.flush()
    async with tenant(nats_server, "acme") as (client, _):
        reply = await client.request("pl.v1.api.acme.job.status", b"question", timeout=30)
        assert reply.data == b"answer to question"


async def test_tenant_has_no_jetstream(nats_server: EmbeddedServer, bus: Bus) -> None:
    await bus.publish(SUBJECT, b"keep me")
    async with tenant(nats_server, "globex") as (client, _):
        for subject in ("$JS.API.INFO", "$JS.API.STREAM.PURGE.OPS_acme"):
            with pytest.raises(nats.errors.TimeoutError):
                await client.request(subject, b"", timeout=0.3)
    assert await bus.stored.get("OPS_acme", SUBJECT) is not None


@pytest.mark.parametrize(
    "subject",
    [
        "pl.v1.permit.train-0",
        "pl.v1.wpg.train-0",
        "pl.v1.op.globex.sums.policy.1",
        "pl.v1.api.globex.job.submit",
        "pl.v1.sched.job",
        "pl.v1.done.acme.sums.policy.1",
        "pl.v1.out.acme.sums.policy.1",
        "$KV.leases.scheduler",
    ],
)
async def test_tenant_cannot_publish_elsewhere(
    nats_server: EmbeddedServer, bus: Bus, subject: str
) -> None:
    heard = await bus.client.subscribe(subject)
    await bus.client.flush()
    async with tenant(nats_server, "acme") as (client, errors):
        await client.publish(subject, b"forged")
        await client.flush()
        assert "permissions violation" in await errors.get()
        await client.close()
    await bus.client.flush()
    assert heard.pending_msgs == 0


async def test_tenant_cannot_aim_the_acknowledgement_of_its_operation_at_the_mesh(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    """With one account for all, the reply subject of an operation would forge a permit."""
    heard = await bus.client.subscribe("pl.v1.permit.>")
    await bus.client.flush()
    async with tenant(nats_server, "acme") as (client, _):
        await client.publish(SUBJECT, b"", reply="pl.v1.permit.train-0")
        await client.flush()
    async with asyncio.timeout(30):
        while await bus.stored.get("OPS_acme", SUBJECT) is None:
            await bus.client.flush()
    await bus.client.flush()
    assert heard.pending_msgs == 0
    assert (await bus.js.stream_info(streams.PERMITS)).state.messages == 0


async def test_wrong_password_is_denied_at_once(nats_server: EmbeddedServer) -> None:
    """However long the connection may take to a server that is slow."""
    denied = r"^PERMISSION_DENIED: .* rejects user 'acme' .* in a file"
    async with asyncio.timeout(30):
        with pytest.raises(CallerError, match=denied):
            await connect(
                nats_server.credentials.url,
                *("guess", "acme", "guess"),
                timeout_s=3600,
                credentials_from="a file",
            )


async def test_server_of_several_with_older_passwords_is_left_for_the_next(
    nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    credentials = nats_server.credentials
    async with EmbeddedServer(tmp_path / "older", ["acme"], fsync=False) as older:
        both = f"{older.credentials.url},{credentials.url}"
        for name in ("any", "other"):  # the name decides with which of them it begins
            client = await connect(both, name, "acme", credentials.tenants["acme"])
            assert client.connected_url is not None
            assert credentials.url.endswith(f":{client.connected_url.port}")
            await client.close()
        async with asyncio.timeout(30):
            with pytest.raises(CallerError, match="PERMISSION_DENIED"):
                await connect(both, "guess", "acme", "guess", timeout_s=3600)


def reload(server: EmbeddedServer, directory: Path, old: str, new: str) -> None:
    """Have a server take its settings anew, with some text of them replaced."""
    settings = directory / "nats.conf"
    settings.write_text(settings.read_text().replace(old, new))
    os.kill(server.pid, signal.SIGHUP)


async def test_password_that_is_changed_while_clients_are_connected(
    nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controllers and services are told, and come back where it is changed back; nats-py's client
    would be closed for good, and a router would serve nobody for ever."""
    credentials = nats_server.credentials
    for variable, value in (("URL", credentials.url), ("USER", credentials.user)):
        monkeypatch.setenv(f"PHASELOOM_BUS_{variable}", value)
    monkeypatch.setenv("PHASELOOM_BUS_PASSWORD", credentials.password)
    stop, acme = asyncio.Event(), credentials.tenants["acme"]
    connecting = phaseloom.connect(credentials.url, "acme", acme, answer_timeout_s=0.1)
    async with asyncio.timeout(60), connecting as mesh:

        async def until_told(code: Code) -> str:
            while True:
                try:
                    await mesh.status("none")
                except PhaseloomError as error:
                    if error.info.code is code:
                        return str(error)
                await asyncio.sleep(0.01)

        async def serve() -> None:
            async with service_bus("service", stop):
                reload(nats_server, tmp_path / "nats", credentials.password, "another")
                await stop.wait()

        with pytest.raises(CallerError, match=r"'mesh' .* PHASELOOM_BUS_PASSWORD"):
            await serve()
        reload(nats_server, tmp_path / "nats", acme, "another")
        assert "PHASELOOM_PASSWORD" in await until_told(Code.PERMISSION_DENIED)
        reload(nats_server, tmp_path / "nats", "another", acme)
        await until_told(Code.UNAVAILABLE)  # it is connected, and there is no scheduler


async def test_refusal_is_told_though_the_server_only_hangs_up_from_then_on() -> None:
    connections = 0

    async def refuse_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if connections == 1:
            writer.write(b'INFO {"version": "2.12.0", "auth_required": true}\r\n')
            await reader.readuntil(b"PING\r\n")
            writer.write(b"-ERR 'maximum connections exceeded'\r\n")
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(refuse_once, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ResourceError, match=r"as acme: .*maximum connections"):
            await connect(f"nats://127.0.0.1:{port}", "guess", "acme", "guess", timeout_s=1.0)
    assert connections > 1


async def test_payload_of_eight_megabytes_is_taken(nats_server: EmbeddedServer, bus: Bus) -> None:
    async with tenant(nats_server, "acme") as (client, _):
        assert client.max_payload == 8 * 2**20
        await client.jetstream().publish(SUBJECT, b"x" * (8 * 2**20))


async def test_credentials_file_is_for_its_owner_only(nats_server: EmbeddedServer) -> None:
    credentials = credentials_file(nats_server)
    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    written = json.loads(credentials.read_text())
    assert written["url"] == nats_server.credentials.url
    assert set(written["tenants"]) == {"acme", "globex"}
    assert len({written["password"], *written["tenants"].values()}) == 3


def credentials_file(server: EmbeddedServer) -> Path:
    config = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")[2].decode()
    return Path(config).with_name("credentials.json")


async def test_restart_keeps_address_credentials_and_what_was_stored(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    before = nats_server.credentials
    await bus.log.append(TimerFired("a"))
    await nats_server.stop()
    await nats_server.start()
    assert nats_server.credentials == before
    fresh = await Bus.open(before.bus, "fresh")
    assert await fresh.log.end() == 1
    await fresh.close()


async def test_stop_leaves_no_process(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path, ["acme"]) as server:
        pid = server.pid
        assert not gone(pid)
    assert gone(pid)


async def test_start_fails_with_the_servers_own_words_when_the_port_is_taken(
    nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    other = EmbeddedServer(tmp_path / "other", ["acme"])
    await other.start()
    await other.stop()
    taken = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", int(other.credentials.url.rpartition(":")[2])
    )
    async with taken:
        with pytest.raises(ResourceError, match="address already in use"):
            await other.start()


async def test_server_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from phaseloom.common.transport.natsserver import EmbeddedServer\n"
        "async def main():\n"
        "    async with EmbeddedServer(Path(sys.argv[1]), ['acme']) as server:\n"
        "        print(server.pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert child_pids(parent.pid) == [pid]
    parent.kill()
    await parent.wait()
    await until_gone([pid], timeout_s=30)


async def test_find_binary_ignores_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A distribution's server may come first there, and an old one ignores what we rely on."""
    fake = tmp_path / "nats-server"
    fake.write_text("#!/bin/sh\necho nats-server: v2.9.0\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_binary().parent != tmp_path
    with pytest.raises(ResourceError, match=r"2\.9\.0") as refused:
        await check_version(fake)
    assert refused.value.info.code is Code.FAILED_PRECONDITION


async def test_publish_without_a_stream_is_refused_for_a_tenant_unknown_to_the_mesh(
    nats_server: EmbeddedServer,
) -> None:
    async with tenant(nats_server, "globex") as (client, _):
        with pytest.raises((NoStreamResponseError, nats.errors.TimeoutError)):
            await client.jetstream().publish("pl.v1.op.globex.a.b.1", b"", timeout=0.5)


async def test_streams_may_be_promised_more_than_the_disk_has(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    more = 4 * shutil.disk_usage(nats_server.store).total
    for name in ("initech", "umbrella"):
        await bus.provision_tenant(name, more)
        made = await bus.js.stream_info(streams.ops_stream(name))
        assert made.config.max_bytes == more
