"""The example with tools on a mesh: conversations in turns, beside another job, with failures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from grpo_tools import Settings, model_of, train
from grpo_tools import deployments as deployments_of
from toolbox import Environment

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig
from tests.support.jobs import no_barrier, running_mesh, tenant

pytestmark = pytest.mark.timeout(240)
SETTINGS = Settings(
    steps=2, questions=3, group=4, warmup_steps=40, warmup_batch=16, eval_questions=6
)


class Heard:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **values: Any) -> None:
        self.events.append((event, values))

    def all(self, event: str) -> list[dict[str, Any]]:
        return [values for name, values in self.events if name == event]


async def test_two_runs_with_failing_tools_end_with_the_same_weights(short_dir: Path) -> None:
    async def run(connection: client.Mesh, name: str, seconds: float) -> Heard:
        heard = Heard()
        environment = Environment(seconds=seconds, faults=0.05, call_reward=0.1)
        job = await connection.submit_job(name, deployments_of(model_of(SETTINGS)))
        await train(job, environment, SETTINGS, heard, no_barrier)
        await job.finish()
        return heard

    async with running_mesh(MeshConfig(), short_dir) as (mesh, log), tenant(mesh) as connection:
        first, second = await asyncio.gather(
            run(connection, "slow", 0.02), run(connection, "quick", 0.0)
        )
        await log.caught_up()
        assert log.failures() == []
    (done,), (other) = first.all("done"), second.all("done")
    for name in ("weights_sha256", "reward_start", "reward_end"):
        assert done[name] == other[0][name], name
    tried = SETTINGS.questions * SETTINGS.group * SETTINGS.steps + 2 * SETTINGS.eval_questions
    left_out = first.all("left_out")
    assert left_out == second.all("left_out")
    assert 0 < len(left_out) < tried
    assert all("was not answered in time" in each["why"] for each in left_out)
    assert max(step["turns"] for step in first.all("step")) > 1.5
    # What was tried has taught something, and did not only confirm the warm-up.
    assert len(log.finished("slow.policy")) > 2 * SETTINGS.warmup_steps + 2
