"""A directory that loses in a power cut what was not fsynced: a FUSE file system over another one.

Programs work in the mounted directory. Every call goes to the directory `live` below it at once, so
that they see what they have written. What a file had at its last `fsync` is kept apart, in
`durable`. `PowerCut.cut` gives each file that content back: of what was written since nothing is
left, or some blocks are. Names (create, rename, unlink) are durable at once. Jepsen's LazyFS has
the same model. Used by `powercuts` and by tests.

Needs root, /dev/fuse and libfuse 3 (Debian: `apt-get install libfuse3-3`); `missing()` says which
of them this machine lacks. Calls are served one at a time.
"""

from __future__ import annotations

import ctypes.util
import errno
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BLOCK_BYTES = 4096
_UNUSED_S = 30.0
"""How long the directory may be in use after what works in it was killed."""


def missing() -> str:
    """What this machine lacks for a power cut; empty: nothing."""
    if os.geteuid() != 0:
        return "root"
    if not Path("/dev/fuse").exists():
        return "/dev/fuse"
    if ctypes.util.find_library("fuse3") is None:
        return "libfuse3 (apt-get install libfuse3-3)"
    return ""


class PowerCut:
    """A directory whose unsynced writes can be lost. Args: root: an empty directory for it."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "mounted"
        """Where programs work."""
        self._live, self._durable, self._dirty = root / "live", root / "durable", root / "dirty"
        for directory in (self.directory, self._live, self._durable):
            directory.mkdir(parents=True)
        self._process: subprocess.Popen[str] | None = None

    def mount(self) -> None:
        """Raises: AssertionError: the file system does not come up."""
        places = [str(p) for p in (self.directory, self._live, self._durable, self._dirty)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *places], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said == "mounted\n", f"the file system does not come up: {said}"

    def unmount(self) -> None:
        """Nothing is lost. Everything that works in the directory must have ended, or be ending.

        Raises: AssertionError: something goes on working in it.
        """
        assert self._process is not None
        deadline_s = time.monotonic() + _UNUSED_S
        while subprocess.run(
            ["umount", str(self.directory)], check=False, stderr=subprocess.DEVNULL
        ).returncode:
            assert time.monotonic() < deadline_s, f"{self.directory} is still used"
            time.sleep(0.02)
        self._process.communicate()
        self._process = None

    def abandon(self) -> None:
        """End the file system, whatever still works in it."""
        subprocess.run(["umount", "-l", str(self.directory)], check=False)
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def cut(self, *, seed: int | None = None) -> dict[str, int]:
        """Cut the power and mount the directory again. What worked in it must have been killed.

        Args:   seed: of which blocks of unsynced data have reached the disk all the same; None: no
                    block has.
        Returns: bytes lost, by path.
        """
        self.unmount()
        written: dict[str, list[list[int]]] = json.loads(self._dirty.read_text())
        draw = random.Random(seed)
        lost = {}
        for file in sorted(self._live.rglob("*")):
            if not file.is_file() or file.is_symlink():
                continue
            ranges = written.get(str(file.stat().st_ino))
            if ranges is not None:
                name = str(file.relative_to(self._live))
                lost[name] = self._lose(file, ranges, draw if seed is not None else None)
        self.mount()
        return lost

    def _lose(self, file: Path, ranges: list[list[int]], draw: random.Random | None) -> int:
        """Give a file what is durable of it. Returns: lost bytes."""
        copy = self._durable / str(file.stat().st_ino)
        durable = bytearray(copy.read_bytes() if copy.exists() else b"")
        present = file.read_bytes()
        lost = 0
        for start, end in ranges:
            for first in range(start, end, BLOCK_BYTES):
                block = present[first : min(first + BLOCK_BYTES, end)]
                if draw is None or draw.random() < 0.5:
                    lost += len(block)
                    continue
                durable.extend(bytes(max(0, first + len(block) - len(durable))))
                durable[first : first + len(block)] = block
        copy.write_bytes(durable)
        with file.open("r+b") as output:  # the same inode: it may have other names
            output.write(durable)
            output.truncate(len(durable))
        return lost


@contextmanager
def power_cut(root: Path) -> Iterator[PowerCut]:
    """A mounted directory; in the end it is unmounted, by force if need be."""
    cutting = PowerCut(root.absolute())  # the file system's process goes elsewhere
    cutting.mount()
    try:
        yield cutting
    finally:
        cutting.abandon()


# --- the file system's own process ---------------------------------------------------------------


class _Unsynced:
    """What was written to each file since its last fsync, by inode.

    `durable/<inode>` has a file's content at its last fsync; a file without one has had none.
    """

    def __init__(self, durable: Path) -> None:
        self._durable = durable
        self._ranges: dict[int, list[list[int]]] = {}

    def changes(self, descriptor: int, start: int, end: int) -> None:
        """Note that a range of a file changes, or its size does: an empty range."""
        inode = os.fstat(descriptor).st_ino
        ranges = self._ranges.setdefault(inode, [])
        if ranges and ranges[-1][0] <= start <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], end)
        elif start < end:
            ranges.append([start, end])

    def synced(self, descriptor: int) -> None:
        """Note that a file is on disk as it is."""
        stat = os.fstat(descriptor)
        ranges = self._ranges.pop(stat.st_ino, None)
        if ranges is None:
            return
        source = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        copy = os.open(self._durable / str(stat.st_ino), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(copy, stat.st_size)
            for start, end in ranges:
                for first in range(start, min(end, stat.st_size), 2**20):
                    data = os.pread(source, min(2**20, end - first), first)
                    os.pwrite(copy, data, first)
        finally:
            os.close(source)
            os.close(copy)

    def gone(self, inode: int) -> None:
        """Forget a file that has no name left, and its last fsync with it."""
        self._ranges.pop(inode, None)
        (self._durable / str(inode)).unlink(missing_ok=True)

    @property
    def ranges(self) -> dict[int, list[list[int]]]:
        return self._ranges


def _serve(mounted: Path, live: Path, durable: Path, dirty: Path) -> None:
    import mfusepy

    unsynced = _Unsynced(durable)

    class Through(mfusepy.Operations):  # type: ignore[misc]
        """Every call goes to `live`; writes and fsyncs are noted."""

        use_ns = True

        def init(self, path: str) -> None:
            print("mounted", flush=True)

        def destroy(self, path: str) -> None:
            dirty.write_text(json.dumps(unsynced.ranges))

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            stat = os.lstat(f"{live}{path}") if fh is None else os.fstat(fh)
            names = ["mode", "ino", "dev", "nlink", "uid", "gid", "size", "blocks", "rdev"]
            times = {f"st_{t}time": getattr(stat, f"st_{t}time_ns") for t in "amc"}
            return {f"st_{name}": getattr(stat, f"st_{name}") for name in names} | times

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(f"{live}{path}")]

        def open(self, path: str, flags: int) -> int:
            descriptor = os.open(f"{live}{path}", flags & ~(os.O_DIRECT | os.O_APPEND))
            if flags & os.O_TRUNC:
                unsynced.changes(descriptor, 0, 0)
            return descriptor

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            descriptor = os.open(f"{live}{path}", os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)
            unsynced.changes(descriptor, 0, 0)
            return descriptor

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            unsynced.changes(fh, offset, offset + len(data))
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            descriptor = os.open(f"{live}{path}", os.O_RDWR) if fh is None else fh
            try:
                size = os.fstat(descriptor).st_size
                unsynced.changes(descriptor, min(size, length), length)
                os.ftruncate(descriptor, length)
            finally:
                if fh is None:
                    os.close(descriptor)
            return 0

        def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
            if mode:
                raise OSError(errno.EOPNOTSUPP, "only plain fallocate")
            if offset + size > os.fstat(fh).st_size:
                self.truncate(path, offset + size, fh)
            return 0

        def flush(self, path: str, fh: int) -> int:
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            unsynced.synced(fh)
            return 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            return 0

        def release(self, path: str, fh: int) -> int:
            stat = os.fstat(fh)
            os.close(fh)
            if stat.st_nlink == 0:
                unsynced.gone(stat.st_ino)
            return 0

        def unlink(self, path: str) -> int:
            stat = os.lstat(f"{live}{path}")
            os.unlink(f"{live}{path}")
            if stat.st_nlink == 1:
                unsynced.gone(stat.st_ino)
            return 0

        def rename(self, old: str, new: str) -> int:
            replaced = -1
            with suppress(FileNotFoundError):
                stat = os.lstat(f"{live}{new}")
                replaced = stat.st_ino if stat.st_nlink == 1 else -1
            os.rename(f"{live}{old}", f"{live}{new}")
            if replaced >= 0:
                unsynced.gone(replaced)
            return 0

        def link(self, target: str, source: str) -> int:
            os.link(f"{live}{source}", f"{live}{target}")
            return 0

        def symlink(self, target: str, source: str) -> int:
            os.symlink(source, f"{live}{target}")
            return 0

        def readlink(self, path: str) -> str:
            return os.readlink(f"{live}{path}")

        def mkdir(self, path: str, mode: int) -> int:
            os.mkdir(f"{live}{path}", mode)
            return 0

        def rmdir(self, path: str) -> int:
            os.rmdir(f"{live}{path}")
            return 0

        def chmod(self, path: str, mode: int) -> int:
            os.chmod(f"{live}{path}", mode)
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            os.chown(f"{live}{path}", uid, gid, follow_symlinks=False)
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            os.utime(f"{live}{path}", ns=times or (time.time_ns(), time.time_ns()))
            return 0

        def access(self, path: str, amode: int) -> int:
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            stat = os.statvfs(live)
            names = [
                "bavail",
                "bfree",
                "blocks",
                "bsize",
                "favail",
                "ffree",
                "files",
                "flag",
                "frsize",
                "namemax",
            ]
            return {f"f_{name}": getattr(stat, f"f_{name}") for name in names}

        def mknod(self, path: str, mode: int, dev: int) -> int:
            os.mknod(f"{live}{path}", mode, dev)  # sockets of services
            return 0

    mfusepy.FUSE(Through(), str(mounted), foreground=True, nothreads=True, hard_remove=True)


if __name__ == "__main__":
    _serve(*(Path(argument) for argument in sys.argv[1:]))
