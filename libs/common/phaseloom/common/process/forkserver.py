"""A server process that imports modules once and forks other processes from itself.

`ForkServer` is the side of the process that starts the server, and `serve` is the server. Each
forked process gets a text, and a descriptor if one is passed. The text never appears on a command
line, because it may contain a secret. The server ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NoReturn

from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.process import config, lifecycle

_LENGTH: Final = struct.Struct("<I")
_PID: Final = struct.Struct("<i")
_STDIN: Final = 0


class ForkedProcess:
    """A child of the fork server. Its descriptor outlives its pid."""

    def __init__(self, pid: int, sentinel: int) -> None:
        self.pid = pid
        self.sentinel = sentinel
        """The pid descriptor, which becomes readable when the process is dead."""

    def kill(self) -> None:
        """Kill the process. Harmless if it is dead or the descriptor was closed."""
        if self.sentinel >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.sentinel)
        self.sentinel = -1


class ForkServer:
    """Starts a fork server, and restarts it after a crash."""

    def __init__(self, command: Sequence[str], remedy: str) -> None:
        """Start the server, which makes its imports at once.

        Call it in a thread that lives as long as this process.
        Args: command: the command of a program that calls `serve`.
              remedy: what to do if the server does not run.
        """
        self._command = [*command]
        self._remedy = remedy
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._socket, server_socket = socket.socketpair()
        environment = {**config.inherited(), lifecycle.DIE_WITH_PARENT: str(os.getpid())}
        self._process: subprocess.Popen[bytes] | None = None
        self._reason = "the server ended"
        self._is_lost = False
        """Whether the server failed to answer, which may be noticed before its death."""
        try:
            with server_socket:
                self._process = subprocess.Popen(
                    self._command, stdin=server_socket.fileno(), env=environment
                )
        except OSError as error:
            self._reason = str(error)

    def restart_if_dead(self) -> None:
        """Restart the server if it has died. Call it in the thread that created this object."""
        if self._is_lost or self._process is None or self._process.poll() is not None:
            self.close()
            self._start()

    def fork(self, text: str, fd: int | None = None) -> ForkedProcess:
        """Fork a process after the server has finished its imports. May be called from any thread.

        Args:   text: passed to the process.
                fd: a descriptor of which the process gets a copy as its standard input.
        Raises: ResourceError: the server is not running.
        """
        data = text.encode()
        try:
            with self._lock:
                header = [_LENGTH.pack(len(data))]
                socket.send_fds(self._socket, header, [] if fd is None else [fd])
                self._socket.sendall(data)
                answer, fds, _, _ = socket.recv_fds(self._socket, _PID.size, 1)
        except OSError as error:
            raise self._dead() from error
        if len(answer) != _PID.size or len(fds) != 1:
            raise self._dead()
        (pid,) = _PID.unpack(answer)
        return ForkedProcess(pid, fds[0])

    def close(self) -> None:
        """End the server. Its children continue, unless they asked to die with it."""
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _dead(self) -> ResourceError:
        self._is_lost = True
        return ResourceError(
            f"{' '.join(self._command)} cannot fork processes: {self._reason}",
            remedy=self._remedy,
        )


def serve(preload: Callable[[], None], run: Callable[[str], None]) -> None:
    """Run as a server until the process that started it is gone.

    Args: preload: makes the imports.
          run: what a forked process does with its text.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Forked processes and their children must not hold the server's socket or read from it.
    with socket.socket(fileno=os.dup(_STDIN)) as owner:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), _STDIN)
        preload()
        signal.signal(signal.SIGCHLD, lambda number, frame: _reap())
        for text, fds in _requests(owner):
            _fork(owner, run, text, fds)


def _requests(owner: socket.socket) -> Iterator[tuple[str, list[int]]]:
    while True:
        header, fds, _, _ = socket.recv_fds(owner, _LENGTH.size, 1)
        if not header:
            return
        header += _receive(owner, _LENGTH.size - len(header))
        yield _receive(owner, *_LENGTH.unpack(header)).decode(), fds


def _receive(owner: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes and (chunk := owner.recv(num_bytes - len(data))):
        data += chunk
    return bytes(data)


def _fork(owner: socket.socket, run: Callable[[str], None], text: str, fds: list[int]) -> None:
    # Block SIGCHLD: a child reaped before it has a descriptor could be confused with a new process
    # of the same pid.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run(owner, run, text, fds)
    sentinel = os.pidfd_open(pid)
    with contextlib.suppress(OSError):
        socket.send_fds(owner, [_PID.pack(pid)], [sentinel])
    for fd in (sentinel, *fds):
        os.close(fd)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _run(owner: socket.socket, run: Callable[[str], None], text: str, fds: list[int]) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        owner.close()
        for fd in fds:
            os.dup2(fd, _STDIN)
            os.close(fd)
        run(text)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(1)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
