"""The router on a real server: what reaches the decision log, and what does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from phaseloom.common.contract import streams
from phaseloom.common.contract.api import (
    Attached,
    Beat,
    Checkpoint,
    DeploymentStatus,
    Heartbeat,
    JobRequest,
    JobStatus,
    ResultReply,
    ResultRequest,
    Usage,
    UsageRequest,
)
from phaseloom.common.contract.arrays import pack_int32s
from phaseloom.common.contract.codec import CONTENT_TYPE, JSON, MSGPACK, decode, encode
from phaseloom.common.contract.errors import CallerError, Code, ErrorInfo, ResourceError
from phaseloom.common.contract.events import (
    Notice,
    OperationsQueued,
    QueuedOperation,
    SessionOpened,
)
from phaseloom.common.contract.ids import JobKey, OperationKey, VersionKey
from phaseloom.common.contract.operations import (
    After,
    Completion,
    Generate,
    LoadState,
    Operation,
    OptimStepResult,
    Outcome,
    Prompt,
    PublishWeights,
    SamplingParams,
    SyncWeights,
)
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.process import lifecycle
from phaseloom.common.transport import pulling
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import connect
from phaseloom.common.transport.leases import session_lease_key
from phaseloom.common.transport.natsserver import EmbeddedServer
from phaseloom.common.transport.services import call_api, serve_api
from phaseloom.router import shell as router_shell
from phaseloom.router.core.limits import Limits
from phaseloom.router.shell import Router
from tests.support.processes import service

TENANT = "acme"
JOB = JobKey(TENANT, "sums")
GENERATE = Generate([Prompt([1, 2, 3])], SamplingParams(max_tokens=5), num_samples=2)


def key(seq: int | str, deployment: str = "policy", tenant: str = TENANT) -> OperationKey:
    return OperationKey(tenant, JOB.job, deployment, str(seq))


@pytest.fixture
async def tenant(nats_server: EmbeddedServer) -> AsyncIterator[Client]:
    """The tenant's own connection."""
    credentials = nats_server.credentials
    client = await connect(
        credentials.url,
        "controller",
        TENANT,
        credentials.tenants[TENANT],
        inbox_prefix=f"_INBOX_{TENANT}",
    )
    yield client
    await client.close()


@pytest.fixture
async def router(bus: Bus) -> AsyncIterator[None]:
    async with Router(bus).running(["acme", "globex"]):
        yield


async def show_job(bus: Bus, *, state: str = "active", next_seq: int = 1) -> None:
    """What the scheduler's projection says of the job."""
    deployment = DeploymentStatus("policy", "train", "node0", "ready", 1, next_seq)
    status = JobStatus(JOB.job, state, [deployment])
    await bus.keys.put(Bucket.VIEW, str(JOB), encode(status))


async def attach(client: Client) -> Attached:
    attached: Attached = await call_api(
        client, TENANT, "session.attach", JobRequest(JOB.job), Attached
    )
    return attached


async def publish(
    client: Client, where: OperationKey, payload: bytes, content_type: str = MSGPACK
) -> dict[str, object]:
    """As any NATS client would: a request on the operation's subject, answered by a PubAck."""
    reply = await client.request(
        streams.op_subject(where), payload, timeout=30, headers={CONTENT_TYPE: content_type}
    )
    answer: dict[str, object] = json.loads(reply.data)
    return answer


async def send(client: Client, where: OperationKey, operation: Operation) -> None:
    answer = await publish(client, where, encode(operation))
    assert "error" not in answer, answer


async def queued(bus: Bus, num: int) -> list[QueuedOperation]:
    """The first operations in the decision log."""
    found: list[QueuedOperation] = []
    # What a killed replica had is delivered again after its time to acknowledge, more than once
    # where the next one has to wait for what comes before.
    async with asyncio.timeout(60), aclosing(bus.log.read()) as entries:
        async for entry in entries:
            if isinstance(entry.event, SessionOpened):
                continue
            assert isinstance(entry.event, QueuedOperation)
            found.append(entry.event)
            if len(found) == num:
                return found
    raise AssertionError("the log ended")


async def finish(bus: Bus, where: OperationKey, id: str) -> Completion:
    completion = Completion(id, Outcome.COMPLETED, OptimStepResult({"grad_norm:mean": 1.0}))
    await bus.publish(streams.done_subject(where), completion)
    return completion


# --- operations ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("router")
@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
async def test_operation_reaches_the_log_without_its_payload(
    bus: Bus, tenant: Client, content_type: str
) -> None:
    await show_job(bus)
    session = (await attach(tenant)).session
    operation = Operation("a", session, GENERATE, after=[After("sampler", 4)])
    payload = encode(operation, content_type)
    await publish(tenant, key(1), payload, content_type)
    assert await queued(bus, 1) == [
        QueuedOperation(
            key(1),
            "a",
            "generate",
            [After("sampler", 4)],
            size=16,
            content_type=content_type,
            session=session,
            num_bytes=len(payload),
        )
    ]


@pytest.mark.usefixtures("router")
async def test_trace_of_the_controller_goes_on_in_the_log(bus: Bus, tenant: Client) -> None:
    await bus.keys.put(Bucket.SESSIONS, str(JOB), b"1")
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {CONTENT_TYPE: MSGPACK, "traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    payload = encode(Operation("a", 1, PublishWeights()))
    await tenant.request(streams.op_subject(key(1)), payload, timeout=30, headers=headers)
    async with asyncio.timeout(30), aclosing(bus.log.read()) as entries:
        entry = await anext(entries)
    assert entry.headers["traceparent"].split("-")[1] == trace_id


@pytest.mark.usefixtures("router")
async def test_sync_weights_names_the_version_it_brings(bus: Bus, tenant: Client) -> None:
    await show_job(bus)
    session = (await attach(tenant)).session
    await send(tenant, key(1, "sampler"), Operation("a", session, SyncWeights("policy", 7)))
    (entry,) = await queued(bus, 1)
    assert entry.version == VersionKey(key(1).deployment_key, 7)


@pytest.mark.usefixtures("router")
async def test_garbage_becomes_failed_operations_and_disturbs_nobody(
    bus: Bus, tenant: Client
) -> None:
    """What a controller under development sends; the sound operations between are routed."""
    await show_job(bus)
    session = (await attach(tenant)).session
    sound = Operation("sound", session, PublishWeights())
    sent = [
        (key(1), b"\xff\x00 no message at all", MSGPACK),
        (key(2), b'{"id": "cut', JSON),
        (key(3), b'{"id": "half", "session": 1, "args": {"type": "optim_step"}}', JSON),
        (key(4), encode(sound), MSGPACK),
        (key(5), encode(sound), "text/plain"),
        (key("rx"), encode(Operation("lost", session, LoadState("x"))), MSGPACK),
        (key(6), b"[" * 100_000, JSON),
        (key(7), encode(sound), MSGPACK),
    ]
    for where, payload, content_type in sent:
        assert "error" not in await publish(tenant, where, payload, content_type)
    entries = {e.key.slot: e for e in await queued(bus, len(sent))}
    assert {slot for slot, entry in entries.items() if entry.error is None} == {"4", "7"}
    assert all(e.error.code is Code.INVALID_ARGUMENT for e in entries.values() if e.error)
    assert entries["3"].id == "half"
    assert entries["3"].kind == "optim_step"
    assert entries["3"].error == ErrorInfo(
        Code.INVALID_ARGUMENT,
        "Object missing required field `adam`",
        field="args",
        remedy="see the message contract",
    )
    assert entries["rx"].error is not None
    assert entries["rx"].error.field == "subject.seq"


@pytest.mark.usefixtures("router")
async def test_message_without_a_key_is_buried_with_its_reason(bus: Bus, tenant: Client) -> None:
    notices = await bus.client.subscribe(streams.event_subject("router"))
    subject = f"{streams.PREFIX}.op.{TENANT}.only-a-job"
    await tenant.request(subject, b"{}", timeout=30)
    notice = decode((await notices.next_msg(30)).data, Notice)
    assert (notice.what, notice.subject) == ("buried", subject)
    await show_job(bus)
    session = (await attach(tenant)).session
    await send(tenant, key(1), Operation("a", session, PublishWeights()))
    await queued(bus, 1)
    await until_stored_are(bus, [key(1)])
    buried = await bus.stored.get(streams.DEAD, streams.dead_subject("router"))
    assert buried is not None
    assert buried.payload == b"{}"
    assert buried.headers["Phaseloom-Subject"] == subject
    error = msgspec.json.decode(buried.headers["Phaseloom-Error"], type=ErrorInfo)
    assert error.field == "subject"


async def until_stored_are(bus: Bus, operations: list[OperationKey]) -> None:
    """These operations are in the tenant's stream, and nothing else: what is told to be dropped
    goes a moment later."""
    wanted = [streams.op_subject(operation) for operation in operations]
    async with asyncio.timeout(60):
        while await bus.stored.subjects(streams.ops_stream(TENANT), "pl.v1.op.>") != wanted:
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("router")
async def test_subject_with_a_wildcard_takes_no_other_operation_with_it(
    bus: Bus, tenant: Client
) -> None:
    """The server takes `*` in a subject that is published to; deleting by it would take all."""
    await bus.keys.put(Bucket.SESSIONS, str(JOB), b"1")
    await publish_all(tenant, [1, 2])
    await queued(bus, 2)
    notices = await bus.client.subscribe(streams.event_subject("router"))
    ops = f"{streams.PREFIX}.op.{TENANT}"
    for subject in (f"{ops}.*.policy.1", f"{ops}.sums.policy.*", f"{ops}.>"):
        await tenant.request(subject, b"{}", timeout=30)
        assert decode((await notices.next_msg(30)).data, Notice).subject == subject
    await publish_all(tenant, [3])
    await queued(bus, 3)
    await until_stored_are(bus, [key(seq) for seq in (1, 2, 3)])


@pytest.mark.usefixtures("router")
async def test_second_operation_on_a_seq_is_refused_by_the_server(bus: Bus, tenant: Client) -> None:
    await show_job(bus)
    session = (await attach(tenant)).session
    await send(tenant, key(1), Operation("first", session, PublishWeights()))
    again = await publish(tenant, key(1), encode(Operation("second", session, PublishWeights())))
    error = again["error"]
    assert isinstance(error, dict)
    assert error["err_code"] == 10077
    await send(tenant, key(2), Operation("next", session, PublishWeights()))
    assert [entry.id for entry in await queued(bus, 2)] == ["first", "next"]


@pytest.mark.usefixtures("router")
async def test_late_copy_of_an_operation_reaches_the_scheduler_which_knows_its_seq(
    bus: Bus, tenant: Client
) -> None:
    """A client resends after a lost ack, and the scheduler has purged the operation since."""
    await show_job(bus)
    session = (await attach(tenant)).session
    await send(tenant, key(1), Operation("a", session, PublishWeights()))
    await queued(bus, 1)
    await finish(bus, key(1), "a")
    await bus.stored.delete(streams.ops_stream(TENANT), streams.op_subject(key(1)))
    await send(tenant, key(1), Operation("copy", session, PublishWeights()))
    assert [entry.id for entry in await queued(bus, 2)] == ["a", "copy"]


@pytest.mark.usefixtures("router")
async def test_late_copy_of_an_operation_without_order_is_dropped(bus: Bus, tenant: Client) -> None:
    """Of these the scheduler keeps nothing: it would run again."""
    await show_job(bus)
    session = (await attach(tenant)).session
    await finish(bus, key("rabc"), "a")
    notices = await bus.client.subscribe(streams.event_subject("router"))
    await send(tenant, key("rabc"), Operation("a", session, GENERATE))
    notice = decode((await notices.next_msg(30)).data, Notice)
    assert (notice.what, notice.subject) == ("dropped", str(key("rabc")))
    await send(tenant, key(2), Operation("b", session, PublishWeights()))
    assert [entry.id for entry in await queued(bus, 1)] == ["b"]
    await until_stored_are(bus, [key(2)])


async def test_operations_wait_in_the_stream_when_no_router_runs(bus: Bus, tenant: Client) -> None:
    await bus.keys.put(Bucket.SESSIONS, str(JOB), b"1")
    for seq in range(1, 21):
        await send(tenant, key(seq), Operation(f"id{seq}", 1, PublishWeights()))
    async with Router(bus).running([TENANT]):
        entries = await queued(bus, 20)
    assert {entry.id for entry in entries} == {f"id{seq}" for seq in range(1, 21)}


# --- bounds --------------------------------------------------------------------------------------


class Scheduler:
    """Answers what a tenant has open, as its log stands; what is `finished` is not."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.finished = 0

    async def usage(self, tenant: str, _: UsageRequest) -> Usage:
        end = await self._bus.log.end()
        entries = await queued(self._bus, end) if end else []
        mine = [e for e in entries if e.key.tenant == tenant and e.error is None]
        return Usage(len(mine) - self.finished, end)


async def test_operations_above_the_bound_are_refused_with_a_retry_time_until_some_end(
    bus: Bus, tenant: Client
) -> None:
    await bus.keys.put(Bucket.SESSIONS, str(JOB), b"1")
    scheduler = Scheduler(bus)
    service = await serve_api(bus, "scheduler", {"tenant.usage": (UsageRequest, scheduler.usage)})
    limits = {TENANT: Limits(max_operations=3)}
    async with Router(bus, limits).running([TENANT]):
        for seq in range(1, 5):
            await publish_all(tenant, [seq])
            entries = await queued(bus, seq)
        assert [entry.error for entry in entries[:3]] == [None] * 3
        refused = entries[3].error
        assert refused is not None
        assert refused.code is Code.RESOURCE_EXHAUSTED
        assert refused.details == {
            "bound": "max_operations",
            "limit": "3",
            "used": "3",
            "retry_after_s": "1.000",
        }
        scheduler.finished = 1
        seq = 4
        async with asyncio.timeout(60):
            while entries[-1].error is not None:  # until the end of one is noticed
                seq += 1
                await publish_all(tenant, [seq])
                entries = await queued(bus, seq)
    await service.stop()


async def test_bound_holds_without_a_scheduler_to_ask(bus: Bus, tenant: Client) -> None:
    await bus.keys.put(Bucket.SESSIONS, str(JOB), b"1")
    async with Router(bus, {TENANT: Limits(max_operations=5)}).running([TENANT]):
        await publish_all(tenant, range(1, 21))
        entries = await queued(bus, 20)
    assert sum(entry.error is None for entry in entries) == 5


async def test_stored_bytes_and_rate_are_bounded(bus: Bus, tenant: Client) -> None:
    await bus.keys.put(Bucket.SESSIONS, str(JOB), b"1")
    for first, name, limits in (
        (0, "max_bytes", Limits(max_bytes=1)),
        (4, "rate", Limits(rate=0.001, burst=2)),
    ):
        async with Router(bus, {TENANT: limits}).running([TENANT]):
            for seq in range(first + 1, first + 5):  # one overtaken is counted otherwise
                await publish_all(tenant, [seq])
                entries = (await queued(bus, seq))[first:]
        refused = [entry.error for entry in entries if entry.error is not None]
        assert len(refused) == (4 if name == "max_bytes" else 2)
        assert {error.details["bound"] for error in refused} == {name}
        assert all(float(error.details["retry_after_s"]) > 0 for error in refused)


async def test_other_tenants_are_not_bounded_by_ones_excess(
    bus: Bus, tenant: Client, nats_server: EmbeddedServer
) -> None:
    credentials = nats_server.credentials
    other = await connect(
        credentials.url,
        "controller",
        "globex",
        credentials.tenants["globex"],
        inbox_prefix="_INBOX_globex",
    )
    for name in (TENANT, "globex"):
        await bus.keys.put(Bucket.SESSIONS, f"{name}.{JOB.job}", b"1")
    async with Router(bus, {TENANT: Limits(max_operations=1)}).running([TENANT, "globex"]):
        for seq in (1, 2):
            operation = Operation(f"id{seq}", 1, PublishWeights())
            await send(tenant, key(seq), operation)
            await send(other, key(seq, tenant="globex"), operation)
        entries = await queued(bus, 4)
    assert sum(e.error is not None for e in entries if e.key.tenant == TENANT) == 1
    assert all(e.error is None for e in entries if e.key.tenant == "globex")
    await other.close()


# --- sessions ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("router")
async def test_older_session_is_refused_when_another_attached(bus: Bus, tenant: Client) -> None:
    await show_job(bus)
    first = (await attach(tenant)).session
    second = (await attach(tenant)).session
    assert second == first + 1
    await send(tenant, key(1), Operation("old", first, PublishWeights()))
    await send(tenant, key(2), Operation("new", second, PublishWeights()))
    await send(tenant, key(3), Operation("made up", second + 5, PublishWeights()))
    entries = {entry.id: entry.error for entry in await queued(bus, 3)}
    assert entries["new"] is None
    assert entries["old"] is not None
    assert entries["old"].code is Code.ABORTED
    assert entries["old"].remedy == "attach again"
    assert entries["made up"] is not None
    assert entries["made up"].code is Code.FAILED_PRECONDITION


async def test_replica_learns_of_sessions_that_another_replica_gave(
    bus: Bus, tenant: Client, nats_server: EmbeddedServer
) -> None:
    """Both replicas route; only one served the attach, and none may go on with the old session."""
    await show_job(bus)
    other = await Bus.open(nats_server.credentials.bus, "replica")
    replicas = Router(bus), Router(other)
    async with replicas[0].running([TENANT]), replicas[1].running([TENANT]):
        first = (await attach(tenant)).session
        for seq in range(1, 11):
            await send(tenant, key(seq), Operation(f"warm{seq}", first, PublishWeights()))
        assert all(entry.error is None for entry in await queued(bus, 10))
        await attach(tenant)
        async with asyncio.timeout(60):
            while any(replica._sessions._newest.get(str(JOB)) != 2 for replica in replicas):
                await asyncio.sleep(0.01)
        for seq in range(11, 21):
            await send(tenant, key(seq), Operation(f"old{seq}", first, PublishWeights()))
        entries = (await queued(bus, 20))[10:]
        assert all(e.error is not None and e.error.code is Code.ABORTED for e in entries)
    await other.close()


@pytest.mark.usefixtures("router")
async def test_attach_goes_on_after_what_the_streams_hold(bus: Bus, tenant: Client) -> None:
    """The view lags, and the session before died between two publishes: 5 would wait for ever."""
    await show_job(bus, next_seq=2)
    await bus.keys.put(Bucket.SESSIONS, str(JOB), b"8")
    await finish(bus, key(2), "c2")
    await finish(bus, key(3), "c3")
    await send(tenant, key(4), Operation("c4", 8, PublishWeights()))
    await send(tenant, key(6), Operation("c6", 8, PublishWeights()))
    await queued(bus, 2)
    attached = await attach(tenant)
    assert attached.session == 9
    assert attached.status.deployments[0].next_seq == 7
    filler = (await queued(bus, 3))[2]
    assert filler.key == key(5)
    assert filler.error is not None
    assert filler.error.code is Code.ABORTED


@pytest.mark.usefixtures("router")
async def test_concurrent_attaches_get_sessions_of_their_own(bus: Bus, tenant: Client) -> None:
    await show_job(bus)
    sessions = [a.session for a in await asyncio.gather(*(attach(tenant) for _ in range(8)))]
    assert sorted(sessions) == list(range(1, 9))


@pytest.mark.usefixtures("router")
async def test_attach_is_refused_when_the_job_is_unknown_or_over(bus: Bus, tenant: Client) -> None:
    with pytest.raises(CallerError) as unknown:
        await attach(tenant)
    assert unknown.value.info.code is Code.NOT_FOUND
    await show_job(bus, state="done")
    with pytest.raises(CallerError) as over:
        await attach(tenant)
    assert over.value.info.code is Code.FAILED_PRECONDITION


async def beat(client: Client, session: int) -> Beat:
    request = Heartbeat(JOB.job, session)
    answer: Beat = await call_api(client, TENANT, "session.heartbeat", request, Beat)
    return answer


async def test_heartbeat_keeps_a_lease_that_runs_out_without_it(bus: Bus, tenant: Client) -> None:
    await show_job(bus)
    async with Router(bus, session_ttl_s=3.0).running([TENANT]):
        session = (await attach(tenant)).session
        lease = session_lease_key(JOB)
        assert await bus.keys.get(Bucket.LEASES, lease) is None
        assert await beat(tenant, session) == Beat(3.0)
        async with asyncio.timeout(60), aclosing(bus.keys.watch(Bucket.LEASES, lease)) as changes:
            held = (await anext(changes)).stored
            assert held is not None
            assert held.payload == str(session).encode()
            while (await anext(changes)).stored is not None:
                pass
        await beat(tenant, session)
        assert await bus.keys.get(Bucket.LEASES, lease) is not None


@pytest.mark.usefixtures("router")
async def test_heartbeat_of_a_session_that_is_over_is_aborted(bus: Bus, tenant: Client) -> None:
    await show_job(bus)
    first = (await attach(tenant)).session
    await beat(tenant, first)
    second = (await attach(tenant)).session
    await beat(tenant, second)
    with pytest.raises(ResourceError) as over:
        await beat(tenant, first)
    assert over.value.info.code is Code.ABORTED
    assert over.value.info.field == "session"
    with pytest.raises(CallerError) as unknown:
        await beat(tenant, second + 1)
    assert unknown.value.info.code is Code.FAILED_PRECONDITION
    held = await bus.keys.get(Bucket.LEASES, session_lease_key(JOB))
    assert held is not None
    assert held.payload == str(second).encode()


@pytest.mark.usefixtures("router")
async def test_attach_answers_the_jobs_last_checkpoint(bus: Bus, tenant: Client) -> None:
    await show_job(bus)
    assert (await attach(tenant)).checkpoint is None
    checkpoint = Checkpoint("policy", 7, {"policy": "s7", "sampler": "s7"}, b"\x00\xffblob")
    await bus.keys.put(Bucket.CHECKPOINTS, str(JOB), encode(checkpoint))
    assert (await attach(tenant)).checkpoint == checkpoint


# --- results and the API -------------------------------------------------------------------------


@pytest.mark.usefixtures("router")
async def test_result_is_the_stored_id_and_then_the_completion(bus: Bus, tenant: Client) -> None:
    request = ResultRequest(JOB.job, "policy", "1")

    async def ask() -> ResultReply:
        reply: ResultReply = await call_api(tenant, TENANT, "result.get", request, ResultReply)
        return reply

    assert await ask() == ResultReply()
    await bus.keys.put(Bucket.SESSIONS, str(JOB), b"1")
    await send(tenant, key(1), Operation("mine", 1, PublishWeights()))
    assert await ask() == ResultReply(stored_id="mine")
    completion = await finish(bus, key(1), "mine")
    assert await ask() == ResultReply("mine", completion)


@pytest.mark.usefixtures("router")
async def test_api_answers_in_the_type_of_the_request(bus: Bus, tenant: Client) -> None:
    subject = streams.api_subject(TENANT, "session.attach")
    request = {"job": "sums"}
    for content_type, codec in ((JSON, msgspec.json), (MSGPACK, msgspec.msgpack)):
        await show_job(bus)
        reply = await tenant.request(
            subject, codec.encode(request), timeout=30, headers={CONTENT_TYPE: content_type}
        )
        assert codec.decode(reply.data)["status"]["job"] == "sums"
        reply = await tenant.request(
            subject, codec.encode({}), timeout=30, headers={CONTENT_TYPE: content_type}
        )
        assert (reply.headers or {})["Nats-Service-Error-Code"] == "INVALID_ARGUMENT"
        assert "job" in codec.decode(reply.data)["error"]["message"]


@pytest.mark.usefixtures("router")
async def test_tenant_cannot_publish_or_ask_as_another(bus: Bus, tenant: Client) -> None:
    with pytest.raises(nats.errors.TimeoutError):
        await tenant.request(streams.op_subject(key(1, tenant="globex")), b"{}", timeout=0.3)
    with pytest.raises(ResourceError):
        await call_api(
            tenant,
            "globex",
            "result.get",
            ResultRequest("sums", "policy", "1"),
            ResultReply,
            timeout_s=0.3,
        )
    assert await bus.stored.subjects(streams.ops_stream("globex"), f"{streams.PREFIX}.op.>") == []


@pytest.mark.parametrize(
    ("number", "num_tokens", "num_before"),
    [(500, 1, 2 * pulling.WINDOW), (40, 250_000, 2 * pulling.WINDOW_BYTES // 1_000_000)],
    ids=["many", "large"],
)
async def test_backlog_of_one_tenant_leaves_few_of_its_operations_before_anothers(
    bus: Bus,
    tenant: Client,
    number: int,
    num_tokens: int,
    num_before: int,
) -> None:
    await bus.keys.put(Bucket.SESSIONS, str(JOB), b"1")
    await bus.keys.put(Bucket.SESSIONS, str(JobKey("globex", "sums")), b"1")
    prompt = Prompt(pack_int32s([1] * num_tokens))
    operation = Operation("id", 1, Generate([prompt], SamplingParams(max_tokens=5)))
    for seq in range(1, number + 1):
        await send(tenant, key(seq), operation)
    other = key(1, tenant="globex")
    await bus.publish(streams.op_subject(other), Operation("id", 1, PublishWeights()))
    async with Router(bus).running([TENANT, "globex"]):
        logged = [entry.key for entry in await queued(bus, number + 1)]
    assert logged.index(other) <= num_before


async def test_calls_of_one_tenant_wait_for_no_calls_of_another(
    bus: Bus, tenant: Client, nats_server: EmbeddedServer
) -> None:
    credentials = nats_server.credentials
    first_answered = asyncio.Event()
    order: list[str] = []

    async def usage(name: str, _: UsageRequest) -> Usage:
        if name == TENANT:
            await first_answered.wait()
        order.append(name)
        return Usage(0, 0)

    def call(client: Client, name: str) -> Coroutine[Any, Any, Usage]:
        return call_api(client, name, "tenant.usage", UsageRequest(), Usage, timeout_s=30)

    other = await connect(
        credentials.url,
        "other",
        "globex",
        credentials.tenants["globex"],
        inbox_prefix="_INBOX_globex",
    )
    service = await serve_api(bus, "scheduler", {"tenant.usage": (UsageRequest, usage)})
    async with asyncio.TaskGroup() as flood:
        for _ in range(300):
            flood.create_task(call(tenant, TENANT))
        await tenant.flush()
        await call(other, "globex")
        first_answered.set()
    assert order == ["globex"] + 300 * [TENANT]
    await service.stop()
    await other.close()


# --- replicas ------------------------------------------------------------------------------------


def replica(
    server: EmbeddedServer, name: str
) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    tenants = json.dumps([TENANT])
    return service("router", server, PHASELOOM_ROUTER_NAME=name, PHASELOOM_ROUTER_TENANTS=tenants)


async def publish_all(client: Client, seqs: Iterable[int]) -> None:
    for seq in seqs:
        await send(client, key(seq), Operation(f"id{seq}", 1, PublishWeights()))


async def test_nothing_is_lost_or_doubled_when_a_replica_is_killed_in_the_stream(
    bus: Bus, tenant: Client, nats_server: EmbeddedServer
) -> None:
    await bus.keys.put(Bucket.SESSIONS, str(JOB), b"1")
    total = 600
    async with replica(nats_server, "a") as first, replica(nats_server, "b") as second:
        async with asyncio.TaskGroup() as group:
            group.create_task(publish_all(tenant, range(1, total + 1)))
            await queued(bus, total // 4)
            first.kill()
        entries = await queued(bus, total)
        assert {entry.id for entry in entries} == {f"id{seq}" for seq in range(1, total + 1)}
        async with aclosing(bus.log.queued_since(0.0)) as logged:
            assert len([operation async for operation in logged]) == total
        second.terminate()
        assert await second.wait() == 0


async def leave_half_logged(bus: Bus, tenant: Client, total: int) -> None:
    """As a replica that is killed when one entry of the log has half of what was delivered to it,
    and nothing is acknowledged yet."""
    taken: list[Msg] = []

    def take(message: Msg) -> None:
        taken.append(message)
        consumer.finished(message)

    consumer = await bus.pull(streams.ops_stream(TENANT), "router", take, ack_wait_s=10.0)
    pulling = asyncio.create_task(consumer.run())
    await publish_all(tenant, range(1, total + 1))
    async with asyncio.timeout(60):
        while len(taken) < total:
            await asyncio.sleep(0.01)
    logged = [
        QueuedOperation(key(seq), f"id{seq}", "publish_weights", session=1)
        for seq in range(1, total + 1, 2)
    ]
    await bus.log.append(OperationsQueued(logged))
    await lifecycle.end([pulling])
    await consumer.stop()
    for message in taken:
        await message.nak()


async def logged_seqs(bus: Bus) -> list[int]:
    async with aclosing(bus.log.queued_since(0.0)) as logged:
        return sorted([operation.key.seq or 0 async for operation in logged])


async def test_what_a_dead_replica_had_logged_of_its_batch_is_not_logged_again(
    bus: Bus, tenant: Client
) -> None:
    await bus.keys.put(Bucket.SESSIONS, str(JOB), b"1")
    await leave_half_logged(bus, tenant, 64)
    async with Router(bus).running([TENANT]):
        await queued(bus, 64)
    assert await logged_seqs(bus) == list(range(1, 65))
    async with asyncio.timeout(60):  # the server counts acknowledgements behind the requests
        while (await bus.js.consumer_info(streams.ops_stream(TENANT), "router")).num_ack_pending:
            await asyncio.sleep(0.01)


async def test_what_cannot_be_looked_up_in_time_is_logged_once_more(
    bus: Bus, tenant: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be put back for ever where the log has grown too long."""
    monkeypatch.setattr(router_shell, "_SEARCH_TIMEOUT_S", 0.0)
    await bus.keys.put(Bucket.SESSIONS, str(JOB), b"1")
    await leave_half_logged(bus, tenant, 8)
    async with Router(bus).running([TENANT]):
        await queued(bus, 12)
    assert await logged_seqs(bus) == sorted([*range(1, 9), *range(1, 9, 2)])


async def test_replica_routes_on_after_a_restart_of_the_server_and_stops_without_one(
    bus: Bus, tenant: Client, nats_server: EmbeddedServer
) -> None:
    await bus.keys.put(Bucket.SESSIONS, str(JOB), b"1")
    async with replica(nats_server, "a") as process:
        await publish_all(tenant, [1])
        await queued(bus, 1)
        await nats_server.kill()
        await nats_server.start()
        async with asyncio.timeout(120):
            while True:
                try:
                    await publish_all(tenant, [2])
                    break
                except (nats.errors.Error, AssertionError):  # not connected yet, or stored unheard
                    if await _is_stored(bus, key(2)):
                        break
        assert [entry.id for entry in await queued(bus, 2)] == ["id1", "id2"]
        await nats_server.kill()
        process.terminate()
        async with asyncio.timeout(60):
            assert await process.wait() == 0


async def _is_stored(bus: Bus, where: OperationKey) -> bool:
    stored = await bus.stored.get(streams.ops_stream(where.tenant), streams.op_subject(where))
    return stored is not None
