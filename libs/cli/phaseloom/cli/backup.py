"""`phaseloom backup` copies a run, even a running one; `phaseloom restore` recreates it.

A backup is the run directory at one moment: the NATS server's store, the nodes' seals and weights
versions, checkpoints, passwords and certificates. It equals the files that a `kill -9` of all
processes would have left, so a restored mesh continues like any resumed run.

Most bytes are copied while the processes run. For the last changes all processes are paused, so
that every file is from the same moment.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from phaseloom.cli.meshconfig import MeshConfig, servers_of, settings_of
from phaseloom.cli.rundir import LOCK, find_run, locked, open_bus
from phaseloom.cli.storecheck import MARKS, StoreMarks, check_when_up, end_sessions, newest_mark
from phaseloom.cli.supervisor import NATS
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.process.files import replace_file
from phaseloom.common.tensors.modelfiles import file_blake3
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.decisionlog import LogExtent

MANIFEST = "backup.json"
_FILES = "run"
_FORMAT = 1
_EXCLUDED = frozenset({"logs", "spans", "s", "mesh.json", LOCK})
"""Entries of a run directory that a backup omits: they describe the processes, not the jobs."""
_MAX_PASSES = 5
_MAX_LAST_BYTES = 8 * 2**20
"""Pause the mesh for the final copy once a pass over its files has copied at most this many
bytes."""
_ATTEMPTS = 3
_PAUSE_TIMEOUT_S = 10.0
_POLL_S = 0.005
_MAX_NAMED = 5
"""Number of damaged files that an error lists at most."""
_SERVERS_OWN_DEPTH = 3
"""The server's own files have at most this many path components: `nats/<file>`, or
`nats/<server>/<file>` if there are several servers."""
_TIMESTAMP_MARGIN_NS = 2 * 10**9
"""Copy a file again if it was modified less than this long before its copy began: a later write
may have got the same modification time."""


class BackupFile(msgspec.Struct, frozen=True):
    path: str
    """Relative to the run directory."""
    mode: int
    num_bytes: int = 0
    blake3: str = ""
    link: str = ""
    """Target of a symbolic link; empty for a file."""


class Backup(msgspec.Struct, frozen=True):
    """The contents of `backup.json`, which describes a backup and lists its files."""

    format: int
    phaseloom: str
    made_unix_s: float
    """Time of the backup, in Unix seconds."""
    run: str
    """The run directory that was copied."""
    log_last: int
    """Sequence number of the newest decision log entry in the backup."""
    checkpoint_root: str
    """Checkpoint directory that the backup does not include. Empty if it includes all
    checkpoints."""
    files: list[BackupFile]


def backup(directory: Path, *, run: Path | None = None, console: Console | None = None) -> None:
    """Copy a run on this machine to a directory. Its mesh may be running.

    The processes of a running mesh are paused for a fraction of a second. The copy is verified, so
    a backup is either complete or does not exist.

    Parameters
    ----------
    directory
        Directory to create; it must not exist.
    run
        Run directory, or its name under runs/. Default: the newest run.
    """
    run_dir = find_run(run).resolve()
    target = directory.absolute()
    if target.exists():
        raise CallerError(
            f"{directory} already exists",
            code=Code.ALREADY_EXISTS,
            field="directory",
            remedy="name a directory that does not exist yet",
        )
    if target.is_relative_to(run_dir):
        raise CallerError(
            f"{directory} is inside the run to back up",
            field="directory",
            remedy="name a directory outside the run, preferably on another disk",
        )
    with ExitStack() as stack, _atomic_directory(target) as draft:
        try:
            stack.enter_context(locked(run_dir))
            runs = False
        except CallerError:
            runs = True
        pause_s = _copy_run(run_dir, draft / _FILES, runs=runs)
        made_s = time.time()
        extent = uvloop.run(_check_copy(draft / _FILES))
        settings = settings_of(draft / _FILES)
        manifest = Backup(
            format=_FORMAT,
            phaseloom=version("phaseloom"),
            made_unix_s=made_s,
            run=str(run_dir),
            log_last=extent.last,
            checkpoint_root=settings.checkpoint_root if settings else "",
            files=list(_entries(draft / _FILES)),
        )
        replace_file(draft / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    out = console or Console()
    num_bytes = sum(file.num_bytes for file in manifest.files)
    line = (
        f"{directory}: {len(manifest.files)} files, {num_bytes:,} bytes, the decision log up to "
        f"{manifest.log_last}; the mesh was paused for {pause_s:.2f} s"
    )
    out.print(line, soft_wrap=True, markup=False)
    if manifest.checkpoint_root:
        line = f"not included: the checkpoints in {manifest.checkpoint_root}"
        out.print(line, soft_wrap=True, markup=False)


def restore(directory: Path, run_dir: Path, *, console: Console | None = None) -> None:
    """Restore a backup into a new run directory. Continue with `phaseloom up --resume --run`.

    Every file is verified before the run directory appears. Running controllers must attach again.
    Their jobs lose all work since the backup.

    Parameters
    ----------
    directory
        Directory that `phaseloom backup` has written.
    run_dir
        Run directory to create. It may exist if it is empty.
    """
    manifest = _read_manifest(directory)
    target = run_dir.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CallerError(
            f"{run_dir} is not empty",
            code=Code.FAILED_PRECONDITION,
            field="run_dir",
            remedy="name an empty directory or one that does not exist yet",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with _atomic_directory(target) as draft:
        _copy_files(manifest, directory / _FILES, draft)
        num_jobs = uvloop.run(_prepare_restored(draft))
    made_at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.made_unix_s))
    lines = [
        f"{run_dir} is restored as of {made_at}, with the decision log up to {manifest.log_last}",
        f"later work is lost; controllers of {num_jobs} jobs must attach again",
        f"phaseloom up --resume --run {run_dir}  # with its settings, or those of --mesh-file",
    ]
    if manifest.checkpoint_root:
        lines.insert(2, f"the run uses the present checkpoints in {manifest.checkpoint_root}")
    for line in lines:
        (console or Console()).print(line, soft_wrap=True, markup=False)


@contextmanager
def _atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory, and rename it to `target` if the block succeeds.

    If the block fails, the temporary directory is removed and `target` does not appear.

    Raises: ResourceError: RESOURCE_EXHAUSTED: the disk is full; UNAVAILABLE: the disk fails.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    try:
        draft.mkdir(parents=True, mode=0o700)
        yield draft
        draft.replace(target)
    except OSError as error:
        code = Code.RESOURCE_EXHAUSTED if error.errno == errno.ENOSPC else Code.UNAVAILABLE
        raise ResourceError(
            f"{target} cannot be written: {error}",
            code=code,
            remedy="free space on that disk or repair it",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


# --- the copy of a run that runs -----------------------------------------------------------------


def _copy_run(run_dir: Path, target: Path, *, runs: bool) -> float:
    """Copy a run directory as it is at one moment. Return how long the mesh was paused, in seconds.

    Args:   runs: whether the mesh of the run is running. If not, no process is paused, because the
                recorded process ids may now belong to other programs.
    Raises: ResourceError: UNAVAILABLE: processes of the mesh restarted during every attempt.
    """
    mirror = Mirror(run_dir, target)
    if not runs:
        mirror.update(is_paused=True)
        return 0.0
    # Each pass copies what changed during the one before, so that little is left for the pause.
    # Each pass copies the changes made during the previous one, so the last pause is short.
    for _ in range(_MAX_PASSES):
        if mirror.update(is_paused=False) <= _MAX_LAST_BYTES:
            break
    for _ in range(_ATTEMPTS):
        began_s = time.monotonic()
        with paused(run_dir) as pids:
            mirror.update(is_paused=True)
            # A process that started during the pause was not stopped, so files may have changed.
            is_consistent = _processes(run_dir) == pids
        if is_consistent:
            return time.monotonic() - began_s
    raise ResourceError(
        f"the processes of {run_dir} restarted during each of {_ATTEMPTS} attempts at a backup",
        remedy="find the reason in the run's logs, then try again",
    )


class Mirror:
    """A copy of a run directory that can be brought up to date repeatedly."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source = source
        self._target = target
        self._copy_run: dict[Path, tuple[int, int, int]] = {}
        """Path → inode, size and modification time of the copied file. All zeros mean: copy it
        again."""

    def update(self, *, is_paused: bool) -> int:
        """Copy everything that has changed, and remove files that no longer exist.

        Args:    is_paused: whether the processes are paused. If not, files may vanish meanwhile.
        Returns: the number of bytes copied.
        """
        self._target.mkdir(exist_ok=True)
        num_bytes = 0
        seen = set()
        for path in _walk(self._source):
            try:
                num_bytes += self._update(path)
            except FileNotFoundError:
                if is_paused:
                    raise
                continue
            seen.add(path)
        for vanished in [path for path in self._copy_run if path not in seen]:
            self._remove(vanished)
            del self._copy_run[vanished]
        return num_bytes

    def _update(self, path: Path) -> int:
        source, target = self._source / path, self._target / path
        status = source.lstat()
        if stat.S_ISDIR(status.st_mode):
            if target.is_symlink() or (target.exists() and not target.is_dir()):
                target.unlink()
            target.mkdir(exist_ok=True)
            target.chmod(stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
            self._copy_run[path] = (0, 0, 0)
            return 0
        now = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._copy_run.get(path) == now:
            return 0
        began_ns = time.time_ns()
        self._remove(path)
        if stat.S_ISLNK(status.st_mode):
            target.symlink_to(source.readlink())
        else:
            shutil.copyfile(source, target)
            target.chmod(stat.S_IMODE(status.st_mode))
        is_settled = began_ns - status.st_mtime_ns > _TIMESTAMP_MARGIN_NS
        self._copy_run[path] = now if is_settled else (0, 0, 0)
        return status.st_size

    def _remove(self, path: Path) -> None:
        target = self._target / path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def _walk(root: Path) -> Iterator[Path]:
    """Yield the directories, files and links of a run that belong in a backup, parents first."""
    for path in _below(root, Path()):
        top = path.parts[0]
        name = path.name
        if top in _EXCLUDED or name.startswith(".latest."):
            continue
        if top == NATS and len(path.parts) <= _SERVERS_OWN_DEPTH and _is_rewritten_by_server(name):
            continue
        yield path


def _is_rewritten_by_server(name: str) -> bool:
    """Return whether the NATS server recreates this file at each start."""
    return name in ("nats.log", "nats.conf", "credentials.json") or name.endswith(".ports")


def _below(root: Path, path_from_root: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError), os.scandir(root / path_from_root) as entries:
        for entry in sorted(entries, key=lambda item: item.name):
            path = path_from_root / entry.name
            if entry.is_dir(follow_symlinks=False):
                yield path
                yield from _below(root, path)
            elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                yield path  # sockets are omitted


def _processes(run_dir: Path) -> set[int]:
    """Return the process ids of a running mesh, each of which leads a process group.

    The result is empty if the mesh has not started any process yet.
    """
    file = run_dir / "mesh.json"
    if not file.is_file():
        return set()
    state = msgspec.json.decode(file.read_bytes())
    return {pid for pid in state["pids"].values() if Path(f"/proc/{pid}").exists()}


@contextmanager
def paused(run_dir: Path) -> Iterator[set[int]]:
    """Pause all processes of a mesh within the block, except the supervisor.

    The processes resume at the end of the block, even if this process is killed within it. Yields
    the ids of the leaders of their process groups.

    Raises: ResourceError: UNAVAILABLE: a process does not stop.
    """
    pids = _processes(run_dir)
    if not pids:
        yield pids
        return
    # The guard resumes the mesh when its stdin closes, which happens even if this process is
    # killed.
    words = ["sh", "-c", 'cat >/dev/null; kill -s CONT -- "$@"', "sh", *(f"-{p}" for p in pids)]
    guard = subprocess.Popen(
        words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGSTOP)
        deadline_s = time.monotonic() + _PAUSE_TIMEOUT_S
        while running_thread := _running_thread(pids):
            if time.monotonic() > deadline_s:
                raise ResourceError(
                    f"process {running_thread} did not stop within {_PAUSE_TIMEOUT_S:g} s",
                    remedy="its disk may be slow: try again, or stop the mesh first",
                )
            time.sleep(_POLL_S)
        yield pids
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


def _running_thread(groups: set[int]) -> int:
    """Return the id of a thread in these process groups that still runs, or 0 if all have
    stopped."""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            if int(_status(process)[2]) not in groups:
                continue
            for thread in (process / "task").iterdir():
                if _status(thread)[0] not in "TtZX":
                    return int(thread.name)
    return 0


def _status(process: Path) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the name: state, parent, process group, …"""
    return (process / "stat").read_text().rpartition(")")[2].split()


# --- what is in a backup -------------------------------------------------------------------------


def _entries(root: Path) -> Iterator[BackupFile]:
    """Flush each file below `root` to disk, and yield its entry for the manifest."""
    for path in _below(root, Path()):
        place = root / path
        mode = place.lstat().st_mode
        if stat.S_ISDIR(mode):
            yield BackupFile(str(path), mode)
        elif stat.S_ISLNK(mode):
            yield BackupFile(str(path), mode, link=str(place.readlink()))
        else:
            with place.open("rb") as file:
                os.fsync(file.fileno())
            yield BackupFile(str(path), mode, place.stat().st_size, file_blake3(place))


def _read_manifest(directory: Path) -> Backup:
    """Read the manifest `backup.json` of a backup.

    Raises: CallerError: the directory is not a backup, or a backup of another format.
    """
    file = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=Backup)
    except (OSError, msgspec.DecodeError) as error:
        raise CallerError(
            f"{directory} is not a backup: {error}",
            code=Code.NOT_FOUND,
            field="directory",
            remedy="name a directory that `phaseloom backup` has written",
        ) from None
    if manifest.format != _FORMAT:
        raise CallerError(
            f"expected a backup of format {_FORMAT}, got format {manifest.format} in {directory}",
            code=Code.FAILED_PRECONDITION,
            field="directory",
            remedy=f"restore it with phaseloom {manifest.phaseloom}",
        )
    return manifest


def _copy_files(manifest: Backup, source: Path, target: Path) -> None:
    """Copy the files of a backup into a run directory, and verify their sizes and hashes.

    Raises: CallerError: a path of the manifest leads outside the run directory.
            ResourceError: DATA_LOSS: a file is missing or has changed.
    """
    bad = []
    for file in manifest.files:
        place = target / file.path
        if not place.resolve().is_relative_to(target.resolve()):
            raise CallerError(
                f"a path in the backup leads outside the run: {file.path}",
                field="directory",
                remedy="restore a backup that `phaseloom backup` has written",
            )
        if stat.S_ISDIR(file.mode):
            place.mkdir(mode=stat.S_IMODE(file.mode) | stat.S_IRWXU)
        elif file.link:
            place.symlink_to(file.link)
        else:
            try:
                shutil.copyfile(source / file.path, place)
            except FileNotFoundError:
                bad.append(file.path)
                continue
            place.chmod(stat.S_IMODE(file.mode))
            if place.stat().st_size != file.num_bytes or file_blake3(place) != file.blake3:
                bad.append(file.path)
    if bad:
        raise ResourceError(
            f"{len(bad)} files of the backup are missing or damaged: {', '.join(bad[:_MAX_NAMED])}",
            code=Code.DATA_LOSS,
            remedy="restore another backup or another copy of this one",
            details={"files": len(bad)},
        )


# --- its store, served for a moment ---------------------------------------------------------------


async def _check_copy(run_dir: Path) -> LogExtent:
    """Check the store of a copied run by reading its whole decision log.

    Returns: the first and last sequence of the log.
    Raises:  ResourceError: DATA_LOSS: the store is incomplete.
    """
    async with _serving(run_dir) as bus:
        marks = StoreMarks(run_dir / MARKS)
        return await check_when_up(bus, marks, newest_mark(run_dir / "nodes"))


async def _prepare_restored(run_dir: Path) -> int:
    """Check the store of a restored run, and end the sessions of its jobs.

    Returns: the number of jobs that had a session.
    Raises:  ResourceError: DATA_LOSS: the store is incomplete.
    """
    async with _serving(run_dir) as bus:
        marks = StoreMarks(run_dir / MARKS)
        await check_when_up(bus, marks, newest_mark(run_dir / "nodes"))
        return await end_sessions(bus)


@asynccontextmanager
async def _serving(run_dir: Path) -> AsyncIterator[Bus]:
    """Run the NATS server of a stopped run at a free port within the block, and connect to it."""
    directory = run_dir / NATS
    settings = settings_of(run_dir) or MeshConfig()
    with tempfile.TemporaryDirectory(prefix="phaseloom-") as temporary:
        file = Path(temporary) / "credentials"
        servers = servers_of(settings, directory, [], credentials_file=file)
        async with servers, open_bus(servers.credentials.bus, "backup") as bus:
            yield bus
    for path in [*directory.glob("*"), *directory.glob("*/*")]:
        if _is_rewritten_by_server(path.name):
            path.unlink()
