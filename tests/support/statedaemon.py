"""A state manager as a process of its own, with an agent's connection and ranks in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_agent import StatusReport
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.contract.state_rank import RankHello, StateMessage
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.transport.framing import Handler, Peer
from phaseloom.worker.agent.stateclient import AgentStateClient
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.heap import Heap
from tests.support.meshcerts import NODE, SECRET, certificates
from tests.support.staterank import fill, slots_of
from tests.support.warm import WARM, program_pid

MiB = 1024 * 1024
POLICY = DeploymentKey("acme", "sums", "policy")
SAMPLER = DeploymentKey("acme", "sums", "sampler")
OTHER = DeploymentKey("acme", "letters", "policy")
ROOT = Path(__file__).parents[2]

T = TypeVar("T")


@dataclass
class Daemon:
    """A state manager process and an agent's connection to it."""

    directory: Path
    environment: dict[str, str]
    tasks: asyncio.TaskGroup
    launcher: tuple[str, ...] = ()
    """Command that runs the process's."""
    process: asyncio.subprocess.Process = field(init=False)
    agent: AgentStateClient = field(init=False)
    ranks: list[RankStateClient] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    _reading: asyncio.Task[None] = field(init=False)
    """Its log, to the end."""

    @property
    def pid(self) -> int:
        """The pid of the state manager itself."""
        return program_pid(self.process.pid)

    @property
    def socket(self) -> Path:
        return self.directory / "state.sock"

    @property
    def files(self) -> Path:
        return self.directory / "files"

    async def digested(self) -> None:
        """Every host copy has its digest."""
        while any(state.dirty_bytes for state in (await self.agent.status()).deployments):
            pass

    async def endpoint(self) -> str:
        return (await self.agent.status()).endpoint

    async def launch(self) -> None:
        """Start the process; returns when it serves."""
        environment = dict(self.environment)
        if self.launcher:
            # What the launcher does to its own process has to be done to the state manager.
            environment.pop(WARM, None)
        process = await asyncio.create_subprocess_exec(
            *self.launcher,
            sys.executable,
            "-m",
            "phaseloom.statemgr.main",
            env=environment,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        serves: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._reading = self.tasks.create_task(self._read_log(process.stderr, serves))
        self.process = process
        assert await serves, self.text()

    async def _read_log(self, stream: asyncio.StreamReader, serves: asyncio.Future[bool]) -> None:
        """Args: serves: done as it says so, or ends before."""
        while line := await stream.readline():
            self.log.append(line.decode())
            if "serves" in self.log[-1] and not serves.done():
                serves.set_result(True)
        if not serves.done():
            serves.set_result(False)

    def text(self) -> str:
        return "".join(self.log)

    async def logged(self, text: str) -> None:
        """Its log comes here by itself, maybe after the answer that it is about."""
        async with asyncio.timeout(30):
            while text not in self.text():
                await self.agent.status()

    async def kill(self) -> None:
        """kill -9; returns when it is dead, as it may be already."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        await self.ended()

    async def ended(self) -> int:
        """Wait until the process is gone, and all that it logged is here. Returns: its status."""
        code = await self.process.wait()
        await asyncio.wait([self._reading])
        return code

    async def leave(self) -> None:
        """Let agent and ranks go: they come to no later incarnation."""
        for rank in self.ranks:
            await rank.close()
        await self.agent.close()

    async def relaunch(self) -> None:
        """kill -9, and another incarnation; agent and ranks come back to it by themselves."""
        await self.kill()
        await self.launch()


@asynccontextmanager
async def daemon(
    directory: Path,
    *,
    devices: list[int] | None = None,
    host_bytes: int = 256 * MiB,
    reconnect_s: float = 30.0,
    launcher: tuple[str, ...] = (),
    **extra: str,
) -> AsyncIterator[Daemon]:
    """A running state manager; at the end its books must agree and it must stop cleanly."""
    await asyncio.to_thread(directory.mkdir, exist_ok=True)
    settings = {
        "NODE": NODE,
        "CERTIFICATES": str(certificates(extra.get("NODE", NODE))),
        "SOCKET": str(directory / "state.sock"),
        "SECRET": SECRET,
        "DIRECTORY": str(directory / "files"),
        "DEVICES": json.dumps(devices or [16 * MiB]),
        "HOST_MEMORY_BYTES": str(host_bytes),
        **extra,
    }
    environment = os.environ | {
        name if name.startswith("PHASELOOM_") else f"PHASELOOM_STATEMGR_{name}": value
        for name, value in settings.items()
    }
    async with asyncio.TaskGroup() as tasks:
        running = Daemon(directory, environment, tasks, launcher)
        await running.launch()
        running.agent = await AgentStateClient.connect(
            running.socket, SECRET, reconnect_s=reconnect_s
        )
        try:
            yield running
            if running.process.returncode is None:
                await running.agent.status()  # fails where its records contradict themselves
        finally:
            await running.leave()
            if running.process.returncode is None:
                running.process.terminate()
            code = await running.ended()
        assert code in {0, -signal.SIGKILL}, running.text()
        assert "Traceback" not in running.text(), running.text()


class Rank:
    """A rank in this process."""

    def __init__(
        self, heap: Heap, slots: list[TensorSlot], *, frozen: bool = False, content: int = 0
    ) -> None:
        """Args: content: seq that the initial state is filled as."""
        self.client: RankStateClient
        self.frozen = frozen
        self.content = content
        self.heap = heap
        self.slots = slots
        self.seq = 0
        self.on_copy: Callable[[], None] = lambda: None
        """Called in the copying thread just before the heap is copied out."""
        self.on_loaded: Callable[[], None] = lambda: None
        """Called in the copying thread after a copy in."""

    def applied(self) -> int:
        self.on_copy()
        return self.seq

    def loaded(self) -> None:
        self.on_loaded()

    def digest(self) -> str:
        return digest_of(self.heap.buffer)

    def run(self, seq: int) -> str:
        """A mutating operation; the digest of what it leaves."""
        fill(self.heap, seq)
        self.seq = seq
        return self.digest()


async def start(
    daemon: Daemon,
    key: DeploymentKey,
    num_bytes: int = MiB,
    *,
    incarnation: int = 1,
    device: int = 0,
    seal_seq: int = 0,
    slots: list[TensorSlot] | None = None,
    applied: int = 0,
    reconnect_s: float = 30.0,
    frozen: bool = False,
    content: int = 0,
    rank_offset: int = 0,
    num_ranks: int = 1,
) -> Rank:
    """Register a deployment with a rank in this process; it is offloaded then.

    Args: applied: seq that its initial state stands for.
          content: what it is filled with; equal ones are equal.
          rank_offset, num_ranks: which of the ranks on all nodes it is.
    """
    token = f"token of {key} {incarnation}"
    await daemon.agent.register_wpg(
        [token],
        key,
        incarnation,
        [device],
        seal_seq,
        rank_offset=rank_offset,
        num_ranks=num_ranks,
    )
    rank = Rank(Heap(num_bytes), slots or slots_of(num_bytes), frozen=frozen, content=content)
    await join(daemon, token, rank, applied=applied, reconnect_s=reconnect_s)
    return rank


async def start_ranks(
    daemon: Daemon,
    key: DeploymentKey,
    sizes: list[int],
    *,
    devices: list[int] | None = None,
    incarnation: int = 1,
    seal_seq: int = 0,
    frozen: bool = False,
) -> list[Rank]:
    """Register a deployment with several ranks, rank i on device i where none are named."""
    tokens = [f"token of {key} {incarnation} {index}" for index in range(len(sizes))]
    devices = devices or list(range(len(sizes)))
    await daemon.agent.register_wpg(tokens, key, incarnation, devices, seal_seq)
    ranks = [Rank(Heap(size), slots_of(size), frozen=frozen) for size in sizes]
    for token, rank in zip(tokens, ranks, strict=True):
        await join(daemon, token, rank)
    return ranks


async def join(
    daemon: Daemon, token: str, rank: Rank, *, applied: int = 0, reconnect_s: float = 30.0
) -> None:
    rank.client = await RankStateClient.connect(
        daemon.socket,
        token,
        applied=rank.applied,
        on_loaded=rank.loaded,
        reconnect_s=reconnect_s,
    )
    daemon.ranks.append(rank.client)
    rank.seq = await rank.client.register_heap(rank.heap, rank.slots, frozen=rank.frozen)
    if not rank.seq:
        fill(rank.heap, rank.content)
        rank.seq = applied
        await rank.client.commit_initial(applied)


async def greeted(
    daemon: Daemon,
    key: DeploymentKey,
    *,
    incarnation: int = 1,
    handler: Handler[StateMessage] | None = None,
) -> Peer[StateMessage]:
    """A rank's session, proved and no more: what it says, and answers, is for the test to say."""
    token = f"raw {key} {incarnation}"
    await daemon.agent.register_wpg([token], key, incarnation, [0], 0)
    peer: Peer[StateMessage] = await Peer.connect(daemon.socket, StateMessage, handler)
    await peer.call(RankHello(token))
    return peer


@asynccontextmanager
async def child(daemon: Daemon, key: DeploymentKey, num_bytes: int) -> AsyncIterator[Child]:
    """A deployment with a rank in a process of its own."""
    token = f"child {key}"
    await daemon.agent.register_wpg([token], key, 1, [0], 0)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.staterank",
        str(daemon.socket),
        token,
        str(num_bytes),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    running = Child(process)
    await running.answer()
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@dataclass
class Child:
    """A rank in a process of its own."""

    process: asyncio.subprocess.Process

    async def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        return await self.answer()

    async def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(await self.process.stdout.readline())


def names(daemon: Daemon) -> list[str]:
    """Of the state files on its disk."""
    return sorted(name for name in files_of(daemon) if "." in name)


def is_empty(report: StatusReport) -> bool:
    """Nothing is held any more, in whatever tier."""
    sums = (report.host_used_bytes, report.nvme_used_bytes, *report.device_used_bytes)
    return not any(sums) and not (report.deployments or report.versions or report.shared_copies)


async def emptied(daemon: Daemon) -> None:
    """Every rank leaves and every job ends; returns once nothing is held, in memory and on disk.

    The daemon is told what the scheduler tells a node: which versions are released, and to forget
    what has lived or is sealed there. A policy of another node is not named to it.
    """
    report = await daemon.agent.status()
    keys = {state.deployment for state in report.deployments}
    for rank in daemon.ranks:
        await rank.close()
    daemon.ranks.clear()
    await daemon.agent.drop_versions(sorted({key.whole for key in report.versions}))
    keys |= {
        DeploymentKey(*path.relative_to(daemon.files).parts[:3])
        for path in daemon.files.glob("[!.]*/*/*/*")
    }
    for key in keys:
        await daemon.agent.drop_wpg(key, 2**31, forget=True)
    try:
        async with asyncio.timeout(30):
            # What is under way ends; a move that was, with the removal of its file.
            while not is_empty(report := await daemon.agent.status()) or files_of(daemon):
                await asyncio.sleep(0.01)
    except TimeoutError:
        left = (memory_of(daemon), files_of(daemon))
        raise AssertionError(f"{left} of {report}") from None


def files_of(daemon: Daemon) -> list[str]:
    """Whatever their names are, without the lock."""
    paths = daemon.files.rglob("*")
    return [path.name for path in paths if path.is_file() and path.name != ".lock"]


_MEMORY = "/memfd:phaseloom: "


def open_memory(pid: int, what: str = "") -> dict[Path, str]:
    """The memory that a process has open and whose name begins so: descriptor in /proc → name.

    The process goes on meanwhile: what it closes in between may be here or not.
    """
    found = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            link = os.readlink(descriptor)
            if link.startswith(f"{_MEMORY}{what}"):
                found[descriptor] = link.removeprefix(_MEMORY)
    return found


def memory_of(daemon: Daemon) -> list[str]:
    """Names of what a state manager holds."""
    return sorted(set(open_memory(daemon.pid).values()))


def real_memory(pid: int, what: str = "the host copy") -> dict[int, int]:
    """Inodes of the memory that a process has open and whose name begins so, and bytes that are
    behind each."""
    found = {}
    for descriptor in open_memory(pid, what):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            status = descriptor.stat()
            found[status.st_ino] = status.st_blocks * 512
    return found


async def taken(daemon: Daemon, num_bytes: int) -> None:
    """Once its host copies really take so many bytes: a thread may look at what was given up a
    moment longer."""
    pid = daemon.pid
    try:
        async with asyncio.timeout(30):
            while sum(real_memory(pid).values()) != num_bytes:
                await daemon.agent.status()
    except TimeoutError:
        raise AssertionError(f"{real_memory(pid)}, not {num_bytes} bytes") from None


def flip_in_memory(pid: int, what: str, place: int = 100) -> None:
    """One bit of a state manager's memory whose name begins so."""
    descriptors = list(open_memory(pid, what))
    assert descriptors, f"no memory for {what}"
    fd = os.open(descriptors[0], os.O_RDWR)
    byte = os.pread(fd, 1, place)[0]
    os.pwrite(fd, bytes([byte ^ 1]), place)
    os.close(fd)


async def sent(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A call that has been sent: what one connection is asked next begins after it."""
    asking = asyncio.create_task(call)
    await asyncio.sleep(0)
    return asking


def flip_in_file(path: Path, place: int) -> None:
    """Args: place: negative: from its end."""
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
