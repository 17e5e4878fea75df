"""Two training jobs whose mesh loses its power again and again, with all that was not fsynced.

The mesh's whole run directory (the server's store, state files, checkpoints, credentials) is on a
disk that forgets in a power cut what was not fsynced (`losingdisk`). Everything of the mesh is
killed at random moments, and it is gone on with by `phaseloom up --resume`; the controllers are
elsewhere and live on. Rounds of both jobs follow one another on the same disk. Every job must end
with the weights of an undisturbed run, bit for bit, and every operation that was acknowledged must
have its one outcome.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from loadtest.losingdisk import PowerCut, power_cut
from loadtest.machine import TASKS, TENANT, Controller, Failed, Machine
from loadtest.records import Machine as MachineRecord
from loadtest.records import describe
from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import content_type_of, decode
from phaseloom.common.contract.operations import Completion, Outcome
from phaseloom.common.process import config
from phaseloom.common.transport.bus import Bus

_MESH = """
[mesh]
seal_every = 10
"""


class Settings(msgspec.Struct, frozen=True):
    """The jobs of a run, and how often the power is cut."""

    cuts: int = 5
    seed: int = 0
    cuts_a_round: int = 5
    """Cuts while the same two jobs train; then two new ones follow."""
    steps: int = 12
    """The steps of each job."""
    prompts: int = 8
    warmup_steps: int = 4
    checkpoint_every: int = 4
    max_pause_s: float = 2.0
    """The longest time from a job's next step after a restart to the next cut; it is random."""
    stuck_s: float = 300.0
    """Jobs that take no step for so long count as stuck."""


class Cut(msgspec.Struct, frozen=True):
    at_s: float
    """Seconds since the run began."""
    seed: int | None
    """Of which unsynced blocks have reached the disk; null: none has."""
    lost_files: int
    """Files of which something was not fsynced."""
    lost_bytes: int
    up_s: float
    """Seconds until the mesh was up again."""


class JobEnd(msgspec.Struct, frozen=True):
    job: str
    task: str
    weights_sha256: str
    is_same: bool
    """Whether the weights are those of the undisturbed run."""
    operations: int
    """Operations of the job that the server has acknowledged."""
    lost: list[str]
    """Those of them without an outcome, or with another one than COMPLETED."""


class PowerCutsReport(msgspec.Struct, frozen=True):
    machine: MachineRecord
    settings: Settings
    wall_s: float
    reference: dict[str, str]
    """The SHA-256 of the weights of each task's undisturbed run."""
    jobs: list[JobEnd]
    cuts: list[Cut]
    failure: str = ""
    """Why the run was given up; empty: it went to its end."""

    @property
    def has_failed(self) -> bool:
        return bool(self.failure) or not all(job.is_same and not job.lost for job in self.jobs)


async def run(settings: Settings, directory: Path, told: Callable[[str], None]) -> PowerCutsReport:
    """Run the jobs undisturbed, then under power cuts.

    Args: directory: an existing directory for the disk and for logs.
          told: called with a line about each thing that happens.
    """
    config.set_for_children("PHASELOOM_TELEMETRY_SAMPLE_RATIO", "0")
    began_s = time.monotonic()
    (directory / "mesh.toml").write_text(_MESH)
    reference = await _undisturbed(settings, directory)
    told(f"undisturbed: {reference}")
    cuts: list[Cut] = []
    ends: list[JobEnd] = []
    failure = ""
    with power_cut(directory) as disk:
        try:
            async with _machine(disk.directory, directory) as machine:
                cutting = _Cutting(settings, machine, disk, told)
                cuts = cutting.cuts
                while len(cuts) < settings.cuts:
                    ends += await cutting.round(len(ends) // len(TASKS) + 1, reference)
        except* Failed as errors:
            failure = str(_leaf(errors))
            told(failure)
    return PowerCutsReport(
        machine=describe(),
        settings=settings,
        wall_s=round(time.monotonic() - began_s, 1),
        reference=reference,
        jobs=ends,
        cuts=cuts,
        failure=failure,
    )


@asynccontextmanager
async def _machine(runs: Path, directory: Path) -> AsyncIterator[Machine]:
    options = ["--mesh-file", str(directory / "mesh.toml")]
    machine = Machine(runs, directory / "mesh.log", options)
    await machine.start()
    try:
        yield machine
    finally:
        await machine.stop()


async def _undisturbed(settings: Settings, directory: Path) -> dict[str, str]:
    async with _machine(directory / "undisturbed", directory) as machine:
        controllers = await _controllers(settings, machine, 0)
        async with asyncio.TaskGroup() as group:
            running = {c.task: group.create_task(c.run()) for c in controllers}
        return {task: done.result() for task, done in running.items()}


async def _controllers(settings: Settings, machine: Machine, number: int) -> list[Controller]:
    names = ("steps", "prompts", "warmup_steps", "checkpoint_every")
    options = {name.replace("_", "-"): getattr(settings, name) for name in names}
    return [
        await Controller.started(
            f"{task.replace('_', '-')}-{number}",
            task,
            options,
            machine.credentials,
            machine.log.with_name(f"controller-{task}-{number}.log"),
        )
        for task in TASKS
    ]


class _Cutting:
    """A mesh whose power is cut, and what has come of that so far."""

    def __init__(
        self, settings: Settings, machine: Machine, disk: PowerCut, told: Callable[[str], None]
    ) -> None:
        self.cuts: list[Cut] = []
        self._settings = settings
        self._machine = machine
        self._disk = disk
        self._told = told
        self._draw = random.Random(settings.seed)
        self._began_s = time.monotonic()

    async def round(self, number: int, reference: dict[str, str]) -> list[JobEnd]:
        """Train both jobs, and cut the power while they do.

        Raises: Failed: also in a group: a job is stuck, or a process does not come up.
        """
        controllers = await _controllers(self._settings, self._machine, number)
        last = min(self._settings.cuts, len(self.cuts) + self._settings.cuts_a_round)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(c.run()) for c in controllers]
            while len(self.cuts) < last and await self._moved(controllers):
                await asyncio.sleep(self._draw.uniform(0, self._settings.max_pause_s))
                if all(task.done() for task in running):
                    break
                await self._cut()
            try:
                async with asyncio.timeout(self._settings.stuck_s):
                    await asyncio.wait(running)
            except TimeoutError:
                raise Failed(f"the jobs of round {number} do not come to their end") from None
        async with self._machine.bus() as bus:
            return [
                await self._end(bus, controller, reference[controller.task])
                for controller in controllers
            ]

    async def _moved(self, controllers: list[Controller]) -> bool:
        """Wait until each job takes a further step; False: one of them has ended."""
        try:
            async with asyncio.timeout(self._settings.stuck_s):
                return all([await each.reached(each.steps + 1) for each in controllers])
        except TimeoutError:
            raise Failed(f"no step for {self._settings.stuck_s:.0f} s") from None

    async def _cut(self) -> None:
        number = len(self.cuts)
        seed = self._settings.seed + number if number % 2 else None
        at_s = time.monotonic()
        await self._machine.kill()
        lost = await asyncio.to_thread(self._disk.cut, seed=seed)
        await self._machine.start("--resume")
        cut = Cut(
            at_s=round(at_s - self._began_s, 2),
            seed=seed,
            lost_files=len(lost),
            lost_bytes=sum(lost.values()),
            up_s=round(time.monotonic() - at_s, 2),
        )
        self.cuts.append(cut)
        self._told(
            f"cut {len(self.cuts)} of {self._settings.cuts}: {cut.lost_bytes:,} bytes of "
            f"{cut.lost_files} files were not fsynced; up again after {cut.up_s} s"
        )

    async def _end(self, bus: Bus, controller: Controller, expected: str) -> JobEnd:
        acknowledged, lost = await _operations(bus, controller.job)
        is_same = controller.weights_sha256 == expected
        self._told(
            f"{controller.job}: {'the same weights' if is_same else 'OTHER WEIGHTS'}, "
            f"{acknowledged} operations, {len(lost)} lost"
        )
        return JobEnd(
            controller.job,
            controller.task,
            controller.weights_sha256,
            is_same=is_same,
            operations=acknowledged,
            lost=lost,
        )


async def _operations(bus: Bus, job: str) -> tuple[int, list[str]]:
    """How many operations of a job were acknowledged, and those without their outcome.

    A deployment's ordered operations are numbered from 1, so that a lost one leaves a hole.
    """
    prefix = f"{streams.PREFIX}.done.{TENANT}.{job}."
    slots = [s.removeprefix(prefix) for s in await bus.stored.subjects(streams.DONE, f"{prefix}>")]
    stored = f"{streams.PREFIX}.op.{TENANT}.{job}."
    queued = [
        s.removeprefix(stored)
        for s in await bus.stored.subjects(streams.ops_stream(TENANT), f"{stored}>")
    ]
    known = {*slots, *queued}
    newest = Counter[str]()
    for deployment, slot in (name.split(".") for name in known):
        if slot.isdigit():
            newest[deployment] = max(newest[deployment], int(slot))
    wanted = {f"{name}.{seq}" for name, last in newest.items() for seq in range(1, last + 1)}
    outcomes = await bus.stored.get_all(streams.DONE, [f"{prefix}{slot}" for slot in slots])
    completed = set()
    for subject, message in outcomes.items():
        completion = decode(message.payload, Completion, content_type_of(message.headers))
        if completion.outcome is Outcome.COMPLETED:
            completed.add(subject.removeprefix(prefix))
    wanted |= known
    return len(wanted), sorted(wanted - completed)


def _leaf(error: BaseException) -> BaseException:
    return _leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
