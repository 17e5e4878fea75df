"""The GRPO example in step with its rollouts and ahead of them, three jobs at once on one mesh.

The jobs differ only in how far rollouts are ahead of training, and in whether weights are updated
while rollouts run; task, seed and settings are the same. They share the demo's two devices.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from loadtest.records import Machine, describe
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.process import config, diewithparent
from phaseloom.demo.controllers import find_example

TENANT = "demo"
MODES = {
    "synchronous": [],
    "one step ahead": ["--ahead", "1"],
    "three steps ahead, updated in flight": ["--ahead", "3", "--in-flight"],
}
QUARTERS = 4


class Settings(msgspec.Struct, frozen=True):
    task: str = "letter_counting"
    steps: int = 60
    seed: int = 0


class JobReport(msgspec.Struct, frozen=True):
    mode: str
    rewards: list[float]
    """The mean reward of each step's rollout."""
    reward_start: float
    """The mean reward on held-out problems before the first step."""
    reward_end: float
    seconds: float
    """From the first rollout to the end of the last step, beside the other jobs."""

    @property
    def by_quarter(self) -> list[float]:
        """The mean reward in each quarter of the steps."""
        size = -(-len(self.rewards) // QUARTERS)
        return [fmean(self.rewards[i : i + size]) for i in range(0, len(self.rewards), size)]


class OffPolicyReport(msgspec.Struct, frozen=True):
    machine: Machine
    settings: Settings
    jobs: list[JobReport]


async def run(settings: Settings, directory: Path) -> OffPolicyReport:
    """Run the jobs. Args: directory: an existing one, for the mesh.

    Raises: RuntimeError: a job failed; its log is in the directory.
    """
    async with Mesh(MeshConfig(tenants=[TENANT]), directory) as mesh:
        await mesh.ready()
        async with asyncio.TaskGroup() as group:
            jobs = [
                group.create_task(_run(settings, mesh, mode, options, directory))
                for mode, options in MODES.items()
            ]
    return OffPolicyReport(describe("torch"), settings, [job.result() for job in jobs])


async def _run(
    settings: Settings, mesh: Mesh, mode: str, options: Sequence[str], directory: Path
) -> JobReport:
    name = mode.replace(",", "").replace(" ", "-")
    words = ["--task", settings.task, "--job", name, *options]
    words += ["--steps", str(settings.steps), "--seed", str(settings.seed)]
    environment = {
        **config.inherited(),
        "PHASELOOM_URL": mesh.url,
        "PHASELOOM_TENANT": TENANT,
        "PHASELOOM_PASSWORD": mesh.credentials.tenants[TENANT],
        "OMP_NUM_THREADS": "1",
    }
    path = directory / "logs" / f"controller-{name}.log"
    with path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *diewithparent.launcher([sys.executable, "-u", str(find_example()), *words]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environment,
        )
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    events = [msgspec.json.decode(line) for line in said.splitlines()]
    if process.returncode or events[-1]["event"] != "done":
        raise RuntimeError(f"{mode}: the controller ended with {process.returncode}, see {path}")
    done = events[-1]
    return JobReport(
        mode,
        [event["reward"] for event in events if event["event"] == "step"],
        done["reward_start"],
        done["reward_end"],
        done["grpo_end_t"] - done["grpo_start_t"],
    )
