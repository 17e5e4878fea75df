"""The command line starts fast: what only one subcommand needs is imported by it alone."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from phaseloom.cli.main import (
    _CHECKPOINT_COMMANDS,
    _COMMANDS,
    _EXAMPLES,
    _MODEL_COMMANDS,
    application,
)
from tests.support.processes import descendant_pids

WORKLOAD = Path(__file__).parents[3] / "loadtest/papers/data/Mixed_seed0_nodesA.csv"
_HEAVY = {
    "aiofiles",
    "cryptography",
    "google",
    "grpc",
    "importlib.metadata",
    "markdown_it",
    "matplotlib",
    "nats",
    "numpy",
    "opentelemetry",
    "prometheus_client",
    "pygments",
    "rich.live",
    "rich.markdown",
    "rich.progress",
    "torch",
    "uvloop",
}
_PROGRAM = """
import sys

sys.argv = ["phaseloom", *sys.argv[1:]]
from phaseloom.cli.main import main

try:
    main()
finally:
    print("\\nmodules", *sys.modules)
"""


def _imported(*arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    return set(done.stdout.rpartition("\nmodules ")[2].split())


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_imports_no_heavy_module_and_no_subcommand(arguments: tuple[str, ...]) -> None:
    imported = _imported(*arguments)
    assert imported & _HEAVY == set()
    of_commands = {name for name in imported if name.startswith("phaseloom.cli.")}
    assert of_commands == {"phaseloom.cli.main"}


def test_version_is_that_of_the_distribution() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phaseloom.cli.main", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "0.1.0"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phaseloom.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def _every_command() -> list[tuple[str, ...]]:
    """Every command and every group, as it is written on a command line."""
    groups = {"model": _MODEL_COMMANDS, "checkpoint": _CHECKPOINT_COMMANDS}
    plain = [(place.partition(":")[2].replace("_", "-"),) for place in _COMMANDS]
    return plain + [(group, name) for group, names in groups.items() for name in names]


def test_help_of_every_command_says_what_each_of_its_options_is() -> None:
    app = application()
    for command in _every_command():
        written = io.StringIO()
        console = Console(file=written, width=200, color_system=None)
        app([*command, "--help"], console=console, result_action="return_value")
        text = written.getvalue()
        assert " ".join(("Usage: phaseloom", *command)) in text
        bare = re.findall(r"│[ *]+((?:[A-Z_]+ )?--\S+(?: --\S+)*) *(?:\[.*\] *)?│", text)
        assert f"phaseloom {_EXAMPLES[' '.join(command)]}" in text
        assert bare == [], f"{command}: options without a word of help"


def test_every_command_has_an_example_that_its_command_line_accepts() -> None:
    app = application()
    assert {" ".join(command) for command in _every_command()} <= {*_EXAMPLES}
    for command, example in _EXAMPLES.items():
        assert example.startswith(command)
        app.parse_args(shlex.split(example), exit_on_error=False, print_error=False)


def test_wrong_command_line_ends_with_code_2_and_says_what_was_meant() -> None:
    done = _run("up", "--gatway", "8800")
    assert done.returncode == 2
    assert "--gateway" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_error_of_phaseloom_ends_with_code_1_in_one_line(tmp_path: Path) -> None:
    done = _run("jobs", "--run", str(tmp_path / "none"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("accounts", "/proc/x", "t", "--url", "nats://h:1"), "No such file or directory"),
        (("simulate", "--workload", "jobs.csv", "--out", "/proc/x"), "No such file or directory"),
        (("simulate", "plexrl-hrrs"), "python -m loadtest simulate plexrl-hrrs"),
        (("model", "convert", "/proc/x"), "/proc/x cannot be created"),
        (("demo", "--steps", "0"), "steps must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_written_or_run_is_said_in_one_line(
    arguments: tuple[str, ...], what: str
) -> None:
    """Each was a traceback, or came after minutes."""
    done = _run(*arguments)
    assert done.returncode == 1
    assert what in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("num_started", [2, 3])
def test_ctrl_c_ends_a_simulation_at_once(tmp_path: Path, num_started: int) -> None:
    """It went on until the runs under way had ended, which take up to minutes. Processes that had
    just been started printed tracebacks.

    Args: num_started: processes when the signal comes: one, and one for each parallel run.
    """
    words = ["simulate", "--workload", str(WORKLOAD), "--processes", "2"]
    command = [sys.executable, "-m", "phaseloom.cli.main", *words, "--out", str(tmp_path)]
    pipe = subprocess.PIPE
    running = subprocess.Popen(command, stderr=pipe, text=True, start_new_session=True)
    while len(descendant_pids(running.pid)) < num_started:
        assert running.poll() is None
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "Traceback" not in said


def test_completion_is_installed_for_the_shell(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phaseloom", "--install-completion", "--shell", "bash"],
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    scripts = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("--new-keys" in path.read_text() for path in scripts)
