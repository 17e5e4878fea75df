"""Three NATS servers that replicate everything: a job goes on whichever of them is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from loadtest.cuttingoff import EnsembleBehindProxies
from phaseloom import client
from phaseloom.cli import doctor
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.storecheck import check_store
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.events import OperationFinished, TimerFired
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.operations import Completion, Outcome
from phaseloom.common.contract.streams import DONE, SCHED, Bucket, done_subject
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.keys import Conflict
from phaseloom.common.transport.link import AlreadyStored
from phaseloom.common.transport.natsserver import MEMBERS, EmbeddedEnsemble
from phaseloom.common.transport.retry import until_done
from tests.support.jobs import NOOP, TASKS, Log, following, run_job, short, tenant

STEPS = 2
NUM_EVENTS = 100
THREE = MeshConfig(nats_servers=3, schedulers=2)


async def leader_of(bus: Bus, stream: str) -> str:
    """The server that leads a stream."""
    cluster = (await bus.js.stream_info(stream)).cluster
    assert cluster is not None
    assert cluster.leader
    return cluster.leader


async def follower_of(bus: Bus, stream: str) -> str:
    leader = await leader_of(bus, stream)
    return next(name for name in MEMBERS if name != leader)


async def whole(bus: Bus, stream: str = SCHED) -> None:
    """Until every server has all of a stream."""
    async with asyncio.timeout(60):
        while True:
            try:
                cluster = (await bus.js.stream_info(stream)).cluster
            except Exception:  # nobody leads it right now
                cluster = None
            peers = cluster.replicas or [] if cluster is not None and cluster.leader else []
            if len(peers) == 2 and all(peer.current and not peer.offline for peer in peers):
                return
            await asyncio.sleep(0.1)


# --- the servers alone ----------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ensemble(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedEnsemble]:
    directory = tmp_path_factory.mktemp("three")
    async with EmbeddedEnsemble(directory, ["acme"], fsync=False) as servers:
        yield servers


@asynccontextmanager
async def buses(ensemble: EmbeddedEnsemble) -> AsyncIterator[list[Bus]]:
    """One connection to each server."""
    config = ensemble.credentials.bus
    each = [replace(config, url=server.credentials.url) for server in ensemble.members.values()]
    opened = await asyncio.gather(*(Bus.open(one, "test") for one in each))
    yield opened
    for bus in opened:
        await bus.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_one_of_many_writers_is_first_whichever_server_it_speaks_with(
    ensemble: EmbeddedEnsemble,
) -> None:
    async with buses(ensemble) as opened:
        for number in range(8):
            key = OperationKey("acme", "race", "policy", str(number))

            async def write(bus: Bus, name: str, key: OperationKey = key) -> str:
                done = Completion(name, Outcome.COMPLETED)
                try:
                    await bus.publish(done_subject(key), done)
                except AlreadyStored:
                    return ""
                return name

            writers = [write(bus, f"{i}-{n}") for i, bus in enumerate(opened) for n in range(4)]
            (first,) = [name for name in await asyncio.gather(*writers) if name]
            subject = done_subject(key)
            for bus in opened:
                stored = await bus.stored.get(DONE, subject)
                assert stored is not None
                assert first.encode() in stored.payload


@pytest.mark.asyncio(loop_scope="module")
async def test_one_of_many_holders_takes_a_key_whichever_server_it_speaks_with(
    ensemble: EmbeddedEnsemble,
) -> None:
    async with buses(ensemble) as opened:
        revision = 0
        for number in range(8):

            async def take(bus: Bus, name: str, revision: int = revision) -> int:
                try:
                    return await bus.keys.swap(Bucket.LEASES, "race", name.encode(), revision)
                except Conflict:
                    return 0

            takers = [take(bus, f"{number}-{i}") for i, bus in enumerate(opened * 4)]
            (revision,) = [taken for taken in await asyncio.gather(*takers) if taken]


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_acknowledged_is_read_at_once_whichever_server_is_asked(
    ensemble: EmbeddedEnsemble,
) -> None:
    """A server that only follows may lag behind what is acknowledged: it does not answer."""
    async with buses(ensemble) as opened:
        for number in range(60):
            value = str(number).encode()
            await opened[number % 3].keys.put(Bucket.VIEW, "read", value)
            for bus in opened:
                stored = await bus.keys.get(Bucket.VIEW, "read")
                assert stored is not None
                assert stored.payload == value


@pytest.mark.asyncio(loop_scope="module")
async def test_streams_made_for_one_server_get_their_copies(ensemble: EmbeddedEnsemble) -> None:
    config = ensemble.credentials.bus
    alone = await Bus.open(replace(config, replicas=1), "test")
    await alone.provision_tenant("acme", 2**20)
    await alone.close()
    bus = await Bus.open(config, "test")
    await bus.provision_tenant("acme", 2**20)
    made = (await bus.js.stream_info("OPS_acme")).config
    assert (made.num_replicas, made.allow_direct) == (3, False)
    await bus.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_doctor_says_which_server_lacks_streams(
    ensemble: EmbeddedEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ensemble.credentials.bus
    bus = await Bus.open(config, "test")
    await whole(bus)
    for name in ("url", "user", "password", "replicas"):
        monkeypatch.setenv(f"PHASELOOM_BUS_{name.upper()}", str(getattr(config, name)))

    async def until(verdict: doctor.Verdict, server: str = "") -> None:
        """Any server may lag behind for a moment on a busy machine."""
        async with asyncio.timeout(60):
            while True:
                findings = {f.check: f for f in await doctor.server_findings()}
                found = findings.get("replicas")
                if found is not None and found.verdict is verdict and server in found.found:
                    return

    await until(doctor.Verdict.OK)
    lost = await follower_of(bus, SCHED)
    await ensemble.members[lost].stop()
    await until(doctor.Verdict.WARNING, lost)
    await ensemble.members[lost].start()
    await whole(bus)
    await bus.close()


# --- stores that are not what they were -----------------------------------------------------------


def _cut_short(store: Path, _: Path) -> None:
    messages = store / "jetstream/MESH/streams/SCHED/msgs"
    (block,) = messages.glob("*.blk")
    os.truncate(block, block.stat().st_size // 2)
    (messages / "index.db").unlink(missing_ok=True)


def _put_back(store: Path, older: Path) -> None:
    shutil.rmtree(store)
    shutil.copytree(older, store)


def _wipe(store: Path, _: Path) -> None:
    shutil.rmtree(store)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [_cut_short, _put_back, _wipe])
async def test_server_that_has_lost_messages_gets_them_from_the_others(
    tmp_path: Path, damage: Callable[[Path, Path], None]
) -> None:
    nats = await _stores(tmp_path)
    damage(nats / "nats-2/store", tmp_path / "older/nats-2/store")
    async with EmbeddedEnsemble(nats, ["acme"], fsync=False) as ensemble:
        bus = await Bus.open(ensemble.credentials.bus, "test")
        await until_done(lambda: check_store(bus, 2 * NUM_EVENTS), "check")
        await whole(bus)
        await bus.close()
        # It alone, with one other, has all that there was.
        await ensemble.members["nats-1"].kill()
        bus = await Bus.open(ensemble.credentials.bus, "test")
        extent = await until_done(lambda: check_store(bus, 2 * NUM_EVENTS), "check")
        assert (extent.first, extent.num_entries) == (1, 2 * NUM_EVENTS)
        await bus.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_older", [2, 3])
async def test_older_copies_of_most_stores_are_noticed(tmp_path: Path, num_older: int) -> None:
    """With two of them it is the servers' election that decides: the third one leads and heals the
    others, or the two do and it is noticed. Never is a part of the log gone unnoticed."""
    nats = await _stores(tmp_path)
    for name in MEMBERS[:num_older]:
        _put_back(nats / name / "store", tmp_path / "older" / name / "store")
    async with EmbeddedEnsemble(nats, ["acme"], fsync=False) as ensemble:
        bus = await Bus.open(ensemble.credentials.bus, "test")
        end: int | Code
        try:
            end = (await until_done(lambda: check_store(bus, 2 * NUM_EVENTS), "check")).last
        except ResourceError as error:
            end = error.info.code
        await bus.close()
    healed = 2 * NUM_EVENTS
    assert end in ([healed, Code.DATA_LOSS] if num_older < len(MEMBERS) else [Code.DATA_LOSS])


async def _stores(directory: Path) -> Path:
    """Stores of three servers with `2 * NUM_EVENTS` events in the log, and in `older` what they
    were with half of them."""
    nats = directory / "nats"
    for older in (directory / "older", None):
        async with EmbeddedEnsemble(nats, ["acme"], fsync=False) as ensemble:
            bus = await Bus.open(ensemble.credentials.bus, "test")
            for number in range(NUM_EVENTS):
                await bus.log.append(TimerFired(str(number)))
            await whole(bus)
            await bus.close()
        if older is not None:
            shutil.copytree(nats, older)
    return nats


# --- a mesh on them ------------------------------------------------------------------------------

Fault = Callable[[Mesh, Bus], Coroutine[None, None, None]]


async def kill_log_leader(mesh: Mesh, bus: Bus) -> None:
    assert mesh.kill(await leader_of(bus, SCHED))


async def kill_follower(mesh: Mesh, bus: Bus) -> None:
    assert mesh.kill(await follower_of(bus, SCHED))


async def kill_leases_leader(mesh: Mesh, bus: Bus) -> None:
    assert mesh.kill(await leader_of(bus, f"KV_{Bucket.LEASES}"))


async def kill_meta_leader(mesh: Mesh, bus: Bus) -> None:
    """Who decides where streams and consumers are. No stream needs it to be read or written."""
    assert mesh.kill(await meta_leader(mesh))


async def meta_leader(mesh: Mesh) -> str:
    logs = [(mesh.run_dir / "nats" / name / "nats.log", name) for name in MEMBERS]
    told = [
        (line.split("] ", 1)[1][:26], name)
        for log, name in logs
        for line in log.read_text().splitlines()
        if "Self is new JetStream cluster metadata leader" in line
    ]
    return max(told)[1]


async def freeze_log_leader(mesh: Mesh, bus: Bus) -> None:
    """It stands still for longer than the others wait for it, then goes on as if it led."""
    frozen = await leader_of(bus, SCHED)
    mesh.kill(frozen, signal.SIGSTOP)
    try:
        await asyncio.sleep(12)
    finally:
        mesh.kill(frozen, signal.SIGCONT)


async def cut_off_log_leader(mesh: Mesh, bus: Bus) -> None:
    """It runs on without the others for less than it takes to give up leading, and then longer."""
    assert isinstance(mesh.servers, EnsembleBehindProxies)
    for seconds in (7, 14):
        lonely = await leader_of(bus, SCHED)
        mesh.servers.cut_off(lonely)
        await asyncio.sleep(seconds)
        mesh.servers.bring_back(lonely)
        await whole(bus)


async def restart_all_in_turn(mesh: Mesh, bus: Bus) -> None:
    for name in MEMBERS:
        (before,) = mesh.pids(name)
        mesh.kill(name, signal.SIGTERM)
        async with asyncio.timeout(60):
            while mesh.pids(name) in ([], [before]):
                await asyncio.sleep(0.05)
        await whole(bus)


async def disturbed(fault: Fault, expected: dict[str, str], directory: Path) -> None:
    """Run a job, and the fault while it does: the weights are those of nobody disturbed."""
    file = directory / "credentials.json"
    servers = None
    if fault is cut_off_log_leader:
        servers = EnsembleBehindProxies(
            directory / "nats", THREE.tenants, credentials_file=file, fsync=False
        )
    async with (
        Mesh(replace(THREE, fsync=False), directory, servers=servers) as mesh,
        following(mesh) as log,
    ):
        await mesh.ready()
        bus = await Bus.open(mesh.credentials.bus, "looker")
        faults: list[asyncio.Task[None]] = []

        async def begin(name: str) -> None:
            if name == "start":
                faults.append(asyncio.create_task(fault(mesh, bus)))

        task = TASKS[0]
        began_s = time.monotonic()
        weights = await run_job(mesh, task, short(task, STEPS), barrier=begin)
        print(f"{fault.__name__}: {time.monotonic() - began_s:.1f} s")
        await asyncio.gather(*faults)
        assert weights == expected[task]
        await check_once(mesh, bus, log)
        await bus.close()


async def check_once(mesh: Mesh, bus: Bus, log: Log) -> None:
    """Nothing failed, all three servers are there again with all there is, and no outcome is
    doubled."""
    await whole(bus)
    await log.caught_up()
    assert log.failures() == []
    assert len(mesh.pids("nats")) == 3
    for deployment in (f"{TASKS[0]}.policy", f"{TASKS[0]}.sampler"):
        finished = log.finished(deployment)
        assert finished
        assert sorted(set(finished)) == list(range(1, max(finished) + 1))


@pytest.mark.slow
async def test_job_goes_on_to_the_same_weights_when_the_logs_leader_is_killed(
    expected: dict[str, str], short_dir: Path
) -> None:
    await disturbed(kill_log_leader, expected, short_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        kill_follower,
        kill_leases_leader,
        kill_meta_leader,
        freeze_log_leader,
        cut_off_log_leader,
        restart_all_in_turn,
    ],
)
async def test_job_goes_on_to_the_same_weights_whatever_happens_to_one_server(
    fault: Fault, expected: dict[str, str], short_dir: Path
) -> None:
    await disturbed(fault, expected, short_dir)


# --- full disks ----------------------------------------------------------------------------------


class Disk:
    """A disk of its own for a server's store, which can be full: a tmpfs, whose size can change."""

    ROOM = "2g"
    """At most so much; only what is written takes memory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __enter__(self) -> Disk:
        self.directory.mkdir(parents=True)
        self._mount(f"size={self.ROOM}")
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", self.directory], check=True)

    def fill(self) -> None:
        while True:
            used = shutil.disk_usage(self.directory).used
            with suppress(subprocess.CalledProcessError):  # more was written meanwhile
                return self._mount(f"remount,size={used}")

    def make_room(self) -> None:
        self._mount(f"remount,size={self.ROOM}")

    def _mount(self, options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.directory)]
        subprocess.run(command, check=True)


needs_mount = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="needs root, to mount a small disk"
)


@asynccontextmanager
async def on_small_disks(directory: Path) -> AsyncIterator[tuple[Mesh, Log, list[Disk]]]:
    """A mesh of three servers, each with its store on a disk of its own."""
    with ExitStack() as stack:
        places = [directory / "nats" / name / "store" for name in MEMBERS]
        disks = [stack.enter_context(Disk(place)) for place in places]
        async with (
            Mesh(replace(THREE, fsync=False, schedulers=1), directory) as mesh,
            following(mesh) as log,
        ):
            await mesh.ready()
            yield mesh, log, disks


async def steps(policy: client.Deployment, done: list[int], number: int = 2**30) -> None:
    """Steps of a policy, one after another; each that is done is noted."""
    for _ in range(number):
        await policy.optim_step(client.AdamParams(1e-3))
        done.append(len(done))


async def restarted(mesh: Mesh, name: str, before: list[int]) -> None:
    async with asyncio.timeout(120):
        while not mesh.pids(name) or mesh.pids(name) == before:
            await asyncio.sleep(0.1)


@needs_mount
@pytest.mark.slow
@pytest.mark.usefixtures("noop_nodes")
async def test_full_disk_of_one_server_stops_nobody_and_it_is_restarted_once_there_is_room(
    short_dir: Path,
) -> None:
    async with on_small_disks(short_dir) as (mesh, log, disks), tenant(mesh) as connected:
        policy = (await connected.submit_job("job", NOOP)).deployment("policy")
        bus = await Bus.open(mesh.credentials.bus, "looker")
        full = await leader_of(bus, SCHED)
        disk, before = disks[MEMBERS.index(full)], mesh.pids(full)
        disk.fill()
        await steps(policy, [], 40)
        async with asyncio.timeout(60):
            while not (told := [n for n in await bus.newest_notices(9) if n.what == "disk_full"]):
                await asyncio.sleep(0.1)
        assert (told[0].subject, "RESOURCE_EXHAUSTED" in told[0].reason) == (full, True)
        disk.make_room()
        await restarted(mesh, full, before)
        await whole(bus)
        await steps(policy, [], 5)
        await log.until_finished("job.policy.45")
        assert log.finished("job.policy") == list(range(1, 46))
        assert log.failures() == []
        await bus.close()


@needs_mount
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("noop_nodes")
async def test_jobs_stop_with_a_reason_when_all_disks_are_full_and_go_on_with_room(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The controller is told, attaches again, and finds every step that was acknowledged."""
    async with on_small_disks(short_dir) as (mesh, log, disks):
        before = {name: mesh.pids(name) for name in MEMBERS}
        async with tenant(mesh) as connected:
            policy = (await connected.submit_job("job", NOOP)).deployment("policy")
            done: list[int] = []
            await steps(policy, done, 5)
            for disk in disks:
                disk.fill()
            with pytest.raises(ResourceError) as stopped:
                await steps(policy, done)
            unanswered = len(done) + 1
            assert stopped.value.info.code == Code.UNAVAILABLE
            assert "free disk space" in stopped.value.info.remedy
        told = [record.message for record in caplog.records if "is full: " in record.message]
        assert len(told) == len(MEMBERS)
        for disk in disks:
            disk.make_room()
        for name in MEMBERS:
            await restarted(mesh, name, before[name])
        await mesh.ready(120)
        async with tenant(mesh) as connected:
            job = await connected.attach("job")
            await steps(job.deployment("policy"), done, 5)
            await log.until(lambda _: len(log.finished("job.policy")) >= len(done) - 1)
        finished = log.finished("job.policy")
        assert finished == sorted(set(finished)), "none twice"
        # What came through as the disks filled may have its end in the log by a replay alone.
        ended = {e.key.seq for e in log.events if isinstance(e, OperationFinished)}
        missing = set(range(1, finished[-1] + 1)) - ended
        assert missing <= {unanswered}, "all that was acknowledged is there"


@needs_mount
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("noop_nodes")
async def test_mesh_outlives_a_disk_that_is_full_of_its_whole_run(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where it is the machine's only disk: its own small files ended the mesh."""
    with Disk(short_dir / "run") as disk:
        config = MeshConfig(fsync=False)
        async with Mesh(config, disk.directory) as mesh, following(mesh) as log:
            await mesh.ready()
            async with tenant(mesh) as connected:
                job = await connected.submit_job("job", NOOP)
                await steps(job.deployment("policy"), [], 5)
            disk.fill()
            before = mesh.kill("nats")
            async with asyncio.timeout(60):
                while "nats does not start" not in caplog.text:
                    await asyncio.sleep(0.1)
            disk.make_room()
            await restarted(mesh, "nats", before)
            await mesh.ready(120)
            async with tenant(mesh) as connected:
                job = await connected.attach("job")
                await steps(job.deployment("policy"), [], 5)
            await log.until_finished("job.policy.10")
