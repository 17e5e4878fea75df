"""`phaseloom backup` and `restore`: a run that is copied while it works, lost, and gone on with."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpo import deployments, train
from rich.console import Console
from settings import Settings

from loadtest.machine import Failed, Machine
from phaseloom import client
from phaseloom.cli.backup import MANIFEST, backup, restore
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.events import TimerFired
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.logmark import read_mark
from phaseloom.common.transport.natsserver import EmbeddedServer
from tests.support.jobs import TASKS, TENANT, Reports, oracle, short

pytestmark = pytest.mark.long

STEPS = 4


class Progress(Reports):
    """What a controller has said, and how many steps of it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self._moved = asyncio.Event()

    def __call__(self, event: str, **values: Any) -> None:
        super().__call__(event, **values)
        if event == "step":
            self.steps += 1
            self._moved.set()

    async def reached(self, step: int) -> None:
        while self.steps < step:
            self._moved.clear()
            await self._moved.wait()


async def control(
    machine: Machine, task: str, said: Progress, until: asyncio.Event, *, attaches: bool = False
) -> str:
    """Be the controller of a job, from its beginning or its last checkpoint; its weights.

    Args: until: set once the job may end.
    """
    credentials = machine.credentials
    settings = settings_of(task)

    async def barrier(name: str) -> None:
        if name == "end":
            await until.wait()

    async with client.connect(credentials.url, TENANT, credentials.tenants[TENANT]) as mesh:
        if attaches:
            job = await mesh.attach(task)
        else:
            job = await mesh.submit_job(task, deployments(settings))
        await train(job, task, settings, said, barrier, last=job.checkpoint)
        await job.finish()
    return said.weights_sha256


async def attached(machine: Machine, task: str, until: asyncio.Event) -> str:
    """Be a controller that attaches, and does so again where its job falls back after that."""
    while True:
        try:
            return await control(machine, task, Progress(), until, attaches=True)
        except PhaseloomError as error:
            if error.info.code is not Code.ABORTED:
                raise


def settings_of(task: str) -> Settings:
    return replace(short(task, STEPS), checkpoint_every=2)


@pytest.fixture
async def machine(tmp_path: Path, cold_nodes: None) -> AsyncIterator[Machine]:
    """A mesh that is up, whose services a backup can stop."""
    mesh_file = tmp_path / "mesh.toml"
    mesh_file.write_text("[mesh]\nseal_every = 6\n")
    machine = Machine(tmp_path / "runs", tmp_path / "mesh.log", ["--mesh-file", str(mesh_file)])
    await machine.start()
    yield machine
    await machine.stop()


class Jobs:
    """Both jobs in training, with a backup that was made meanwhile."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._may_end = asyncio.Event()
        self._said = {task: Progress() for task in TASKS}
        self._running = [
            asyncio.create_task(control(machine, task, said, self._may_end))
            for task, said in self._said.items()
        ]

    async def back_up(self, copy: Path) -> None:
        """Make a backup when some steps are done, and let the jobs take the others."""
        await asyncio.gather(*(each.reached(3) for each in self._said.values()))
        told = await in_a_process("backup", str(copy), "--run", str(self._machine.run_dir))
        assert "the mesh was paused for" in told
        await asyncio.gather(*(each.reached(STEPS) for each in self._said.values()))

    async def go_on(self) -> None:
        """The controllers of before are told that they must attach again; others go on from the
        last checkpoint that there is, to the weights that nothing has disturbed."""
        self._may_end.set()
        for controller in self._running:
            with pytest.raises(PhaseloomError) as refusal:
                async with asyncio.timeout(120):
                    await controller
            assert refusal.value.info.code is Code.ABORTED
        ends = [attached(self._machine, task, self._may_end) for task in TASKS]
        place = self._machine.log
        assert await asyncio.gather(*ends) == [
            await asyncio.to_thread(oracle, task, short(task, STEPS), place.with_name(task))
            for task in TASKS
        ]


@pytest.mark.timeout(1200)
async def test_jobs_go_on_from_a_backup_to_the_same_weights(
    machine: Machine, tmp_path: Path
) -> None:
    """The machine is lost with its disk after the backup; the run is restored on another one."""
    copy, restored = tmp_path / "copy", tmp_path / "elsewhere" / "run"
    jobs = Jobs(machine)
    await jobs.back_up(copy)
    await machine.kill()
    assert read_mark(copy / "run/nodes/train-0") > 0
    shutil.rmtree(machine.runs)

    told = await in_a_process("restore", str(copy), str(restored))
    assert "controllers of 2 jobs must attach again" in told
    machine.runs.mkdir()
    (machine.runs / "latest").symlink_to(restored)
    await machine.start("--resume", "--run", str(restored))
    await jobs.go_on()


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_jobs_fall_back_to_their_checkpoints_on_an_older_store(
    machine: Machine, tmp_path: Path
) -> None:
    """An operator puts back a copy of the server's store alone, under nodes that have gone on."""
    jobs = Jobs(machine)
    await jobs.back_up(tmp_path / "copy")
    await machine.kill()
    store = machine.run_dir / "nats/store"
    shutil.rmtree(store)
    shutil.copytree(tmp_path / "copy/run/nats/store", store)

    with pytest.raises(Failed, match="DATA_LOSS: the decision log ends at"):
        await machine.start("--resume")
    await machine.start("--resume", "--accept-loss")
    await jobs.go_on()


async def in_a_process(*words: str) -> str:
    command = [sys.executable, "-m", "phaseloom.cli.main", *words]
    done = await asyncio.to_thread(
        subprocess.run, command, check=False, capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has ended, with a log of three entries, a session and a file of a node."""
    run = tmp_path / "run"

    async def fill(bus: Bus) -> None:
        for number in range(3):
            await bus.log.append(TimerFired(f"timer-{number}."))
        await bus.keys.put(Bucket.SESSIONS, "demo.sums", b"3")

    run.mkdir()
    asyncio.run(served(run, fill))
    (run / "mesh.json").write_text(json.dumps({"pid": 0, "pids": {}}))
    (run / "logs").mkdir()
    (run / "nodes/train-0").mkdir(parents=True)
    (run / "nodes/train-0/a.state").write_bytes(b"state")
    return run


def test_what_is_restored_is_what_the_run_had(run_dir: Path, tmp_path: Path) -> None:
    backup(tmp_path / "copy", run=run_dir)
    target = tmp_path / "restored"
    target.mkdir()
    told = restored(tmp_path / "copy", target)

    assert "the decision log up to 3" in told
    assert "controllers of 1 jobs must attach again" in told
    assert (target / "nodes/train-0/a.state").read_bytes() == b"state"
    assert (target / "credentials.json").read_bytes() == (run_dir / "credentials.json").read_bytes()
    assert not (target / "logs").exists()

    async def look(bus: Bus) -> None:
        assert await bus.log.end() == 3
        session = await bus.keys.get(Bucket.SESSIONS, "demo.sums")
        assert session is not None
        assert int(session.payload) > 3, "a controller of before would go on"

    asyncio.run(served(target, look))


def test_processes_that_have_the_ids_of_an_ended_run_are_left_alone(
    run_dir: Path, tmp_path: Path
) -> None:
    """As after a restart of the machine: they would have been stopped for the copy."""
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        state = {"pid": os.getpid(), "pids": {"router-0": stranger.pid}}
        (run_dir / "mesh.json").write_text(json.dumps(state))
        backup(tmp_path / "copy", run=run_dir)
        moved = os.waitid(os.P_PID, stranger.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        assert moved is None
    finally:
        stranger.kill()
        stranger.wait()


def test_damaged_backup_is_refused_with_the_names_of_its_files(
    run_dir: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    backup(copy, run=run_dir)
    (copy / "run/nodes/train-0/a.state").write_bytes(b"stale")
    (copy / "run/credentials.json").unlink()
    with pytest.raises(ResourceError) as refusal:
        restored(copy, tmp_path / "restored")
    assert refusal.value.info.code is Code.DATA_LOSS
    assert "credentials.json, nodes/train-0/a.state" in refusal.value.info.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "run"]


def test_store_that_lies_is_not_backed_up(run_dir: Path, tmp_path: Path) -> None:
    (block,) = run_dir.glob("nats/store/jetstream/MESH/streams/SCHED/msgs/*.blk")
    damaged = bytearray(block.read_bytes())
    damaged[damaged.index(b"timer-1.")] ^= 1
    block.write_bytes(damaged)
    with pytest.raises(ResourceError) as refusal:
        backup(tmp_path / "copy", run=run_dir)
    assert refusal.value.info.code is Code.DATA_LOSS
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (Code.ALREADY_EXISTS, "backup over something"),
        (Code.INVALID_ARGUMENT, "backup into the run"),
        (Code.FAILED_PRECONDITION, "restore over something"),
        (Code.NOT_FOUND, "restore what is no backup"),
        (Code.FAILED_PRECONDITION, "restore another format"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_do(
    run_dir: Path, tmp_path: Path, code: Code, what: str
) -> None:
    copy = tmp_path / "copy"
    backup(copy, run=run_dir)
    other_format = tmp_path / "other"
    shutil.copytree(copy, other_format)
    manifest = json.loads((copy / MANIFEST).read_text())
    (other_format / MANIFEST).write_text(json.dumps(manifest | {"format": 0}))
    calls: dict[str, Callable[[], object]] = {
        "backup over something": lambda: backup(copy, run=run_dir),
        "backup into the run": lambda: backup(run_dir / "copy", run=run_dir),
        "restore over something": lambda: restored(copy, run_dir),
        "restore what is no backup": lambda: restored(run_dir, tmp_path / "new"),
        "restore another format": lambda: restored(other_format, tmp_path / "new"),
    }
    with pytest.raises(CallerError) as refusal:
        calls[what]()
    assert refusal.value.info.code is code
    assert refusal.value.info.remedy


def test_mesh_goes_on_where_its_backup_is_killed(tmp_path: Path) -> None:
    """Else it would stand still for ever."""
    works = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        state = {"pid": os.getpid(), "pids": {"works": works.pid}}
        (tmp_path / "mesh.json").write_text(json.dumps(state))
        code = (
            "from pathlib import Path\n"
            "from phaseloom.cli.backup import paused\n"
            f"with paused(Path({str(tmp_path)!r})):\n"
            "    print('still', flush=True); input()"
        )
        pipe = subprocess.PIPE
        making = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
        with making:
            assert making.stdout is not None
            assert making.stdout.readline() == "still\n"
            assert status(works.pid) == "T"
            making.kill()
        os.waitid(os.P_PID, works.pid, os.WCONTINUED)
        assert status(works.pid) in {"R", "S"}
    finally:
        works.send_signal(signal.SIGCONT)
        works.kill()
        works.wait()


def status(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def restored(copy: Path, target: Path) -> str:
    told = io.StringIO()
    restore(copy, target, console=Console(file=told))
    return told.getvalue()


async def served(run: Path, use: Callable[[Bus], Awaitable[None]]) -> None:
    """Use the store of a run, as its server has it."""
    file = run / "credentials.json"
    async with EmbeddedServer(run / "nats", ["demo"], credentials_file=file) as server:
        bus = await Bus.open(server.credentials.bus, "test")
        await use(bus)
        await bus.close()
