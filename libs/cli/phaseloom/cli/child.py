"""A child process of the supervisor, restarted with growing pauses whenever it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from phaseloom.cli.hanging import Pulse
from phaseloom.cli.processes import ChildSpec
from phaseloom.common.contract.errors import unexpected_error
from phaseloom.common.process import config as configuration
from phaseloom.common.process.heartbeat import NOTIFY_SOCKET
from phaseloom.common.process.lifecycle import DIE_WITH_PARENT

log = logging.getLogger(__name__)

STABLE_AFTER_S = 10.0
"""A child that ran at least this long counts as stable: its next restart has the shortest pause."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_LAST_BYTES = 64 * 1024
"""Number of bytes at the end of a child's log to search for its last line."""


def pause_s(failures: int) -> float:
    """Return the seconds to wait before a restart after this many consecutive failures."""
    return float(min(_FIRST_PAUSE_S * 2 ** (failures - 1), _LONGEST_PAUSE_S))


@dataclass(slots=True)
class Ended:
    """How a child ended."""

    exit_code: int
    after_s: float

    def __str__(self) -> str:
        how = f"exit code {self.exit_code}"
        if self.exit_code < 0:
            how = signal.Signals(-self.exit_code).name
        return f"{how} after {self.after_s:.1f} s"


@dataclass(slots=True)
class NotStarted:
    """Why a child could not be started, such as too few open files."""

    error: OSError
    after_s: float = 0.0

    def __str__(self) -> str:
        info = unexpected_error(self.error)
        return f"it could not be started: {info.message}" + (
            f" (to fix: {info.remedy})" if info.remedy else ""
        )


def logged_reason(log_file: Path) -> str:
    """Return ": " and the reason if the last line of a service's log is CRITICAL, otherwise ""."""
    with suppress(OSError, msgspec.DecodeError, IndexError), log_file.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        line = msgspec.json.decode(file.read().splitlines()[-1], type=_LogLine)
        return f": {line.message}" if line.level == "CRITICAL" else ""
    return ""


class _LogLine(msgspec.Struct):
    level: str
    message: str


Report = Callable[[str, str], Awaitable[None]]
"""Called with the name of a child that has ended, and the reason, before it is restarted."""


@dataclass(slots=True)
class Child:
    """One child process, restarted whenever it ends until `stop` or `kill` is called."""

    spec: ChildSpec
    log_file: Path
    on_start: Callable[[], None]
    report: Report
    process: asyncio.subprocess.Process | None = None
    pulse: Pulse = field(default_factory=Pulse)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Run the process, and restart it whenever it ends, until `stop` or `kill` is called."""
        failures, previous_line = 0, ""
        try:
            while not self._stopping.is_set():
                try:
                    ended: Ended | NotStarted = await self._run_once()
                except OSError as error:
                    ended = NotStarted(error)
                if self._stopping.is_set():
                    return
                # A long run ends the series of failures, so that its next pause is short.
                failures = 1 if ended.after_s >= STABLE_AFTER_S else failures + 1
                wait_s = pause_s(failures)
                last_line = await asyncio.to_thread(logged_reason, self.log_file)
                cause = (
                    ": same reason as before"
                    if last_line and last_line == previous_line
                    else last_line
                )
                previous_line = last_line
                reason = f"{ended}{cause}; restarts in {wait_s:.1f} s; see {self.log_file}"
                await self.report(self.spec.name, reason)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._stopping.wait()
        finally:
            self.send(signal.SIGKILL)
            self.pulse.close()
            self._stopped.set()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    async def stop(self, timeout_s: float) -> None:
        """End the process with SIGTERM, or with SIGKILL after the timeout. Do not restart it."""
        self._stopping.set()
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self._stopped.wait()
        except TimeoutError:
            log.warning("%s did not stop within %.0f s; killing it", self.spec.name, timeout_s)
            self.send(signal.SIGKILL)
            await self._stopped.wait()

    def kill(self) -> None:
        """End the process immediately with SIGKILL. Do not restart it."""
        self._stopping.set()
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def _run_once(self) -> Ended:
        started_s = time.monotonic()
        self.log_file.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        self.pulse.restart()
        stdin = asyncio.subprocess.DEVNULL
        if self.spec.listener is not None:
            stdin = self.spec.listener.open().fileno()
        with self.log_file.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self.spec.module,
                env={
                    **configuration.inherited(),
                    **self.spec.environment,
                    DIE_WITH_PARENT: str(os.getpid()),
                    NOTIFY_SOCKET: self.pulse.address,
                },
                stdin=stdin,
                stdout=output,
                stderr=output,
                # A session of its own, so that Ctrl-C does not reach it: the supervisor stops
                # children in order.
                start_new_session=True,
            )
        self.on_start()
        if self._stopping.is_set():  # `stop` was called while the process started
            self.send(signal.SIGTERM)
        exit_code = await self.process.wait()
        # The child leads a process group. End its own children as well: none may outlive it.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process = None
        return Ended(exit_code, time.monotonic() - started_s)
