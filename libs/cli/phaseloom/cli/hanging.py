"""Tells processes that hang from those that merely get little processor time.

A service sends heartbeats from its event loop. Silence alone proves nothing, because the machine
may be busy. It counts only if the supervisor ran on time and no thread of the service was waiting
for a processor, for the disk or for a debugger.

`close_connections` takes a hung process out of the rotation: NATS and HTTP clients then turn to
another replica, and the process connects again if it wakes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phaseloom.common.process.heartbeat import STATUS

TICK_S = 0.25
"""How often to check each service."""
HUNG_AFTER_S = 2.0
"""Silence after which a service counts as hung and leaves the rotation."""
_LONGEST_TICK_S = 2 * TICK_S
"""A longer tick shows that the supervisor itself did not run on time. Its remainder is ignored."""
UNMEASURED_S = 1.0
"""Silence after which the process is examined. Heartbeats are half as far apart."""
_UNCOUNTED_STATES = "Dt"
"""States in /proc/PID/stat: waiting for a disk, and stopped by a debugger."""
_STOPPED = "T"
_RUNNABLE = "R"
_SYS_PIDFD_GETFD = 438
_CREDENTIALS = struct.Struct("iII")
_MESSAGE_BYTES = 512


class Silence:
    """How long a process has been silent although it could run."""

    def __init__(self) -> None:
        self.pid = 0
        """The process; 0: it is not known yet, and nothing is expected of it."""
        self.seconds = 0.0
        self._threads: dict[str, _Thread] = {}
        """The last reading of the process's threads. Empty: none yet."""

    def end(self) -> None:
        """Start again from 0: the process has sent a sign of life, or a new one replaces it."""
        self.seconds, self._threads = 0.0, {}

    def hold(self, before_s: float) -> None:
        """Do not count the last tick. Args: before_s: the silence before it."""
        self.seconds = min(self.seconds, max(before_s, UNMEASURED_S))

    def add(self, elapsed_s: float) -> None:
        """Count a tick without a sign of life. Args: elapsed_s: since the last tick."""
        elapsed_s = min(elapsed_s, _LONGEST_TICK_S)
        if not self.pid:
            return
        if self.seconds < UNMEASURED_S:
            self.seconds += elapsed_s
            return
        with suppress(OSError):  # it has just ended
            self.seconds += elapsed_s - self._excused_s(elapsed_s)

    def _excused_s(self, elapsed_s: float) -> float:
        """Return how much of a tick the process could not use.

        Raises: OSError: the process has ended.
        """
        if _state(Path(f"/proc/{self.pid}")) == _STOPPED:
            return 0.0
        previous, self._threads = self._threads, _threads(self.pid)
        return max(
            thread.excused_s(previous[name], elapsed_s) if name in previous else elapsed_s
            for name, thread in self._threads.items()
        )


class Pulse:
    """The heartbeats of one service."""

    def __init__(self) -> None:
        self.silence = Silence()
        """Silence of the process that sends heartbeats. It is known once the first one arrives."""
        self.status = ""
        """What the service is short of, and how to fix it; empty: nothing."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")  # the kernel chooses a free name that no file can lose
        self.address = "@" + self._socket.getsockname()[1:].decode()
        """Value of NOTIFY_SOCKET for the service."""

    def close(self) -> None:
        self._socket.close()

    def restart(self) -> None:
        """Forget the previous process of the service."""
        self._receive()
        self.silence.end()
        self.silence.pid = 0
        self.status = ""

    def tick(self, elapsed_s: float) -> None:
        """Receive heartbeats, or count the silence. Args: elapsed_s: since the last tick."""
        if self._receive():
            self.silence.end()
        else:
            self.silence.add(elapsed_s)

    def _receive(self) -> bool:
        """Receive all heartbeats that have arrived. Returns: whether there were any."""
        has_beat = False
        with suppress(OSError):  # none is left, or the service is stopping
            while True:
                message, credentials, _, _ = self._socket.recvmsg(
                    _MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
                pid, user, _ = _CREDENTIALS.unpack(credentials[0][2])
                if user == os.getuid():  # any user of the machine can send to this socket
                    self.silence.pid, has_beat = pid, True
                    self.status = message.partition(STATUS)[2].decode(errors="replace")
        return has_beat


@dataclass(frozen=True, slots=True)
class _Thread:
    """One reading of a thread's state and times."""

    state: str
    run_s: float
    delay_s: float
    """Time for which it has waited for a processor, without the current wait."""

    def excused_s(self, previous: _Thread, elapsed_s: float) -> float:
        """Return for how much of a tick, from the previous reading to this one, it had to wait."""
        if self.state in _UNCOUNTED_STATES:
            return elapsed_s
        waited_s = self.delay_s - previous.delay_s
        if self.state == _RUNNABLE:
            waited_s = max(waited_s, elapsed_s - (self.run_s - previous.run_s))
        return min(waited_s, elapsed_s)


def _threads(pid: int) -> dict[str, _Thread]:
    """Read the threads of a process.

    Raises: OSError: the process has ended, or the kernel does not measure how long threads wait.
    """
    threads = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # the thread has just ended
            run_ns, delay_ns, _ = map(int, (thread / "schedstat").read_text().split())
            threads[thread.name] = _Thread(_state(thread), run_ns / 1e9, delay_ns / 1e9)
    return threads


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def close_connections(pid: int) -> None:
    """Close the TCP connections of another process, as if its peers had closed them.

    Listening sockets stay open, so the process can serve again when it wakes.

    Raises: OSError: the kernel does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
            number = libc.syscall(_SYS_PIDFD_GETFD, process, int(name), 0)
            if number < 0 and ctypes.get_errno() != errno.EBADF:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            if number >= 0:
                with socket.socket(fileno=number) as copy:
                    _shut_down(copy)
    finally:
        os.close(process)


def _shut_down(connection: socket.socket) -> None:
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        # A listening or unconnected socket has no peer. Shutting it down would be permanent.
        with suppress(OSError):
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
