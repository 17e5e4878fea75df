"""A server process that imports backends' runtimes once and forks ranks of one Python interpreter.

A node has one server for each configured interpreter. This module imports no torch itself. The
server, `python -m phaseloom.worker.agent.forkserver BACKEND...`, imports the backends' runtimes
(`preload`) and forks a rank for each configuration that arrives on its standard input, a socket. A
rank's configuration never appears on a command line, because it contains a secret. The server dies
with its agent; a rank ends itself when its agent's socket closes.
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
from collections.abc import Iterator, Sequence
from typing import Final

from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.process import config, lifecycle

_LENGTH: Final = struct.Struct("<I")
_PID: Final = struct.Struct("<i")
_STDIN: Final = 0


class RankProcess:
    """The process of a rank, a child of the fork server. Its descriptor outlives its pid."""

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
    """The agent's side of a fork server. It starts the server, and restarts it after a crash."""

    def __init__(self, python: str, backends: Sequence[str]) -> None:
        """Start the server, which imports the runtimes at once.

        Call it in a thread that lives as long as this process.
        Args: backends: the backends whose runtimes the server imports; empty: each rank imports its
                 own.
        """
        self._command = [python, "-m", __name__, *backends]
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

    def fork(self, config_json: str) -> RankProcess:
        """Fork a rank after the server has finished its imports. May be called from any thread.

        Raises: ResourceError: the server is not running.
        """
        data = config_json.encode()
        with self._lock:
            try:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
                answer, fds, _, _ = socket.recv_fds(self._socket, _PID.size, 1)
            except OSError as error:
                raise self._dead() from error
        if len(answer) != _PID.size or len(fds) != 1:
            raise self._dead()
        (pid,) = _PID.unpack(answer)
        return RankProcess(pid, fds[0])

    def close(self) -> None:
        """End the server; its ranks continue."""
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _dead(self) -> ResourceError:
        self._is_lost = True
        return ResourceError(
            f"{' '.join(self._command)} cannot fork ranks: {self._reason}",
            field="interpreters",
            remedy="run `phaseloom doctor` on the node to see what the interpreter lacks",
        )


def main(backends: Sequence[str]) -> None:
    """Run as the server: fork a rank for each configuration until the agent is gone."""
    lifecycle.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Ranks and their child processes must not hold the agent's socket or read from it.
    with socket.socket(fileno=os.dup(_STDIN)) as agent:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), _STDIN)
        from phaseloom.worker.agent.preload import preload

        preload(backends)
        signal.signal(signal.SIGCHLD, lambda number, frame: _reap())
        for config_json in _configs(agent):
            _fork(agent, config_json)


def _configs(agent: socket.socket) -> Iterator[str]:
    while header := _receive(agent, _LENGTH.size):
        yield _receive(agent, *_LENGTH.unpack(header)).decode()


def _receive(agent: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes and (chunk := agent.recv(num_bytes - len(data))):
        data += chunk
    return bytes(data)


def _fork(agent: socket.socket, config_json: str) -> None:
    # Block SIGCHLD: a rank reaped before it has a descriptor could be confused with a new process
    # of the same pid.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run(agent, config_json)
    sentinel = os.pidfd_open(pid)
    with contextlib.suppress(OSError):
        socket.send_fds(agent, [_PID.pack(pid)], [sentinel])
    os.close(sentinel)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _run(agent: socket.socket, config_json: str) -> None:
    """Become a rank; never returns."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        agent.close()
        from phaseloom.worker.rank.process import main as run_rank

        run_rank(config_json)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(1)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main(sys.argv[1:])
