"""The command line starts fast: what only one subcommand needs is imported by it alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
