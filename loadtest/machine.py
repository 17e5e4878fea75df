"""A mesh as an operator runs it: `phaseloom up` as a process, killed whole, and gone on with.

Its controllers run elsewhere, and outlive it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from phaseloom.common.process import config, diewithparent
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.natsserver import Credentials
from phaseloom.demo.controllers import find_example

TENANT = "demo"
TASKS = ("chain_sum", "letter_counting")
_LINE_LIMIT_BYTES = 2**20


class Failed(Exception):
    """A process ended that should have gone on, or ended in another way than it should have."""


class Machine:
    """A machine that runs one mesh, on a disk that outlives it.

    Args: runs: the directory of runs, on that disk. log: where the mesh's process writes.
          options: of `phaseloom up`.
    """

    def __init__(self, runs: Path, log: Path, options: Sequence[str] = ()) -> None:
        self.runs = runs
        self.log = log
        self._command = [
            *(sys.executable, "-m", "phaseloom.cli.main", "up"),
            *("--runs", str(runs), "--console-port", "0", *options),
        ]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def run_dir(self) -> Path:
        """The newest run's directory."""
        return (self.runs / "latest").resolve()

    async def start(self, *options: str) -> None:
        """Start the mesh, and wait until it is up.

        Args:   options: of `phaseloom up`, for this time.
        Raises: Failed: it ends before; the message has what it said last.
        """
        with self.log.open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *diewithparent.launcher([*self._command, *options]),
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(b"the mesh is up"):
                return
        code = await self._process.wait()
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        raise Failed(f"the mesh does not come up, exit code {code}: {''.join(last)}")

    async def kill(self) -> None:
        """End everything at once, as a power cut does."""
        assert self._process is not None
        pids = json.loads((self.run_dir / "mesh.json").read_text())["pids"].values()
        self._process.kill()
        await self._process.wait()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End the mesh in order, where it still runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.communicate()

    @property
    def credentials(self) -> Credentials:
        file = self.run_dir / "credentials.json"
        return msgspec.json.decode(file.read_bytes(), type=Credentials)

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        """A connection to the mesh's bus."""
        bus = await Bus.open(self.credentials.bus, "looking on")
        try:
            yield bus
        finally:
            await bus.close()


@dataclass
class Controller:
    """The process of one job's controller, `examples/grpo.py`."""

    job: str
    task: str
    process: asyncio.subprocess.Process
    log: Path
    steps: int = 0
    """How many steps it has told of."""
    weights_sha256: str = ""
    """The weights that it ended with; empty: it has not."""
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def started(
        cls, job: str, task: str, options: dict[str, int], credentials: Credentials, log: Path
    ) -> Controller:
        """Args: options: of the program, such as `steps`. log: where it writes its errors."""
        given = {"task": task, "job": job, **options}
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *diewithparent.launcher([sys.executable, "-u", str(find_example()), *words]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={
                    **config.inherited(),
                    "PHASELOOM_URL": credentials.url,
                    "PHASELOOM_TENANT": TENANT,
                    "PHASELOOM_PASSWORD": credentials.tenants[TENANT],
                    "OMP_NUM_THREADS": "1",
                },
                limit=_LINE_LIMIT_BYTES,
            )
        return cls(job, task, process, log)

    async def run(self) -> str:
        """Follow the process to its end, and return the weights that it ended with.

        Raises: Failed: it ended without; the message has what it said last.
        """
        try:
            async for said in self._said():
                self.steps += said["event"] == "step"
                if said["event"] == "done":
                    self.weights_sha256 = cast("str", said["weights_sha256"])
                self._moved.set()
            code = await self.process.wait()
        finally:
            self._moved.set()
            self.kill()
            await self.process.wait()
        if code or not self.weights_sha256:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise Failed(f"the controller of {self.job}, exit code {code}: {''.join(last)}")
        return self.weights_sha256

    async def reached(self, step: int) -> bool:
        """Wait until it has told of so many steps; False: it ended before."""
        while self.steps < step:
            if self.weights_sha256 or self.process.returncode is not None:
                return False
            self._moved.clear()
            await self._moved.wait()
        return True

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()

    async def _said(self) -> AsyncIterator[dict[str, Any]]:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            with suppress(msgspec.DecodeError):  # half a line of one that was killed
                yield msgspec.json.decode(line)
