"""The scheduler's policies on a mesh of real processes: who shares, who is refused, who waits."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import Awaitable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest
from grpo import declared, deployments, train
from rich.console import Console
from settings import Settings

from phaseloom.cli.jobs import explain
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import MeshJob
from phaseloom.common.contract.api import JobStatus
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.events import ActivationOpened, Event
from phaseloom.scheduler.core.policies.registry import ORDERING, PLACEMENT
from tests.support.jobs import (
    NOOP,
    TASKS,
    TENANT,
    Reports,
    oracle,
    run_job,
    running_mesh,
    short,
    tenant,
)

BALANCED = declared(5.0, 5.0)
ALONE = {"isolated", "solo", "colocated"}
"""Placement policies under which nobody shares: the next job waits until the one before is done."""
STEPS = 3
MANY_STEPS = 6
PATIENCE_S = 240.0
MEMORY_BYTES = {"rollout": 8 * 2**20, "train": 16 * 2**20}


# --- admission -----------------------------------------------------------------------------------


def explained(mesh: Mesh, job: str) -> str:
    """What `phaseloom explain` says of a job."""
    text = io.StringIO()
    explain(f"{TENANT}.{job}", run=mesh.run_dir, console=Console(file=text))
    return text.getvalue()


@pytest.mark.usefixtures("noop_nodes")
async def test_slo_that_cannot_be_kept_is_refused_in_numbers_or_waited_for(
    short_dir: Path,
) -> None:
    """Two jobs that roll out and train for 5 s each fill each other's gaps; for a third there is no
    room within an iteration of 12 s, until one of them ends."""
    async with Mesh(MeshConfig(placement="coexec"), short_dir) as mesh:
        await mesh.ready()
        async with tenant(mesh) as connection:
            first = await connection.submit_job("first", NOOP, slo=1.2, cycle=BALANCED)
            beside = await connection.submit_job("beside", NOOP, slo=1.2, cycle=BALANCED)
            assert ", with first (" in (await beside.status()).placement

            no_room = r"would take 15\.0 s, but only 12\.0 s are allowed .* \(0 free\)"
            with pytest.raises(ResourceError, match=no_room) as refused:
                await connection.submit_job("third", NOOP, slo=1.2, cycle=BALANCED, may_wait=False)
            assert refused.value.info.code is Code.RESOURCE_EXHAUSTED
            told = await asyncio.to_thread(explained, mesh, "third")
            assert told.startswith(
                "demo.third: rejected\n  RESOURCE_EXHAUSTED: there are no nodes for the job now"
            )

            submitting = connection.submit_job("patient", NOOP, slo=1.2, cycle=BALANCED)
            waiting = asyncio.create_task(submitting)
            async with asyncio.timeout(60):
                while not await has_no_place(connection.status("patient")):
                    await asyncio.sleep(0.02)
            told = await asyncio.to_thread(explained, mesh, "patient")
            assert told.startswith("demo.patient: submitted\n  UNAVAILABLE: the job is waiting")
            assert "(0 free)" in told
            await first.finish()
            patient = await waiting
            assert ", with beside (" in (await patient.status()).placement
            told = await asyncio.to_thread(explained, mesh, "patient")
            assert told.startswith("demo.patient: active\n  in group g1, ")


async def has_no_place(asked: Awaitable[JobStatus]) -> bool:
    """Whether the job is known, and known to wait; not before its submission has been answered."""
    try:
        return (await asked).error is not None
    except CallerError as error:
        if error.info.code is not Code.NOT_FOUND:
            raise
        return False


# --- jobs that learn -----------------------------------------------------------------------------


class Together:
    """GRPO jobs on one mesh that are submitted in turn, and begin and end GRPO together."""

    def __init__(self) -> None:
        self.weights: dict[str, str] = {}
        """SHA-256 of each job's, at the end."""
        self.steps: list[str] = []
        """The job of each step that was done, in order."""

    async def run(self, mesh: Mesh, asked: dict[str, tuple[str, Settings]]) -> None:
        """Args: asked: by job, its task and settings."""
        everybody = asyncio.Barrier(len(asked))
        async with (
            asyncio.timeout(PATIENCE_S),
            tenant(mesh) as connection,
            asyncio.TaskGroup() as group,
        ):
            jobs = {
                name: await connection.submit_job(name, deployments(settings))
                for name, (_, settings) in asked.items()
            }
            for name, job in jobs.items():
                group.create_task(self._train(job, *asked[name], everybody))

    async def _train(
        self, job: MeshJob, task: str, settings: Settings, everybody: asyncio.Barrier
    ) -> None:
        reports = Reports()

        def report(event: str, **values: object) -> None:
            reports(event, **values)
            if event == "step":
                self.steps.append(job.name)

        async def barrier(_: str) -> None:
            await everybody.wait()

        await train(job, task, settings, report, barrier)
        await job.finish()
        self.weights[job.name] = reports.weights_sha256


def covering() -> list[tuple[str, str]]:
    """Pairs in which every placement and every ordering policy comes at least once."""
    count = max(len(PLACEMENT), len(ORDERING))
    return list(islice(zip(cycle(PLACEMENT), cycle(ORDERING)), count))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "order"), covering())
async def test_cold_jobs_share_one_node_a_pool_under_every_policy(
    place: str, order: str, expected: dict[str, str], short_dir: Path
) -> None:
    """Whatever the policies, what the jobs learn is the same, bit for bit."""
    config = MeshConfig(placement=place, ordering=order)
    async with running_mesh(config, short_dir) as (mesh, log):
        if place in ALONE:
            found = await asyncio.gather(*(run_job(mesh, t, short(t, STEPS)) for t in TASKS))
            assert dict(zip(TASKS, found, strict=True)) == expected
        else:
            jobs = Together()
            await jobs.run(mesh, {task: (task, short(task, STEPS)) for task in TASKS})
            assert jobs.weights == expected
        await log.caught_up()
        assert log.failures() == []
        assert place in ALONE or any(map(is_change_of_jobs, log.events))


def is_change_of_jobs(event: Event) -> bool:
    return isinstance(event, ActivationOpened) and any(
        other.job != event.deployment.job for other in event.displaced
    )


FOUR = {
    f"{task.replace('_', '-')}-{seed}": (task, replace(short(task, MANY_STEPS), seed=seed))
    for seed in (0, 1)
    for task in TASKS
}
"""By job."""


@pytest.fixture(scope="module")
def expected_of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("oracle")
    return {name: oracle(*asked, root / name) for name, asked in FOUR.items()}


@pytest.mark.slow
async def test_four_jobs_share_two_nodes_of_each_pool(
    expected_of_four: dict[str, str], short_dir: Path
) -> None:
    """Two cold jobs take nodes of their own, two more join; all are served, none is changed by the
    others."""
    nodes = [
        NodeConfig(f"{pool}-{number}", pool, [num_bytes])
        for pool, num_bytes in MEMORY_BYTES.items()
        for number in (0, 1)
    ]
    config = MeshConfig(nodes=nodes, placement="coexec", ordering="hold")
    async with running_mesh(config, short_dir) as (mesh, log):
        jobs = Together()
        await jobs.run(mesh, FOUR)
        await log.caught_up()
        assert log.failures() == []
        opened = [event for event in log.events if isinstance(event, ActivationOpened)]

    assert {event.node for event in opened} == {node.name for node in nodes}
    homes = {event.deployment.job: set[str]() for event in opened}
    for event in opened:
        homes[event.deployment.job].add(event.node)
    assert all(len(home) == 2 for home in homes.values()), "a node of each pool for each job"
    assert sorted(Counter(map(frozenset, homes.values())).values()) == [2, 2]
    assert any(map(is_change_of_jobs, opened))

    ends = {name: [i for i, job in enumerate(jobs.steps) if job == name] for name in FOUR}
    first_end = min(of_job[-1] for of_job in ends.values())
    assert all(of_job[0] < first_end for of_job in ends.values()), f"somebody starved: {jobs.steps}"
    assert jobs.weights == expected_of_four
