"""A recorded run of llm-d's time slicing: one RL job alone, then two jobs on the same two GPUs.

From the data file `llmd_runs.json` (llm-d RL time-slicing, Apache-2.0), its synchronous run: a
sampler and a trainer, ten iterations. The phases are read off the *baseline's* utilisation samples,
one a minute; the lock windows of the time-sliced run contain the loss that is to be shown.
"""

from __future__ import annotations

from statistics import mean, median

import msgspec

from loadtest.papers.workloads.packaged import DATA
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob

SAMPLE_S = 60.0
Sample = tuple[float, float]
"""A time in seconds, and a utilisation in per cent."""


class _Side(msgspec.Struct, frozen=True):
    duration_s: float
    duty_gpus: dict[str, list[Sample]]
    events: list[dict[str, msgspec.Raw]]


class _Run(msgspec.Struct, frozen=True):
    pool_map: dict[str, str]
    baseline: _Side
    timeslice: _Side


class _File(msgspec.Struct, frozen=True):
    runs: list[_Run]


class _Swap(msgspec.Struct, frozen=True):
    pool: str
    ckpt_ms: float = 0.0
    restore_ms: float = 0.0


class Recording(msgspec.Struct, frozen=True):
    iterations: int
    rollout_s: float
    """The mean of the rollouts over the iterations."""
    train_s: float
    think_s: float
    """The mean time of an iteration in which neither GPU works."""
    setup_s: float
    """The time until the first rollout."""
    alone_s: float
    """The time of the whole run of one job."""
    shared_s: float
    """The time of the whole run of two jobs."""
    swaps: dict[str, tuple[float, float]]
    """The median (offload, load) seconds of each pool."""


def recording(*, whole_minutes: bool = False) -> Recording:
    """The recording of the job alone and of both jobs.

    Args: whole_minutes: count a minute at the edge of a phase as wholly active, which makes phases
          longer than they were; else by its share of the phase's usual utilisation.
    """
    data = DATA / "llmd_runs.json"
    run = msgspec.json.decode(data.read_bytes(), type=_File, strict=False).runs[0]
    gpus = {pool: gpu for gpu, pool in run.pool_map.items()}
    duty = run.baseline.duty_gpus
    rollouts = _active_s(duty[gpus["sampler"]], whole_minutes)
    trains = _active_s(duty[gpus["trainer"]], whole_minutes)
    starts = [start_s for start_s, _ in rollouts]
    period_s = (starts[-1] - starts[0]) / (len(starts) - 1)
    # Work of the trainer before the first rollout is its setup.
    trains = [active for active in trains if active[0] > starts[0]]
    train_s = mean(active_s for _, active_s in trains)
    # The two overlap within a minute at most: time that does not fit is the rollout's.
    rollout_s = min(mean(active_s for _, active_s in rollouts), period_s - train_s)
    return Recording(
        iterations=len(rollouts),
        rollout_s=rollout_s,
        train_s=train_s,
        think_s=period_s - rollout_s - train_s,
        setup_s=starts[0],
        alone_s=run.baseline.duration_s,
        shared_s=run.timeslice.duration_s,
        swaps={
            ROLLOUT: _swap(run.timeslice, "sampler"),
            TRAIN: _swap(run.timeslice, "trainer"),
        },
    )


def jobs(recorded: Recording, *, count: int, with_swaps: bool) -> list[SimJob]:
    """Copies of the recorded job, which all arrive at once.

    Args: with_swaps: whether switches take the recorded time; else they are wholly hidden.
    """
    demands = {
        pool: Demand(offload_s=offload_s, load_s=load_s) if with_swaps else Demand()
        for pool, (offload_s, load_s) in recorded.swaps.items()
    }
    phases = (
        Phase(ROLLOUT, recorded.rollout_s, think_s=recorded.think_s / 2),
        Phase(TRAIN, recorded.train_s, think_s=recorded.think_s / 2),
    )
    return [
        SimJob(
            name=f"job-{index}",
            arrival_s=0.0,
            iterations=recorded.iterations,
            phases=phases,
            demands=demands,
            start_s=recorded.setup_s,
        )
        for index in range(count)
    ]


def _active_s(samples: list[Sample], whole_minutes: bool) -> list[tuple[float, float]]:
    """The (start, seconds active) of each run of minutes with activity."""
    found: list[tuple[float, float]] = []
    run: list[Sample] = []
    for sample in [*samples, (float("inf"), 0.0)]:
        if sample[1] > 0:
            run.append(sample)
            continue
        if len(run) > 1:
            full = median(percent for _, percent in run)
            shares = [1.0 if whole_minutes else min(1.0, p / full) for _, p in run]
            found.append((run[0][0] - SAMPLE_S * shares[0], SAMPLE_S * sum(shares)))
        run = []
    return found


def _swap(side: _Side, pool: str) -> tuple[float, float]:
    swaps = [msgspec.json.decode(msgspec.json.encode(event), type=_Swap) for event in side.events]
    of_pool = [swap for swap in swaps if swap.pool == pool]
    offload_ms = median(swap.ckpt_ms for swap in of_pool if swap.ckpt_ms)
    load_ms = median(swap.restore_ms for swap in of_pool if swap.restore_ms)
    return offload_ms / 1e3, load_ms / 1e3
