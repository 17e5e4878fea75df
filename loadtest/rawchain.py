"""The limit of an operation's round trip: the mesh's durable hops with nothing in between.

The chain has the same streams on a server of the same kind, the same accounts and the same number
of processes as the mesh. Each process does only what its hop cannot do without:

    controller  publishes on OPS, gets the republished `out`
    router      push consumer of OPS: appends to SCHED, acknowledges
    scheduler   ordered consumer of SCHED: publishes on PERMITS
    agent       push consumer of PERMITS: hands over to the rank by Unix socket, acknowledges
    rank        gets the payload from OPS, publishes DONE, appends the end to SCHED, answers

No message is decoded or checked; the operation's subject is all that travels. A hop does not wait
for one message's acknowledgement before it takes the next. The client is nats-py as it comes.
`python -m loadtest.rawchain <role> <socket> <parent pid>` is one of these processes; it writes
`ready` to its standard output.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import nats
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig

from phaseloom.common.contract import streams
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.process import config, diewithparent
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import BusConfig
from phaseloom.common.transport.natsserver import Credentials, EmbeddedServer

ROLES = ("rank", "agent", "scheduler", "router")
"""The roles in the order of their start: each process finds the one that it hands over to."""
TENANT = "demo"
NODE = NodeId("raw-0")

_READY = b"ready\n"
_READY_TIMEOUT_S = 30.0
_STREAM_BYTES = 2**30
_OPS = streams.ops_stream(TENANT)
_OP = f"{streams.PREFIX}.op."
_DONE = f"{streams.PREFIX}.done."
_OUT = f"{streams.PREFIX}.out."
_QUEUED = f"{streams.PREFIX}.sched.queued"
_FINISHED = f"{streams.PREFIX}.sched.finished"
_MSG_ID = "Nats-Msg-Id"


# --- the controller -------------------------------------------------------------------------------


class Controller:
    """The controller's end of the chain."""

    def __init__(self, client: Client, payload: bytes) -> None:
        self._client = client
        self._payload = payload
        self._seq = 0
        self._outs: dict[str, asyncio.Future[None]] = {}

    async def on_out(self, message: Msg) -> None:
        self._outs.pop(message.subject).set_result(None)

    async def call(self) -> None:
        """Run one operation: publish it, and wait for its PubAck and its outcome."""
        self._seq += 1
        suffix = f"{TENANT}.raw.policy.{self._seq}"
        out = self._outs[_OUT + suffix] = asyncio.get_running_loop().create_future()
        await self._client.request(_OP + suffix, self._payload, timeout=10.0)
        await out


@asynccontextmanager
async def raw_chain(
    directory: Path, payload: bytes, *, fsync: bool = True
) -> AsyncIterator[Controller]:
    """A chain on a server of its own; everything ends with the block.

    Args: directory: where the server's store lies.
          payload: the payload of every operation.
          fsync: whether the server has each message on disk before it acknowledges it.
    """
    async with AsyncExitStack() as stack:
        embedded = EmbeddedServer(directory / "nats", [TENANT], fsync=fsync)
        server = await stack.enter_async_context(embedded)
        credentials = server.credentials
        bus = await Bus.open(credentials.bus, "raw")
        stack.push_async_callback(bus.close)
        await bus.provision_tenant(TENANT, _STREAM_BYTES)
        # A Unix socket's path has at most 107 bytes, which the directory's may have already.
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="phaseloom-"))
        for role in ROLES:
            socket = Path(sockets) / "rank.sock"
            await stack.enter_async_context(_process(role, socket, credentials))
        client = await nats.connect(
            credentials.url,
            user=TENANT,
            password=credentials.tenants[TENANT],
            inbox_prefix=f"_INBOX_{TENANT}".encode(),
        )
        stack.push_async_callback(client.close)
        controller = Controller(client, payload)
        await client.subscribe(f"{_OUT}{TENANT}.raw.>", cb=controller.on_out)
        yield controller


@asynccontextmanager
async def _process(role: str, socket: Path, credentials: Credentials) -> AsyncIterator[None]:
    environment = {
        **config.inherited(),
        "PHASELOOM_BUS_URL": credentials.url,
        "PHASELOOM_BUS_USER": credentials.user,
        "PHASELOOM_BUS_PASSWORD": credentials.password,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtest.rawchain"),
        *(role, str(socket), str(os.getpid())),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_READY_TIMEOUT_S):
            if await process.stdout.readline() != _READY:
                raise RuntimeError(f"the raw {role} ended with {await process.wait()}")
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


# --- the other processes --------------------------------------------------------------------------


Role = Callable[[JetStreamContext, Path, asyncio.TaskGroup], Awaitable[None]]


async def _rank(js: JetStreamContext, socket: Path, tasks: asyncio.TaskGroup) -> None:
    async def run(line: bytes, writer: asyncio.StreamWriter) -> None:
        suffix = line.decode().rstrip("\n")
        payload = await js.get_last_msg(_OPS, _OP + suffix, direct=True)
        assert payload.data is not None
        await js.publish(_DONE + suffix, b"done")
        await js.publish(_FINISHED, suffix.encode(), headers={_MSG_ID: f"finished:{suffix}"})
        writer.write(line)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            tasks.create_task(run(line, writer))

    await asyncio.start_unix_server(serve, socket)


async def _agent(js: JetStreamContext, socket: Path, tasks: asyncio.TaskGroup) -> None:
    reader, writer = await asyncio.open_unix_connection(socket)
    running: dict[bytes, Msg] = {}

    async def acknowledge() -> None:
        while line := await reader.readline():
            await running.pop(line).ack()

    async def take(message: Msg) -> None:
        line = message.data + b"\n"
        running[line] = message
        writer.write(line)

    tasks.create_task(acknowledge())

    await js.subscribe(
        streams.permit_subject(NODE),
        stream=streams.PERMITS,
        durable=f"node-{NODE}",
        cb=take,
        manual_ack=True,
        config=ConsumerConfig(ack_policy=AckPolicy.EXPLICIT),
    )


async def _scheduler(js: JetStreamContext, socket: Path, tasks: asyncio.TaskGroup) -> None:
    async def permit(message: Msg) -> None:
        headers = {_MSG_ID: f"cmd:{message.metadata.sequence.stream}:0"}
        await js.publish(streams.permit_subject(NODE), message.data, headers=headers)

    async def take(message: Msg) -> None:
        if message.subject == _QUEUED:
            tasks.create_task(permit(message))

    await js.subscribe(
        f"{streams.PREFIX}.sched.>", stream=streams.SCHED, ordered_consumer=True, cb=take
    )


async def _router(js: JetStreamContext, socket: Path, tasks: asyncio.TaskGroup) -> None:
    async def route(message: Msg) -> None:
        suffix = message.subject.removeprefix(_OP)
        await js.publish(_QUEUED, suffix.encode(), headers={_MSG_ID: f"queued:{suffix}"})
        await message.ack()

    async def take(message: Msg) -> None:
        tasks.create_task(route(message))

    await js.subscribe(
        f"{_OP}{TENANT}.>",
        stream=_OPS,
        durable="router",
        queue="router",
        cb=take,
        manual_ack=True,
        config=ConsumerConfig(ack_policy=AckPolicy.EXPLICIT),
    )


_ROLES: dict[str, Role] = {
    "rank": _rank,
    "agent": _agent,
    "scheduler": _scheduler,
    "router": _router,
}


async def _serve(role: str, socket: Path) -> None:
    settings = config.load(BusConfig, "bus")
    client = await nats.connect(settings.url, user=settings.user, password=settings.password)
    async with asyncio.TaskGroup() as tasks:
        await _ROLES[role](client.jetstream(timeout=10.0), socket, tasks)
        await client.flush()
        sys.stdout.buffer.write(_READY)
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    diewithparent.arm(int(sys.argv[3]))
    uvloop.run(_serve(sys.argv[1], Path(sys.argv[2])))
