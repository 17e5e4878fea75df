"""Which way to a directory's disk really works: found by a round trip, never by what is installed.

`python -m phaseloom.statemgr.disk.probing DIRECTORY` prints what was found as JSON.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from phaseloom.common.contract.state_agent import DiskMethod, DiskPath
from phaseloom.statemgr.disk.blockfile import BlockFile, BufferedFile, DirectFile
from phaseloom.statemgr.disk.gds import KvikioFile

Opener = Callable[[Path, bool, int], BlockFile]
"""path, writable, bytes to take room for"""

PAGE_BYTES = 4096
"""Memory and offsets are multiples of it, so no disk may ask for more."""
PROBE_PREFIX = ".probe-"
_ALIGNMENTS = (512, 1024, 2048, PAGE_BYTES)
_PROBE_BYTES = 3 * PAGE_BYTES + 100


def probe(directory: Path) -> DiskPath:
    """Raises nothing: where nothing can be written now, later writes say so one by one."""
    try:
        return _probe(directory)
    except OSError as error:
        why = f"nothing can be written in {directory}: {error.strerror}"
        return DiskPath(DiskMethod.BUFFERED, 1, why)


def _probe(directory: Path) -> DiskPath:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=PROBE_PREFIX) as scratch:
        why_no_kvikio = _why_not_kvikio(Path(scratch))
        if not why_no_kvikio:
            return DiskPath(DiskMethod.KVIKIO, PAGE_BYTES, "a round trip through kvikio came back")
        found = _find_alignment(Path(scratch))
        if isinstance(found, int):
            return DiskPath(DiskMethod.DIRECT, found, why_no_kvikio)
        return DiskPath(DiskMethod.BUFFERED, 1, f"{why_no_kvikio}; direct I/O: {found}")


def opener(path: DiskPath) -> Opener:
    match path.method:
        case DiskMethod.KVIKIO:
            return _open_kvikio
        case DiskMethod.DIRECT:
            return _open_direct
        case DiskMethod.BUFFERED:
            return _open_buffered


def _open_kvikio(path: Path, writable: bool, num_bytes: int) -> BlockFile:
    return KvikioFile(path, writable=writable, num_bytes=num_bytes)


def _open_direct(path: Path, writable: bool, num_bytes: int) -> BlockFile:
    return DirectFile(path, PAGE_BYTES, writable=writable, num_bytes=num_bytes)


def _open_buffered(path: Path, writable: bool, num_bytes: int) -> BlockFile:
    return BufferedFile(path, writable=writable, num_bytes=num_bytes)


def _why_not_kvikio(scratch: Path) -> str:
    """Empty: it works. It needs the CUDA driver also for host memory."""
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"kvikio needs the CUDA driver: {error}"
    try:
        return "" if _comes_back(_open_kvikio, scratch / "kvikio") else "kvikio lost bytes"
    except Exception as error:  # Whatever a foreign library raises: no.
        return f"kvikio fails: {error}"


def _comes_back(open_file: Opener, path: Path) -> bool:
    with mmap.mmap(-1, 2 * mmap.PAGESIZE * 4) as memory:
        view = memoryview(memory)
        written, read = view[:_PROBE_BYTES], view[4 * mmap.PAGESIZE :][:_PROBE_BYTES]
        try:
            written[:] = os.urandom(_PROBE_BYTES)
            file = open_file(path, True, _PROBE_BYTES)
            try:
                file.write(written, 0)
                file.finish(_PROBE_BYTES)
            finally:
                file.close()
            file = open_file(path, False, 0)
            try:
                return file.read(read, 0) == _PROBE_BYTES and read == written
            finally:
                file.close()
        finally:
            for each in (written, read, view):
                each.release()


def _find_alignment(scratch: Path) -> int | str:
    """The least alignment of memory, offset and length that this disk takes; or why none is."""
    path = scratch / "direct"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return error.strerror or repr(error)
    why = ""
    try:
        for alignment in _ALIGNMENTS:
            try:
                if _moves_directly(fd, alignment):
                    return alignment
                why = "it lost bytes"
            except OSError as error:
                why = error.strerror or repr(error)
    finally:
        os.close(fd)
    return why


def _moves_directly(fd: int, alignment: int) -> bool:
    with mmap.mmap(-1, 4 * PAGE_BYTES) as memory, memoryview(memory) as view:
        content = os.urandom(alignment)
        view[alignment : 2 * alignment] = content
        with view[alignment : 2 * alignment] as source:
            os.pwritev(fd, [source], alignment)
        start = 2 * PAGE_BYTES + alignment
        with view[start : start + alignment] as target:
            return os.preadv(fd, [target], alignment) == alignment and target == content


def main() -> None:
    print(msgspec.json.encode(probe(Path(sys.argv[1]))).decode())


if __name__ == "__main__":
    main()
