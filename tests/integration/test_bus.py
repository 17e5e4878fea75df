"""The bus against a real nats-server: what the design rests on, each shown to hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.commands import ReleaseVersions
from phaseloom.common.contract.errors import Code, ErrorInfo, ResourceError
from phaseloom.common.contract.events import NodeLost, OperationsQueued, QueuedOperation, TimerFired
from phaseloom.common.contract.ids import NodeId, OperationKey
from phaseloom.common.contract.operations import Completion, Outcome
from phaseloom.common.contract.specs import CommandId
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.process import diewithparent
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import BusConfig, with_timeout
from phaseloom.common.transport.decisionlog import LogEntry
from phaseloom.common.transport.keys import Conflict
from phaseloom.common.transport.link import AlreadyStored
from phaseloom.common.transport.natsserver import EmbeddedServer, find_binary
from phaseloom.common.transport.stored import Stored
from tests.support.processes import free_port

KEY = OperationKey("acme", "sums", "policy", "7")
NODE = NodeId("train-0")


def command(index: int) -> ReleaseVersions:
    return ReleaseVersions(id=CommandId(1, index), node=NODE, revision=1, versions=[])


async def take(bus: Bus, count: int, start: int = 1) -> list[LogEntry]:
    entries: list[LogEntry] = []
    async with aclosing(bus.log.read(start)) as log:
        async for entry in log:
            entries.append(entry)
            if len(entries) == count:
                break
    return entries


async def test_publish_returns_the_stream_sequence(bus: Bus) -> None:
    first = await bus.log.append(TimerFired("a"))
    assert await bus.log.append(TimerFired("b")) == first + 1
    assert await bus.log.end() == first + 1


async def test_publish_is_stored_once_when_its_id_comes_again(bus: Bus) -> None:
    first = await bus.log.append(TimerFired("a"), msg_id="same")
    assert await bus.log.append(TimerFired("a"), msg_id="same") == first
    assert await bus.log.end() == first


async def test_publish_leaves_the_callers_headers_alone(bus: Bus) -> None:
    headers = {"traceparent": "x"}
    await bus.log.append(TimerFired("a"), msg_id="1", headers=headers)
    assert headers == {"traceparent": "x"}


async def test_publish_says_already_stored_when_a_subject_has_its_message(bus: Bus) -> None:
    first = Completion("first", Outcome.COMPLETED)
    await bus.publish(streams.done_subject(KEY), first)
    with pytest.raises(AlreadyStored):
        await bus.publish(streams.done_subject(KEY), Completion("second", Outcome.FAILED))
    stored = await bus.stored.get(streams.DONE, streams.done_subject(KEY))
    assert stored is not None
    assert decode(stored.payload, Completion) == first


async def test_publish_says_exhausted_and_not_already_stored_when_the_stream_is_full(
    bus: Bus,
) -> None:
    """The server has one error code for both; taken for the other, an operation would be lost."""
    await bus.provision_tenant("tiny", 1024)
    with pytest.raises(ResourceError) as full:
        await bus.publish("pl.v1.op.tiny.job.policy.1", b"x" * 4096)
    assert full.value.info.code is Code.RESOURCE_EXHAUSTED


async def test_publish_fails_when_no_stream_takes_the_subject(bus: Bus) -> None:
    with pytest.raises(ResourceError, match="not stored"):
        await bus.publish("pl.v1.nothing.here", b"")


async def test_done_republishes_only_what_was_stored(bus: Bus) -> None:
    """A second writer, refused, must not reach a controller as another outcome."""
    heard: asyncio.Queue[Completion] = asyncio.Queue()

    async def hear(message: Msg) -> None:
        await heard.put(decode(message.data, Completion))

    await bus.client.subscribe("pl.v1.out.acme.>", cb=hear)
    await bus.publish(streams.done_subject(KEY), Completion("first", Outcome.COMPLETED))
    with pytest.raises(AlreadyStored):
        await bus.publish(streams.done_subject(KEY), Completion("second", Outcome.FAILED))
    last = OperationKey("acme", "sums", "policy", "8")
    await bus.publish(streams.done_subject(last), Completion("last", Outcome.COMPLETED))
    assert [(await heard.get()).id, (await heard.get()).id] == ["first", "last"]


async def test_read_log_begins_at_the_exact_sequence(bus: Bus) -> None:
    for number in range(5):
        await bus.log.append(TimerFired(str(number)), headers={"n": str(number)})
    entries = await take(bus, 3, start=3)
    assert [entry.sequence for entry in entries] == [3, 4, 5]
    assert [entry.event for entry in entries] == [TimerFired("2"), TimerFired("3"), TimerFired("4")]
    assert [entry.headers["n"] for entry in entries] == ["2", "3", "4"]
    assert entries[0].time_s <= entries[1].time_s <= entries[2].time_s


async def test_read_log_sees_what_is_appended_while_it_waits(bus: Bus) -> None:
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(take(bus, 2))
        await bus.log.append(TimerFired("early"))
        await bus.log.append(TimerFired("late"))
    assert [entry.event for entry in reader.result()] == [TimerFired("early"), TimerFired("late")]


async def test_read_log_misses_nothing_and_repeats_nothing_when_the_server_is_killed(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    """Its consumer lives in the server's memory: it is made again where the reader stood, also
    when it had not read anything yet from a start in the middle."""
    for number in range(3):
        await bus.log.append(TimerFired(str(number)))
    async with aclosing(bus.log.read(2)) as from_two, aclosing(bus.log.read(4)) as from_four:
        seen = [(await anext(from_two)).sequence]
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(anext(from_four))
            seen.append((await anext(from_two)).sequence)
            while (await bus.js.stream_info(streams.SCHED)).state.consumer_count < 2:
                await bus.client.flush()
            await nats_server.kill()
            await nats_server.start()
            await append_when_back(bus, TimerFired("after"))
            seen.append((await anext(from_two)).sequence)
        assert seen == [2, 3, 4]
        assert waiting.result().event == TimerFired("after")


async def append_when_back(bus: Bus, event: TimerFired) -> int:
    """Append; publishes of an outage wait in the client until it has reconnected."""
    return await bus.log.append(event, msg_id=event.timer)


async def test_consume_redelivers_until_acknowledged(bus: Bus) -> None:
    taken: asyncio.Queue[Msg] = asyncio.Queue()
    subject = streams.permit_subject(NODE)
    await bus.publish(subject, command(1))
    await bus.consume(streams.PERMITS, subject, "agent-train-0", taken.put_nowait)

    first = await taken.get()
    assert first.metadata.num_delivered == 1
    await first.nak()
    second = await taken.get()
    assert second.metadata.num_delivered == 2
    await second.ack()
    await until_gone_from_permits(bus, subject)


async def until_gone_from_permits(bus: Bus, subject: str) -> None:
    """The server takes an acknowledgement into account behind its answers to requests."""
    async with asyncio.timeout(60):
        while await bus.stored.get(streams.PERMITS, subject) is not None:
            await asyncio.sleep(0.01)


async def test_consumer_has_heartbeats_which_handlers_do_not_see(
    nats_server: EmbeddedServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wake a server that sleeps on a consumer with messages to deliver."""
    monkeypatch.setattr("phaseloom.common.transport.bus._IDLE_HEARTBEAT_S", 0.1)
    subject = streams.permit_subject(NODE)
    taken: asyncio.Queue[Msg] = asyncio.Queue()
    subscription = await bus.consume(streams.PERMITS, subject, "agent", taken.put_nowait)
    deliver = (await subscription.consumer_info()).config.deliver_subject
    assert deliver is not None
    watched = await bus.client.subscribe(deliver)
    beats = [await watched.next_msg(10.0) for _ in range(3)]
    assert {(beat.headers or {}).get("Status") for beat in beats} == {"100"}
    await bus.publish(subject, command(1))
    assert (await taken.get()).data
    assert taken.empty()


async def test_consume_takes_over_when_the_predecessor_is_gone(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    first = await Bus.open(nats_server.credentials.bus, "first")
    left: asyncio.Queue[Msg] = asyncio.Queue()
    taken: asyncio.Queue[Msg] = asyncio.Queue()
    subject = streams.permit_subject(NODE)
    await first.consume(streams.PERMITS, subject, "agent", left.put_nowait, ack_wait_s=1.0)
    await bus.publish(subject, command(1))
    message = await left.get()
    async with asyncio.TaskGroup() as group:
        group.create_task(
            bus.consume(streams.PERMITS, subject, "agent", taken.put_nowait, ack_wait_s=1.0)
        )
        await first.close()
    assert (await taken.get()).data == message.data


async def test_bury_parks_the_message_with_its_reason_and_takes_it_off(bus: Bus) -> None:
    error = ErrorInfo(Code.INVALID_ARGUMENT, "not a command", field="type")
    taken: asyncio.Queue[Msg] = asyncio.Queue()
    await bus.publish(streams.permit_subject(NODE), b"\xc1")
    await bus.consume(streams.PERMITS, streams.permit_subject(NODE), "agent", taken.put_nowait)
    await bus.bury("agent", await taken.get(), error)
    parked = await bus.stored.get(streams.DEAD, streams.dead_subject("agent"))
    assert parked is not None
    assert parked.headers["Phaseloom-Subject"] == streams.permit_subject(NODE)
    assert '"not a command"' in parked.headers["Phaseloom-Error"]
    await until_gone_from_permits(bus, streams.permit_subject(NODE))


async def test_delete_subject_leaves_the_others(bus: Bus) -> None:
    for number in (1, 2, 3):
        await bus.publish(f"pl.v1.op.acme.sums.policy.{number}", b"")
    await bus.stored.delete("OPS_acme", "pl.v1.op.acme.sums.policy.2")
    assert await bus.stored.subjects("OPS_acme", "pl.v1.op.acme.sums.>") == [
        "pl.v1.op.acme.sums.policy.1",
        "pl.v1.op.acme.sums.policy.3",
    ]
    assert await bus.stored.get("OPS_acme", "pl.v1.op.acme.sums.policy.2") is None


async def test_get_stored_is_none_when_the_stream_is_absent(bus: Bus) -> None:
    assert await bus.stored.get("OPS_nobody", "pl.v1.op.nobody.a.b.1") is None


async def test_kv_swap_refuses_when_the_key_changed(bus: Bus) -> None:
    first = await bus.keys.swap(Bucket.SEALS, "acme.sums.policy", b"1", 0)
    second = await bus.keys.swap(Bucket.SEALS, "acme.sums.policy", b"2", first)
    for stale in (0, first):
        with pytest.raises(Conflict):
            await bus.keys.swap(Bucket.SEALS, "acme.sums.policy", b"3", stale)
    assert await bus.keys.get(Bucket.SEALS, "acme.sums.policy") == Stored(
        b"2", second, (await got_headers(bus, "acme.sums.policy"))
    )


async def got_headers(bus: Bus, key: str) -> dict[str, str]:
    stored = await bus.keys.get_raw(Bucket.SEALS, key)
    assert stored is not None
    return stored.headers


async def test_kv_delete_makes_the_key_absent_and_can_be_followed_by_a_swap(bus: Bus) -> None:
    first = await bus.keys.swap(Bucket.SEALS, "a", b"1", 0)
    with pytest.raises(Conflict):
        await bus.keys.delete(Bucket.SEALS, "a", first + 1)
    marker = await bus.keys.delete(Bucket.SEALS, "a", first)
    assert await bus.keys.get(Bucket.SEALS, "a") is None
    raw = await bus.keys.get_raw(Bucket.SEALS, "a")
    assert raw is not None
    assert raw.is_gone
    await bus.keys.swap(Bucket.SEALS, "a", b"2", marker)
    assert (await bus.keys.get(Bucket.SEALS, "a") or raw).payload == b"2"


async def test_kv_put_and_keys(bus: Bus) -> None:
    await bus.keys.put(Bucket.VIEW, "acme.sums", b"x")
    await bus.keys.put(Bucket.VIEW, "acme.letters", b"y")
    assert await bus.keys.names(Bucket.VIEW) == ["acme.letters", "acme.sums"]


async def test_kv_value_expires_and_watchers_hear_of_it(bus: Bus) -> None:
    await bus.keys.swap(Bucket.LEASES, "node.a", b"1", 0, ttl_s=3.0)
    async with aclosing(bus.keys.watch(Bucket.LEASES)) as changes:
        now = await anext(changes)
        assert now.stored is not None
        assert (now.key, now.stored.payload) == ("node.a", b"1")
        assert (await anext(changes)).stored is None
    assert await bus.keys.get(Bucket.LEASES, "node.a") is None


async def test_kv_watch_goes_on_when_the_server_is_killed(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    await bus.keys.put(Bucket.VIEW, "a", b"1")
    async with aclosing(bus.keys.watch(Bucket.VIEW, "a")) as changes:
        await anext(changes)
        await nats_server.kill()
        await nats_server.start()
        async with asyncio.TaskGroup() as group:
            change = group.create_task(anext(changes))
            await bus.keys.put(Bucket.VIEW, "a", b"2")
        stored = change.result().stored
        assert stored is not None
        assert stored.payload == b"2"


async def test_stream_for_which_the_disk_has_no_room_is_refused_with_the_numbers(bus: Bus) -> None:
    with pytest.raises(
        ResourceError, match=rf"no room for stream OPS_vast.* {2**60} bytes"
    ) as refused:
        await bus.provision_tenant("vast", 2**60)
    assert refused.value.info.code is Code.RESOURCE_EXHAUSTED
    assert "ops_max_bytes" in (refused.value.info.remedy or "")


async def test_provision_again_changes_nothing(bus: Bus) -> None:
    await bus.log.append(TimerFired("a"))
    await bus.provision()
    await bus.provision_tenant("acme", 1)
    assert await bus.log.end() == 1
    info = await bus.js.stream_info("OPS_acme")
    assert info.config.max_bytes == 64 * 2**20


async def test_reconnect_provisions_memory_streams_again_when_the_server_was_killed(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    await bus.log.append(TimerFired("a"))
    await nats_server.kill()
    await nats_server.start()
    await append_when_back(bus, TimerFired("b"))
    await bus.notice("test", "back", "the server was killed")
    async with asyncio.timeout(30):
        while await bus.stored.get(streams.EVENTS, streams.event_subject("test")) is None:
            await bus.notice("test", "back", "the server was killed")
    assert await bus.log.end() == 2


async def test_close_returns_when_the_server_is_gone(
    nats_server: EmbeddedServer,
) -> None:
    bus = await Bus.open(nats_server.credentials.bus, "lonely", timeout_s=0.5)
    await nats_server.kill()
    async with asyncio.timeout(30):
        await bus.close()
    assert bus.client.is_closed


async def test_open_fails_with_a_remedy_when_there_is_no_server(
    nats_server: EmbeddedServer,
) -> None:
    await nats_server.stop()
    with pytest.raises(ResourceError, match="phaseloom up"):
        await Bus.open(nats_server.credentials.bus, "lonely")


async def test_read_log_gives_nodes_their_events_back_as_they_were(bus: Bus) -> None:
    event = NodeLost(NODE, 3, "lease expired")
    await bus.log.append(event)
    assert (await take(bus, 1))[0].event == event


async def test_call_that_swallows_its_cancellation_is_ended_all_the_same() -> None:
    """As nats-py's connecting does where it is cancelled while it flushes."""
    cancelled = 0

    async def stubborn() -> None:
        nonlocal cancelled
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        cancelled += 1
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        with pytest.raises(TimeoutError):
            await with_timeout(0.01, stubborn())
    assert cancelled == 1


async def queued_keys(bus: Bus, since_s: float) -> list[str]:
    async with aclosing(bus.log.queued_since(since_s)) as operations:
        return [operation.key.slot async for operation in operations]


async def test_events_that_one_append_brought_come_one_by_one_or_as_they_are_stored(
    bus: Bus,
) -> None:
    await bus.log.append(OperationsQueued([queued(1), queued(2)]))
    await bus.log.append(TimerFired("t"))
    async with aclosing(bus.log.read()) as log:
        got = [await anext(log) for _ in range(3)]
    assert [(e.sequence, type(e.event)) for e in got] == [
        (1, QueuedOperation),
        (1, QueuedOperation),
        (2, TimerFired),
    ]
    async with aclosing(bus.log.read_entries()) as entries:
        assert isinstance((await anext(entries)).event, OperationsQueued)


async def test_what_was_queued_since_a_time_is_found_without_a_consumer(bus: Bus) -> None:
    assert await queued_keys(bus, 0.0) == []
    await bus.log.append(queued(1))
    async with aclosing(bus.log.read()) as log:
        first = await anext(log)
    for seq in range(2, 600, 2):
        await bus.log.append(OperationsQueued([queued(seq), queued(seq + 1)]))
    await bus.log.append(TimerFired("t"))
    assert await queued_keys(bus, first.time_s) == [str(seq) for seq in range(1, 600)]
    assert await queued_keys(bus, first.time_s + 0.0001) == [str(seq) for seq in range(2, 600)]
    assert await queued_keys(bus, first.time_s + 3600) == []


async def test_streams_are_made_once_the_server_has_what_it_stores_them_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes connections before: in a cluster, until its members have chosen who leads."""
    port = free_port()
    arguments = ["-a", "127.0.0.1", "-p", str(port)]
    async with nats_process(*arguments) as early:
        settings = BusConfig(f"nats://127.0.0.1:{port}", "", "")
        opening = asyncio.create_task(Bus.open(settings, "x", timeout_s=60.0))
        async with asyncio.timeout(60):
            while "cannot provision streams yet" not in caplog.text:
                await asyncio.sleep(0.01)
        early.terminate()
        await early.wait()
    async with nats_process(*arguments, "-js", "-sd", str(tmp_path)):
        bus = await opening
        assert await bus.log.end() == 0
        await bus.close()
    told = [r for r in caplog.records if "provisioned" in r.message and r.levelname == "WARNING"]
    assert len(told) < 10, "the same over and over"


@asynccontextmanager
async def nats_process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *diewithparent.launcher([str(find_binary()), *arguments]),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_all_that_is_stored_of_many_subjects_is_read_at_once(bus: Bus) -> None:
    subjects = [streams.done_subject(queued(seq).key) for seq in range(1, 100)]
    assert await bus.stored.get_all(streams.DONE, subjects) == {}
    for subject in subjects[::2]:
        await bus.publish(subject, Completion(subject, Outcome.COMPLETED))
    stored = await bus.stored.get_all(streams.DONE, subjects)
    assert sorted(stored) == sorted(subjects[::2])
    assert stored[subjects[2]].sequence == 2
    assert decode(stored[subjects[2]].payload, Completion).id == subjects[2]
    assert list(await bus.stored.get_all(streams.DONE, subjects[:1])) == subjects[:1]
    assert await bus.stored.get_all(streams.DONE, subjects[1:2]) == {}


async def test_more_than_one_answer_holds_is_read_all_the_same(bus: Bus) -> None:
    large = [streams.done_subject(queued(seq).key) for seq in range(1, 16)]
    error = ErrorInfo(Code.INTERNAL, "x" * 7 * 2**20)
    for subject in large:
        await bus.publish(subject, Completion(subject, Outcome.FAILED, error=error))
    assert sorted(await bus.stored.get_all(streams.DONE, large)) == sorted(large)


@pytest.mark.parametrize("status", ["204", "404", "503"])
async def test_header_that_looks_like_the_servers_end_of_an_answer_ends_none(
    bus: Bus, status: str
) -> None:
    """Whoever publishes names headers as they like."""
    subjects = [streams.done_subject(queued(seq).key) for seq in range(1, 5)]
    for subject in subjects:
        headers = {"Status": status, "Nats-Subject": "x"} if subject == subjects[-1] else {}
        await bus.publish(subject, Completion(subject, Outcome.COMPLETED), headers=headers)
    for order in (subjects, subjects[-1:], subjects[1::2]):
        assert sorted(await bus.stored.get_all(streams.DONE, order)) == sorted(order)


def queued(seq: int) -> QueuedOperation:
    return QueuedOperation(OperationKey("demo", "job", "policy", str(seq)), f"id{seq}", "forward")
