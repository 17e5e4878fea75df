"""`phaseloom demo --spatial`: two jobs on one device of two cores, in turns and at the same time.

In each of several rounds, the same two jobs run under each multiplexing policy: `off` (sharing in
time only), `static` (one core per job), and the requested policies. Each run has its own mesh in
`runs/<id>/round-<n>-<policy>/`, with a timeline that shows which job had how many cores.
`summary.json` has the medians of the rounds, and every run. Each run is also predicted, from the
run in turns of its round and the table of slowdowns (`simulator.rerun`).

A setting names the jobs and the memory of the device: jobs that always have work, jobs that wait
for tools, a device without memory for both trainings at once, and a table by which sharing does not
pay, so that `greedy` must not share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from msgspec.structs import replace

from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.recorder import read_entries
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import Residency, SlowdownTable
from phaseloom.common.observability.intervals import Interval, intersect, merge, total
from phaseloom.demo.controllers import ControllerSpec
from phaseloom.demo.report import JobResult, RunLog
from phaseloom.scheduler.core.policies.registry import MULTIPLEXING
from phaseloom.simulator.rerun import makespan_s
from phaseloom.simulator.tables import PAPER_TABLE, TWO_CORES_TABLE

POOL = "train"
NUM_CORES = 2
SERIAL, STATIC, GREEDY = "off", "static", "greedy"


@dataclass(frozen=True)
class Setting:
    """Two jobs, and the device that they share."""

    about: str
    """Description of the two jobs, for the heading of the results."""
    steps: int
    device_bytes: int
    example: str = "grpo.py"
    """The controllers' program."""
    arguments: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    """Names of the jobs; the jobs differ only in their seeds. Empty: one job for each task."""
    table: Path = TWO_CORES_TABLE
    """The table of slowdowns that the scheduler uses."""
    shares: bool = True
    """Whether sharing pays by the table. If not, `greedy` must not share. `fair` may share anyway,
    because it balances two jobs even if less gets done."""

    def specs(self, tasks: Sequence[str], seed: int, steps: int | None) -> list[ControllerSpec]:
        steps = steps or self.steps
        if not self.jobs:
            return [ControllerSpec(task, task, seed, steps) for task in tasks]
        return [ControllerSpec(job, "", seed + i, steps) for i, job in enumerate(self.jobs)]


_EVERYTHING_BYTES = 64 * 2**20
"""Room for the states of both jobs, so that no time is spent on switches."""
_SHORT = ("--warmup-steps", "30")
"""Less warm-up than the example's default, so that nine runs take five minutes on two cores."""
SETTINGS = {
    "steady": Setting(
        "two GRPO jobs that always have work", 12, _EVERYTHING_BYTES, arguments=_SHORT
    ),
    "tools": Setting(
        "two GRPO jobs in several turns, which wait for tools",
        4,
        _EVERYTHING_BYTES,
        example="grpo_tools.py",
        arguments=(
            *("--together", "--tool-seconds", "0.05", "--call-reward", "0.1"),
            *("--warmup-steps", "50", "--warmup-batch", "16"),
            *("--questions", "8", "--eval-questions", "16"),
        ),
        jobs=("tools-a", "tools-b"),
    ),
    "memory": Setting(
        "two GRPO jobs, and no memory for both of their trainings",
        8,
        24 * 2**20,
        arguments=_SHORT,
    ),
    "no-gain": Setting(
        "two GRPO jobs, and a GPU's table of slowdowns, by which sharing does not pay",
        8,
        _EVERYTHING_BYTES,
        arguments=_SHORT,
        table=PAPER_TABLE,
        shares=False,
    ),
}
STEADY = "steady"
"""The default setting."""
LEAST_BESIDE = 0.05
"""Share of a run in which operations of both jobs may overlap even if the device is not shared:
operations that only move state may overlap with anything."""


class SpatialRun(msgspec.Struct, frozen=True):
    """Both jobs under one policy."""

    round: int
    multiplexing: str
    seconds: float
    """From the first step of either job to the end of the last one."""
    weights_sha256: dict[str, str]
    """Job → SHA-256 of its final weights."""
    beside: float = 0.0
    """Share of these seconds in which operations of both jobs ran."""
    begin_unix_s: float = 0.0
    """Start of the first step."""
    predicted_seconds: float | None = None
    """Prediction from the run in turns of the same round and the table."""
    not_predicted: str = ""
    """Why the run could not be predicted."""


class PolicyFigures(msgspec.Struct, frozen=True):
    """A policy's medians over the rounds."""

    seconds: float
    ratio: float
    """Time in turns relative to the time under this policy: the median of the rounds' ratios."""
    ratios: list[float]
    over_static: float
    """The same ratio for `static` instead of in turns."""
    beside: float
    """Share of the time in which operations of both jobs ran."""
    predicted_over: list[float] = []
    """Predicted over real seconds of each round; empty: nothing was predicted."""


class Spatial(msgspec.Struct, frozen=True):
    serial_seconds: float
    """Median over the rounds, as are the next two fields."""
    static_seconds: float
    multiplexed_seconds: float
    """Under the first requested policy, as are the next two fields."""
    ratio: float
    ratios: list[float]
    weights_identical: bool
    """Whether each job has bit-identical final weights in all runs."""
    runs: list[SpatialRun]
    setting: str = STEADY
    policies: dict[str, PolicyFigures] = {}
    """The figures of each policy, including `static`."""
    serial_predicted_over: list[float] = []
    """`PolicyFigures.predicted_over` for `off`."""


class SpatialSummary(msgspec.Struct, frozen=True):
    """The content of `summary.json`."""

    run: str
    seed: int
    steps: int
    spatial: Spatial


def setting_of(
    setting: str, multiplexing: Sequence[str], rounds: int, slowdowns: Path | None = None
) -> Setting:
    """Return the setting of this name after checking the other choices.

    Raises: CallerError: a choice is not valid. The error names the parameter.
    """
    if setting not in SETTINGS:
        raise CallerError(
            f"setting {setting!r} is not known",
            field="setting",
            remedy=f"name one of {', '.join(SETTINGS)}",
        )
    compared = [policy for policy in MULTIPLEXING if policy not in (SERIAL, STATIC)]
    if not multiplexing or not set(multiplexing) <= set(compared):
        raise CallerError(
            f"multiplexing must name policies to compare with {SERIAL} and {STATIC}, got "
            f"{', '.join(multiplexing) or 'none'}",
            field="multiplexing",
            remedy=f"name one or more of {', '.join(compared)}",
        )
    if rounds < 1:
        raise CallerError(
            f"rounds must be at least 1, got {rounds}", field="rounds", remedy="give 1 or more"
        )
    if slowdowns is not None and not SETTINGS[setting].shares:
        raise CallerError(
            f"the setting {setting} has its own table of slowdowns",
            field="slowdowns",
            remedy="omit slowdowns, or name another setting",
        )
    return SETTINGS[setting]


def mesh_of(multiplexing: str, settings: MeshConfig, setting: str = STEADY) -> MeshConfig:
    """Return the settings for a mesh of one device with two cores."""
    node = NodeConfig(
        "device-0",
        POOL,
        [SETTINGS[setting].device_bytes],
        cores_per_device=NUM_CORES,
        exclusive_residency=Residency.SHARED,
    )
    return replace(settings, nodes=[node], multiplexing=multiplexing)


def run_of(number: int, multiplexing: str, results: Sequence[JobResult], log: RunLog) -> SpatialRun:
    begin_s = min(result.grpo_start_unix_s for result in results)
    end_s = max(result.grpo_end_unix_s for result in results)
    hashes = {result.name: result.weights_sha256 for result in results}
    seconds = end_s - begin_s
    beside_s = _beside_s(log, (begin_s, end_s))
    beside = round(beside_s / seconds, 3)
    return SpatialRun(number, multiplexing, seconds, hashes, beside, begin_s)


def directory_of(run_dir: Path, number: int, multiplexing: str) -> Path:
    return run_dir / f"round-{number}-{multiplexing}"


def predicted(runs: Sequence[SpatialRun], run_dir: Path, table: SlowdownTable) -> list[SpatialRun]:
    """Return the runs with a prediction for each, or the reason why there is none.

    Args: run_dir: the demo's directory, with the logs of the runs.
          table: the slowdowns to predict by.
    """
    in_turns = {run.round: run for run in runs if run.multiplexing == SERIAL}
    return [_predicted(run, in_turns[run.round], run_dir, table) for run in runs]


def _predicted(
    run: SpatialRun, in_turns: SpatialRun, run_dir: Path, table: SlowdownTable
) -> SpatialRun:
    window = (in_turns.begin_unix_s, in_turns.begin_unix_s + in_turns.seconds)
    try:
        log = read_entries(directory_of(run_dir, run.round, SERIAL) / "events.jsonl")
        entries = [(entry.sequence, entry.time_unix_s, entry.event) for entry in log]
        seconds = makespan_s(entries, window, run.multiplexing, table)
    except Exception as error:  # the measurement is valid even if its prediction fails
        return replace(run, not_predicted=f"{type(error).__name__}: {error}")
    return replace(run, predicted_seconds=seconds)


def _beside_s(log: RunLog, window: Interval) -> float:
    """Return for how many seconds of a window both jobs had operations running."""
    by_job: dict[str, list[Interval]] = {}
    for ran in log.executions:
        by_job.setdefault(ran.key.job, []).append(ran.interval)
    if len(by_job) < 2:
        return 0.0
    first, second = (intersect(merge(ran), [window]) for ran in by_job.values())
    return total(intersect(first, second))


def summarize(runs: Sequence[SpatialRun], setting: str = STEADY) -> Spatial:
    """Return the medians over the rounds.

    Args: runs: complete rounds, each with `off`, `static` and the other policies in this order.
    """
    by: dict[str, list[SpatialRun]] = {}
    for run in runs:
        by.setdefault(run.multiplexing, []).append(run)
    policies = {
        name: _figures(of, by[SERIAL], by[STATIC]) for name, of in by.items() if name != SERIAL
    }
    first, *_ = (name for name in policies if name != STATIC)
    hashes = runs[0].weights_sha256
    return Spatial(
        serial_seconds=median(run.seconds for run in by[SERIAL]),
        static_seconds=policies[STATIC].seconds,
        multiplexed_seconds=policies[first].seconds,
        ratio=policies[first].ratio,
        ratios=policies[first].ratios,
        weights_identical=all(run.weights_sha256 == hashes for run in runs),
        runs=list(runs),
        setting=setting,
        policies=policies,
        serial_predicted_over=_predicted_over(by[SERIAL]),
    )


def _figures(
    runs: Sequence[SpatialRun], serial: Sequence[SpatialRun], static: Sequence[SpatialRun]
) -> PolicyFigures:
    def over(rivals: Sequence[SpatialRun]) -> list[float]:
        return [rival.seconds / run.seconds for rival, run in zip(rivals, runs, strict=True)]

    ratios = over(serial)
    return PolicyFigures(
        seconds=median(run.seconds for run in runs),
        ratio=median(ratios),
        ratios=ratios,
        over_static=median(over(static)),
        beside=median(run.beside for run in runs),
        predicted_over=_predicted_over(runs),
    )


def _predicted_over(runs: Sequence[SpatialRun]) -> list[float]:
    pairs = [(run.predicted_seconds, run.seconds) for run in runs]
    return [predicted_s / real_s for predicted_s, real_s in pairs if predicted_s is not None]


def lines_of(spatial: Spatial) -> list[str]:
    """Return the figures as lines of prose."""
    same = "identical" if spatial.weights_identical else "DIFFERENT"
    note = _prediction_note(spatial.serial_predicted_over)
    lines = [
        "",
        f"{SETTINGS[spatial.setting].about}; one device of {NUM_CORES} cores, median of "
        f"{len(spatial.ratios)} rounds:",
        f"  {'in turns':13} {spatial.serial_seconds:7.2f} s{note}",
    ]
    for name, figures in spatial.policies.items():
        rounds = ", ".join(f"{ratio:.2f}" for ratio in figures.ratios)
        lines.append(
            f"  {'one core each' if name == STATIC else name:13} {figures.seconds:7.2f} s  "
            f"{figures.ratio:.2f} times as fast (by round: {rounds}); both jobs at the same time "
            f"for {figures.beside:.0%} of the run{_prediction_note(figures.predicted_over)}"
        )
    for run in spatial.runs:
        if run.not_predicted:
            lines.append(
                f"round {run.round}, {run.multiplexing}: no prediction, {run.not_predicted}"
            )
    return [
        *lines,
        f"final weights of each job in all {len(spatial.runs)} runs: {same}",
    ]


def _prediction_note(predicted_over: Sequence[float]) -> str:
    return f"; predicted {median(predicted_over) - 1:+.0%}" if predicted_over else ""


def problems(spatial: Spatial) -> list[str]:
    """Return a sentence for each failed expectation. A small gain by sharing is not one."""
    failures = []
    if not spatial.weights_identical:
        failures.append("a job's final weights differ between runs that shared differently")
    greedy = spatial.policies.get(GREEDY)
    if greedy and not SETTINGS[spatial.setting].shares and greedy.beside > LEAST_BESIDE:
        failures.append(
            f"{GREEDY} shared the device for {greedy.beside:.0%} of the time although sharing does "
            "not pay"
        )
    return failures


def write(summary: SpatialSummary, run_dir: Path) -> None:
    written = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    (run_dir / "summary.json").write_bytes(written + b"\n")
