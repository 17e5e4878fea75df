"""How fast a node's state moves, against the machine: disk against fio, switches against memcpy.

The state manager's own code writes and reads its own files (checksums, header, fsync and rename
included) beside fio with direct I/O of the same block size, depth, file system and preallocation,
and an `fsync` at the end: fio with buffers of its own, as it comes, and fio with buffers on huge
pages, which ours are. Where fio is not installed, a bare loop of ours does nothing but move the
blocks. Switches go through a real daemon; the same bytes are copied plainly between two switches,
once the digests of the offloaded state are in. All sides take turns, and none is always first.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import xxhash

from loadtest.records import Record
from phaseloom.cli.certs import make_certificates
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import DiskMethod
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.process.lifecycle import DIE_WITH_PARENT
from phaseloom.common.tensors.blockfile import DEPTH
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, digest_of
from phaseloom.common.tensors.hugepages import make_huge, map_file
from phaseloom.common.transport.certificates import directory_of
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.node.extents import Extent
from phaseloom.statemgr.records.seals import seal_header
from phaseloom.statemgr.records.stateheader import Section
from phaseloom.worker.agent.stateclient import AgentStateClient
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.heap import Heap

_KEY = DeploymentKey("bench", "state", "policy")
SECRET = "bench"
NODE = "bench"
SOCKET = "s"
_GB = 1e9
_PATTERN_BYTES = 1024 * 1024


Side = tuple[Callable[[], float], list[list[float]]]
"""What takes its turn, returning seconds, and the lists that take them."""


@dataclass(slots=True)
class Pairs:
    """The seconds of one measured thing and of its limit, round by round, for the same bytes."""

    name: str
    num_bytes: int
    limit: str
    aim: str
    ours_s: list[float] = field(default_factory=list)
    limit_s: list[float] = field(default_factory=list)

    def speed(self) -> Record:
        """A record in GB/s. The ratio is one of speeds, so 1 is as fast as the limit."""
        ratios = [bare / own for own, bare in zip(self.ours_s, self.limit_s, strict=True)]
        return Record(
            name=self.name,
            value=round(self.num_bytes / _GB / median(self.ours_s), 3),
            unit="GB/s",
            limit=self.limit,
            limit_value=round(self.num_bytes / _GB / median(self.limit_s), 3),
            ratio=round(median(ratios), 3),
            aim=self.aim,
        )

    def time(self) -> Record:
        """A record in milliseconds. The ratio is one of times, so 1 takes as long as the limit."""
        ratios = [own / bare for own, bare in zip(self.ours_s, self.limit_s, strict=True)]
        return Record(
            name=self.name,
            value=round(1e3 * median(self.ours_s), 3),
            unit="ms",
            limit=self.limit,
            limit_value=round(1e3 * median(self.limit_s), 3),
            ratio=round(median(ratios), 3),
            aim=self.aim,
        )


async def measure(directory: Path, num_bytes: int, num_rounds: int) -> list[Record]:
    """Measure the disk, switches and many tensors.

    Args: directory: a directory on the disk that is measured.
          num_bytes: the size of a state file.
    """
    disk = await asyncio.to_thread(measure_disk, directory / "disk", num_bytes, num_rounds)
    small = await measure_switches(directory / "small", 2**28, num_rounds)
    large = await measure_switches(directory / "large", 2**30, num_rounds)
    tensors = await measure_tensors(directory / "tensors", 2**30, 10_000, num_rounds)
    return [*disk, *small, *large, *tensors]


# --- the disk ------------------------------------------------------------------------------------


def measure_disk(directory: Path, num_bytes: int, num_rounds: int) -> list[Record]:
    """Measure writing a seal and reading it back, against the bare disk.

    There is no aim against fio on huge pages, which is measured where the system gives any. Where
    kvikio moves host memory, it is measured against direct I/O.
    """
    states = StateDirectory(directory)
    others = [s for s in [StateDirectory(directory, DiskMethod.KVIKIO)] if _is_other(s, states)]
    path = states.seal(_KEY, 1)
    memory = filled(Extent(num_bytes, "bench"), num_bytes)
    target = filled(Extent(num_bytes, "bench target"), num_bytes)
    header = seal_header(_KEY, 1, [Section(num_bytes, [], digest_of(memory))])

    def write(by: StateDirectory) -> float:
        by.remove(path)
        return _seconds(lambda: by.write(path, header, [memory]))

    def read(by: StateDirectory) -> float:
        return _seconds(lambda: by.read(find_parts(path)[0], target))

    with _huge_buffers() as huge_fd:
        bares = _bare_disks(directory / "bare", num_bytes, target, huge_fd)
        measured = []
        for direction, ours in (("write", write), ("read", read)):
            pairs = _against(bares, direction, num_bytes)
            versus = _versus(states, others, direction, num_bytes)
            sides: list[Side] = [
                (partial(ours, states), [*(p.ours_s for p in pairs), *(p.limit_s for p in versus)])
            ]
            limits = [bare.write if direction == "write" else bare.read for bare in bares]
            sides += [(run, [p.limit_s]) for run, p in zip(limits, pairs, strict=True)]
            sides += [(partial(ours, s), [p.ours_s]) for s, p in zip(others, versus, strict=True)]
            measured.append((sides, [*pairs, *versus]))
        for number in range(num_rounds):
            for sides, _ in measured:
                first = number % len(sides)
                for side, takers in sides[first:] + sides[:first]:
                    seconds = side()
                    for taker in takers:
                        taker.append(seconds)
    shutil.rmtree(directory)
    return [pair.speed() for _, pairs in measured for pair in pairs]


def _is_other(states: StateDirectory, usual: StateDirectory) -> bool:
    return states.disk.path.method is not usual.disk.path.method


def _versus(
    usual: StateDirectory, others: Sequence[StateDirectory], direction: str, num_bytes: int
) -> list[Pairs]:
    """The pairs of one direction of state files by other methods with the usual one."""
    name = f"nvme_{direction}_{num_bytes / 2**20:.0f}_mib"
    limit = f"state files by {usual.disk.path.method}"
    return [Pairs(f"{name}_{s.disk.path.method}", num_bytes, limit, "") for s in others]


def _against(bares: list[Bare], direction: str, num_bytes: int) -> list[Pairs]:
    """The pairs of one direction of our state files with each bare disk."""
    name = f"nvme_{direction}_{num_bytes / 2**20:.0f}_mib"
    how = f"{BLOCK_BYTES // 2**20} MiB blocks, {DEPTH} in flight"
    return [
        Pairs(f"{name}{bare.suffix}", num_bytes, f"{bare.name}, {how}", bare.aim) for bare in bares
    ]


@dataclass(frozen=True, slots=True)
class Bare:
    """The disk alone. `write` and `read` return seconds; `write` makes a new file."""

    name: str
    write: Callable[[], float]
    read: Callable[[], float]
    suffix: str = ""
    aim: str = "≥ 0.90"


def _bare_disks(file: Path, num_bytes: int, memory: memoryview, huge_fd: int | None) -> list[Bare]:
    if shutil.which("fio") is None:
        return [
            Bare(
                "bare direct I/O, ours, for fio is not installed",
                lambda: _loop(file, num_bytes, memory, is_write=True),
                lambda: _loop(file, num_bytes, memory, is_write=False),
            )
        ]
    bares = [_fio_as(file, num_bytes, "fio, direct I/O")]
    if huge_fd is not None:
        options = f"--mem=mmapshared:/proc/{os.getpid()}/fd/{huge_fd}"
        name = "fio, direct I/O from huge pages"
        bares.append(_fio_as(file, num_bytes, name, options, suffix="_huge_pages", aim=""))
    return bares


@contextmanager
def _huge_buffers() -> Iterator[int | None]:
    """A file in memory on huge pages, for fio's buffers; None: the system gives none."""
    num_bytes = (DEPTH + 1) * BLOCK_BYTES
    fd = os.memfd_create("bench: buffers of fio")
    try:
        os.ftruncate(fd, num_bytes)
        whole, start = map_file(fd, num_bytes)
        yield fd if make_huge(memoryview(whole)[start : start + num_bytes]) else None
    finally:
        os.close(fd)


def _fio_as(file: Path, num_bytes: int, name: str, *options: str, **of: str) -> Bare:
    return Bare(
        name,
        lambda: _fio(file, num_bytes, "write", *options),
        lambda: _fio(file, num_bytes, "read", *options),
        **of,
    )


def _fio(file: Path, num_bytes: int, direction: str, *options: str) -> float:
    if direction == "write":
        file.unlink(missing_ok=True)
    command = ["fio", "--name=bare", f"--filename={file}", f"--rw={direction}", "--direct=1"]
    command += [f"--bs={BLOCK_BYTES}", f"--iodepth={DEPTH}", "--ioengine=libaio", *options]
    command += [f"--size={num_bytes}", "--end_fsync=1", "--output-format=json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    bandwidth: int = json.loads(ran.stdout)["jobs"][0][direction]["bw_bytes"]
    return num_bytes / bandwidth


def _loop(file: Path, num_bytes: int, memory: memoryview, *, is_write: bool) -> float:
    """A function that moves blocks between memory and a file, and does nothing else."""
    if is_write:
        file.unlink(missing_ok=True)
    move = os.pwritev if is_write else os.preadv

    def run() -> None:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            if is_write:
                os.posix_fallocate(fd, 0, num_bytes)
            starts = range(0, num_bytes, BLOCK_BYTES)
            with ThreadPoolExecutor(DEPTH) as threads:
                list(threads.map(lambda s: move(fd, [memory[s : s + BLOCK_BYTES]], s), starts))
            os.fsync(fd)
        finally:
            os.close(fd)

    return _seconds(run)


# --- switches ------------------------------------------------------------------------------------


async def measure_switches(directory: Path, num_bytes: int, num_rounds: int) -> list[Record]:
    """Measure switches: two deployments take turns on a device that holds one of them."""
    async with daemon(directory, num_bytes) as agent:
        ranks = [await _start(agent, directory, name, num_bytes) for name in ("a", "b")]
        keys = [rank.key for rank in ranks]
        measured = await switch_in_turns(agent, keys, num_bytes, num_rounds)
        for rank in ranks:
            await rank.client.close()
    return measured.records(f"{num_bytes / 2**20:.0f}_mib")


@dataclass(slots=True)
class Switches:
    """The seconds of switches that move `num_bytes` out and as many in, round by round."""

    num_bytes: int
    offloads: list[tuple[float, float]] = field(default_factory=list)
    """Ours, and the plain copy into touched memory."""
    loads: list[tuple[float, float]] = field(default_factory=list)
    """The same for loads, which on an emulated device may copy nothing."""
    wholes: list[tuple[float, float]] = field(default_factory=list)
    """The whole switch, and two such copies."""

    def records(self, of: str) -> list[Record]:
        return [
            self._pairs(
                f"offload_{of}", "memcpy into touched memory", "≥ 0.80", self.offloads
            ).speed(),
            self._pairs(f"load_{of}", "memcpy into touched memory", "≥ 0.67", self.loads).speed(),
            self.whole(f"switch_{of}"),
        ]

    def whole(self, name: str) -> Record:
        return self._pairs(name, "two plain copies", "≤ 1.2", self.wholes).time()

    def _pairs(self, name: str, limit: str, aim: str, of: list[tuple[float, float]]) -> Pairs:
        ours_s, limit_s = zip(*of, strict=True)
        return Pairs(name, self.num_bytes, limit, aim, [*ours_s], [*limit_s])


async def switch_in_turns(
    agent: AgentStateClient,
    keys: Sequence[DeploymentKey],
    num_bytes: int,
    num_rounds: int,
    use: Callable[[int], Awaitable[None]] | None = None,
) -> Switches:
    """Switch two offloaded deployments in, by turns; the same bytes are copied plainly in between.

    Args: use: does something with the deployment of this index, which has just come in.
    """
    source = Extent(num_bytes, "bench: plain source")
    touched = Extent(num_bytes, "bench: plain target")
    plain = filled(source, num_bytes)
    into = filled(touched, num_bytes)
    measured = Switches(num_bytes)
    await agent.switch_in(keys[0], 1, 1, [])
    if use is not None:
        await use(0)
    for number in range(2 + 2 * num_rounds):
        out, back = number % 2, 1 - number % 2
        started_s = time.perf_counter()
        switched = await agent.switch_in(keys[back], 1, 2 + number, [keys[out]])
        took_s = time.perf_counter() - started_s
        await _digested(agent)
        copy_s = await asyncio.to_thread(copy_seconds, plain, into)
        if use is not None:
            await use(back)
        if number < 2:
            # The first switches touch both extents for the first time, which later ones do not.
            continue
        measured.offloads.append((switched.offload_s, copy_s))
        measured.loads.append((switched.load_s, copy_s))
        measured.wholes.append((took_s, 2 * copy_s))
    return measured


async def _digested(agent: AgentStateClient) -> None:
    """Wait until the state manager does nothing that would disturb the next measurement."""
    while any(state.dirty_bytes for state in (await agent.status()).deployments):
        pass


# --- many tensors --------------------------------------------------------------------------------


async def measure_tensors(
    directory: Path, num_bytes: int, num_tensors: int, num_rounds: int
) -> list[Record]:
    """Measure the cost of many tensors, against plain copies and against one large tensor."""
    copies, of = "two plain copies", f"{num_tensors}_tensors"
    index = Pairs(f"index_{of}", num_bytes, copies, "≤ 0.05")
    switch = Pairs(f"switch_{of}", num_bytes, copies, "≤ 1.05")
    plain, into = (filled(Extent(num_bytes, f"bench: {name}"), num_bytes) for name in "ab")
    version = Pairs(f"version_{of}", num_bytes, "the same bytes as one tensor", "≤ 1.05")
    async with daemon(directory, num_bytes, num_deployments=4) as agent:
        slots = _slots(num_bytes, num_tensors)
        many = [await _start(agent, directory, name, num_bytes, slots) for name in ("a", "b")]
        one = [await _start(agent, directory, name, num_bytes) for name in ("c", "d")]
        await agent.switch_in(many[0].key, 1, 1, [])
        for number in range(2 + 2 * num_rounds):
            out, back = many[number % 2], many[1 - number % 2]
            started_s = time.perf_counter()
            await agent.switch_in(back.key, 1, 2 + number, [out.key])
            took_s = time.perf_counter() - started_s
            await _digested(agent)
            if number >= 2:
                switch.ours_s.append(took_s)
                switch.limit_s.append(2 * await asyncio.to_thread(copy_seconds, plain, into))
        index.ours_s = [rank.registered_s for rank in many]
        index.limit_s = [median(switch.limit_s)] * len(many)
        for epoch, rank in enumerate((many[1], *one), start=100):
            await agent.switch_in(rank.key, 1, epoch, [])
        for number in range(1 + num_rounds):
            took = [await _publish(agent, a, b, 1 + number) for a, b in (many, one)]
            if number:
                version.ours_s.append(took[0])
                version.limit_s.append(took[1])
        for rank in (*many, *one):
            await rank.client.close()
    return [index.time(), switch.time(), version.time()]


async def _publish(
    agent: AgentStateClient, policy: BenchRank, sampler: BenchRank, seq: int
) -> float:
    """The seconds that it takes to cut a version from one heap and copy it into another."""
    key = VersionKey(policy.key, seq)
    started_s = time.perf_counter()
    await policy.client.versions.create(key, policy.slots)
    await sampler.client.versions.load(await sampler.client.versions.open(key, []), sampler.slots)
    took_s = time.perf_counter() - started_s
    await agent.drop_versions([key])
    return took_s


def _slots(num_bytes: int, num_tensors: int) -> list[TensorSlot]:
    size = num_bytes // num_tensors // 64 * 64
    return [
        TensorSlot(f"layers.{n}.weight", Role.WEIGHT, "uint8", [size], n * size, size)
        for n in range(num_tensors)
    ]


def copy_seconds(source: memoryview, target: memoryview) -> float:
    to, start = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (target, source))
    return _seconds(lambda: ctypes.memmove(to, start, len(source)))


def fresh_copy_seconds(source: memoryview) -> float:
    fresh = mmap.mmap(-1, len(source), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fresh.madvise(mmap.MADV_HUGEPAGE)
    return copy_seconds(source, memoryview(fresh))


@asynccontextmanager
async def daemon(
    directory: Path, num_bytes: int, *, num_deployments: int = 1, authority: Path | None = None
) -> AsyncIterator[AgentStateClient]:
    """A state manager whose only device has room for `num_deployments` deployments.

    Args: authority: the directory of the certificates, which state managers that fetch from one
                     another share; None: this one has its own.
    """
    authority = authority or directory
    await asyncio.to_thread(make_certificates, authority, [NODE])
    settings = {
        "NODE": NODE,
        "SOCKET": str(directory / SOCKET),
        "SECRET": SECRET,
        "CERTIFICATES": str(directory_of(authority, NODE)),
        "DIRECTORY": str(directory / "files"),
        "DEVICES": json.dumps([num_deployments * num_bytes]),
        "HOST_MEMORY_BYTES": str((num_deployments + 2) * num_bytes),
    }
    environment = {
        **os.environ,
        **{f"PHASELOOM_STATEMGR_{name}": value for name, value in settings.items()},
        DIE_WITH_PARENT: str(os.getpid()),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "phaseloom.statemgr.main",
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        while b"serves" not in (line := await process.stderr.readline()):
            if not line:
                raise RuntimeError("the state manager did not start")
        agent = await AgentStateClient.connect(directory / SOCKET, SECRET)
        try:
            yield agent
        finally:
            await agent.close()
    finally:
        process.terminate()
        await process.communicate()


@dataclass(slots=True)
class BenchRank:
    key: DeploymentKey
    client: RankStateClient
    slots: list[TensorSlot]
    registered_s: float
    """The seconds until the state manager knew all tensors."""


async def _start(
    agent: AgentStateClient,
    directory: Path,
    name: str,
    num_bytes: int,
    slots: list[TensorSlot] | None = None,
) -> BenchRank:
    """Start a rank with a heap.

    Args: slots: the tensors of the heap; empty: the whole heap is one tensor.
    """
    key = DeploymentKey("bench", "state", name)
    token = f"token of {key}"
    await agent.register_wpg([token], key, 1, [0], 0)
    client = await RankStateClient.connect(
        directory / SOCKET, token, applied=lambda: 0, on_loaded=lambda: None
    )
    heap, slots = Heap(num_bytes), slots or _slots(num_bytes, 1)
    started_s = time.perf_counter()
    await client.register_heap(heap, slots)
    registered_s = time.perf_counter() - started_s
    _fill(heap.buffer)
    await client.commit_initial()
    return BenchRank(key, client, slots, registered_s)


def filled(extent: Extent, num_bytes: int) -> memoryview:
    memory = extent.view(num_bytes)
    make_huge(memory)  # every user that fills an extent does so
    _fill(memory)
    return memory


def _fill(memory: memoryview) -> None:
    """Fill memory with bytes that no disk or hash has a short cut for."""
    pattern = b"".join(
        xxhash.xxh3_128(number.to_bytes(8, "little")).digest()
        for number in range(_PATTERN_BYTES // 16)
    )
    for start in range(0, len(memory), _PATTERN_BYTES):
        memory[start : start + _PATTERN_BYTES] = pattern[: len(memory) - start]


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
