"""The scheduler's shell on a real server: snapshots, outcomes, leases, and who leads."""

from __future__ import annotations

import asyncio
import os
import signal
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from grpo import deployments
from nats.js.api import DiscardPolicy

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract import streams
from phaseloom.common.contract.api import (
    Explanation,
    JobRequest,
    JobStatus,
    OperationRequest,
    PhaseRequest,
)
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.commands import ReleaseVersions
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    ErrorInfo,
    PhaseloomError,
    ResourceError,
)
from phaseloom.common.contract.events import (
    Event,
    JobFinished,
    JobSubmitted,
    NodeUp,
    Notice,
    OperationFinished,
    QueuedOperation,
    SchedulerConfigured,
    SealCommitted,
    SessionLost,
    SessionOpened,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey
from phaseloom.common.contract.operations import (
    AdamParams,
    After,
    Completion,
    Generate,
    Operation,
    OptimStep,
    Outcome,
    Prompt,
    SamplingParams,
)
from phaseloom.common.contract.specs import (
    CommandId,
    DeviceSpec,
    JobSpec,
    ModelSpec,
    SchedulerConfig,
)
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.decisionlog import LogEntry
from phaseloom.common.transport.keys import Conflict
from phaseloom.common.transport.leases import renew_session, scheduler_lease_key
from phaseloom.common.transport.natsserver import EmbeddedServer
from phaseloom.common.transport.retry import RetryingLog
from phaseloom.common.transport.services import call_api
from phaseloom.scheduler import main
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.state.outputs import (
    DropCheckpoint,
    ForgetJob,
    SendCommand,
    SettleCompletion,
    WriteCompletion,
)
from phaseloom.scheduler.core.state.tree import CORE_VERSION
from phaseloom.scheduler.housekeeping import Housekeeping
from phaseloom.scheduler.shell import Shell
from phaseloom.scheduler.sink import BusSink
from phaseloom.scheduler.snapshots import Snapshot, Snapshots
from tests.support.jobs import (
    NOOP,
    TASKS,
    TENANT,
    Log,
    Wire,
    kill_rank,
    oracle,
    policy_seq,
    run_job,
    running_mesh,
    short,
    tenant,
)
from tests.support.warm import signal_programs

ACME = "acme"
A = JobKey(ACME, "a")
POLICY = DeploymentKey(ACME, "a", "policy")
CONFIG = SchedulerConfig(
    placement="pack",
    ordering="hrrs",
    idle_grace_s=0.03,
    quantum_s=2.0,
    seal_every=0,
    max_losses=3,
    max_reading=64,
    phase_hold_s=1.0,
    speculative_switch_in=False,
)


def key(seq: int, job: str = "a") -> OperationKey:
    return OperationKey(ACME, job, "policy", str(seq))


def spec() -> client.DeploymentSpec:
    return client.DeploymentSpec("policy", "train", "noop", ModelSpec({}), trainable=True)


BEGUN: tuple[Event, ...] = (
    NodeUp(NodeId("t0"), "train", [DeviceSpec(100)], 100, 1, "t0:1"),
    JobSubmitted(A, JobSpec(deployments=[spec()]), "submit"),
    WpgStarted(POLICY, 1, NodeId("t0"), 10, 0),
    SessionOpened(A, 1),
)
"""A job that is active."""


@asynccontextmanager
async def running(*coroutines: Awaitable[None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        await lifecycle.end(tasks)


# --- snapshots ----------------------------------------------------------------------------------

LARGE = os.urandom(100_000)
"""Cannot be compressed."""


async def test_snapshot_larger_than_a_message_comes_back_whole(bus: Bus) -> None:
    writer = Snapshots(bus, chunk_bytes=30_000)
    assert await writer.load() is None
    assert await writer.save(7, b"the first") == 0
    assert await writer.save(9, LARGE) == 7
    stored = await Snapshots(bus).load()
    assert stored is not None
    assert stored.payload == LARGE
    assert stored.manifest.sequence == 9
    assert stored.manifest.num_chunks == 4
    keys = await bus.keys.names(Bucket.SNAPSHOTS)
    assert keys == ["core", *(f"core.9.{index}" for index in range(4))], "the old one's chunks stay"


async def test_leader_whose_place_was_taken_cannot_store_an_older_snapshot(bus: Bus) -> None:
    old, new = Snapshots(bus), Snapshots(bus)
    for snapshots in (old, new):
        await snapshots.load()
    await new.save(9, b"new")
    with pytest.raises(ResourceError, match="no longer leads"):
        await old.save(7, b"old")
    stored = await Snapshots(bus).load()
    assert stored is not None
    assert stored.payload == b"new"


async def test_damaged_snapshot_is_refused(bus: Bus) -> None:
    snapshots = Snapshots(bus)
    await snapshots.save(7, b"sound")
    await bus.keys.put(Bucket.SNAPSHOTS, "core.7.0", zlib.compress(b"other"))
    with pytest.raises(ResourceError) as caught:
        await Snapshots(bus).load()
    assert caught.value.info.code is Code.DATA_LOSS


@pytest.fixture
def environment(nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a scheduler process is given."""
    credentials = nats_server.credentials
    for name in ("url", "user", "password"):
        monkeypatch.setenv(f"PHASELOOM_BUS_{name.upper()}", getattr(credentials, name))


async def store_snapshot(bus: Bus, core_version: int, *, is_last: bool) -> None:
    fields = msgspec.msgpack.decode(Core().snapshot())
    fields["core_version"] = core_version
    await Snapshots(bus).save(0, msgspec.msgpack.encode(fields), is_last=is_last)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("is_last", "remedy"),
    [(False, "then stop it with SIGTERM"), (True, "finish its jobs")],
    ids=["of-one-that-was-killed", "of-a-later-version"],
)
async def test_scheduler_refuses_a_snapshot_of_another_core_version(
    bus: Bus, is_last: bool, remedy: str
) -> None:
    await store_snapshot(bus, CORE_VERSION + 1, is_last=is_last)
    with pytest.raises(ResourceError) as caught:
        await main.serve(asyncio.Event())
    assert caught.value.info.code is Code.FAILED_PRECONDITION
    assert f"core version {CORE_VERSION + 1}" in caught.value.info.message
    assert remedy in caught.value.info.remedy
    assert await bus.keys.get(Bucket.LEASES, "scheduler") is None, "the lease is kept"


@pytest.mark.usefixtures("environment")
async def test_scheduler_that_is_stopped_leaves_a_snapshot_for_any_core_version(bus: Bus) -> None:
    for _ in range(2):  # the second one goes on from it
        stop = asyncio.Event()
        serving = asyncio.create_task(main.serve(stop))
        await until(lambda: folds(bus))
        led_since = (await newest(bus)).manifest.led_since
        assert led_since in (None, CORE_VERSION), "while it leads no other version may"
        stop.set()
        await serving
        stored = await newest(bus)
        assert stored.manifest.sequence >= 1
        assert stored.manifest.led_since == 0
        assert msgspec.msgpack.decode(stored.payload)["core_version"] == CORE_VERSION
    assert led_since == CORE_VERSION


async def newest(bus: Bus) -> Snapshot:
    stored = await Snapshots(bus).load()
    assert stored is not None
    return stored


async def test_only_the_leader_that_knows_the_newest_snapshot_claims_it(bus: Bus) -> None:
    old, new = Snapshots(bus), Snapshots(bus)
    await old.load()
    await old.save(7, b"last", is_last=True)
    await new.load()
    await old.claim(12)
    with pytest.raises(ResourceError, match="no longer leads"):
        await new.claim(13)
    stored = await newest(bus)
    assert (stored.payload, stored.manifest.led_since) == (b"last", 12)


@pytest.mark.usefixtures("environment")
async def test_scheduler_refuses_a_log_that_begins_behind_its_snapshot(bus: Bus) -> None:
    for _ in range(3):
        await bus.log.append(SchedulerConfigured(CONFIG))
    await bus.log.truncate(3)
    with pytest.raises(ResourceError, match="starts at 3") as caught:
        await main.serve(asyncio.Event())
    assert caught.value.info.code is Code.DATA_LOSS


async def until(is_met: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await is_met():
            await asyncio.sleep(0.02)


async def folds(bus: Bus) -> bool:
    """Whether anybody leads, and has come to what was in the log before this was asked."""
    return await answers(bus, "job.finish")


async def answers(bus: Bus, call: str = "job.status") -> bool:
    """Whether anybody serves the jobs' calls."""
    try:
        await call_api(bus.client, ACME, call, JobRequest("none"), JobStatus)
    except PhaseloomError as error:
        return error.info.code is Code.NOT_FOUND
    return False


@pytest.mark.usefixtures("environment")
async def test_standby_leads_once_the_leader_has_stopped(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None is lost because the machine is slow: released, it need not run out.
    monkeypatch.setenv("PHASELOOM_SCHEDULER_LEASE_TTL_S", "30")
    stops, serving = {}, {}
    for name in ("one", "two", "three"):
        monkeypatch.setenv("PHASELOOM_SCHEDULER_NAME", name)
        stops[name] = asyncio.Event()
        serving[name] = asyncio.create_task(main.serve(stops[name]))
        await until(lambda: leads(bus, "one"))
    stops["three"].set()
    await serving["three"]  # while it stands by
    assert await leads(bus, "one")
    stops["one"].set()
    await serving["one"]
    await until(lambda: leads(bus, "two"))
    stops["two"].set()
    await serving["two"]
    assert await leader(bus) == ("", 0), "the lease is released"


@pytest.mark.usefixtures("environment")
async def test_leader_whose_lease_is_lost_stands_by_and_leads_again(bus: Bus) -> None:
    """As one that was too slow for it finds out; in any other way it would be nobody's."""
    stop = asyncio.Event()
    serving = asyncio.create_task(main.serve(stop))
    await until(lambda: answers(bus))
    taken = await take_lease(bus)
    await until(lambda: is_silent(bus))
    assert not serving.done()
    await bus.keys.delete(Bucket.LEASES, scheduler_lease_key(), taken)
    await until(lambda: answers(bus))
    stop.set()
    await serving
    assert await leader(bus) == ("", 0), "the lease is released"


@pytest.mark.usefixtures("environment")
async def test_scheduler_outlasts_a_server_that_is_too_slow_for_its_lease(
    nats_server: EmbeddedServer,
    bus: Bus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PHASELOOM_SCHEDULER_LEASE_TTL_S", "1")
    stop = asyncio.Event()
    serving = asyncio.create_task(main.serve(stop))
    await until(lambda: answers(bus))
    pid = nats_server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            while "no longer leads" not in caplog.text:
                await asyncio.sleep(0.02)
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(lambda: answers(bus))
    stop.set()
    await serving


@pytest.mark.usefixtures("environment")
async def test_operation_whose_outcome_is_stored_is_explained_as_ended(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker tells the log a moment later."""
    monkeypatch.setenv("PHASELOOM_SCHEDULER_LEASE_MARGIN_S", "600")  # the node has no agent
    stop = asyncio.Event()
    serving = asyncio.create_task(main.serve(stop))
    await until(lambda: folds(bus))
    for event in (*BEGUN, QueuedOperation(key(1), "id", "optim_step", session=1)):
        await bus.log.append(event)
    await until(lambda: folds(bus))
    request = OperationRequest("a", "policy", "1")

    async def state() -> str:
        explained: Explanation = await call_api(
            bus.client, ACME, "operation.explain", request, Explanation
        )
        return explained.state

    assert await state() == "permitted"
    await bus.publish(streams.done_subject(key(1)), Completion("id", Outcome.COMPLETED))
    assert await state() == "completed"
    stop.set()
    await serving


async def take_lease(bus: Bus) -> int:
    """From whoever holds it, who may renew it at any moment; where it is stored."""
    while True:
        held = await bus.keys.get(Bucket.LEASES, scheduler_lease_key())
        assert held is not None
        with suppress(Conflict):
            return await bus.keys.swap(
                Bucket.LEASES, scheduler_lease_key(), b"other, pid 1", held.sequence
            )


async def is_silent(bus: Bus) -> bool:
    return not await answers(bus)


async def leads(bus: Bus, name: str) -> bool:
    return (await leader(bus))[0] == name


# --- the sink -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stored", [True, False])
async def test_settled_operation_is_told_as_it_is_stored(bus: Bus, is_stored: bool) -> None:
    """Its workers died after they had stored the outcome, or before."""
    if is_stored:
        await bus.publish(streams.done_subject(key(1)), Completion("id", Outcome.COMPLETED))
    given_up = Completion("id", Outcome.FAILED, error=ErrorInfo(Code.ABORTED, "given up"))
    settle = SettleCompletion(key(1), "optim_step", given_up, "application/msgpack")
    for _ in range(2):  # a restart performs it again
        await BusSink(bus, Snapshots(bus)).perform(settle, None)
    assert await bus.log.end() == 1
    stored = await bus.stored.get(streams.DONE, streams.done_subject(key(1)))
    assert stored is not None
    outcome = decode(stored.payload, Completion).outcome
    assert outcome is (Outcome.COMPLETED if is_stored else Outcome.FAILED)
    async for entry in bus.log.read():
        assert isinstance(entry.event, OperationFinished)
        assert (entry.event.outcome, entry.event.incarnation) == (outcome, 0)
        break


async def test_outputs_are_stored_though_the_server_dies_under_them(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    sink = BusSink(bus, Snapshots(bus))
    pid = nats_server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # it takes nothing any more, and the connection stands
    failed = Completion("id", Outcome.FAILED)
    async with asyncio.TaskGroup() as tasks:
        write = WriteCompletion(key(1), failed, "application/msgpack")
        performing = tasks.create_task(sink.perform(write, None))
        appending = tasks.create_task(
            RetryingLog(bus, "scheduler").append(SchedulerConfigured(CONFIG))
        )
        await asyncio.sleep(0)  # both are on their way
        await nats_server.kill()
        await nats_server.start()
    assert performing.done()
    assert appending.result() >= 1
    assert await bus.stored.get(streams.DONE, streams.done_subject(key(1))) is not None


async def test_command_for_which_there_is_no_room_waits_and_people_are_told(bus: Bus) -> None:
    full = (await bus.js.stream_info(streams.PERMITS)).config
    full.max_msgs, full.discard = 1, DiscardPolicy.NEW
    await bus.js.update_stream(full)
    notices = await bus.client.subscribe(streams.event_subject("scheduler"))
    sink = BusSink(bus, Snapshots(bus))
    command = ReleaseVersions(CommandId(1, 0), NodeId("t0"), 1, [])
    await sink.perform(SendCommand(command), None)
    again = msgspec.structs.replace(command, id=CommandId(2, 0))
    async with asyncio.TaskGroup() as tasks:
        performing = tasks.create_task(sink.perform(SendCommand(again), None))
        notice = decode((await notices.next_msg(timeout=60)).data, Notice)
        assert (notice.what, performing.done()) == ("waiting for room", False)
        await bus.js.purge_stream(streams.PERMITS)
    stored = (await bus.js.stream_info(streams.PERMITS)).state
    assert (stored.messages, stored.last_seq) == (1, 2)


async def test_job_that_is_forgotten_leaves_nothing_on_the_bus(bus: Bus) -> None:
    sink = BusSink(bus, Snapshots(bus))
    for job in ("a", "b"):
        await bus.publish(streams.done_subject(key(1, job)), Completion("id", Outcome.FAILED))
        await bus.publish(streams.op_subject(key(2, job)), b"late")
        await bus.keys.put(Bucket.VIEW, f"{ACME}.{job}", b"x")
        await bus.keys.put(Bucket.SEALS, f"{ACME}.{job}.policy", b"x")
    async with running(sink.run()):
        await sink.perform(ForgetJob(A, ["policy"]), None)
        await sink.save(1, b"")  # what is to be deleted is, before it is stored
    assert await absent(bus, Bucket.SEALS, f"{POLICY}")
    done = await bus.stored.subjects(streams.DONE, "pl.v1.done.>")
    assert done == [streams.done_subject(key(1, "b"))]
    stored = await bus.stored.subjects(streams.ops_stream(ACME), "pl.v1.op.>")
    assert stored == [streams.op_subject(key(2, "b"))]
    assert await bus.keys.names(Bucket.VIEW) == [f"{ACME}.b"]


async def test_checkpoint_of_an_ended_job_is_gone_before_its_name_is_given_again(bus: Bus) -> None:
    await bus.keys.put(Bucket.CHECKPOINTS, str(A), b"x")
    await BusSink(bus, Snapshots(bus)).perform(DropCheckpoint(A), None)
    assert await absent(bus, Bucket.CHECKPOINTS, str(A))


async def absent(bus: Bus, bucket: Bucket, name: str) -> bool:
    return await bus.keys.get(bucket, name) is None


# --- housekeeping -------------------------------------------------------------------------------


@asynccontextmanager
async def keeping(bus: Bus) -> AsyncIterator[tuple[Housekeeping, Shell]]:
    """A scheduler's fold with one job that is active, and what watches beside it."""
    log = RetryingLog(bus, "scheduler")
    sink = BusSink(bus, Snapshots(bus))
    shell = Shell(Core(), log, sink, CONFIG, snapshot_every=1000)
    async with running(shell.run(), sink.run()):
        await shell.caught_up.wait()
        for event in BEGUN:
            await bus.log.append(event)
        await folded(bus, shell)
        yield Housekeeping(bus, log, shell), shell


async def folded(bus: Bus, shell: Shell) -> None:
    end = await bus.log.end()
    async with asyncio.timeout(60):
        while shell.core.state.sequence < end:
            await asyncio.sleep(0.01)


async def finish(bus: Bus, shell: Shell, seq: int) -> None:
    """An operation that is queued, permitted, and completed."""
    await bus.log.append(QueuedOperation(key(seq), "id", "optim_step", session=1))
    await folded(bus, shell)
    epoch = shell.core.state.deployments[str(POLICY)].activation.epoch
    await bus.publish(streams.done_subject(key(seq)), Completion("id", Outcome.COMPLETED))
    event = OperationFinished(key(seq), "optim_step", Outcome.COMPLETED, epoch, 1, 0.0, 0.0)
    await bus.log.append(event)
    await folded(bus, shell)


async def test_old_outcomes_are_deleted_once_no_rebuild_needs_them(bus: Bus) -> None:
    async with keeping(bus) as (housekeeping, shell):
        await finish(bus, shell, 1)
        for stray in (key(3), key(1, "nobody"), key(1)):
            subject = streams.done_subject(stray)
            if not await bus.stored.subjects(streams.DONE, subject):
                await bus.publish(subject, Completion("id", Outcome.FAILED))
        async with running(housekeeping.sweep_outcomes(0.1, lambda tenant: 0)):
            await until(lambda: is_gone(bus, key(1, "nobody")))
            assert not await is_gone(bus, key(1)), "a rebuild compares with it"
            assert not await is_gone(bus, key(3)), "an attach tells by it what a gap is"
            await bus.log.append(JobFinished(A, "end"))
            await until(lambda: is_gone(bus, key(1)))
            await until(lambda: is_gone(bus, key(3)))


async def test_outcomes_of_a_tenant_short_of_bytes_are_deleted_early(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phaseloom.scheduler.housekeeping.MIN_KEPT_S", 0.0)
    async with keeping(bus) as (housekeeping, shell):
        await finish(bus, shell, 1)
        await bus.publish(streams.done_subject(key(1, "nobody")), Completion("i", Outcome.FAILED))
        state = shell.core.state
        state.outcomes[A.tenant] = {int(shell.now_s() // 60) - 2: 1000}
        await housekeeping.relieve(3600.0, lambda tenant: 0)
        await housekeeping.relieve(3600.0, lambda tenant: 2000)
        assert not await is_gone(bus, key(1, "nobody")), "half of its bytes, or no limit"
        await housekeeping.relieve(3600.0, lambda tenant: 1999)
        assert await is_gone(bus, key(1, "nobody"))
        assert not await is_gone(bus, key(1)), "a rebuild compares with it"
        await folded(bus, shell)
        assert state.outcome_bytes(A.tenant, shell.now_s()) == 0


async def is_gone(bus: Bus, op: OperationKey) -> bool:
    return not await bus.stored.subjects(streams.DONE, streams.done_subject(op))


async def test_controller_without_a_heartbeat_is_reported_and_so_is_its_return(bus: Bus) -> None:
    async with keeping(bus) as (housekeeping, shell), running(housekeeping.watch_sessions()):
        job = shell.core.state.jobs[str(A)]
        await renew_session(bus, A, 1, ttl_s=1)
        assert await next_of(bus, SessionLost) == SessionLost(A, 1)
        await folded(bus, shell)
        assert not job.controller.is_attached
        await renew_session(bus, A, 1, ttl_s=60)
        await until(lambda: value(lambda: job.controller.is_attached))
        await renew_session(bus, A, 1, ttl_s=1)
        await until(lambda: value(lambda: not job.controller.is_attached))


async def test_controller_that_died_while_no_scheduler_watched_is_reported(bus: Bus) -> None:
    await renew_session(bus, A, 1, ttl_s=1)
    await until(lambda: absent(bus, Bucket.LEASES, f"session.{A}"))
    async with keeping(bus) as (housekeeping, _), running(housekeeping.watch_sessions()):
        assert await next_of(bus, SessionLost) == SessionLost(A, 1)


async def value(read: Callable[[], bool]) -> bool:
    return read()


async def next_of(bus: Bus, kind: type[Event]) -> Event:
    async with asyncio.timeout(60):
        async for entry in bus.log.read():
            if isinstance(entry.event, kind):
                return entry.event
    raise AssertionError


# --- two of them --------------------------------------------------------------------------------


async def test_two_leaders_send_every_command_once(bus: Bus) -> None:
    """The lease saves work; were it lost unnoticed, both would send the same under one id."""
    logs = RetryingLog(bus, "scheduler")
    sinks = [BusSink(bus, Snapshots(bus)) for _ in range(2)]
    shells = [Shell(Core(), logs, sink, CONFIG, 1000) for sink in sinks]
    async with running(*(shell.run() for shell in shells), *(sink.run() for sink in sinks)):
        for event in (SchedulerConfigured(CONFIG), *BEGUN):
            await bus.log.append(event)
        for shell in shells:
            await folded(bus, shell)
        for seq in range(1, 4):
            await bus.log.append(QueuedOperation(key(seq), "id", "optim_step", session=1))
        for shell in shells:
            await folded(bus, shell)
            await shell.quiesce()
    sent = (await bus.js.stream_info(streams.PERMITS)).state.messages
    replayed = Core()
    commands = [
        output
        for entry in await entries(bus)
        for output in replayed.step(entry.sequence, entry.time_s, entry.event)
        if isinstance(output, SendCommand)
    ]
    assert sent == len(commands) == 3, "start, open, permit"


async def entries(bus: Bus) -> list[LogEntry]:
    found = []
    end = await bus.log.end()
    async for entry in bus.log.read():
        found.append(entry)
        if entry.sequence == end:
            break
    return found


# --- on a mesh ----------------------------------------------------------------------------------

STEPS = 3
TASK = TASKS[0]


@pytest.fixture
def expected(tmp_path: Path) -> str:
    """SHA-256 of the task's final weights, undisturbed."""
    return oracle(TASK, short(TASK, STEPS), tmp_path)


async def test_standby_goes_on_where_the_leader_was_killed(
    expected: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = short(TASK, STEPS)
    monkeypatch.setenv("PHASELOOM_SCHEDULER_SNAPSHOT_EVERY", "25")
    async with running_mesh(MeshConfig(schedulers=2, seal_every=4), short_dir) as (mesh, log):
        async with asyncio.TaskGroup() as group:
            job = group.create_task(run_job(mesh, TASK, settings))
            await log.until_finished(f"{TASK}.policy.{policy_seq(1, 1)}")
            await kill_until_another_leads(mesh)
        assert job.result() == expected
        await log.caught_up()
        assert log.failures() == []


async def kill_until_another_leads(mesh: Mesh) -> None:
    """The supervisor starts the killed one again, and it too waits for the lease."""
    bus = await Bus.open(mesh.credentials.bus, "killer")
    try:
        async with asyncio.timeout(120):
            while not (held := await leader(bus))[1]:
                await asyncio.sleep(0.05)
            before, pid = held
            os.kill(pid, signal.SIGKILL)
            killed = {pid, 0}
            while (now := await leader(bus))[0] in (before, ""):
                if now[1] not in killed:
                    with suppress(ProcessLookupError):
                        os.kill(now[1], signal.SIGKILL)
                    killed.add(now[1])
                await asyncio.sleep(0.05)
    finally:
        await bus.close()


@pytest.mark.usefixtures("noop_nodes")
async def test_services_that_were_frozen_go_on_by_themselves(short_dir: Path) -> None:
    """As by a machine that has far too much to do."""
    services = ("scheduler", "router", "profiler", "statemgr")
    async with running_mesh(MeshConfig(), short_dir) as (mesh, _), tenant(mesh) as controller:
        job = await controller.submit_job("noop", NOOP)
        policy = job.deployment("policy")
        await policy.optim_step(AdamParams(1e-3))
        before = {service: mesh.pids(service) for service in services}
        async with reading(mesh) as bus:
            for service in services:
                signal_programs(before[service], signal.SIGSTOP)
            try:
                await until(lambda: absent(bus, Bucket.LEASES, scheduler_lease_key()))
            finally:
                for service in services:
                    signal_programs(before[service], signal.SIGCONT)
        await policy.optim_step(AdamParams(1e-3))
        await job.finish()
        assert {service: mesh.pids(service) for service in services} == before


@asynccontextmanager
async def reading(mesh: Mesh) -> AsyncIterator[Bus]:
    bus = await Bus.open(mesh.credentials.bus, "reader")
    try:
        yield bus
    finally:
        await bus.close()


async def leader(bus: Bus) -> tuple[str, int]:
    """Name and process of the scheduler that holds the lease; empty and 0 where none does."""
    stored = await bus.keys.get(Bucket.LEASES, scheduler_lease_key())
    if stored is None:
        return "", 0
    name, _, pid = stored.payload.decode().partition(", pid ")
    return name, int(pid)


STEP = OptimStep(AdamParams(1e-3))


@pytest.mark.usefixtures("noop_nodes")
async def test_life_of_jobs_and_operations_as_a_controller_sees_it(short_dir: Path) -> None:
    async with running_mesh(MeshConfig(), short_dir) as (mesh, log), tenant(mesh) as controller:
        job = await controller.submit_job("noop", NOOP)
        policy = job.deployment("policy")
        await policy.optim_step(AdamParams(1e-3))
        async with Wire.connected(mesh) as wire:
            await cancel_and_expiry(wire, log)
            await why_of_ended(wire)
            await stale_phase(wire)
            await job.finish()
            assert await asks_no_more(wire)
            again = await controller.submit_job("noop", NOOP)
            step = again.deployment("policy").optim_step(AdamParams(1e-3))
            await step
            assert step.seq == 5, "it goes on behind the operations of the job before"
            await again.finish()


async def cancel_and_expiry(wire: Wire, log: Log) -> None:
    """policy 2 is missing, so that 3 and 4 wait; then it comes."""
    await wire.send("noop.policy.3", Operation("three", 1, STEP))
    await log.until_finished("noop.policy.1")
    await log.until_queued("noop.policy.3")
    # The scheduler has come to both once 4, which is behind them, has its outcome.
    await wire.send("noop.policy.4", Operation("four", 1, STEP, timeout_s=0.5))
    assert (await wire.outcome("noop.policy.4")).outcome is Outcome.EXPIRED
    three = OperationRequest("noop", "policy", "3")
    explained = await wire.call("operation.explain", three, Explanation)
    assert explained.state == "queued"
    assert explained.waits_for == ["policy 2 (not published yet), which comes first"]
    assert (await wire.call("operation.cancel", three, Explanation)).state == "cancelled"
    assert (await wire.outcome("noop.policy.3")).outcome is Outcome.CANCELLED
    with pytest.raises(CallerError, match="has ended"):
        await wire.call("operation.cancel", three, Explanation)
    await wire.send("noop.policy.2", Operation("two", 1, STEP))
    assert (await wire.outcome("noop.policy.2")).outcome is Outcome.COMPLETED


async def why_of_ended(wire: Wire) -> None:
    for slot, state in (("3", "cancelled"), ("2", "completed")):
        request = OperationRequest("noop", "policy", slot)
        explained = await wire.call("operation.explain", request, Explanation)
        assert explained.state == state
        assert explained.waits_for == []
    unknown = OperationRequest("noop", "policy", "99")
    with pytest.raises(CallerError, match="is not open"):
        await wire.call("operation.explain", unknown, Explanation)


@pytest.mark.usefixtures("noop_nodes")
async def test_deployments_come_and_go_and_the_job_drains(short_dir: Path) -> None:
    async with running_mesh(MeshConfig(), short_dir) as (mesh, log), tenant(mesh) as controller:
        job = await controller.submit_job("noop", NOOP)
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        await sampler.sync_weights(policy.publish_weights())
        like = msgspec.structs.replace(NOOP[1], name="judge")
        judge = await job.create_deployment(like)
        with pytest.raises(CallerError) as exists:
            await job.create_deployment(like)
        assert exists.value.info.code is Code.ALREADY_EXISTS
        await judge.generate([Prompt([1])], SamplingParams(1))
        waiting = judge.generate([Prompt([1])], SamplingParams(1), after=[After("policy", 99)])
        await log.until(lambda e: is_queued(e, "noop.judge.2"))
        await job.delete_deployment("judge")
        with pytest.raises(ResourceError) as aborted:
            await waiting
        assert aborted.value.info.code is Code.ABORTED
        judge = await job.create_deployment(like)
        again = judge.generate([Prompt([1])], SamplingParams(1))
        await again
        assert again.seq == 3, "it goes on behind the one before"
        await job.delete_deployment("policy")  # the sampler holds a version of it
        await sampler.generate([Prompt([1])], SamplingParams(1))
        stranded = sampler.generate([Prompt([1])], SamplingParams(1), after=[After("judge", 99)])
        await log.until(lambda e: is_queued(e, "noop.sampler.3"))
        await deafen(controller)  # the outcome is stored, and does not come by itself
        await job.drain()
        with pytest.raises(CallerError, match="is draining"):
            await stranded
        assert (await controller.status("noop")).state == "done"


async def deafen(controller: client.Mesh) -> None:
    for subscription in list(controller._client._subs.values()):
        if subscription.subject.startswith(f"{streams.PREFIX}.out."):
            await subscription.unsubscribe()


def is_queued(event: Event, operation: str) -> bool:
    return isinstance(event, QueuedOperation) and str(event.key) == f"{TENANT}.{operation}"


async def stale_phase(wire: Wire) -> None:
    for is_open in (True, False):
        declared = PhaseRequest("noop", 1, "train", is_open)
        assert (await wire.call("phase.declare", declared, JobStatus)).state == "active"
    with pytest.raises(ResourceError) as caught:
        await wire.call("phase.declare", PhaseRequest("noop", 0, "train", True), JobStatus)
    assert caught.value.info.code is Code.ABORTED
    with pytest.raises(CallerError, match="no deployment in pool"):
        await wire.call("phase.declare", PhaseRequest("noop", 1, "gpu", True), JobStatus)


async def asks_no_more(wire: Wire) -> bool:
    """An operation of a job that has ended is refused, and answered."""
    await wire.send("noop.sampler.rlate", Operation("late", 1, Generate([], SamplingParams(1))))
    return (await wire.outcome("noop.sampler.rlate")).outcome is Outcome.FAILED


async def test_job_whose_seal_is_damaged_falls_back_to_its_checkpoint_whole(
    short_dir: Path,
) -> None:
    config = MeshConfig(seal_every=2)
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as controller:
        job = await controller.submit_job("grpo", deployments(short(TASK, 1)))
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        await train(policy)
        saved = await policy.save_state("best", controller_blob=b"step 1")
        await train(policy)
        published = policy.publish_weights()
        await sampler.sync_weights(published)
        await log.until(lambda e: isinstance(e, SealCommitted))
        for seal in (mesh.run_dir / "nodes" / "train-0").rglob("*seal*"):
            if seal.is_file():
                damage(seal)
        waiting = sampler.generate([Prompt([1])], SamplingParams(1), after=[After("policy", 99)])
        kill_rank(mesh, "grpo.policy")
        with pytest.raises(ResourceError) as caught:
            await waiting
        assert caught.value.info.code is Code.ABORTED
        assert caught.value.info.details == {"rolled_back_to": "best"}
        await until(lambda: is_in_state(controller, "rolled_back"))
        again = await controller.attach("grpo")
        assert again.checkpoint is not None
        assert again.checkpoint.controller_blob == b"step 1"
        await until(lambda: is_in_state(controller, "active"))
        policy, sampler = again.deployment("policy"), again.deployment("sampler")
        restored = await policy.save_state("after")
        assert restored.weights_sha256 == saved.weights_sha256
        await train(policy)
        await sampler.sync_weights(policy.publish_weights())
        await again.finish()


async def train(policy: client.Deployment) -> None:
    batch = [client.Datum([1, 2, 3], [2, 3, 4], weights=[1.0, 1.0, 1.0])]
    policy.forward_backward(batch, "cross_entropy")
    await policy.optim_step(AdamParams(1e-2))


async def is_in_state(controller: client.Mesh, state: str) -> bool:
    return (await controller.status("grpo")).state == state


def damage(file: Path) -> None:
    """Flip what is in its middle, as a bad disk does."""
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64 * [0xAA])
    file.write_bytes(content)
