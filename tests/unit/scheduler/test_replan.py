"""Plans for the whole cluster are computed beside the shell's loop, and answered once."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.events import (
    JobFinished,
    JobSubmitted,
    ReplanComputed,
    SchedulerConfigured,
)
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.specs import Cycle, JobSpec, Segment
from phaseloom.common.process import lifecycle
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.placement import repack
from phaseloom.scheduler.core.planning import admission
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Move, Placement, Waits
from phaseloom.scheduler.core.state.outputs import ComputeReplan
from phaseloom.scheduler.shell import Replan, Shell
from tests.support.memorylog import MemoryLog, MemorySink
from tests.support.world import CONFIG, node_up, spec

CYCLE = Cycle(10.0, [Segment("train", 0, 5.0)])


class Policy:
    """Each job on nodes of its own; a plan moves nothing, and is counted."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def place(self, cluster: Cluster, member: Member) -> Decision:
        return admission.nodes_of_its_own(cluster, member) or Waits("nothing is free")

    def replan(self, cluster: Cluster) -> list[Move]:
        self.threads.append(threading.current_thread())
        return []


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    made = Policy()
    monkeypatch.setitem(PLACEMENT, "counting", Placement(made.place, made.replan))
    return made


async def log_with_departures(number: int) -> MemoryLog:
    ticks = itertools.count(1)
    log = MemoryLog(lambda: float(next(ticks)))
    await log.append(SchedulerConfigured(replace(CONFIG, placement="counting")))
    for node in range(number + 1):
        await log.append(node_up(f"t{node}", "train"))
    job = JobSpec(deployments=[spec("policy", "train")], cycle=CYCLE)
    for name in range(number + 1):
        await log.append(JobSubmitted(JobKey("t", f"j{name}"), job, "s"))
    for name in range(number):
        await log.append(JobFinished(JobKey("t", f"j{name}"), "f"))
    return log


@asynccontextmanager
async def running(log: MemoryLog, core: Core, replan: Replan | None = None) -> AsyncIterator[Shell]:
    config = replace(CONFIG, placement="counting")
    shell = Shell(core, log, MemorySink(), config, 1000, replan=replan)
    task = asyncio.create_task(shell.run())
    try:
        yield shell
    finally:
        await lifecycle.end([task])


async def answers(log: MemoryLog, number: int) -> list[ReplanComputed]:
    """The first so many, once they are in the log."""
    async with asyncio.timeout(30):
        while True:
            found = [e.event for e in log.entries if isinstance(e.event, ReplanComputed)]
            if len(found) >= number:
                return found
            await asyncio.sleep(0.001)


async def test_question_is_answered_from_a_thread_of_its_own(policy: Policy) -> None:
    log = await log_with_departures(1)
    async with running(log, Core()) as shell:
        found = await answers(log, 1)
        async with asyncio.timeout(30):
            while shell.core.state.replanning:
                await asyncio.sleep(0.001)
    assert [answer.as_of for answer in found] == [6], "of the departure"
    assert len(policy.threads) == 1
    assert threading.main_thread() not in policy.threads


async def test_of_a_backlog_only_what_is_open_at_its_end_is_computed(policy: Policy) -> None:
    log = await log_with_departures(1)
    async with running(log, Core()):
        await answers(log, 1)
    await log.append(JobSubmitted(JobKey("t", "j2"), JobSpec(deployments=[spec("p", "train")]), ""))
    await log.append(JobFinished(JobKey("t", "j1"), "f"))
    async with running(log, Core()):
        found = await answers(log, 2)
    assert [answer.as_of for answer in found] == [6, 9]
    assert len(policy.threads) == 2


async def test_leader_that_dies_while_it_computes_is_replaced_by_one_that_answers(
    policy: Policy,
) -> None:
    log = await log_with_departures(2)
    asked: list[ComputeReplan] = []

    async def never(question: ComputeReplan) -> ReplanComputed:
        asked.append(question)
        await asyncio.Event().wait()
        return repack.compute(question)

    async with running(log, Core(), never) as dead:
        async with asyncio.timeout(30):
            while not asked:
                await asyncio.sleep(0.001)
        snapshot = dead.core.snapshot()
    async with running(log, Core.restore(snapshot)):
        answer = (await answers(log, 1))[0]
    assert answer.as_of == asked[0].as_of
