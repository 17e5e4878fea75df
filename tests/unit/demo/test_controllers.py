"""Controllers as real child processes: barriers, results, failures, and nobody left behind."""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

from phaseloom.common.contract.errors import ResourceError
from phaseloom.demo.controllers import (
    ControllerLine,
    Controllers,
    ControllerSpec,
    find_example,
    result_of,
)

ROOT = Path(__file__).parents[3]
PROGRAM = textwrap.dedent(
    """
    import argparse, json, os, sys, time

    parser = argparse.ArgumentParser()
    for name in ("task", "job", "seed", "steps"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--wait", action="store_true")
    options = parser.parse_args()

    def say(event, **values):
        print(json.dumps({"event": event, "t": time.time(), **values}), flush=True)

    def barrier(name):
        say("barrier", name=name)
        if not sys.stdin.readline():
            raise EOFError("no line")

    say("ready", pid=os.getpid(), url=os.environ["PHASELOOM_URL"])
    if options.task == "fails":
        sys.exit("the sum of all fears")
    if options.task == "slow":
        time.sleep(0.2)
    barrier("start")
    for step in range(1, int(options.steps) + 1):
        say("step", step=step, reward=step / 10)
    if options.task == "hangs":
        time.sleep(600)
    barrier("end")
    if options.task != "mute":
        say("done", weights_sha256="ab", reward_start=0.25, reward_end=0.5,
            grpo_start_t=1.0, grpo_end_t=2.0)
    """
)


class Run:
    """Controllers of some tasks, and everything they said in the order it was heard."""

    def __init__(self, directory: Path, *tasks: str) -> None:
        script = directory / "grpo.py"
        script.write_text(PROGRAM)
        self.lines: list[tuple[str, ControllerLine]] = []
        self.logs = directory
        self.controllers = Controllers(
            script,
            [ControllerSpec(task, task, seed=0, steps=2) for task in tasks],
            environment={"PHASELOOM_URL": "nats://here:1"},
            logs=directory,
            on_line=lambda job, line: self.lines.append((job, line)),
        )

    def pids(self) -> list[int]:
        return [line["pid"] for _, line in self.lines if line["event"] == "ready"]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_results_come_in_the_order_of_the_specs(tmp_path: Path) -> None:
    results = await Run(tmp_path, "slow", "quick").controllers.run()
    assert [r.name for r in results] == ["slow", "quick"]
    assert results[0].steps == 2
    assert results[0].rewards == [0.1, 0.2]
    assert (results[0].reward_start, results[0].reward_end) == (0.25, 0.5)
    assert (results[0].grpo_start_unix_s, results[0].grpo_end_unix_s) == (1.0, 2.0)


async def test_nobody_passes_a_barrier_before_all_are_there(tmp_path: Path) -> None:
    run = Run(tmp_path, "slow", "quick")
    await run.controllers.run()
    said = [(job, line["event"], line.get("name")) for job, line in run.lines]
    first_step = min(i for i, (_, event, _) in enumerate(said) if event == "step")
    assert {("slow", "barrier", "start"), ("quick", "barrier", "start")} <= set(said[:first_step])


async def test_failure_names_the_job_its_last_words_and_the_log(tmp_path: Path) -> None:
    run = Run(tmp_path, "fails", "quick")
    with pytest.raises(ExceptionGroup) as failed:
        await run.controllers.run()
    (error,) = failed.value.exceptions
    assert isinstance(error, ResourceError)
    assert "fails ended with exit code 1: the sum of all fears" in str(error)
    assert str(tmp_path / "controller-fails.log") in str(error)
    assert len(run.pids()) >= 1
    assert not any(is_alive(pid) for pid in run.pids())


async def test_children_end_when_the_run_is_cancelled(tmp_path: Path) -> None:
    run = Run(tmp_path, "hangs")
    reached = asyncio.Event()
    on_line = run.controllers._on_line

    def watch(job: str, line: ControllerLine) -> None:
        on_line(job, line)
        if line["event"] == "step":
            reached.set()

    run.controllers._on_line = watch
    task = asyncio.create_task(run.controllers.run())
    await reached.wait()
    (pid,) = run.pids()
    assert is_alive(pid)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(pid)


async def test_controller_that_never_says_done_failed(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await Run(tmp_path, "mute").controllers.run()
    assert "exited without reporting `done`" in str(failed.value.exceptions[0])


def test_result_needs_a_done_line() -> None:
    with pytest.raises(ResourceError):
        result_of("sums", [{"event": "step", "step": 1, "reward": 0.0}])


def test_example_is_found_in_this_repository() -> None:
    assert find_example().samefile(ROOT / "examples" / "grpo.py")


def test_wheel_has_the_example_and_all_that_it_imports(tmp_path: Path) -> None:
    """An installed wheel is enough for `phaseloom demo`: outside a clone nothing else is there.

    The program and the modules beside it lie in one folder, from which Python runs it.
    """
    builders: Any = pytest.importorskip("hatchling.builders.wheel")
    (wheel,) = builders.WheelBuilder(str(ROOT)).build(
        directory=str(tmp_path), versions=["standard"]
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    installed = tmp_path / "installed" / "phaseloom" / "demo"
    program = "from phaseloom.demo.controllers import find_example; print(find_example())"
    python = [sys.executable, "-S", "-c"]
    paths = [str(tmp_path / "installed"), *(path for path in sys.path if "packages" in path)]
    found = subprocess.run(
        [*python, program],
        env={"PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    assert found == str(installed / "examples" / "grpo.py")
    assert {path.name for path in (installed / "examples").iterdir()} >= {
        "grpo.py",
        "grpo_pretrained.py",
        "grpo_tools.py",
        "orchard.txt",
    }
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    programs = [*(installed / "examples").glob("*.py")]
    there = {path.stem for path in programs}
    assert there <= names
    for file in programs:
        assert imported(file) & names <= there, file.name


def imported(file: Path) -> set[str]:
    """The modules that a program names in its imports."""
    tree = ast.parse(file.read_text())
    return {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]
        if name
    }
