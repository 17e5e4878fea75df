"""How far a run is from the cheapest strict round robin of whoever was there."""

from __future__ import annotations

from collections.abc import Sequence

from phaseloom.simulator.jobs import ROLLOUT, TRAIN, SimJob
from phaseloom.simulator.metrics import Result
from phaseloom.simulator.optimum import Job, Pricing, Regrouping, Span, regrouping_bound

_HOUR_S = 3600.0


def over_optimal(result: Result, jobs: Sequence[SimJob], pricing: Pricing) -> tuple[float, float]:
    """The run's cost over the bound for the jobs as they were there in this run.

    Returns: the ratio, never less than it is over the optimum, and how much it can be too high at
        most, relative to itself; 0: it is that over the optimum.
    """
    of_name = {job.name: job for job in jobs}
    spans = [
        Span(planned(of_name[job.name]), job.placed_s / _HOUR_S, job.ended_s / _HOUR_S)
        for job in result.jobs
        if job.ended_s > job.placed_s >= 0
    ]
    best = regrouping_bound(spans, pricing)
    return result.cost / best.bound, best.gap


def solo_bound(jobs: Sequence[SimJob], pricing: Pricing) -> Regrouping:
    """Dollars of the bound for jobs that each stay for as long as they would alone: the same for
    every policy, and out of reach of any that uses the SLOs' slack."""
    spans = [
        Span(
            planned(job),
            job.arrival_s / _HOUR_S,
            (job.arrival_s + job.iterations * job.solo_s) / _HOUR_S,
        )
        for job in jobs
    ]
    return regrouping_bound(spans, pricing)


def planned(job: SimJob) -> Job:
    """As the offline planner sees it."""
    rollout, train = job.take(ROLLOUT), job.take(TRAIN)
    seconds = {pool: sum(p.longest_s for p in job.phases if p.pool == pool) for pool in job.pools}
    return Job(
        name=job.name,
        rollout_s=seconds[ROLLOUT],
        train_s=seconds[TRAIN],
        allowed_s=(job.slo or float("inf")) * job.solo_s,
        rollout_nodes=rollout.num_nodes,
        train_nodes=train.num_nodes,
        rollout_bytes=rollout.host_bytes,
        train_bytes=train.host_bytes,
        gap_s=job.solo_s - seconds[ROLLOUT] - seconds[TRAIN],
    )
