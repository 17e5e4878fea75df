"""`phaseloom demo --spatial`: two GRPO jobs on one device of two cores, by turns and side by side.

The same two jobs run under each multiplexing policy, one policy after the other, for several
rounds: `off` (the device is shared in time alone), `static` (a core for each job) and `greedy`.
Each run has a mesh of its own in `runs/<id>/round-<n>-<policy>/`, with its timeline, in which one
sees who had how many cores when. `summary.json` has the medians of the rounds, and every run.

The device holds the states of both jobs, so that no time is spent on switches: what is measured is
the sharing alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
from msgspec.structs import replace

from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.report import JobResult
from phaseloom.common.contract.specs import Residency
from phaseloom.simulator.spatial.tables import TWO_CORES_TABLE

POOL = "train"
NUM_CORES = 2
DEVICE_BYTES = 64 * 2**20
"""The memory of the device: the states of both jobs fit, their policies and their samplers."""
TABLE = TWO_CORES_TABLE
"""The table of slowdowns that says what runs side by side on a device of two cores."""
STEPS = 20
"""The GRPO steps of each job in a run, where no others are asked for."""
SERIAL, STATIC, MULTIPLEXED = "off", "static", "greedy"
POLICIES = (SERIAL, STATIC, MULTIPLEXED)


class SpatialRun(msgspec.Struct, frozen=True):
    """Both jobs under one policy."""

    round: int
    multiplexing: str
    seconds: float
    """From the first GRPO operation of either job to the last one's end."""
    weights_sha256: dict[str, str]
    """Job → SHA-256 of its final weights."""


class Spatial(msgspec.Struct, frozen=True):
    serial_seconds: float
    """The median over the rounds, in seconds; the next two fields likewise."""
    static_seconds: float
    multiplexed_seconds: float
    ratio: float
    """How many times longer the jobs take in turns than multiplexed: the median of the rounds'
    ratios."""
    ratios: list[float]
    """The ratio of each round."""
    weights_identical: bool
    """Whether each job has the same final weights in all runs, bit for bit."""
    runs: list[SpatialRun]


class SpatialSummary(msgspec.Struct, frozen=True):
    """The content of `summary.json`."""

    run: str
    seed: int
    steps: int
    spatial: Spatial


def mesh_of(multiplexing: str, settings: MeshConfig) -> MeshConfig:
    """A mesh of one device of two cores."""
    node = NodeConfig(
        "device-0",
        POOL,
        [DEVICE_BYTES],
        cores_per_device=NUM_CORES,
        exclusive_residency=Residency.SHARED,
    )
    return replace(settings, nodes=[node], multiplexing=multiplexing)


def run_of(number: int, multiplexing: str, results: Sequence[JobResult]) -> SpatialRun:
    begin_s = min(result.grpo_start_unix_s for result in results)
    end_s = max(result.grpo_end_unix_s for result in results)
    hashes = {result.name: result.weights_sha256 for result in results}
    return SpatialRun(number, multiplexing, end_s - begin_s, hashes)


def summarize(runs: Sequence[SpatialRun]) -> Spatial:
    """The medians over the rounds. Args: runs: the runs of whole rounds."""
    by = {policy: [r for r in runs if r.multiplexing == policy] for policy in POLICIES}
    pairs = zip(by[SERIAL], by[MULTIPLEXED], strict=True)
    ratios = [serial.seconds / multiplexed.seconds for serial, multiplexed in pairs]
    seconds = {policy: median(r.seconds for r in of) for policy, of in by.items()}
    first = runs[0].weights_sha256
    return Spatial(
        serial_seconds=seconds[SERIAL],
        static_seconds=seconds[STATIC],
        multiplexed_seconds=seconds[MULTIPLEXED],
        ratio=median(ratios),
        ratios=ratios,
        weights_identical=all(run.weights_sha256 == first for run in runs),
        runs=list(runs),
    )


def lines_of(spatial: Spatial) -> list[str]:
    """The figures in prose."""
    rounds = ", ".join(f"{ratio:.2f}" for ratio in spatial.ratios)
    static = spatial.serial_seconds / spatial.static_seconds
    same = "identical" if spatial.weights_identical else "DIFFERENT"
    return [
        "",
        f"two jobs on one device of {NUM_CORES} cores, median of {len(spatial.ratios)} rounds:",
        f"  by turns             {spatial.serial_seconds:7.2f} s",
        f"  a core each          {spatial.static_seconds:7.2f} s  {static:.2f} times as fast",
        f"  multiplexed          {spatial.multiplexed_seconds:7.2f} s  {spatial.ratio:.2f} times as"
        f" fast (each round: {rounds})",
        f"final weights of each job in all {len(spatial.runs)} runs: {same}",
    ]


def problems(spatial: Spatial) -> list[str]:
    """A sentence for each thing that should hold and does not; the gain by sharing is no such
    thing."""
    if spatial.weights_identical:
        return []
    return ["final weights depend on how the device was shared"]


def write(summary: SpatialSummary, run_dir: Path) -> None:
    written = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    (run_dir / "summary.json").write_bytes(written + b"\n")
