"""A store that is not what it was is noticed before anything is decided on it.

What is done to its files here nats-server takes without a word: it skips a damaged entry, cuts a
damaged block off, gives out sequences anew.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.storecheck import MARKS, StoreMarks
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract import streams
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.events import TimerFired
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.logmark import LogMark, read_mark
from phaseloom.common.transport.natsserver import EmbeddedServer
from phaseloom.common.transport.retry import until_done
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.main import restore_core
from phaseloom.scheduler.snapshots import Snapshots

TENANT = "demo"
NUM_ENTRIES = 40
Damage = Callable[[bytearray], bytearray]


def flipped(block: bytearray) -> bytearray:
    block[block.index(b"timer-20.") + 3] ^= 1
    return block


def last_flipped(block: bytearray) -> bytearray:
    block[block.index(b"timer-40.") + 3] ^= 1
    return block


def hole(block: bytearray) -> bytearray:
    start = block.index(b"timer-20.")
    block[start : start + 512] = bytes(512)
    return block


def tail_cut(block: bytearray) -> bytearray:
    return block[: len(block) * 3 // 4]


class Run:
    """A run's directory with a server's store, in which no service has worked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server = EmbeddedServer(
            directory / "nats", [TENANT], credentials_file=directory / "credentials.json"
        )

    async def bus(self) -> Bus:
        return await Bus.open(self.server.credentials.bus, "test")

    async def fill(self, entries: range) -> None:
        bus = await self.bus()
        for number in entries:
            await bus.log.append(TimerFired(f"timer-{number}."))
        await bus.close()

    def damage(self, damage: Damage, stream: str = streams.SCHED) -> None:
        block = self.store / f"streams/{stream}/msgs/1.blk"
        block.write_bytes(damage(bytearray(block.read_bytes())))

    @property
    def store(self) -> Path:
        return self.directory / "nats/store/jetstream/MESH"

    async def resumed(self, *, accepts_loss: bool = False) -> None:
        """As `phaseloom up --resume` begins."""
        mesh = Mesh(MeshConfig(tenants=[TENANT]), self.directory, accepts_loss=accepts_loss)
        async with mesh:
            pass


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    """A run with a log, whose server still works."""
    run = Run(tmp_path)
    await run.server.start()
    await run.fill(range(1, NUM_ENTRIES + 1))
    yield run
    await run.server.stop()


@pytest.mark.parametrize("damage", [flipped, last_flipped, hole, tail_cut])
@pytest.mark.parametrize("ends", ["stopped", "killed"])
async def test_damaged_log_is_refused(run: Run, damage: Damage, ends: str) -> None:
    """A server that was stopped skips the damage, one that was killed cuts off all behind it."""
    (run.directory / MARKS).write_text(f'{{"SCHED": {NUM_ENTRIES}}}')
    await (run.server.stop() if ends == "stopped" else run.server.kill())
    run.damage(damage)
    await refused(run)


async def test_log_that_ends_before_the_snapshot_is_refused(run: Run) -> None:
    await snapshot(run, sequence=NUM_ENTRIES)
    await run.server.kill()
    run.damage(tail_cut)
    await refused(run)


async def test_snapshot_that_is_gone_with_the_log_before_it_is_refused(run: Run) -> None:
    await snapshot(run, sequence=NUM_ENTRIES - 10)
    bus = await run.bus()
    await bus.log.truncate(NUM_ENTRIES - 10)
    await bus.stored.delete(f"KV_{Bucket.SNAPSHOTS}", ">")
    await bus.close()
    await run.server.stop()
    error = await refused(run)
    assert "a newer snapshot of the scheduler is lost" in error.info.message


async def test_older_copy_of_the_store_is_refused(run: Run) -> None:
    await run.server.stop()
    shutil.copytree(run.store, run.directory / "older")
    await run.server.start()
    await run.fill(range(NUM_ENTRIES + 1, NUM_ENTRIES + 6))
    bus = await run.bus()
    mark = LogMark(bus, run.directory / "nodes/train-0")
    mark.record(await bus.log.end())
    keeping = asyncio.create_task(mark.keep())
    while read_mark(run.directory / "nodes/train-0") < NUM_ENTRIES + 5:
        await asyncio.sleep(0.01)
    keeping.cancel()
    await bus.close()
    await run.server.stop()
    shutil.rmtree(run.store)
    shutil.copytree(run.directory / "older", run.store)

    error = await refused(run)
    assert error.info.details == {
        "first_lost": str(NUM_ENTRIES + 1),
        "last_lost": str(NUM_ENTRIES + 5),
    }
    assert "--accept-loss" in error.info.remedy


async def test_any_stream_that_went_back_is_refused(run: Run) -> None:
    """Outcomes, operations, commands and keys are as much a part of it as the log."""
    bus = await run.bus()
    for number in range(20):
        await bus.publish(f"pl.v1.done.demo.sums.policy.{number}", {"n": f"timer-{number}."})
    await bus.close()
    (run.directory / MARKS).write_text('{"DONE": 20}')
    await run.server.kill()
    run.damage(tail_cut, streams.DONE)
    error = await refused(run)
    assert "stream DONE ends at" in error.info.message
    assert error.info.details["last_lost"] == "20"
    assert int(error.info.details["first_lost"]) > 10


async def test_damaged_key_is_refused(run: Run) -> None:
    """The server answers as if there were none: a job would begin anew, for one."""
    bus = await run.bus()
    for job in ("sums", "letters"):
        await bus.keys.put(Bucket.CHECKPOINTS, f"demo.{job}", b"timer-20." + job.encode())
    await bus.close()
    await run.server.stop()
    run.damage(flipped, f"KV_{Bucket.CHECKPOINTS}")
    error = await refused(run)
    assert "the value of demo.sums in bucket checkpoints is damaged" in error.info.message


async def test_lost_tail_is_gone_on_without_where_the_operator_accepts_that(run: Run) -> None:
    """What the nodes have is newer than the store, and is kept, but not used."""
    node = run.directory / "nodes/train-0"
    node.mkdir(parents=True)
    (node / "log-mark").write_text(str(NUM_ENTRIES + 7))
    (node / "a.state").write_text("newer than the store")
    bus = await run.bus()
    await bus.keys.put(Bucket.SESSIONS, "demo.sums", b"3")
    await bus.close()
    await run.server.stop()
    await refused(run)

    await run.resumed(accepts_loss=True)
    (aside,) = run.directory.glob("set-aside-*/train-0/a.state")
    assert aside.read_text() == "newer than the store"
    assert not (node / "a.state").exists()
    await run.server.start()
    bus = await run.bus()
    stored = await bus.keys.get(Bucket.SESSIONS, "demo.sums")
    assert stored is not None
    assert int(stored.payload) > 3, "no controller goes on with what it knew"
    await bus.close()
    await run.server.stop()


async def test_log_with_a_hole_cannot_be_gone_on_with_at_all(run: Run) -> None:
    await run.server.stop()
    run.damage(flipped)
    with pytest.raises(ResourceError) as refusal:
        await run.resumed(accepts_loss=True)
    assert refusal.value.info.code is Code.DATA_LOSS


async def test_log_that_goes_back_under_a_mesh_ends_it_and_is_told_to_all(run: Run) -> None:
    """The server was started again by itself, on a block whose end is gone; before that, on one
    that was whole."""
    writer, reader = await run.bus(), await run.bus()
    read: list[int] = []

    async def follow() -> None:
        async with aclosing(reader.log.read_entries(NUM_ENTRIES)) as entries:
            async for entry in entries:
                read.append(entry.sequence)

    reading = asyncio.create_task(follow())
    await until(lambda: read == [NUM_ENTRIES])
    await run.server.kill()
    await run.server.start()
    end = await until_done(lambda: writer.log.append(TimerFired("the last")), "append")
    await until(lambda: read[-1] == end)
    marks = StoreMarks(run.directory / MARKS)
    await marks.check(writer)
    keeping = asyncio.create_task(marks.keep(writer))
    await run.server.kill()
    run.damage(tail_cut)
    await run.server.start()
    with pytest.raises(ResourceError) as told:
        await until_done(lambda: writer.log.append(TimerFired("with a number of old")), "append")
    assert told.value.info.code is Code.DATA_LOSS
    with pytest.raises(ResourceError, match="the decision log ends at"):
        async with asyncio.timeout(30):
            await keeping
    await run.fill(range(end))  # the reader stands at `end`, and hears nothing until then
    with pytest.raises(ResourceError) as told:
        async with asyncio.timeout(30):
            await reading
    assert told.value.info.code is Code.DATA_LOSS
    for bus in (writer, reader):
        await bus.close()
    await run.server.stop()


async def test_scheduler_does_not_begin_on_such_a_log(run: Run) -> None:
    """Also where nothing looks at the store before it: in containers, on a server of one's own."""
    await snapshot(run, sequence=NUM_ENTRIES)
    await run.server.kill()
    run.damage(tail_cut)
    await run.server.start()
    bus = await run.bus()
    with pytest.raises(ResourceError) as refusal:
        await restore_core(bus, Snapshots(bus))
    assert refusal.value.info.code is Code.DATA_LOSS
    await bus.close()
    await run.server.stop()


async def test_agent_does_not_begin_on_an_older_log(run: Run, tmp_path: Path) -> None:
    bus = await run.bus()
    (tmp_path / "log-mark").write_text(str(NUM_ENTRIES + 1))
    with pytest.raises(ResourceError) as refusal:
        await LogMark(bus, tmp_path).check()
    assert refusal.value.info.code is Code.DATA_LOSS
    (tmp_path / "log-mark").write_text(str(NUM_ENTRIES))
    await LogMark(bus, tmp_path).check()
    await bus.close()
    await run.server.stop()


async def until(is_met: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_met():
            await asyncio.sleep(0.005)


async def snapshot(run: Run, sequence: int) -> None:
    bus = await run.bus()
    core = Core()
    core.state.advance(sequence, 1.0)
    await Snapshots(bus).save(sequence, core.snapshot())
    await bus.close()


async def refused(run: Run) -> ResourceError:
    """What `phaseloom up --resume` says; nothing of the mesh has begun."""
    with pytest.raises(ResourceError) as refusal:
        await run.resumed()
    assert refusal.value.info.code is Code.DATA_LOSS, refusal.value
    assert "phaseloom restore" in refusal.value.info.remedy
    assert not (run.directory / "mesh.json").exists(), "a service was started"
    return refusal.value


def test_marks_that_cannot_be_read_are_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / MARKS).write_bytes(b"{")
    with pytest.raises(ResourceError, match=f"{MARKS} is damaged"):
        StoreMarks(tmp_path / MARKS)
