"""Parts that all scenarios share: prices, configurations, records of results."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from phaseloom.common.contract.specs import SchedulerConfig
from phaseloom.simulator.engine import simulate
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, SimJob
from phaseloom.simulator.metrics import Result
from phaseloom.simulator.nodes import PoolSpec
from phaseloom.simulator.scenarios.report import Record

PRICES = {ROLLOUT: 14.80, TRAIN: 42.24}
"""The dollars an hour of a node of eight GPUs: H20 at 1.85, H800 at 5.28 (WEAVE Table 1)."""
HOST_BYTES = 2 * 10**12
"""The host memory of a node (WEAVE Table 1)."""


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


def pools(rollout: int, train: int) -> list[PoolSpec]:
    """Pools with so many nodes each."""
    return [
        PoolSpec(ROLLOUT, rollout, PRICES[ROLLOUT], HOST_BYTES),
        PoolSpec(TRAIN, train, PRICES[TRAIN], HOST_BYTES),
    ]


def ample(jobs: Sequence[SimJob]) -> list[PoolSpec]:
    """Pools with so many nodes that every job could have its own: provisioning never waits."""
    return pools(*(sum(job.take(pool).num_nodes for job in jobs) for pool in (ROLLOUT, TRAIN)))


def run(
    jobs: Sequence[SimJob],
    nodes: Sequence[PoolSpec],
    settings: SchedulerConfig,
    seed: int,
    **options: Any,
) -> tuple[Result, float]:
    """Simulate a workload; the result, and the seconds of one core that it took."""
    with _no_collections():
        began_s = time.thread_time()
        result = simulate(jobs, nodes, settings, seed=seed, **options)
        return result, time.thread_time() - began_s


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turn off the garbage collector while the block lasts.

    A run makes millions of objects and hardly any cycles; looking for them takes a seventh of its
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
    """The record that every scenario of whole clusters reports."""
    held_s = sum(pool.held_s for pool in result.pools.values())
    busy_s = sum(pool.busy_s for pool in result.pools.values())
    queueing = [job.queueing_delay for job in result.jobs if job.queueing_delay >= 0]
    return Record(
        policy=policy,
        seed=seed,
        workload=workload,
        jobs=len(result.jobs),
        cost_per_hour=result.cost_per_hour,
        slo_attainment=result.slo_attainment if result.promised else None,
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


def only(record: Record, *names: str) -> Record:
    """The record with these figures alone, beside policy, seed and workload."""
    kept = {"policy", "seed", "workload", "more", "simulated_in_s", *names}
    return replace(record, **{f: None for f in record.__struct_fields__ if f not in kept})
