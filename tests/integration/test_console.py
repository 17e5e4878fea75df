"""The console's process on a real server: keys, tenants, updates, what an operator may do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from nats.aio.client import Client

from phaseloom.common.contract.api import (
    DrainNode,
    JobReport,
    JobRequest,
    JobStatus,
    NodeStatus,
    Reported,
)
from phaseloom.common.contract.codec import encode
from phaseloom.common.contract.errors import CallerError, ResourceError
from phaseloom.common.contract.events import (
    JobFinished,
    NodeUp,
    OperationFinished,
    QueuedOperation,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import DeviceSpec
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import connect
from phaseloom.common.transport.natsserver import EmbeddedServer
from phaseloom.common.transport.services import call_api, serve_api
from phaseloom.console.core.wire import Caller, Update
from phaseloom.console.http import MAX_STREAMS
from tests.support.processes import free_port, service

PATIENCE_S = 30.0
NODE = NodeId("train-0")
KEYS = {"acme": "key-of-acme", "globex": "key-of-globex", "": "operators-key"}
ACTS = {"X-Phaseloom-Console": "1"}


@dataclass(frozen=True)
class Console:
    http: aiohttp.ClientSession
    url: str

    async def ask(self, path: str, tenant: str = "", **options: Any) -> aiohttp.ClientResponse:
        headers = {"Authorization": f"Bearer {KEYS[tenant]}", **options.pop("headers", {})}
        method = options.pop("method", "GET")
        return await self.http.request(method, self.url + path, headers=headers, **options)

    async def state(self, tenant: str = "") -> Update:
        answer = await self.ask("/api/state", tenant)
        assert answer.status == 200
        return msgspec.json.decode(await answer.read(), type=Update)

    async def until_seen(self, number: int, num_jobs: int = 0) -> Update:
        """The view, once it has so many operations, of the log, and jobs, of a bucket."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = await self.state()
                if len(found.operations) >= number and len(found.jobs or []) >= num_jobs:
                    return found
                await asyncio.sleep(0.02)


@asynccontextmanager
async def console(
    server: EmbeddedServer, port: int, *, spans: Path | None = None
) -> AsyncIterator[Console]:
    tenants = {key: tenant for tenant, key in KEYS.items() if tenant}
    environment = {
        "PHASELOOM_CONSOLE_PORT": str(port),
        "PHASELOOM_CONSOLE_OPERATOR_KEY": KEYS[""],
        "PHASELOOM_CONSOLE_KEYS": msgspec.json.encode(tenants).decode(),
        "PHASELOOM_TELEMETRY_SPANS_DIR": str(spans or ""),
    }
    url = f"http://127.0.0.1:{port}"
    async with service("console", server, **environment), aiohttp.ClientSession() as http:
        running = Console(http, url)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(aiohttp.ClientError):
                    if (await running.ask("/api/me")).status == 200:
                        break
                await asyncio.sleep(0.02)
        yield running


@pytest_asyncio.fixture
async def shown(nats_server: EmbeddedServer, bus: Bus) -> AsyncIterator[Console]:
    async with console(nats_server, free_port()) as running:
        yield running


async def run(bus: Bus, tenant: str, *seqs: int) -> None:
    """Operations of a tenant's job `a`, as the log tells of them."""
    key = DeploymentKey(tenant, "a", "policy")
    await bus.log.append(NodeUp(NODE, "train", [DeviceSpec(64)], 640, 1, "h:1"))
    await bus.log.append(WpgStarted(key, 1, NODE, 10, 0, [0]))
    for seq in seqs:
        operation = OperationKey(tenant, "a", "policy", str(seq))
        await bus.log.append(QueuedOperation(operation, str(operation), "forward_backward"))
        await bus.log.append(
            OperationFinished(
                operation, "forward_backward", Outcome.COMPLETED, 1, 1, 1e9 + seq, 0.5
            )
        )


async def test_page_opens_with_a_key_once_and_everything_else_needs_one(shown: Console) -> None:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        assert (await http.get(f"{shown.url}/api/state")).status == 401
        assert (await http.get(f"{shown.url}/?key=wrong")).status == 401
        page = await http.get(f"{shown.url}/?key={KEYS['acme']}")
        assert page.status == 200
        assert str(page.url) == f"{shown.url}/", "the key does not stay in the address"
        assert "script-src 'self'" in page.headers["Content-Security-Policy"]
        (cookie,) = http.cookie_jar
        assert cookie["httponly"]
        assert cookie["samesite"] == "Strict"
        me = msgspec.json.decode(await (await http.get(f"{shown.url}/api/me")).read(), type=Caller)
        assert me == Caller("acme")
        for name in ("console.js", "console.css"):
            assert (await http.get(f"{shown.url}/static/{name}")).status == 200
        assert (await http.get(f"{shown.url}/static/sources.sha256")).status == 404


async def test_each_tenant_sees_its_own_and_an_operator_all(shown: Console, bus: Bus) -> None:
    await bus.keys.put(Bucket.VIEW, "acme.a", encode(JobStatus("a", "active")))
    await run(bus, "acme", 1, 2)
    await run(bus, "globex", 1)
    everything = await shown.until_seen(3, num_jobs=1)
    assert set(everything.deployments) == {"acme.a.policy", "globex.a.policy"}
    own = await shown.state("acme")
    assert own.deployments == ["acme.a.policy"]
    assert len(own.operations) == 2
    assert [row.job for row in own.jobs or []] == ["acme.a"]
    assert not (await shown.state("globex")).jobs
    for path in ("/api/explain/acme.a", "/api/explain/acme.a.policy.1"):
        assert (await shown.ask(path, "globex")).status == 403


async def test_legs_of_an_operation_are_its_spans(
    nats_server: EmbeddedServer, bus: Bus, tmp_path: Path
) -> None:
    """Where the console has none, as of services on other machines, there are no legs."""
    async with console(nats_server, free_port(), spans=tmp_path) as shown:
        await run(bus, "acme", 1)
        origin_s = (await shown.until_seen(1)).origin_s
        path = "/api/trace/acme.a.policy.1"
        assert await (await shown.ask(path, "acme")).json() == []
        (tmp_path / "test-1.jsonl").write_text(
            "".join(_span(origin_s, *one) for one in (("route", 1, None), ("queue", 2, "route")))
        )
        legs = await (await shown.ask(path, "acme")).json()
        assert [(leg["name"], leg["begin"], leg["end"]) for leg in legs] == [
            ("route", 10_000, 15_000),
            ("queue", 20_000, 25_000),
        ]
        assert [leg.get("depth", 0) for leg in legs] == [0, 1]
        assert (await shown.ask(path, "globex")).status == 403


def _span(origin_s: float, name: str, after_s: int, parent: str | None) -> str:
    """A line of a span of half a second, `after_s` after the first event of the log."""
    begin_ns = int((origin_s + after_s) * 1e9)
    span = {
        "name": name,
        "trace_id": "one",
        "span_id": name,
        "parent_id": parent,
        "start_unix_ns": begin_ns,
        "end_unix_ns": begin_ns + 500_000_000,
        "service": "test",
        "attributes": {"tenant": "acme", "job": "a", "deployment": "policy", "seq": "1"},
    }
    return json.dumps(span) + "\n"


async def test_updates_stream_and_go_on_where_a_page_was(shown: Console, bus: Bus) -> None:
    await run(bus, "acme", 1)
    seen = await shown.until_seen(1)
    mark = f"{seen.origin_s}-{seen.cursor}"
    stream = await shown.ask(f"/api/events?since={mark}")
    await run(bus, "acme", 2)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            name, update = await next_update(stream)
            assert not update.is_whole
            if update.operations:
                break
    assert [row.slot for row in update.operations] == ["2"]
    stream.close()
    await run(bus, "acme", 3)
    again = await shown.ask("/api/events", headers={"Last-Event-ID": name})
    async with asyncio.timeout(PATIENCE_S):
        while not (update := (await next_update(again))[1]).operations:
            assert not update.is_whole
    assert [row.slot for row in update.operations] == ["3"]
    again.close()
    elsewhere = await shown.ask("/api/events", headers={"Last-Event-ID": "17.5-3"})
    assert (await next_update(elsewhere))[1].is_whole, "another console's place says nothing here"
    elsewhere.close()


async def test_streams_of_one_key_are_bounded_and_bad_input_is_no_failure(shown: Console) -> None:
    origin_s = (await shown.state()).origin_s
    streams = []
    while (stream := await shown.ask("/api/events", "acme")).status == 200:
        streams.append(stream)
        assert len(streams) <= MAX_STREAMS
    assert stream.status == 429
    assert "event streams" in (await stream.json())["error"]["message"]
    other = await shown.ask(f"/api/events?since={origin_s}-{'9' * 5000}", "globex")
    assert other.status == 200, "another key has streams of its own"
    other.close()
    streams.pop().close()
    async with asyncio.timeout(PATIENCE_S):
        while (stream := await shown.ask("/api/events", "acme")).status == 429:
            stream.close()
            await asyncio.sleep(0.05)
    assert stream.status == 200
    for is_open in (*streams, stream):
        is_open.close()
    for bearer in ("\udcff", "\u00ff", "a" * 5000):
        answer = await shown.ask("/api/me", headers={"Authorization": f"Bearer {bearer}"})
        assert answer.status == 401
        answer.close()
    for path in ("/?key=%ff", "/?key=%ed%a0%80", "/api/explain/%00", "/static/%ff", "/none"):
        answer = await shown.ask(path)
        assert answer.status in (400, 401, 404), path
        answer.close()
    answer = await shown.ask("/", headers={"X": "a" * 10_000})
    assert answer.status == 400
    assert "malformed: Got more than 8190 bytes" in (await answer.json())["error"]["message"]
    assert "Content-Security-Policy" in answer.headers
    assert (await shown.state()).origin_s == origin_s, "the next request is served"


async def next_update(stream: aiohttp.ClientResponse) -> tuple[str, Update]:
    """The next one and its id."""
    name = ""
    async for line in stream.content:
        if line.startswith(b"id: "):
            name = line[4:].decode().strip()
        if line.startswith(b"data: "):
            return name, msgspec.json.decode(line[6:], type=Update)
    raise AssertionError("the stream ended")


async def test_console_goes_on_when_the_server_was_restarted(
    nats_server: EmbeddedServer, shown: Console, bus: Bus
) -> None:
    await run(bus, "acme", 1)
    await shown.until_seen(1)
    await nats_server.stop()
    await nats_server.start()
    await run(bus, "acme", 2)
    seen = await shown.until_seen(2)
    assert [row.slot for row in seen.operations] == ["1", "2"], "none twice"


async def test_only_an_operator_acts_and_only_by_a_call_of_the_page(
    shown: Console, bus: Bus
) -> None:
    asked: list[tuple[str, object]] = []

    async def finish(tenant: str, request: JobRequest) -> JobStatus:
        asked.append((tenant, request))
        return JobStatus(request.job, "failed")

    async def drain(_: str, request: DrainNode) -> NodeStatus:
        asked.append(("", request))
        return NodeStatus(request.node, is_up=True, is_draining=not request.undo)

    serving = await serve_api(
        bus,
        "job-api",
        {"job.finish": (JobRequest, finish)},
        operators={"drain": (DrainNode, drain)},
    )
    try:
        cancel = "/api/cancel/acme.a"
        assert (await shown.ask(cancel, "acme", method="POST", headers=ACTS)).status == 403
        assert (await shown.ask(cancel, method="POST")).status == 400, "as a form of another site"
        assert not asked
        done = await shown.ask(cancel, method="POST", headers=ACTS)
        assert (done.status, (await done.json())["state"]) == (200, "failed")
        done = await shown.ask("/api/drain/train-0", method="POST", headers=ACTS)
        assert (await done.json())["is_draining"]
        done = await shown.ask("/api/drain/train-0?undo=1", method="POST", headers=ACTS)
        assert done.status == 200
    finally:
        await serving.stop()
    assert asked == [
        ("acme", JobRequest("a", cancelled=True)),
        ("", DrainNode("train-0")),
        ("", DrainNode("train-0", undo=True)),
    ]


async def test_call_that_nobody_answers_is_told_with_what_to_do(shown: Console) -> None:
    answer = await shown.ask("/api/explain/acme.a")
    assert answer.status == 503
    error = (await answer.json())["error"]
    assert (error["code"], error["remedy"]) == ("UNAVAILABLE", "try again")
    answer = await shown.ask("/api/explain/not..a-name")
    assert answer.status == 400


async def test_what_a_controller_reports_is_shown(
    nats_server: EmbeddedServer, shown: Console, bus: Bus
) -> None:
    await bus.keys.put(Bucket.VIEW, "acme.a", encode(JobStatus("a", "active")))
    password = nats_server.credentials.tenants["acme"]
    router = service("router", nats_server, PHASELOOM_ROUTER_TENANTS='["acme"]')
    client = await connect(
        nats_server.credentials.url, "test", "acme", password, inbox_prefix="_INBOX_acme"
    )
    async with router:
        try:
            for step, values in ((0, {"reward": 0.25}), (1, {"reward": 0.5, "loss": 2.0})):
                await reported(client, JobReport("a", step, values, "run1"))
            second = JobStatus("a", "active", run="run2")
            await bus.keys.put(Bucket.VIEW, "acme.a", encode(second))
            await reported(client, JobReport("a", 0, {"reward": 0.125}))
            with pytest.raises(CallerError, match="not a valid name"):
                await reported(client, JobReport("a", 0, {"reward": 0.5}, "two.runs"))
            with pytest.raises(CallerError, match="job another does not exist"):
                await reported(client, JobReport("another", 0, {"reward": 0.5}))
            for values in ({}, {"a b": 1.0}, {"loss": float("nan")}):
                with pytest.raises(CallerError) as refused:
                    await reported(client, JobReport("a", 2, values))
                assert refused.value.info.remedy
        finally:
            await client.close()
    async with asyncio.timeout(PATIENCE_S):
        while len((found := await shown.state("acme")).reports) < 3:
            await asyncio.sleep(0.02)
    assert [(row.run, row.step, row.values) for row in found.reports] == [
        ("run1", 0, {"reward": 0.25}),
        ("run1", 1, {"reward": 0.5, "loss": 2.0}),
        ("run2", 0, {"reward": 0.125}),
    ]
    assert not (await shown.state("globex")).reports


async def reported(client: Client, report: JobReport) -> None:
    """Waits for the router, which starts."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await call_api(client, "acme", "job.report", report, Reported)
                return
            except ResourceError:
                await asyncio.sleep(0.02)


async def test_job_that_is_gone_is_forgotten(shown: Console, bus: Bus) -> None:
    sequence = await bus.keys.put(Bucket.VIEW, "acme.a", encode(JobStatus("a", "active")))
    await run(bus, "acme", 1)
    await shown.until_seen(1)
    await bus.log.append(JobFinished(JobKey("acme", "a"), "1"))
    await bus.keys.delete(Bucket.VIEW, "acme.a", sequence)
    async with asyncio.timeout(PATIENCE_S):
        while (await shown.state()).jobs:
            await asyncio.sleep(0.02)
