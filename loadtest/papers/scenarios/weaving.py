"""Parts that WEAVE's scenarios share: policies, costs of switching, and the yardstick.

The yardstick is the price of the cheapest strict round robin, regrouped for free, of jobs that each
stay as long as they would alone (`optimum`). It depends on the jobs only, so it is the same for
every policy. The price of the jobs that a run had at each time is a second one, on request: it
grows if a policy delays jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any, Protocol, TypeVar

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
from loadtest.papers.scenarios.scenario import Bound, Options
from phaseloom.simulator.comparison.cases import Case, ProgressReporter
from phaseloom.simulator.comparison.clusters import (
    HOST_BYTES,
    LIVE,
    ample,
    config_of,
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
    "colocated": "fcfs",
}
LIVE_POLICIES = (f"coexec{LIVE}", f"coexec_repack{LIVE}")
"""Placement policies in the configuration of a mesh, with the ordering that they depend on."""
POLICIES = ("coexec", "coexec_repack", *LIVE_POLICIES, "random", "most_idle", "solo")
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
    bound: Bound = Bound.SOLO,
    slo_percentile: float = 0.0,
) -> tuple[Record, Result]:
    """Run a workload under a policy.

    With `Bound.REGROUPING`, compare its cost with the optimum of the jobs present, if it is found.

    Args: policy: a placement policy, followed by `LIVE` if the configuration is that of a mesh.
    """
    placement = policy.removesuffix(LIVE)
    settings = config_of(
        ORDERINGS[placement] + policy.removeprefix(placement),
        placement,
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


class Workload(Protocol):
    """The jobs of a scenario under one seed. It is hashable."""

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def max_group_jobs(self) -> int: ...
    def jobs(self) -> list[SimJob]: ...


_W = TypeVar("_W", bound="Workload")


def compared(
    options: Options,
    runs: Sequence[tuple[_W, str]],
    case: Callable[[_W, str, Bound], tuple[Record, Any]],
) -> list[tuple[Record, Any]]:
    """Run each workload under its policy, and divide its cost by the workload's solo bound.

    Args: case: a function at module level. Returns a record, and more that this only passes on.
    """
    workloads = [] if options.bound is Bound.NONE else list(dict.fromkeys(w for w, _ in runs))
    bounds = [Case(f"{w.name}, bound, seed {w.seed}", solo_bound, (w,)) for w in workloads]
    cases = [
        Case(f"{w.name}, {policy}, seed {w.seed}", case, (w, policy, options.bound))
        for w, policy in runs
    ]
    results = options.run_cases([*bounds, *cases])
    best: dict[_W, Regrouping | None] = dict(zip(workloads, results, strict=False))
    return [
        (_over(record, best.get(workload)), rest)
        for (workload, _), (record, rest) in zip(runs, results[len(bounds) :], strict=True)
    ]


def _over(record: Record, best: Regrouping | None) -> Record:
    if best is None or record.dollars is None:
        return record
    gap = max(record.optimal_gap or 0.0, best.gap)
    return replace(record, over_solo_bound=record.dollars / best.bound, optimal_gap=gap or None)


def solo_bound(workload: Workload) -> Regrouping | None:
    """The bound in dollars for jobs that each stay for as long as they would alone; None: there are
    too many ways to put them on nodes.

    It is the same for every policy. A policy that runs jobs next to one another more often than the
    strict round robin allows, or that spends the slack of SLOs, may cost less.
    """
    tell = ProgressReporter(f"{workload.name}, bound, seed {workload.seed}")
    spans = [span for job in workload.jobs() for span in _spans_alone(job)]
    try:
        return regrouping_bound(spans, pricing(workload.max_group_jobs), tell)
    except TooLarge:
        return None


def _spans_alone(job: SimJob) -> Iterator[Span]:
    """The time of a job that runs alone. A job that drifts has a span for each part of its drift,
    with the mean durations of that part."""
    num_parts = max((len(drift.factors) - 1 for drift in job.drift), default=1)
    end_s = job.arrival_s
    for part in range(num_parts):
        drifted = at_progress(job, (part + 0.5) / num_parts)
        start_s, end_s = end_s, end_s + job.iterations / num_parts * drifted.solo_s
        yield Span(planned(drifted), start_s / _HOUR_S, end_s / _HOUR_S)


def at_progress(job: SimJob, progress: float) -> SimJob:
    """The job with the durations that it has at this progress, and without drift."""

    def factor(pool: str) -> float:
        return prod(d.factor(progress) for d in job.drift if d.pool == pool)

    if not job.drift:
        return job
    phases = tuple(
        replace(phase, mean_s=phase.longest_s * factor(phase.pool), worst_s=0.0)
        for phase in job.phases
    )
    return replace(job, phases=phases, drift=())


def colocated(job: SimJob) -> SimJob:
    """The job with all phases on the train nodes, which are as many as it had there (veRL)."""
    phases = tuple(replace(p, pool=TRAIN, kind=p.operation_kind) for p in job.phases)
    return replace(job, phases=phases, demands={TRAIN: job.demand(TRAIN)})


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
