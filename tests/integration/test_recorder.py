"""The recorder against a real nats-server: a faithful, readable file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from phaseloom.cli.recorder import Recorded, Recorder, read_entries, read_events
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.events import OperationsQueued, QueuedOperation, TimerFired
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.decisionlog import LogEntry
from tests.support.joblog import Turn, grpo_log


async def test_file_has_every_entry_as_the_log_has_it(bus: Bus, tmp_path: Path) -> None:
    events = [event for _, _, event in grpo_log(3, lambda _: Turn()).entries()]
    for event in events[:10]:
        await bus.log.append(event)
    watched: list[Recorded] = []
    recorder = Recorder(bus, tmp_path / "events.jsonl", watched.append)
    recording = asyncio.create_task(recorder.run())
    for event in events[10:]:
        await bus.log.append(event)
    await recorder.drained()
    recording.cancel()
    with suppress(asyncio.CancelledError):
        await recording
    recorded = read_events(tmp_path / "events.jsonl")
    assert [r.event for r in recorded] == events
    assert recorded == watched
    logged = [(e.sequence, e.time_s) for e in [x async for x in _entries(bus, len(events))]]
    assert [(r.sequence, r.time_unix_s) for r in recorded] == logged


async def _entries(bus: Bus, count: int) -> AsyncIterator[LogEntry]:
    async for entry in bus.log.read():
        yield entry
        if entry.sequence >= count:
            return


async def test_until_returns_once_the_watcher_has_seen_it(bus: Bus, tmp_path: Path) -> None:
    seen: list[str] = []

    def watch(entry: Recorded) -> None:
        assert isinstance(entry.event, TimerFired)
        seen.append(entry.event.timer)

    recorder = Recorder(bus, tmp_path / "events.jsonl", watch)
    async with asyncio.TaskGroup() as group:
        recording = group.create_task(recorder.run())
        waiting = group.create_task(recorder.until(lambda: "third" in seen))
        for name in ("first", "second", "third"):
            assert not waiting.done()
            await bus.log.append(TimerFired(name))
        await waiting
        recording.cancel()
    assert seen == ["first", "second", "third"]


def test_line_cut_off_by_a_crash_is_left_out_and_a_foreign_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = b'{"sequence":1,"time_unix_s":2.5,"event":{"type":"timer_fired","timer":"t"}}\n'
    path.write_bytes(line + line[:30])
    assert read_events(path) == [Recorded(1, 2.5, TimerFired("t"))]
    path.write_bytes(line + b'{"sequence":2}\n')
    with pytest.raises(CallerError, match=r"events\.jsonl:2 is not a recorded event"):
        read_events(path)


def test_entry_of_several_events_is_one_to_a_scheduler_and_several_to_people(
    tmp_path: Path,
) -> None:
    queued = [
        QueuedOperation(OperationKey("acme", "a", "policy", str(seq)), str(seq), "optim_step")
        for seq in (1, 2)
    ]
    entry = Recorded(7, 2.5, OperationsQueued(queued))
    path = tmp_path / "events.jsonl"
    path.write_bytes(msgspec.json.encode(entry) + b"\n")
    assert read_entries(path) == [entry]
    assert read_events(path) == [Recorded(7, 2.5, each) for each in queued]
