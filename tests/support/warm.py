"""Programs that need not import anything: they are forked from a process that has.

To import torch and the backends takes a node's fork server three seconds of processor time, and
what a service needs takes each service a third of a second: together most of what a small mesh
costs. Here the first fork server that starts has a process of this test process import them, and it
and all later ones are forks of that, and the first service another process: the same program from
there on, with the arguments, the environment and the files of the process that was started, which
waits for it. Whoever kills that process kills the program; SIGTERM and SIGINT are passed on.

    agent -> python -m phaseloom.worker.agent.forkserver   (`warmstart/sitecustomize.py`: it waits)
    test process -> tests.support.warm -> the fork server -> its ranks

Some things are not as on a real node: ranks are not descendants of their agent, a program has
another pid than the process that was started (`program_pid`), and the string hashes of all programs
are the same. Tests that need any of these run `cold`.
"""

from __future__ import annotations

import gc
import importlib
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from phaseloom.common.process.config import inherited
from phaseloom.common.process.lifecycle import DIE_WITH_PARENT

WARM = "PHASELOOM_TESTS_WARM"
"""The variable that says where warm processes are to be had."""
_LENGTH = struct.Struct("<I")
_PID = struct.Struct("<i")
_TORCH, _OURS = "torch", "ours"
"""The names of the sockets of the two processes, by what each has imported."""
_SERVICES = ("scheduler", "router", "profiler", "statemgr", "worker")


@contextmanager
def warm() -> Iterator[None]:
    """Services, fork servers and ranks that are started meanwhile, by whatever process, start
    warm."""
    directory = Path(tempfile.mkdtemp(prefix="pl-"))
    with ExitStack() as started, pytest.MonkeyPatch.context() as patch:
        for imported in (_TORCH, _OURS):
            started.enter_context(_started_when_asked(directory, imported))
        patch.setenv(WARM, f"{sys.prefix}:{directory}")
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("warmstart")), prepend=os.pathsep)
        yield
    shutil.rmtree(directory)


@contextmanager
def _started_when_asked(directory: Path, imported: str) -> Iterator[None]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / imported))
    listener.listen(64)
    here, ours = os.pipe()
    starter = threading.Thread(
        target=_start_when_asked, args=(listener, here, imported), daemon=True
    )
    starter.start()
    yield
    os.close(ours)
    starter.join()
    listener.close()


def program_pid(pid: int) -> int:
    """The pid of the program that runs for the process `pid`: another one where it started warm."""
    directory = os.environ.get(WARM, "").partition(":")[2]
    with suppress(OSError):
        return int(Path(directory, str(pid)).read_text())
    return pid


def signal_programs(pids: Iterable[int], number: int) -> None:
    """Send a signal that cannot be passed on, such as SIGSTOP, to the programs that run for these
    processes."""
    for pid in pids:
        os.kill(program_pid(pid), number)


@contextmanager
def cold() -> Iterator[None]:
    """Programs that are started meanwhile import torch themselves, as everywhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(WARM, raising=False)
        yield


def _start_when_asked(listener: socket.socket, ended: int, imported: str) -> None:
    """Start the process that imports once somebody has connected, and again where it has died.

    It dies with the thread that has started it, which is this one.

    Args: ended: a pipe whose other end is closed when no more are needed.
          imported: what it imports.
    """
    while ended not in _ready(listener.fileno(), ended):
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno()), imported],
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


def main(listener: socket.socket, imported: str) -> NoReturn:
    """Import what fork servers import, or services, then fork a program for each connection."""
    from phaseloom.common.process import lifecycle

    lifecycle.die_with_parent()
    if imported == _TORCH:
        from phaseloom.worker.agent.preload import preload
        from phaseloom.worker.backends import BACKENDS, missing_modules

        preload([name for name in BACKENDS if not missing_modules(name)])
    else:
        for service in _SERVICES:
            name = f"phaseloom.{service}.main"
            importlib.import_module(name)
            # It is run as a program later, and Python warns where such a module is there already.
            del sys.modules[name]
        gc.collect()
        gc.freeze()
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
                with suppress(OSError):
                    asking.send(_PID.pack(pid))
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
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
