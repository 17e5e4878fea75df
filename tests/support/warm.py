"""Programs that need not import torch: they are forked from a process that has.

To import torch and the backends takes a node's fork server three seconds of processor time, which
is most of what a small mesh costs. Here the first one that starts has a process of this test
process import them, and it and all later ones are forks of that: the same program from there on,
with the arguments, the environment and the files of the process that was started, which waits for
it. Whoever kills that process kills the program.

    agent -> python -m phaseloom.worker.agent.forkserver   (`warmstart/sitecustomize.py`: it waits)
    test process -> tests.support.warm -> the fork server -> its ranks

Two things are not as on a real node: ranks are not descendants of their agent, and the string
hashes of all nodes are the same. Tests that need either run `cold`.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from phaseloom.common.process.config import inherited
from phaseloom.common.process.lifecycle import DIE_WITH_PARENT

_VARIABLE = "PHASELOOM_TESTS_WARM"
_LENGTH = struct.Struct("<I")


@contextmanager
def warm() -> Iterator[None]:
    """Fork servers and ranks that are started meanwhile, by whatever process, start warm."""
    directory = Path(tempfile.mkdtemp(prefix="pl-"))
    listener = socket.socket(socket.AF_UNIX)
    path = directory / "warm.sock"
    listener.bind(str(path))
    listener.listen()
    here, ours = os.pipe()
    starter = threading.Thread(target=_start_when_asked, args=(listener, here), daemon=True)
    starter.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_VARIABLE, f"{sys.prefix}:{path}")
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("warmstart")), prepend=os.pathsep)
        yield
    os.close(ours)
    starter.join()
    listener.close()
    shutil.rmtree(directory)


@contextmanager
def cold() -> Iterator[None]:
    """Programs that are started meanwhile import torch themselves, as everywhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(_VARIABLE, raising=False)
        yield


def _start_when_asked(listener: socket.socket, ended: int) -> None:
    """Start the process that imports once somebody has connected, and again where it has died.

    It dies with the thread that has started it, which is this one.

    Args: ended: a pipe whose other end is closed when no more are needed.
    """
    while ended not in _ready(listener.fileno(), ended):
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno())],
            env={**inherited(), DIE_WITH_PARENT: str(os.getpid()), "OMP_NUM_THREADS": "1"},
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
        death = os.pidfd_open(process.pid)
        _ready(death, ended)
        os.close(death)
        process.kill()
        process.wait()
    os.close(ended)


def _ready(*descriptors: int) -> list[int]:
    """Those of the descriptors that can be read, once one can."""
    return select.select(descriptors, [], [])[0]


# --- the process that has imported ---------------------------------------------------------------


@dataclass
class _Forked:
    """A program that runs here for the process that was started."""

    pid: int
    death: int
    """Pid descriptor."""
    asking: socket.socket
    """The connection of the process that was started, which is closed where that is killed."""

    def end(self) -> None:
        """It has ended: what it has started ends too, and whoever started it is told its code."""
        os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        with suppress(OSError):
            self.asking.send(bytes([os.waitstatus_to_exitcode(status) & 0xFF]))
        self.close()

    def close(self) -> None:
        os.close(self.death)
        self.asking.close()


def main(listener: socket.socket) -> NoReturn:
    """Import what fork servers import, then fork a program for each connection."""
    from phaseloom.common.process import lifecycle
    from phaseloom.worker.agent.preload import preload
    from phaseloom.worker.backends import BACKENDS, missing_modules

    lifecycle.die_with_parent()
    preload([name for name in BACKENDS if not missing_modules(name)])
    running: list[_Forked] = []
    while True:
        fds = [fd for each in running for fd in (each.death, each.asking.fileno())]
        ready = _ready(listener.fileno(), *fds)
        for each in list(running):
            if each.death in ready:
                running.remove(each)
                each.end()
            elif each.asking.fileno() in ready:
                # The process that was started is killed; what this one has started goes on.
                running.remove(each)
                signal.pidfd_send_signal(each.death, signal.SIGKILL)
                os.waitpid(each.pid, 0)
                each.close()
        if listener.fileno() in ready:
            asking, _ = listener.accept()
            head, files, _, _ = socket.recv_fds(asking, _LENGTH.size, 3)
            if len(head) == _LENGTH.size:
                (num_bytes,) = _LENGTH.unpack(head)
                asked = json.loads(asking.recv(num_bytes, socket.MSG_WAITALL))
                words, options, directory, environment = asked
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    asking.close()
                    for each in running:
                        each.close()
                    _run(words, options, directory, environment, files)
                running.append(_Forked(pid, os.pidfd_open(pid), asking))
            for fd in files:
                os.close(fd)


def _run(
    words: Sequence[str],
    warning_options: Sequence[str],
    directory: str,
    environment: dict[str, str],
    files: Sequence[int],
) -> NoReturn:
    """Be `python -m <words>`."""
    code = 1
    try:
        os.setsid()
        for target, fd in enumerate(files):
            os.dup2(fd, target)
            os.close(fd)
        os.environ.clear()
        os.environ.update({**environment, DIE_WITH_PARENT: str(os.getppid())})
        os.chdir(directory)
        for option in warning_options:
            warnings.simplefilter(option)  # type: ignore[arg-type]
        sys.argv[1:] = words[1:]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
