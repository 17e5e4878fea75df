"""Large and hostile payloads of one tenant against real routers, while another tenant works."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any

import pytest
from nats.aio.client import Client

from phaseloom.common.contract import streams
from phaseloom.common.contract.api import JobReport, Reported, ResultReply, ResultRequest, SubmitJob
from phaseloom.common.contract.codec import CONTENT_TYPE, JSON, MSGPACK, decode, encode
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.events import QueuedOperation
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.operations import (
    Completion,
    Datum,
    ForwardBackward,
    Generate,
    GenerateResult,
    Loss,
    Operation,
    Outcome,
    Prompt,
    SamplingParams,
    Sequence,
)
from phaseloom.common.contract.specs import DeploymentSpec, JobSpec, ModelSpec
from phaseloom.common.contract.streams import Bucket, api_subject
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import connect
from phaseloom.common.transport.natsserver import EmbeddedServer
from phaseloom.common.transport.services import call_api, serve_api
from tests.support.processes import free_port, service

FLOODER, VICTIM, JOB = "acme", "globex", "sums"
_PATIENCE_S = 120.0
_SLOWEST_S = 2.0
"""Generous, because other tests share the machine's processors."""
_STALLS = "phaseloom_loop_stalls_total"


def key(tenant: str, seq: int) -> OperationKey:
    return OperationKey(tenant, JOB, "policy", str(seq))


def generate(num_prompts: int) -> Operation:
    prompts = [Prompt([1])] * num_prompts
    return Operation("id", 1, Generate(prompts, SamplingParams(4)))


def batch(num_samples: int, num_tokens: int) -> Operation:
    packed = bytes(4 * num_tokens)
    data = [Datum(tokens=packed, targets=packed, weights=packed)] * num_samples
    return Operation("id", 1, ForwardBackward(data, Loss.CROSS_ENTROPY))


def nested(opening: bytes, closing: bytes) -> bytes:
    depth = 3_000_000
    return b'{"id": "id", "session": 1, "args": ' + opening * depth + closing * depth + b"}"


def bad_words(num: int) -> bytes:
    args = {"type": "generate", "prompts": [], "sampling": {"bad_words": [[]] * num}}
    return encode({"id": "id", "session": 1, "args": args})


def floods() -> list[tuple[bytes, str, str]]:
    """Payloads, their types, and what their errors say; empty: the operation is valid."""
    whole = b'{"id": "id", "session": 1, "args": {"type": "generate", "prompts": [{"tokens": ['
    many_numbers = whole + b"1," * 4_000_000 + b"1]}], "
    huge_number = whole + b"1" * 8_000_000 + b"]}], "
    sampling = b'"sampling": {"max_tokens": 4}}}'
    return [
        *[(encode(generate(830_000)), MSGPACK, "at most 131072 prompts")] * 12,
        (encode(generate(100_000)), MSGPACK, "the result may have"),
        (encode(batch(60_000, 8)), MSGPACK, ""),
        (encode(batch(50, 12_000)), MSGPACK, ""),
        (many_numbers + sampling, JSON, ""),
        (huge_number + sampling, JSON, ""),
        (bad_words(8_000_000), MSGPACK, "memory"),
        (nested(b"[", b"]"), JSON, ""),
        (nested(b'{"a":', b"}")[:8_000_000], JSON, ""),
        (b"\x91" * 8_000_000, MSGPACK, ""),
        (bytes(8_000_000), JSON, "not valid"),
    ]


@asynccontextmanager
async def tenant_client(server: EmbeddedServer, tenant: str) -> AsyncIterator[Client]:
    credentials = server.credentials
    client = await connect(
        credentials.url,
        "controller",
        tenant,
        credentials.tenants[tenant],
        inbox_prefix=f"_INBOX_{tenant}",
    )
    yield client
    await client.close()


async def publish(client: Client, where: OperationKey, payload: bytes, content_type: str) -> None:
    headers = {CONTENT_TYPE: content_type}
    reply = await client.request(streams.op_subject(where), payload, timeout=60, headers=headers)
    assert "error" not in json.loads(reply.data)


class Logged:
    """The headers that have reached the decision log, and when."""

    def __init__(self) -> None:
        self.headers: dict[OperationKey, QueuedOperation] = {}
        self.times_s: dict[OperationKey, float] = {}
        self._changed = asyncio.Condition()

    async def follow(self, bus: Bus) -> None:
        async with aclosing(bus.log.queued_since(0.0)) as stored:
            async for _ in stored:
                pass
        async with aclosing(bus.log.read()) as entries:
            async for entry in entries:
                operations = getattr(entry.event, "operations", [entry.event])
                async with self._changed:
                    for operation in operations:
                        if isinstance(operation, QueuedOperation):
                            self.headers.setdefault(operation.key, operation)
                            self.times_s.setdefault(operation.key, time.monotonic())
                    self._changed.notify_all()

    async def until(self, *keys: OperationKey) -> None:
        async with asyncio.timeout(_PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.headers.keys() >= set(keys))


def stalls(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    assert any(line.startswith("phaseloom_router_lag") for line in lines)
    return [line for line in lines if line.startswith(_STALLS)]


async def send(client: Client, logged: Logged, seq: int) -> float:
    """Publish a small operation. Returns: the seconds until it is in the log."""
    start_s = time.monotonic()
    await publish(client, key(VICTIM, seq), encode(generate(2)), MSGPACK)
    await logged.until(key(VICTIM, seq))
    assert logged.headers[key(VICTIM, seq)].error is None
    return time.monotonic() - start_s


async def work(client: Client, logged: Logged, flooded: asyncio.Event) -> float:
    """Send small operations until the flood is over. Returns: the slowest one's seconds."""
    slowest_s, seq = 0.0, 1
    while not flooded.is_set():
        seq += 1
        slowest_s = max(slowest_s, await send(client, logged, seq))
        await asyncio.sleep(0.02)
    return slowest_s


async def test_payloads_that_cost_much_are_refused_and_delay_nobody(
    bus: Bus, nats_server: EmbeddedServer
) -> None:
    for tenant in (FLOODER, VICTIM):
        await bus.keys.put(Bucket.SESSIONS, f"{tenant}.{JOB}", b"1")
    ops = (await bus.js.stream_info(streams.ops_stream(FLOODER))).config
    await bus.js.update_stream(ops.evolve(max_bytes=2**30))
    tenants = json.dumps([FLOODER, VICTIM])
    payloads = floods()
    ports = [free_port(), free_port()]
    async with AsyncExitStack() as started:
        routers = [
            await started.enter_async_context(
                service(
                    "router",
                    nats_server,
                    PHASELOOM_ROUTER_TENANTS=tenants,
                    PHASELOOM_METRICS_PORT=str(port),
                )
            )
            for port in ports
        ]
        flooder = await started.enter_async_context(tenant_client(nats_server, FLOODER))
        victim = await started.enter_async_context(tenant_client(nats_server, VICTIM))
        logged, flooded = Logged(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(logged.follow(bus))
            await send(victim, logged, 1)  # the routers run now
            working = tasks.create_task(work(victim, logged, flooded))
            for seq, (payload, content_type, _) in enumerate(payloads, 1):
                await publish(flooder, key(FLOODER, seq), payload, content_type)
            await logged.until(*(key(FLOODER, seq) for seq in range(1, len(payloads) + 1)))
            flooded.set()
            slowest_s = await working
            following.cancel()
        for seq, (_, _, expected) in enumerate(payloads, 1):
            error = logged.headers[key(FLOODER, seq)].error
            if expected:
                assert error is not None
                assert error.code is Code.INVALID_ARGUMENT
                assert expected in error.message
        for router, port in zip(routers, ports, strict=True):
            assert router.returncode is None
            assert await asyncio.to_thread(stalls, port) == []
        assert slowest_s < _SLOWEST_S


async def test_large_results_are_answered_in_both_types(
    bus: Bus, nats_server: EmbeddedServer
) -> None:
    sequences = [[Sequence([1, 2], [-0.5, -1.0], "length")]] * 30_000
    ports = [free_port()]
    async with (
        service(
            "router",
            nats_server,
            PHASELOOM_ROUTER_TENANTS=json.dumps([FLOODER]),
            PHASELOOM_METRICS_PORT=str(ports[0]),
        ),
        tenant_client(nats_server, FLOODER) as client,
    ):
        await until_served(client)
        for seq, stored_type in enumerate((MSGPACK, JSON), 1):
            completion = Completion("id", Outcome.COMPLETED, GenerateResult(sequences))
            subject = streams.done_subject(key(FLOODER, seq))
            await bus.publish(subject, completion, content_type=stored_type)
            request = ResultRequest(JOB, "policy", str(seq))
            for content_type in (MSGPACK, JSON):
                answer = await client.request(
                    api_subject(FLOODER, "result.get"),
                    encode(request, content_type),
                    timeout=60,
                    headers={CONTENT_TYPE: content_type},
                )
                reply: ResultReply = decode(answer.data, ResultReply, content_type)
                assert reply == ResultReply("id", completion)
        assert await asyncio.to_thread(stalls, ports[0]) == []


async def test_large_api_requests_are_refused_before_they_are_decoded(
    bus: Bus, nats_server: EmbeddedServer
) -> None:
    async with (
        service("router", nats_server, PHASELOOM_ROUTER_TENANTS=json.dumps([FLOODER])),
        tenant_client(nats_server, FLOODER) as client,
    ):
        await until_served(client)
        report = JobReport(JOB, 1, {str(i): 1.0 for i in range(100_000)})
        with pytest.raises(CallerError, match="may have at most 262144 bytes"):
            await call_api(client, FLOODER, "job.report", report, Reported)


async def test_requests_with_many_lists_are_refused_before_they_are_decoded(
    bus: Bus, nats_server: EmbeddedServer
) -> None:
    received: list[SubmitJob] = []

    async def submit(tenant: str, request: SubmitJob) -> Reported:
        received.append(request)
        return Reported()

    def request_with(config: dict[str, Any], texts: list[str]) -> SubmitJob:
        model = ModelSpec(config, token_texts=texts)
        deployment = DeploymentSpec("policy", "train", "noop", model)
        return SubmitJob(JOB, JobSpec(deployments=[deployment]))

    many_texts = request_with({"layers": [1] * 10_000}, ["a token"] * 150_000)
    many_lists = request_with({"a": [[]] * 300_000}, [])
    endpoints = {"job.submit": (SubmitJob, submit)}
    serving = await serve_api(bus, "scheduler", endpoints, max_bytes={"job.submit": 2**21})
    async with tenant_client(nats_server, FLOODER) as client:
        with pytest.raises(CallerError, match="at most 20000 lists and objects, got 300008"):
            await call_api(client, FLOODER, "job.submit", many_lists, Reported, timeout_s=60)
        await call_api(client, FLOODER, "job.submit", many_texts, Reported, timeout_s=60)
    await serving.stop()
    assert received == [many_texts]


async def until_served(client: Client) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            with suppress(ResourceError):
                await call_api(
                    client, FLOODER, "result.get", ResultRequest(JOB, "p", "1"), ResultReply
                )
                return
            await asyncio.sleep(0.05)
