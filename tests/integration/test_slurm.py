"""The script for Slurm, with an srun that starts its tasks on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.containers import ROOT, last_words
from tests.support.processes import free_port

pytestmark = pytest.mark.long

SCRIPT = ROOT / "deploy/slurm/phaseloom.sbatch"
NUM_NODES = 2
SRUN = r"""#!/usr/bin/env bash
# Slurm's: it starts the tasks, hands signals on to them, and waits for them.
while [[ $1 == --* ]]; do
  case $1 in --ntasks=*) tasks=${1#*=} ;; esac
  shift
done
for ((i = 0; i < tasks; i++)); do
  SLURM_PROCID=$i "$@" &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}"' TERM
wait
wait
"""


def environment(directory: Path, nats_port: int) -> dict[str, str]:
    """What Slurm sets, and what a user gives, for nodes that are all on this machine."""
    stub = directory / "bin" / "srun"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(SRUN)
    stub.chmod(0o755)
    return os.environ | {
        "PATH": f"{stub.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
        ),
        "SLURM_JOB_NUM_NODES": str(NUM_NODES),
        "MESH_DIR": str(directory / "mesh"),
        "MESH_PYTHON": sys.executable,
        "MESH_HOST": "127.0.0.1",
        "MESH_NODE_HOST": "127.0.0.1",
        "MESH_PORT": str(nats_port),
        "MESH_DEVICES": json.dumps([16 * 2**20]),
        "MESH_DEVICE_KIND": "emulated",
        "MESH_HOST_MEMORY_BYTES": str(2**31),
    }


async def run(variables: dict[str, str], directory: Path) -> str:
    """Submit the script with a program; returns what the program prints."""
    program = [sys.executable, "-m", "tests.support.keptjob"]
    with (directory / "slurm.out").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            "bash",
            str(SCRIPT),
            *program,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    said = (directory / "slurm.out").read_text()
    assert code == 0, said + last_words(directory / "mesh/logs")
    return said.splitlines()[-1]


def still_running(directory: Path) -> list[str]:
    """The command lines of processes that were started for a mesh."""
    mark = f"MESH_DIR={directory / 'mesh'}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or is another's
            continue
    return found


@pytest.mark.usefixtures("noop_nodes")
async def test_job_of_one_allocation_goes_on_in_the_next(short_dir: Path) -> None:
    variables = environment(short_dir, free_port())
    for steps in ("1", "2"):
        assert await run(variables, short_dir) == steps
        assert still_running(short_dir) == []


def test_script_passes_its_linter() -> None:
    linter = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([linter, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
