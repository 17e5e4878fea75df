"""The clusters that jobs are simulated on: prices, sizes, switch times, configurations."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec.structs import replace

from phaseloom.common.contract.specs import SchedulerConfig, SchedulerSettings
from phaseloom.simulator.comparison.report import Record
from phaseloom.simulator.engine import simulate
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, SimJob
from phaseloom.simulator.metrics import Result
from phaseloom.simulator.nodes import PoolSpec

PRICES = {ROLLOUT: 14.80, TRAIN: 42.24}
"""Dollars per hour of a node of eight GPUs: H20 at 1.85, H800 at 5.28 (WEAVE Table 1)."""
HOST_BYTES = 2 * 10**12
"""Host memory of a node (WEAVE Table 1)."""


class Switching(msgspec.Struct, frozen=True):
    """Durations of switches and moves."""

    phase_s: float = 0.0
    """Time of a switch on a node: offload plus load."""
    move_s: float = 0.0
    """Time to stop a job on its nodes and resume it on others."""


SWITCHING = Switching(phase_s=5.0, move_s=308.0)
"""Typical times. A switch takes 2 s in WEAVE Table 4 and 2.5 to 9 s in a recording of llm-d; a move
takes 197 to 419 s (WEAVE §6.6)."""


def config(placement: str, ordering: str, **settings: float) -> SchedulerConfig:
    """Return a configuration in which only the policies decide.

    There is no quantum, no idle grace, no speculative switch-in, and there are no seals.

    Args: settings: settings that differ from their defaults.
    """
    quiet = SchedulerConfig(
        placement=placement,
        ordering=ordering,
        idle_grace_s=0.0,
        quantum_s=0.0,
        seal_every=0,
        max_losses=50,
        max_reading=64,
        phase_hold_s=0.0,
        speculative_switch_in=False,
    )
    return replace(quiet, **settings)


LIVE = ", live"
"""End of the name of a row that runs in the configuration of a mesh."""


def live_config(**settings: Any) -> SchedulerConfig:
    """Return the configuration of a mesh whose operator has set nothing.

    It has the mesh's ordering, quantum, idle grace and speculative switch-in. As under `config`,
    there are no seals, and jobs survive many failures.

    Args: settings: settings that differ from the mesh's.
    """
    mesh = SchedulerSettings(seal_every=0, max_losses=50)
    return SchedulerConfig.of(replace(mesh, **settings))


def config_of(row: str, placement: str = "pack", **settings: float) -> SchedulerConfig:
    """Return the configuration of a row of a table.

    Args: row: an ordering policy, followed by `LIVE` if it runs as in a mesh.
    """
    ordering = row.removesuffix(LIVE)
    if row.endswith(LIVE):
        return live_config(placement=placement, ordering=ordering, **settings)
    return config(placement, ordering, **settings)


def pools(rollout: int, train: int) -> list[PoolSpec]:
    """Return a pool of rollout nodes and one of train nodes."""
    return [
        PoolSpec(ROLLOUT, rollout, PRICES[ROLLOUT], HOST_BYTES),
        PoolSpec(TRAIN, train, PRICES[TRAIN], HOST_BYTES),
    ]


def ample(jobs: Sequence[SimJob]) -> list[PoolSpec]:
    """Return pools with enough nodes for every job to have its own, so that no job must wait."""
    return pools(*(sum(job.demand(pool).num_nodes for job in jobs) for pool in (ROLLOUT, TRAIN)))


def run(
    jobs: Sequence[SimJob],
    nodes: Sequence[PoolSpec],
    settings: SchedulerConfig,
    seed: int,
    **options: Any,
) -> tuple[Result, float]:
    """Simulate a workload. Returns: the result, and the CPU seconds that the run took."""
    with _no_collections():
        began_s = time.thread_time()
        result = simulate(jobs, nodes, settings, seed=seed, **options)
        return result, time.thread_time() - began_s


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turn off the garbage collector inside the block.

    A run creates millions of objects and hardly any cycles. Collection would take a seventh of its
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def record_of(
    result: Result, wall_s: float, *, policy: str, seed: int, workload: str = ""
) -> Record:
    """Return the record of one run of a whole cluster."""
    held_s = sum(pool.held_s for pool in result.pools.values())
    busy_s = sum(pool.busy_s for pool in result.pools.values())
    queueing = [job.queueing_delay for job in result.jobs if job.queueing_delay >= 0]
    return Record(
        policy=policy,
        seed=seed,
        workload=workload,
        jobs=len(result.jobs),
        dollars=result.cost,
        slo_attainment=result.slo_attainment if result.promised else None,
        slo_draws=result.slo_attainment_of_draws if result.promised else None,
        slo_iterations=result.iterations_within_slo if result.promised else None,
        peak_gpus=result.peak_gpus,
        bubble_ratio=result.bubble_ratio,
        makespan_s=result.makespan_s,
        mean_wait_s=result.mean_wait_s,
        queueing_delay=sum(queueing) / len(queueing) if queueing else None,
        switches=result.switches,
        moves=result.moves,
        utilisation=busy_s / held_s if held_s else None,
        decision_ms_p50=result.decision_ms(0.5),
        decision_ms_p99=result.decision_ms(0.99),
        simulated_in_s=wall_s,
    )


def with_switching(jobs: Sequence[SimJob], switching: Switching) -> list[SimJob]:
    """Return the jobs with these times of switches and moves."""
    half_s = switching.phase_s / 2
    return [
        replace(
            job,
            demands={
                pool: replace(demand, load_s=half_s, offload_s=half_s)
                for pool, demand in job.demands.items()
            },
            move_s=switching.move_s,
        )
        for job in jobs
    ]


def planned_switch_s(jobs: Sequence[SimJob]) -> float:
    """Return the longest switch: the longest offload plus the longest load of any job."""
    demands = [demand for job in jobs for demand in job.demands.values()]
    return max(demand.offload_s for demand in demands) + max(demand.load_s for demand in demands)
