"""Parts that WEAVE's scenarios share: policies, costs of switching, and the yardstick.

The yardstick is the cheapest strict round robin of the jobs that were present (`optimum`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from loadtest.papers.optimum import (
    Job,
    Pricing,
    Regrouping,
    Span,
    Terms,
    TooLarge,
    regrouping_bound,
)
from loadtest.papers.scenarios.scenario import Bound
from phaseloom.simulator.comparison.cases import ProgressReporter
from phaseloom.simulator.comparison.clusters import (
    HOST_BYTES,
    ample,
    config,
    planned_switch_s,
    record_of,
    run,
)
from phaseloom.simulator.comparison.report import Record
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, SimJob
from phaseloom.simulator.metrics import Result

_HOUR_S = 3600.0
ORDERINGS = {
    "coexec": "round_robin",
    "coexec_repack": "fcfs",
    "random": "round_robin",
    "most_idle": "round_robin",
    "solo": "fcfs",
}
MAX_GROUP_JOBS = 5
EFFORT = 0.2
"""The effort of the optimum's solver, in its deterministic seconds, which take about as many real
ones. Sets of jobs that it does not finish by then are within a few percent of their bounds."""
TRIES = 5_000_000
"""How often the optimum's search may put a group of jobs on nodes: about a minute in all. Jobs of
one to four nodes take a small part of it."""


def pricing(max_group_jobs: int = MAX_GROUP_JOBS) -> Pricing:
    return Pricing(
        Terms(host_bytes=HOST_BYTES, max_group_jobs=max_group_jobs), effort=EFFORT, tries=TRIES
    )


def measured(
    jobs: Sequence[SimJob],
    policy: str,
    seed: int,
    *,
    workload: str = "",
    max_group_jobs: int = MAX_GROUP_JOBS,
    bound: Bound = Bound.REGROUPING,
    slo_percentile: float = 0.0,
) -> tuple[Record, Result]:
    """Run a workload under a policy, and compare it with the optimum of the jobs present, where
    that is asked for and found."""
    settings = config(
        policy,
        ORDERINGS[policy],
        max_group_jobs=max_group_jobs,
        switch_s=planned_switch_s(jobs),
        slo_percentile=slo_percentile,
    )
    result, cpu_s = run(jobs, ample(jobs), settings, seed)
    record = record_of(result, cpu_s, policy=policy, seed=seed, workload=workload)
    if bound is Bound.REGROUPING:
        with suppress(TooLarge):
            tell = ProgressReporter(f"{workload or policy}, optimum for {policy}")
            ratio, gap = over_optimal(result, jobs, pricing(max_group_jobs), tell)
            record = replace(record, cost_over_optimal=ratio, optimal_gap=gap or None)
    return record, result


def over_optimal(
    result: Result,
    jobs: Sequence[SimJob],
    pricing: Pricing,
    tell: Callable[[int, int], None] | None = None,
) -> tuple[float, float]:
    """The cost of a run over the bound for the jobs that were present in it.

    Returns: the ratio, and the most that it can be too high, relative to itself; 0: it is exactly
             the ratio over the optimum. It is never less than that.
    Raises:  TooLarge: the search for the optimum takes more tries than are allowed.
    """
    of_name = {job.name: job for job in jobs}
    spans = [
        Span(planned(of_name[job.name]), job.placed_s / _HOUR_S, job.ended_s / _HOUR_S)
        for job in result.jobs
        if job.ended_s > job.placed_s >= 0
    ]
    best = regrouping_bound(spans, pricing, tell)
    return result.cost / best.bound, best.gap


def solo_bound(
    jobs: Sequence[SimJob], pricing: Pricing, tell: Callable[[int, int], None] | None = None
) -> Regrouping | None:
    """The bound in dollars for jobs that each stay for as long as they would alone; None: there are
    too many ways to put them on nodes.

    It is the same for every policy, and no policy that uses the SLOs' slack can reach it.
    """
    spans = [
        Span(
            planned(job),
            job.arrival_s / _HOUR_S,
            (job.arrival_s + job.iterations * job.solo_s) / _HOUR_S,
        )
        for job in jobs
    ]
    try:
        return regrouping_bound(spans, pricing, tell)
    except TooLarge:
        return None


def planned(job: SimJob) -> Job:
    """The job as the offline planner sees it."""
    rollout, train = job.demand(ROLLOUT), job.demand(TRAIN)
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
