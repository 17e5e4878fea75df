"""Programs that need not import anything: they are forked from a process that has.

To import torch and the backends takes a node's fork server three seconds of processor time, vLLM
fifteen, and what a service needs takes each service a third of a second: together most of what a
small mesh costs. Here the first fork server of an interpreter that starts has a process of the
tests import them, and it and all later ones are forks of that, and the first service another
process: the same program from there on, with the arguments, the environment and the files of the
process that was started, which waits for it. Whoever kills that process kills the program; SIGTERM
and SIGINT are passed on.

    agent -> python -m phaseloom.worker.agent.forkserver   (`warmstart/sitecustomize.py`: it waits)
    test process -> tests.support.warm -> the fork server -> its ranks

Some things are not as on a real node: ranks are not descendants of their agent, a program has
another pid than the process that was started (`program_pid`), string hashes differ between nodes of
odd and of even numbers alone, and what libraries read of the environment when they are imported is
that of the test process. Tests that need any of these run `cold`.
"""

from __future__ import annotations

import gc
import importlib
import marshal
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

from phaseloom.common.process.config import inherited
from phaseloom.common.process.lifecycle import DIE_WITH_PARENT

WARM = "PHASELOOM_TESTS_WARM"
"""The variable that says where warm processes are to be had: the directory of their sockets, then
the environments of Python, whose places in this list are in the sockets' names."""
_LENGTH = struct.Struct("<I")
_PID = struct.Struct("<i")
_TORCH, _OURS, _SDK = "torch", "ours", "sdk"
"""What a warm process has imported; its socket's name begins with it."""
_ODD = "odd"
"""How the name ends of one that nodes of odd numbers are forked from: its string hashes differ."""
_RANK = ("phaseloom.worker.rank.process", "phaseloom.worker.backends.noop")
"""What ranks without torch import."""
_SERVICES = ("scheduler", "router", "profiler", "statemgr", "worker", "gateway", "console")


@contextmanager
def warm(others: Iterable[Path] = ()) -> Iterator[None]:
    """Services, fork servers and ranks that are started meanwhile, by whatever process, start
    warm.

    Args: others: the Pythons, each of an environment of its own, that ranks run in beside this one.
    """
    # What runs in another environment need not have it.
    import pytest

    own = Path(sys.executable)
    pythons = {sys.prefix: own}
    for python in others:
        if python.exists():
            pythons.setdefault(str(python.parent.parent), python)
    directory = Path(tempfile.mkdtemp(prefix="pl-"))
    with ExitStack() as started, pytest.MonkeyPatch.context() as patch:
        for place, python in enumerate(pythons.values()):
            names = [f"{_TORCH}{place}"]
            if python == own:
                names += [f"{_OURS}0", f"{_SDK}0", f"{_TORCH}0{_ODD}", f"{_OURS}0{_ODD}"]
            for name in names:
                started.enter_context(_started_when_asked(directory / name, python))
        patch.setenv(WARM, ":".join([str(directory), *pythons]))
        # As `pythonpath` in pyproject.toml, for the processes that tests start.
        root = Path(__file__).parents[2]
        packages = [*root.glob("libs/*"), *root.glob("services/*")]
        paths = [Path(__file__).with_name("warmstart"), *packages]
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)), prepend=os.pathsep)
        yield
    shutil.rmtree(directory)


@contextmanager
def _started_when_asked(path: Path, python: Path) -> Iterator[None]:
    """A warm process of this Python, named like its socket, once somebody asks for it there."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    here, ours = os.pipe()
    starter = threading.Thread(
        target=_start_when_asked, args=(listener, here, python, path.name), daemon=True
    )
    starter.start()
    yield
    os.close(ours)
    starter.join()
    listener.close()


def program_pid(pid: int) -> int:
    """The pid of the program that runs for the process `pid`: another one where it started warm."""
    directory = os.environ.get(WARM, "").partition(":")[0]
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
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(WARM, raising=False)
        yield


def _start_when_asked(listener: socket.socket, ended: int, python: Path, name: str) -> None:
    """Start the process that imports once somebody has connected, and again where it has died.

    It dies with the thread that has started it, which is this one.

    Args: ended: a pipe whose other end is closed when no more are needed.
          name: its own, which says what it imports.
    """
    while ended not in _ready(listener.fileno(), ended):
        process = subprocess.Popen(
            [python, "-m", __name__, str(listener.fileno()), name],
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
class Forked:
    """A program that runs here for the process that was started."""

    pid: int
    death: int
    """Pid descriptor."""
    asking: socket.socket
    """The connection of the process that was started, which is closed where that is killed."""

    def end(self) -> None:
        """It has ended: what it has started ends too, and whoever started it is told its code."""
        with suppress(ProcessLookupError):  # it died before it had a group of its own
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        with suppress(OSError):
            self.asking.send(bytes([os.waitstatus_to_exitcode(status) & 0xFF]))
        self.close()

    def close(self) -> None:
        os.close(self.death)
        self.asking.close()


def _import(name: str) -> None:
    """Import what programs need that are forked from the process of this name."""
    if name.startswith(_TORCH):
        from phaseloom.worker.agent.preload import preload
        from phaseloom.worker.backends import BACKENDS, missing_modules

        preload([name for name in BACKENDS if not missing_modules(name)])
        return
    services = [f"phaseloom.{service}.main" for service in _SERVICES]
    for module in ["tinker"] if name.startswith(_SDK) else [*services, *_RANK]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def main(listener: socket.socket, name: str) -> NoReturn:
    """Import what fork servers import, or services, then fork a program for each connection."""
    from phaseloom.common.process import lifecycle

    lifecycle.die_with_parent()
    before = dict(os.environ)
    _import(name)
    # Who imports these modules sets variables, such as those that vLLM reads later.
    handed_down = {key: value for key, value in os.environ.items() if before.get(key) != value}
    running: list[Forked] = []
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
            (num_bytes,) = _LENGTH.unpack(head) if len(head) == _LENGTH.size else (1,)
            asked = asking.recv(num_bytes, socket.MSG_WAITALL)
            # Fewer come of one that was killed while it asked.
            if len(asked) == num_bytes:
                words, options, directory, environment = marshal.loads(asked)
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    asking.close()
                    for each in running:
                        each.close()
                    _run(words, options, directory, {**environment, **handed_down}, files)
                running.append(Forked(pid, os.pidfd_open(pid), asking))
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
    """Be `python -m <words>`, or `python <words>` where the first is a file."""
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
        sys.argv[:] = words
        if words[0].endswith(".py"):
            runpy.run_path(words[0], run_name="__main__")
        else:
            # Python warns if a module is there already that is run as a program.
            sys.modules.pop(words[0], None)
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
