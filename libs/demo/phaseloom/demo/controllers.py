"""The controllers of a run: `examples/grpo.py` as child processes, and their reports.

A controller writes one JSON object per line to stdout, `{"event": "ready" | "warmup" | "eval" |
"step" | "barrier" | "done", ...}`, and waits for a line on stdin at each barrier. Its stderr goes
to a log file. The children die with this process, even if it is killed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.process import config, diewithparent
from phaseloom.demo.report import JobResult

LINE_LIMIT_BYTES = 2**20
STOP_TIMEOUT_S = 5.0
BARRIERS = ("start", "round", "end")

ControllerLine = dict[str, Any]
"""A line of a controller's stdout, decoded."""


@dataclass(frozen=True, slots=True)
class ControllerSpec:
    """One job of a run, which one controller drives."""

    job: str
    task: str
    """The task to pass to the program; empty for a program with a single task."""
    seed: int
    steps: int | None
    """GRPO steps; None: the example's own default."""


def find_example(name: str = "grpo.py") -> Path:
    """Return the path of an example: the installed one, or else the one in the clone."""
    installed = Path(__file__).with_name("examples") / name
    if installed.is_file():
        return installed
    return Path(__file__).resolve().parents[4] / "examples" / name


class Controllers:
    """The controllers of one run, which pass each barrier together.

    Args: script: the controllers' program (`find_example`).
          environment: variables to reach the mesh, in addition to the inherited ones.
          arguments: further arguments for every command line.
          on_line: called with (job, line) for every line that a controller writes.
          at_barrier: called once at each barrier, when all controllers have reached it; they go on
              when it returns.
    """

    def __init__(
        self,
        script: Path,
        specs: Sequence[ControllerSpec],
        *,
        environment: dict[str, str],
        logs: Path,
        on_line: Callable[[str, ControllerLine], None],
        arguments: Sequence[str] = (),
        at_barrier: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._at_barrier = at_barrier
        self._arguments = arguments
        self._specs = specs
        self._environment = {**config.inherited(), **environment}
        self._logs = logs
        self._on_line = on_line
        self._script = script
        self._barriers = {name: asyncio.Barrier(len(specs)) for name in BARRIERS}

    async def run(self) -> list[JobResult]:
        """Run all controllers to the end and return their results in the order of the specs.

        Raises: ExceptionGroup of ResourceError: a controller failed; the others are stopped.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._run_one(spec)) for spec in self._specs]
        return [task.result() for task in tasks]

    async def _run_one(self, spec: ControllerSpec) -> JobResult:
        log_file = self._logs / f"controller-{spec.job}.log"
        command = [sys.executable, "-u", str(self._script), "--job", spec.job]
        command += ["--seed", str(spec.seed), "--wait", *self._arguments]
        command += ["--task", spec.task] if spec.task else []
        command += [] if spec.steps is None else ["--steps", str(spec.steps)]
        with log_file.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *diewithparent.launcher(command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
                limit=LINE_LIMIT_BYTES,
            )
        try:
            lines = await self._read_lines(spec, process)
            code = await process.wait()
        finally:
            await _stop(process)
        if code != 0:
            log_lines = log_file.read_text(errors="replace").strip().splitlines()
            last_line = log_lines[-1] if log_lines else "its log is empty"
            raise ResourceError(
                f"the controller of {spec.job} ended with exit code {code}: {last_line}",
                code=Code.ABORTED,
                remedy=f"see {log_file}",
            )
        return result_of(spec.job, lines)

    async def _read_lines(
        self, spec: ControllerSpec, process: asyncio.subprocess.Process
    ) -> list[ControllerLine]:
        assert process.stdout is not None
        assert process.stdin is not None
        lines = []
        async for text in process.stdout:
            line = msgspec.json.decode(text)
            lines.append(line)
            self._on_line(spec.job, line)
            if line["event"] == "barrier":
                barrier = self._barriers[line["name"]]
                if await barrier.wait() == 0 and self._at_barrier is not None:
                    await self._at_barrier(line["name"])
                await barrier.wait()
                process.stdin.write(b"\n")
                await process.stdin.drain()
        return lines


def result_of(job: str, lines: Sequence[ControllerLine]) -> JobResult:
    """Return the result of a job from its controller's lines.

    Raises: ResourceError: the controller exited with code 0 but never reported `done`.
    """
    steps = [line for line in lines if line["event"] == "step"]
    done = next((line for line in lines if line["event"] == "done"), None)
    if done is None:
        raise ResourceError(f"the controller of {job} exited without reporting `done`")
    return JobResult(
        name=job,
        steps=len(steps),
        reward_start=done["reward_start"],
        reward_end=done["reward_end"],
        weights_sha256=done["weights_sha256"],
        grpo_start_unix_s=done["grpo_start_t"],
        grpo_end_unix_s=done["grpo_end_t"],
        rewards=[line["reward"] for line in steps],
    )


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
