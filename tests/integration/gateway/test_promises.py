"""What a gateway promises is kept: a call that the mesh does not have is to be sent again, and an
outcome that a gateway has not heard of is to be asked for again.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiohttp
from aiohttp import web

from phaseloom.client import DeploymentSpec, Mesh, ModelSpec, connect
from phaseloom.common.contract import streams
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.operations import Operation, PublishWeights
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.natsserver import EmbeddedServer
from phaseloom.gateway import tinker
from phaseloom.gateway.futures import Futures
from phaseloom.gateway.http import answered
from phaseloom.gateway.models import POLICY, Backends, Models
from phaseloom.gateway.records import Book, CheckpointRecord, ModelRecord, SessionRecord
from phaseloom.gateway.replicas import REPLICA, Replica, Seat, passed_on
from phaseloom.gateway.tenants import Tenant
from phaseloom.router.shell import Router
from tests.support.leader import Leader

TENANT = "acme"
JOB = "trained"
KEY = "tml-acme"
MODEL = {"model_id": "s:train:0"}
STEP = {**MODEL, "seq_id": 1, "adam_params": {"learning_rate": 1e-3}}


def connected(server: EmbeddedServer) -> AbstractAsyncContextManager[Mesh]:
    return connect(server.credentials.url, TENANT, server.credentials.tenants[TENANT])


class Program:
    """A program that tells what its calls are answered with."""

    def __init__(self, http: aiohttp.ClientSession, tenant: Tenant) -> None:
        self._http = http
        self.tenant = tenant

    async def __call__(self, call: str, body: dict[str, object]) -> tuple[int, dict[str, object]]:
        async with self._http.post(f"/api/v1/{call}", json=body) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def program(mesh: Mesh, bus: Bus) -> AsyncIterator[Program]:
    """One whose tenant is served by a gateway, which knows the model of the job."""

    async def nothing(_: Seat) -> None:
        """The tenant is served already."""

    book = Book(bus)
    await book.put(SessionRecord(TENANT, "s"))
    await book.put(ModelRecord(TENANT, MODEL["model_id"], JOB, "base"))
    with socket.create_server(("127.0.0.1", 0)) as own:
        url = f"http://127.0.0.1:{own.getsockname()[1]}"
        seat = Seat(TENANT, bus, url, nothing)
        seat.tenant = Tenant(TENANT, Models(mesh, Backends()), Futures(), book, bus)
        app = web.Application(middlewares=[answered, passed_on])
        app.add_routes(tinker.routes)
        app[REPLICA] = Replica({KEY: TENANT}, [seat])
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.SockSite(runner, own).start()
            async with aiohttp.ClientSession(url, headers={"X-API-Key": KEY}) as http:
                yield Program(http, seat.tenant)
        finally:
            await runner.cleanup()


async def begin(mesh: Mesh) -> None:
    noop = ModelSpec({})
    specs = [
        DeploymentSpec(POLICY, "train", "noop", noop, trainable=True),
        DeploymentSpec("sampler", "rollout", "noop", noop),
    ]
    await mesh.submit_job(JOB, specs)


async def test_call_that_was_not_stored_is_to_be_sent_again(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    """Its number was taken, so this session of the job is over."""
    async with Router(bus).running([TENANT]), Leader(bus).running(), connected(nats_server) as mesh:
        await begin(mesh)
        taken = OperationKey(TENANT, JOB, POLICY, "1")
        await bus.publish(streams.op_subject(taken), Operation("theirs", 9, PublishWeights()))
        async with program(mesh, bus) as call:
            status, said = await call("optim_step", STEP)
            assert status == 503, said
            assert "send it again" in str(said["detail"])
            # Also where nothing is asked of the mesh but to keep the number.
            status, said = await call("save_weights", {**MODEL, "seq_id": 1, "path": "a/b"})
            assert status == 503, said


async def test_outcome_that_was_not_heard_of_is_to_be_asked_for_again(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    router = Router(bus, session_ttl_s=1.0)
    async with (
        router.running([TENANT]),
        Leader(bus).running() as leader,
        connected(nats_server) as mesh,
        connected(nats_server) as other,
        program(mesh, bus) as call,
    ):
        await begin(mesh)
        leader.hold()
        status, promise = await call("optim_step", STEP)
        assert status == 200, promise
        await other.attach(JOB)  # from now on the gateway hears of nothing
        status, said = await call("retrieve_future", promise)
        assert status == 503, said
        assert "repeat the request" in str(said["detail"])
        leader.go.set()
        status, said = await call("retrieve_future", promise)
        assert (status, said["type"]) == (200, "optim_step"), said


async def test_record_that_another_gateway_has_written_fails_no_call(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    """A gateway that hung finds that another one has taken the last step of a call meanwhile."""
    async with (
        Router(bus).running([TENANT]),
        Leader(bus).running() as leader,
        connected(nats_server) as mesh,
        program(mesh, bus) as call,
    ):
        await begin(mesh)
        leader.hold()
        status, promise = await call("save_weights", {**MODEL, "seq_id": 1, "path": "mine"})
        assert status == 200, promise
        theirs = Book(bus)
        path = f"tinker://{MODEL['model_id']}/weights/mine"
        saved = CheckpointRecord(TENANT, path, MODEL["model_id"], "base", f"{JOB}/policy", "1", 0.0)
        await theirs.put(saved)
        leader.go.set()
        status, said = await call("retrieve_future", promise)
        assert status == 503, said
