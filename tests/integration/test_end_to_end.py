"""GRPO jobs over the whole mesh: what they learn does not depend on who shares their devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.events import ActivationOpened, Event
from tests.support.jobs import (
    TASKS,
    run_job,
    running_mesh,
    short,
)

STEPS = 3
IDLE_LIMIT_BYTES = 600e6


@pytest.mark.usefixtures("cold_nodes")
async def test_jobs_end_with_the_weights_of_the_oracle_alone_and_shared(
    expected: dict[str, str], short_dir: Path
) -> None:
    """Every change of job on a device is a real context switch: state leaves the worker's memory.

    Bit for bit, and twice through the same mesh: what an ended job left behind disturbs nobody.
    """
    async with running_mesh(MeshConfig(), short_dir) as (mesh, log):
        assert sum(map(_rss_bytes, _service_pids(mesh))) < IDLE_LIMIT_BYTES
        task = TASKS[0]
        assert await run_job(mesh, task, short(task, STEPS), "alone") == expected[task]
        await log.caught_up()
        assert not _switches(log.events, lambda job: job == "alone")

        # They begin and end GRPO together, or one might be done before the other needs a device.
        both = asyncio.Barrier(len(TASKS))

        async def meet(_: str) -> None:
            await both.wait()

        shared = await asyncio.gather(
            *(run_job(mesh, t, short(t, STEPS), barrier=meet) for t in TASKS)
        )
        assert dict(zip(TASKS, shared, strict=True)) == expected
        await log.caught_up()
        for task in TASKS:
            policy = _switches(log.events, lambda job, task=task: job == task)  # type: ignore[misc]
            assert len(policy) >= STEPS, f"{task} hardly ever displaced the other job"
            assert all(s.bytes_out > 0 and s.bytes_in > 0 for s in policy)
        assert log.failures() == []


def _switches(events: list[Event], of_job: Callable[[str], bool]) -> list[ActivationOpened]:
    """Activations of a job that displaced another one's state."""
    return [
        event
        for event in events
        if isinstance(event, ActivationOpened)
        and of_job(event.deployment.job)
        and any(other.job != event.deployment.job for other in event.displaced)
    ]


def _service_pids(mesh: Mesh) -> list[int]:
    return [
        pid
        for name in ("scheduler", "router", "profiler", "worker", "statemgr")
        for pid in mesh.pids(name)
    ]


def _rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (kibibytes,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
    return int(kibibytes) * 1024
