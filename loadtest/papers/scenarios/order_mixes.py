"""Ordering policies on random mixes of jobs, as a mesh runs them.

Two to eight jobs share one to four nodes of each pool; see `workloads.mixes`. The seeds were not
used to choose the policy's constants. The bound counts switches; no schedule beats it. *Stall* is
the longest time for which a job runs nothing, relative to the sum of all jobs' iterations alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from msgspec.structs import replace

from loadtest.papers.scenarios.report import at_most, mean_of, only
from loadtest.papers.scenarios.scenario import Options, Scenario
from loadtest.papers.workloads.mixes import Mix, makespan_bound_s, mix_of, pinned
from phaseloom.common.contract.specs import SchedulerSettings
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.simulator.comparison.cases import Case
from phaseloom.simulator.comparison.clusters import live_config, record_of, run
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report, Target, values
from phaseloom.simulator.metering import Span

FIRST_SEED = 5000
NUM_MIXES = 60
DEFAULT = SchedulerSettings().ordering
ALL = "all"
_PINNED = "pinned"
"""Name under which a mix's placement policy is registered while it runs."""
_LONGEST_RUN = 40.0
"""A run ends after this many times the bound, even if a job starves."""


class Way(NamedTuple):
    """An ordering policy with a quantum."""

    ordering: str
    quantum_s: Callable[[Mix], float] = lambda _: SchedulerSettings().quantum_s


WAYS = {
    DEFAULT: Way(DEFAULT),
    "hrrs": Way("hrrs"),
    "hrrs, no quantum": Way("hrrs", lambda _: 0.0),
    "hrrs, quantum of 10 switches": Way("hrrs", lambda mix: max(2.0, 10 * mix.switch_s)),
    "fcfs": Way("fcfs"),
    "fifo_lock": Way("fifo_lock"),
}


def measure(mix: Mix, way: Way) -> Record:
    """Run a mix in the configuration of a mesh."""
    settings = live_config(
        placement=_PINNED,
        ordering=way.ordering,
        quantum_s=way.quantum_s(mix),
        duty_limit=1.0,
        max_group_jobs=len(mix.jobs),
    )
    bound_s = makespan_bound_s(mix)
    PLACEMENT[_PINNED] = pinned(mix.nodes)
    try:
        result, cpu_s = run(
            mix.jobs,
            mix.pools,
            settings,
            mix.seed,
            records_spans=True,
            until_s=_LONGEST_RUN * bound_s,
        )
    finally:
        del PLACEMENT[_PINNED]
    record = record_of(result, cpu_s, policy=way.ordering, seed=mix.seed)
    starved = [job.name for job in result.jobs if job.outcome != "done"]
    assert not starved, f"mix {mix.seed}, {way.ordering}: {starved} did not end"
    more = {
        "stall": longest_stall_s(result.spans) / mix.cycles_s,
        "slowest": max(job.slowdown for job in result.jobs),
    }
    # The bound counts from time 0, like the arrivals.
    end_s = min(job.arrival_s for job in mix.jobs) + result.makespan_s
    return replace(only(record, "switches"), over_bound=end_s / bound_s, more=more)


def longest_stall_s(spans: list[Span]) -> float:
    """Return the longest time between two operations of a job during which none of it runs."""
    ends_s: dict[str, float] = {}
    longest_s = 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.activity != "switch":
            end_s = ends_s.get(span.job, span.start_s)
            longest_s = max(longest_s, span.start_s - end_s)
            ends_s[span.job] = max(end_s, span.end_s)
    return longest_s


def _case(name: str, seed: int) -> Record:
    return replace(measure(mix_of(seed), WAYS[name]), policy=name)


def _run(options: Options) -> Report:
    names = options.policies_of(WAYS)
    seeds = options.seeds or range(FIRST_SEED, FIRST_SEED + (options.mixes or NUM_MIXES))
    cases = [Case(f"mix {seed}, {name}", _case, (name, seed)) for seed in seeds for name in names]
    found: list[Record] = options.run_cases(cases)
    records = [
        replace(record, workload=workload)
        for workload in (ALL, *_CLASSES.values())
        for record in found
        if workload in (ALL, _class_of(record.seed))
    ]
    return Report(
        scenario="order-mixes",
        about="Ordering policies on random mixes, in the configuration of a mesh",
        parameters={"mixes": len(seeds), "first_seed": seeds[0], "default": DEFAULT},
        records=records,
        targets=_targets(records),
    )


_CLASSES = {
    0.0: "switches are free",
    0.2: "switch up to 0.2 phases",
    0.5: "switch of 0.3 to 0.5 phases",
    1.0: "switch of 0.7 to 1 phases",
}


def _class_of(seed: int) -> str:
    ratio = mix_of(seed).ratio
    return next(name for limit, name in _CLASSES.items() if ratio <= limit)


def _targets(records: list[Record]) -> list[Target]:
    every = [record for record in records if record.workload == ALL]
    ours = [record for record in every if record.policy == DEFAULT]
    if not ours:
        return []
    targets = []
    for figure, limits in (("over_bound", (1.14, 1.45)), ("stall", (1.0, 3.0))):
        numbers = values(ours, figure)
        name = "makespan / bound" if figure == "over_bound" else figure
        targets.append(at_most(f"{DEFAULT}: {name}, mean", mean(numbers), limits[0]))
        targets.append(at_most(f"{DEFAULT}: {name}, worst", max(numbers), limits[1]))
    free = [record for record in records if record.workload == _CLASSES[0.0]]
    by_policy = {name: [r for r in free if r.policy == name] for name in (DEFAULT, "hrrs")}
    if all(by_policy.values()):
        ratio = mean_of(by_policy[DEFAULT], "over_bound") / mean_of(by_policy["hrrs"], "over_bound")
        targets.append(at_most(f"{DEFAULT} over hrrs, makespan, switches are free", ratio, 1.0))
    return targets


def _draw(report: Report, path: Path) -> None:
    shown = [record for record in report.records if record.workload == ALL]
    with canvas(path, 2) as (makespans, stalls):
        bars(makespans, shown, "over_bound", "makespan over the lower bound")
        bars(stalls, shown, "stall", "longest stall of a job, in cycles of all jobs")


SCENARIO = Scenario(
    about="ordering policies on random mixes of jobs: makespan, stalls, switches",
    run=_run,
    draw=_draw,
    policies=tuple(WAYS),
    accepts=frozenset({"mixes"}),
)
