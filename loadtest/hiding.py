"""The share of switching that is over before an operation waits for it, on devices with idle time.

Two jobs share a rollout and a train device on a real mesh. Each generates, waits for its
environment, trains, and waits again, with a seeded jitter. Workers only sleep as long as an
operation is to take; their states have a real size and are really moved. Figures are those of a
run's summary (`phaseloom.demo.report`): the part of a switch is hidden for which no ready operation
waited.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec

from loadtest.records import Machine, describe
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.recorder import Recorded
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import (
    AdamParams,
    DeploymentSpec,
    Job,
    Loss,
    ModelSpec,
    Prompt,
    SamplingParams,
    connect,
)
from phaseloom.common.contract.arrays import pack_float32s, pack_int32s
from phaseloom.common.contract.events import JobFinished
from phaseloom.common.contract.operations import Datum
from phaseloom.common.observability.intervals import intersect, merge, subtract, total
from phaseloom.common.process import config, lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.demo.report import Execution, RunLog, Switch, figures, read_log, window_of

TENANT = "bench"
_LOG_TIMEOUT_S = 60.0
_FLOAT_BYTES = 4
_TOKENS = pack_int32s([0] * 8)
_DATUM = Datum(_TOKENS, _TOKENS, weights=pack_float32s([1.0] * 8))


class Settings(msgspec.Struct, frozen=True):
    jobs: int = 2
    steps: int = 60
    """The number of steps of each job."""
    state_mib: int = 64
    """The size of each deployment's state; a job has two deployments."""
    generate_s: float = 0.5
    environment_s: float = 0.6
    """The pause between the rollout and the training, for tools and rewards."""
    train_s: float = 0.4
    pause_s: float = 0.3
    """The pause before the next rollout."""
    jitter: float = 0.1
    """The share by which each pause varies, up and down, uniformly."""
    seed: int = 0


class HidingReport(msgspec.Struct, frozen=True):
    machine: Machine
    settings: Settings
    seconds: float
    switches: int
    switch_seconds: float
    """The seconds of switching, over both devices."""
    hidden_seconds: float
    hidden_share: float
    hidden_share_settled: float
    """The hidden share of switches in the second half, when cycles have long been known."""
    idle_share: dict[str, float]
    """For each device, the share of the time in which it neither ran an operation nor switched."""
    unhidden_seconds: dict[str, float]
    """The switch seconds for which an operation waited, by reason."""
    hidden_shares: list[float] = []
    """The hidden shares of all runs, the least first. All other figures are the middle run's."""


async def run(settings: Settings, directory: Path) -> HidingReport:
    """Run the two jobs on a mesh, and report how much of their switches was hidden.

    Args: directory: an existing directory for the mesh's store and logs.
    """
    config.set_for_children("PHASELOOM_TELEMETRY_SAMPLE_RATIO", "0")
    state_bytes = settings.state_mib * 2**20
    nodes = [
        NodeConfig(
            f"{pool}-0",
            pool,
            [state_bytes * 3 // 2],
            host_memory_bytes=state_bytes * (settings.jobs + 2),
        )
        for pool in ("rollout", "train")
    ]
    mesh_config = MeshConfig(nodes=nodes, tenants=[TENANT], seal_every=0)
    async with Mesh(mesh_config, directory) as mesh:
        await mesh.ready()
        async with recorded(mesh, settings.jobs) as entries:
            await _drive(settings, mesh)
        return report(settings, read_log(entries))


async def _drive(settings: Settings, mesh: Mesh) -> None:
    password = mesh.credentials.tenants[TENANT]
    async with connect(mesh.url, TENANT, password) as connection:
        specs = _specs(settings)
        jobs = [await connection.submit_job(f"job-{n}", specs) for n in range(settings.jobs)]
        async with asyncio.TaskGroup() as group:
            for number, job in enumerate(jobs):
                group.create_task(_control(settings, job, settings.seed + number))
        for job in jobs:
            await job.finish()


def _specs(settings: Settings) -> list[DeploymentSpec]:
    seconds = {"generate": settings.generate_s, "forward_backward": settings.train_s}
    num_floats = settings.state_mib * 2**20 // _FLOAT_BYTES
    model = ModelSpec({"num_floats": num_floats, "seconds": seconds})
    return [
        DeploymentSpec("policy", "train", "noop", model, trainable=True),
        DeploymentSpec("sampler", "rollout", "noop", model),
    ]


async def _control(settings: Settings, job: Job, seed: int) -> None:
    """Control a job. Its pauses between operations stand for work outside the mesh."""
    draws = random.Random(seed)
    policy, sampler = job.deployment("policy"), job.deployment("sampler")

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds * draws.uniform(1 - settings.jitter, 1 + settings.jitter))

    for _ in range(settings.steps):
        await sampler.generate([Prompt(_TOKENS)], SamplingParams(max_tokens=1))
        await wait(settings.environment_s)
        training = policy.forward_backward([_DATUM], Loss.CROSS_ENTROPY)
        await policy.optim_step(AdamParams(1e-3))
        await training
        await wait(settings.pause_s)


@asynccontextmanager
async def recorded(mesh: Mesh, num_jobs: int) -> AsyncIterator[list[Recorded]]:
    """A list that fills with the decision log; in the end it reaches to the last job's end."""
    entries: list[Recorded] = []
    ended: set[str] = set()
    bus = await Bus.open(mesh.credentials.bus, "bench")

    async def follow() -> None:
        async with aclosing(bus.log.read()) as log:
            async for entry in log:
                entries.append(Recorded(entry.sequence, entry.time_s, entry.event))
                if isinstance(entry.event, JobFinished):
                    ended.add(entry.event.job.job)
                    if len(ended) == num_jobs:
                        return

    following = asyncio.create_task(follow())
    try:
        yield entries
        async with asyncio.timeout(_LOG_TIMEOUT_S):
            await following
    finally:
        await lifecycle.end([following])
        await bus.close()


def middle(reports: Sequence[HidingReport]) -> HidingReport:
    """The run with the median hidden share; the lower of the two middle ones of an even number."""
    by_share = sorted(reports, key=lambda report: report.hidden_share)
    shares = [report.hidden_share for report in by_share]
    return msgspec.structs.replace(by_share[(len(by_share) - 1) // 2], hidden_shares=shares)


# --- figures -------------------------------------------------------------------------------------


def report(settings: Settings, log: RunLog) -> HidingReport:
    window = window_of(log.executions)
    whole = figures(log, window)
    settled = figures(log, (sum(window) / 2, window[1]))
    return HidingReport(
        machine=describe(),
        settings=settings,
        seconds=round(whole.seconds, 1),
        switches=whole.context_switches,
        switch_seconds=round(whole.switch_seconds, 2),
        hidden_seconds=round(whole.hidden_switch_seconds, 2),
        hidden_share=_share(whole.hidden_switch_seconds, whole.switch_seconds),
        hidden_share_settled=_share(settled.hidden_switch_seconds, settled.switch_seconds),
        idle_share={device: round(_idle_share(log, device), 3) for device in log.devices},
        unhidden_seconds=_unhidden(log),
    )


def _share(part: float, whole: float) -> float:
    return round(part / whole, 3) if whole else 1.0


def _idle_share(log: RunLog, device: str) -> float:
    start_s, end_s = window_of(log.executions)
    used = [e.interval for e in log.executions if device in e.devices]
    used += [s.interval for s in log.switches if device in s.devices]
    return 1.0 - total(intersect(merge(used), [(start_s, end_s)])) / (end_s - start_s)


def _unhidden(log: RunLog) -> dict[str, float]:
    """The switch seconds for which an operation waited, by reason."""
    found = {"behind another operation": 0.0, "begun too late": 0.0, "not foreseen": 0.0}
    for switch in log.switches:
        here = [e for e in log.executions if set(e.devices) & set(switch.devices)]
        waited_s = total(intersect(merge(e.waited for e in here), [switch.interval]))
        if waited_s:
            found[_why(switch, here)] += waited_s * len(switch.devices)
    return {why: round(seconds, 2) for why, seconds in found.items()}


def _why(switch: Switch, executions: Iterable[Execution]) -> str:
    """Why an operation waited for a switch.

    Args: executions: the executions on the switch's devices.
    """
    start_s, end_s = switch.interval
    waiting = [e for e in executions if e.ready_s < end_s and e.start_s > start_s]
    ready_s = min(e.ready_s for e in waiting)
    if ready_s > start_s:
        return "begun too late"
    busy = merge(e.interval for e in executions)
    is_idle = total(subtract([(ready_s, start_s)], busy)) > 0.5 * (start_s - ready_s)
    return "not foreseen" if is_idle else "behind another operation"
