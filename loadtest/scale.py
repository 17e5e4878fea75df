"""How large a mesh one scheduler carries: its own core, fed by emulated nodes and controllers.

The events are those of a cluster of 1,000 nodes, eight devices each, with 2,000 jobs that generate
and train in turns; half of the nodes are of each pool. Jobs arrive, work for a while, and at last
ten nodes fail at once. Every step of the core is timed, by the processor time of its thread. Then
the state is stored as the live scheduler stores it, and restored in a process of its own, whose
memory is what the state takes.

The core is all that grows with the cluster. What an event costs beside it, on the bus, is measured
by `load`.
"""

from __future__ import annotations

import subprocess
import sys
import time
import zlib
from pathlib import Path

import msgspec

from loadtest.records import Machine, describe, quantile
from phaseloom.common.contract.events import Event
from phaseloom.common.contract.specs import SchedulerConfig, SchedulerSettings
from phaseloom.scheduler.core.core import Core
from phaseloom.simulator.agenda import Agenda
from phaseloom.simulator.engine import Engine
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob
from phaseloom.simulator.metering import Meter
from phaseloom.simulator.nodes import Costs, PoolSpec
from phaseloom.simulator.world import NodeFault, World

_SHARE = 2
"""Jobs take so many times the devices that there are, and so take turns."""
_LOST = 10
_DOWN_S = 300.0
_SETTLE_S = 120.0
"""From the arrival of the last job until steps are counted."""


class Settings(msgspec.Struct, frozen=True):
    nodes: int = 1000
    devices: int = 8
    """Of each node."""
    jobs: int = 2000
    arrival_s: float = 600.0
    """The time in which all jobs arrive."""
    work_s: float = 300.0
    """For how long all of them work before nodes fail."""


class Steps(msgspec.Struct, frozen=True):
    """Steps of the core of one kind, in seconds of processor time."""

    count: int
    p50_s: float
    p99_s: float
    longest_s: float


class ScaleReport(msgspec.Struct, frozen=True):
    settings: Settings
    machine: Machine
    placed: int
    """Jobs that have a place at the end."""
    operations: int
    """Operations that ran while all jobs worked."""
    working: Steps
    """All events while all jobs work."""
    submitted: Steps
    """Submissions, each of which looks for a place among all nodes."""
    losing: Steps
    """All events from the loss of the nodes until they are back."""
    events_per_s: float
    """Events of the working time over the processor time of their steps."""
    virtual_events_per_s: float
    """Events that the cluster makes in a second of its own time."""
    state_bytes: int
    """Memory of a process after it has restored the snapshot, less what it had before."""
    snapshot_bytes: int
    stored_bytes: int
    """The same, compressed as it is stored."""
    snapshot_s: float
    """To make the snapshot: for so long no event is taken."""
    compress_s: float
    restore_s: float


class _Meter(Meter):
    """Notes every step, with the virtual time at which it is made."""

    def __init__(self, agenda: Agenda) -> None:
        super().__init__()
        self._agenda = agenda
        self.taken: list[tuple[float, str, float]] = []
        """Virtual time, kind of event, seconds of processor time."""

    def stepped(self, event: Event, num_jobs: int, seconds: float) -> None:
        self.taken.append((self._agenda.now_s, type(event).__name__, seconds))


def measure(settings: Settings, work: Path) -> ScaleReport:
    """Run the cluster under a virtual clock.

    Args: work: a directory for the snapshot.
    """
    agenda = Agenda()
    meter = _Meter(agenda)
    engine = Engine(agenda, meter, times_steps=True)
    per_pool = settings.nodes // 2
    pools = [PoolSpec(pool, per_pool, num_devices=settings.devices) for pool in (ROLLOUT, TRAIN)]
    fail_s = settings.arrival_s + _SETTLE_S + settings.work_s
    width = len(str(per_pool - 1))
    faults = [
        NodeFault(f"{(ROLLOUT, TRAIN)[n % 2]}-{n:0{width}}", fail_s, _DOWN_S) for n in range(_LOST)
    ]
    costs = Costs(stop_s=1.0, restart_s=10.0, seal_s=2.0, mirror_s=10.0)
    jobs = [_job(number, settings) for number in range(settings.jobs)]
    world = World(agenda, engine.append, meter, jobs, pools, costs=costs, faults=faults)
    # A tenant here has more jobs than the default limits allow.
    unlimited = SchedulerSettings(max_jobs=0, max_deployments=0, max_ranks=0)
    engine.run(world, SchedulerConfig.of(unlimited), fail_s + _DOWN_S + 60.0)
    begin_s = fail_s - settings.work_s
    working = [s for at_s, _, s in meter.taken if begin_s <= at_s < fail_s]
    submitted = [s for _, kind, s in meter.taken if kind == "JobSubmitted"]
    losing = [s for at_s, _, s in meter.taken if fail_s <= at_s < fail_s + _DOWN_S]
    ran = sum(
        begin_s <= at_s < fail_s and kind == "OperationFinished" for at_s, kind, _ in meter.taken
    )
    return ScaleReport(
        settings,
        describe(),
        sum(bool(d.nodes) for d in engine.core.state.deployments.values()) // 2,
        ran,
        _steps(working),
        _steps(submitted),
        _steps(losing),
        len(working) / sum(working),
        len(working) / settings.work_s,
        *_stored(engine.core, work),
    )


def _job(number: int, settings: Settings) -> SimJob:
    """A job whose iteration takes about 20 s alone. Twice as many devices are asked for as there
    are."""
    rate = settings.jobs / settings.arrival_s
    num_devices = _SHARE * settings.devices * settings.nodes // (2 * settings.jobs)
    demand = Demand(num_devices=max(1, num_devices))
    shift = number % 7
    return SimJob(
        f"job-{number:04}",
        arrival_s=number / rate,
        iterations=10**6,
        phases=(
            Phase(ROLLOUT, 8.0 + shift, worst_s=30.0, sigma=0.3),
            Phase(TRAIN, 6.0, kind="forward_backward"),
            Phase(TRAIN, 1.0, kind="optim_step", think_s=2.0),
        ),
        demands={ROLLOUT: demand, TRAIN: demand},
        tenant=f"tenant-{number % 20}",
        start_s=20.0,
    )


def _steps(seconds: list[float]) -> Steps:
    ordered = sorted(seconds)
    return Steps(len(ordered), quantile(ordered, 0.5), quantile(ordered, 0.99), ordered[-1])


def _stored(core: Core, work: Path) -> tuple[int, int, int, float, float, float]:
    began_s = time.perf_counter()
    snapshot = core.snapshot()
    made_s = time.perf_counter()
    packed = zlib.compress(snapshot, 1)
    packed_s = time.perf_counter()
    file = work / "snapshot"
    file.write_bytes(packed)
    restore = [sys.executable, "-m", "loadtest.scale", str(file)]
    told = subprocess.run(restore, check=True, capture_output=True, text=True).stdout.split()
    return (
        int(told[0]),
        len(snapshot),
        len(packed),
        made_s - began_s,
        packed_s - made_s,
        float(told[1]),
    )


def restored(file: Path) -> tuple[int, float]:
    """Restore a snapshot in this process.

    Returns: the bytes that the process has grown by, and the seconds that it took.
    """
    before = _resident_bytes()
    began_s = time.perf_counter()
    core = Core.restore(zlib.decompress(file.read_bytes()))
    took_s = time.perf_counter() - began_s
    assert core.state.sequence
    return _resident_bytes() - before, took_s


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


if __name__ == "__main__":
    print(*restored(Path(sys.argv[1])))
