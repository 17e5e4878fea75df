"""`phaseloom measure-slowdown` measures how much slower work runs on a part of a device.

Two worker processes, each with the backends of a small job, run every kind of sub-stage in three
ways: alone on the whole device, alone on each share of it, and next to every other kind, on
separate cores. A round measures everything once. Ratios are computed within a round, because the
speed of a machine varies over time. The resulting table has the medians over all rounds.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from pathlib import Path
from statistics import median
from typing import IO

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from phaseloom.cli.extras import check_installed
from phaseloom.common.contract.errors import CallerError, InternalError, to_exception
from phaseloom.common.contract.specs import KindSlowdown, SlowdownTable
from phaseloom.common.process.slowdowns import SUB_STAGES, MeasureRequest, MeasureResult

WARM_UP_S = 0.1
DISTURBED_RATIO = 1.25
"""A slowdown that varies over the rounds by more than this factor shows that another program
disturbed the measurement."""
MAX_UNITS_ALL_SHARES = 4
"""On devices with at most this many units (cores), measure every share. On larger ones, measure
one unit and the quarters."""


@dataclass
class Round:
    """Seconds per call, for everything that one round measures."""

    alone: dict[tuple[str, int], float] = field(default_factory=dict)
    """(kind, number of units) → seconds."""
    together: dict[tuple[str, int, str], float] = field(default_factory=dict)
    """(kind, its number of units, kind on the remaining units) → seconds."""


@dataclass(frozen=True)
class Step:
    """One measurement: a kind on the first units and, if named, another on the remaining ones."""

    kind: str
    count: int
    neighbour: str = ""


def measure_slowdown(
    *,
    cores: int = 2,
    rounds: int = 4,
    seconds: float = 0.8,
    config: Path | None = None,
    out: Path = Path("slowdowns.json"),
    console: Console | None = None,
) -> None:
    """Measure how much slower each kind of work runs on a part of a device, and next to other work.

    A round takes about 20 seconds on two cores. Run nothing else meanwhile. The option
    `--slowdowns` of `phaseloom up` and of `python -m loadtest simulate jigsaw-…` reads the file.

    Parameters
    ----------
    cores
        Number of cores of the device, like `cores_per_device` of a node.
    rounds
        How many times to measure everything.
    seconds
        Length of each measurement. Larger models need longer ones.
    config
        config.json of a model. Default: a model of 0.8 million parameters.
    out
        File to write.
    """
    console = console or Console(highlight=False)
    _check(cores, rounds, seconds, config, out)
    check_installed("measuring slowdowns", ("torch", "transformers", "numpy"), "worker")
    plan = steps(cores)
    measured = []
    with ExitStack() as stack:
        workers = [stack.enter_context(_measuring_worker(cores, config)) for _ in range(2)]
        for worker in workers:
            worker.receive()
        for number in range(1, rounds + 1):
            current = Round()
            for step in track(plan, f"round {number} of {rounds}", console=console, transient=True):
                _measure(workers, step, cores, seconds, current)
            measured.append(current)
    table = table_of(measured, cores, _source(cores, rounds, config))
    out.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    for shown in tables(table):
        console.print(shown)
    console.print(f"wrote {out}")
    for kind, (low, high) in disturbed_kinds(table):
        console.print(
            f"{kind} was {low:.2f} to {high:.2f} times slower on the same share: another program "
            "disturbed the measurement. Measure again once it has ended."
        )


def _check(cores: int, rounds: int, seconds: float, config: Path | None, out: Path) -> None:
    """Check all arguments first, so that none fails after minutes of measuring.

    Raises: CallerError: an argument is invalid; `field` names it.
    """
    num_cores = len(os.sched_getaffinity(0))
    if not 2 <= cores <= num_cores:
        raise CallerError(
            f"cores must be between 2 and {num_cores} (the cores of this machine), got {cores}",
            field="cores",
            remedy="use at least 2 cores, and at most as many as this machine has",
        )
    if rounds < 1:
        raise CallerError(
            f"rounds must be at least 1, got {rounds}",
            field="rounds",
            remedy="use 1 or more; the default is 4",
        )
    if not 0 < seconds < math.inf:
        raise CallerError(
            f"seconds must be a finite number above 0, got {seconds}",
            field="seconds",
            remedy="use 0.1 or more",
        )
    if config is not None:
        try:
            msgspec.json.decode(config.read_bytes(), type=dict[str, object])
        except (OSError, msgspec.DecodeError) as error:
            raise CallerError(
                f"{config} is not a model's config.json: {error}",
                field="config",
                remedy="name the config.json of a model directory",
            ) from None
    if not out.absolute().parent.is_dir():
        raise CallerError(
            f"there is no directory {out.parent}",
            field="out",
            remedy="create it, or name a file elsewhere",
        )


def counts_of(units: int) -> list[int]:
    """Return the numbers of units to measure a kind on, in ascending order up to the whole
    device."""
    if units <= MAX_UNITS_ALL_SHARES:
        return [*range(1, units + 1)]
    return sorted({1, units // 4, units // 2, 3 * units // 4, units})


def splits_of(units: int) -> list[int]:
    """Return the numbers of units for the first of two kinds that run at the same time.

    The second kind gets the remaining units.
    """
    counts = counts_of(units)
    return [count for count in counts if units - count in counts]


def steps(units: int) -> list[Step]:
    """Return all measurements of a round."""
    alone = [Step(kind, count) for kind in SUB_STAGES for count in counts_of(units)]
    together = [
        Step(kind, count, neighbour)
        for kind, neighbour in combinations_with_replacement(SUB_STAGES, 2)
        for count in splits_of(units)
        if kind != neighbour or 2 * count <= units
    ]
    return [*alone, *together]


def table_of(rounds: Sequence[Round], units: int, source: str) -> SlowdownTable:
    """Combine the rounds into a table: the medians of their ratios, with the spread."""
    kinds = {}
    for kind in SUB_STAGES:
        ratios_by_share = {
            count / units: [r.alone[kind, count] / r.alone[kind, units] for r in rounds]
            for count in counts_of(units)
        }
        kinds[kind] = KindSlowdown(
            {share: round(median(of), 3) for share, of in ratios_by_share.items()},
            spread={share: _spread(of) for share, of in ratios_by_share.items() if share < 1},
        )
    ratios: dict[tuple[str, str], list[float]] = {}
    for current in rounds:
        for (kind, count, neighbour), seconds in current.together.items():
            ratios.setdefault((kind, neighbour), []).append(seconds / current.alone[kind, count])
    return SlowdownTable(
        source,
        kinds,
        tuple(count / units for count in splits_of(units)),
        {k: {o: round(median(ratios[k, o]), 3) for o in SUB_STAGES} for k in SUB_STAGES},
        {k: {o: _spread(ratios[k, o]) for o in SUB_STAGES} for k in SUB_STAGES},
    )


def _spread(ratios: Sequence[float]) -> tuple[float, float]:
    return round(min(ratios), 3), round(max(ratios), 3)


def disturbed_kinds(table: SlowdownTable) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield each kind whose slowdown varies too much over the rounds, with its least and
    greatest."""
    for name, kind in table.kinds.items():
        for low, high in kind.spread.values():
            if high > DISTURBED_RATIO * low:
                yield name, (low, high)
                break


def tables(table: SlowdownTable) -> Iterator[Table]:
    """Yield two tables to print: slowdowns by share, and throughput of two kinds side by side."""
    shares = sorted(next(iter(table.kinds.values())).shares)
    alone = Table("slowdown alone", *(f"{share:.0%}" for share in shares))
    for name, kind in table.kinds.items():
        alone.add_row(name, *(_shown(kind.shares[s], kind.spread.get(s)) for s in shares))
    yield alone
    together = Table("throughput together / one after the other", *table.kinds)
    for name in table.kinds:
        gains = (max(map(sum, table.rates(name, neighbour))) for neighbour in table.kinds)
        together.add_row(name, *(f"{gain:.2f}" for gain in gains))
    yield together


def _shown(slowdown: float, spread: tuple[float, float] | None) -> str:
    return f"{slowdown:.2f}" + (f" ({spread[0]:.2f} to {spread[1]:.2f})" if spread else "")


class _Worker:
    """A measuring process, which receives requests and sends results as lines of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin: IO[str] = process.stdin
        self._stdout: IO[str] = process.stdout

    def send(self, run: MeasureRequest) -> None:
        self._stdin.write(msgspec.json.encode(run).decode() + "\n")
        self._stdin.flush()

    def receive(self) -> MeasureResult:
        """Wait for the next result of the process.

        Raises: CallerError: the model cannot be run.
                InternalError: the process has ended; its standard error has the reason.
        """
        line = self._stdout.readline()
        if not line:
            code = self._process.wait()
            raise InternalError(f"a measuring process ended with exit code {code}")
        ran = msgspec.json.decode(line, type=MeasureResult)
        if ran.refused is not None:
            raise to_exception(ran.refused)
        return ran


@contextmanager
def _measuring_worker(cores: int, config: Path | None) -> Iterator[_Worker]:
    command = [sys.executable, "-m", "phaseloom.worker.measuring", "--units", str(cores)]
    if config is not None:
        command += ["--config", str(config)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A session of its own, so that Ctrl-C does not reach it: this process ends the workers.
        start_new_session=True,
    ) as process:
        try:
            yield _Worker(process)
        finally:
            process.kill()


def _measure(
    workers: Sequence[_Worker], step: Step, cores: int, seconds: float, current: Round
) -> None:
    # Both workers measure the same interval, so that each disturbs the other throughout.
    from_s = time.time() + WARM_UP_S
    until_s = from_s + seconds
    first_units, second_units = [*range(step.count)], [*range(step.count, cores)]
    workers[0].send(MeasureRequest(step.kind, first_units, from_s, until_s))
    if not step.neighbour:
        current.alone[step.kind, step.count] = workers[0].receive().seconds
        return
    workers[1].send(MeasureRequest(step.neighbour, second_units, from_s, until_s))
    first, second = workers[0].receive().seconds, workers[1].receive().seconds
    current.together[step.kind, len(first_units), step.neighbour] = first
    # If both have the same kind and number of units, the second result adds no information.
    current.together.setdefault((step.neighbour, len(second_units), step.kind), second)


def _source(cores: int, rounds: int, config: Path | None) -> str:
    model = "a model of 0.8 million parameters" if config is None else config.parent.name
    return (
        f"phaseloom measure-slowdown: {cores} cores of {_processor()}, {model}, backends sampler "
        f"and fsdp, median of {rounds} rounds; spreads are the least and the greatest"
    )


def _processor() -> str:
    """Return the processor's name as Linux reports it."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()
