"""Jobs whose phases vary from iteration to iteration, but do not drift.

Durations are lognormal with a coefficient of variation of 0 to 0.3. The token limit ends a phase
two deviations above its mean. A policy that follows drift should not move jobs for chance. The SLO
is printed twice: relative to the longest iteration, which placement plans with, and relative to
the same draws alone, which the owner of a job would see.
"""

from __future__ import annotations

from math import log, sqrt
from pathlib import Path

from msgspec.structs import replace

from loadtest.papers.scenarios.report import at_least, at_most, mean_of
from loadtest.papers.scenarios.scenario import Bound, Options, Scenario
from loadtest.papers.scenarios.weaving import measured
from loadtest.papers.workloads.weave import generate
from phaseloom.simulator.comparison.clusters import SWITCHING
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report, Target, groups_of
from phaseloom.simulator.jobs import Phase, SimJob

NUM_JOBS = 100
_VARIATIONS = {"0": 0.0, "0.1": 0.1, "0.2": 0.2, "0.3": 0.3}
_POLICIES = ("coexec", "coexec_repack")
_MOVES = "moves_per_job"
_MAX_MOVES = 2.5
_LOSS = 0.05
"""Share of the jobs by which `coexec_repack` may keep fewer SLOs than `coexec`."""


def varying(job: SimJob, variation: float) -> SimJob:
    """The job with durations of the same mean and this coefficient of variation."""
    return replace(job, phases=tuple(_varying(phase, variation) for phase in job.phases))


def _varying(phase: Phase, variation: float) -> Phase:
    sigma = sqrt(log(1 + variation**2))
    return replace(phase, sigma=sigma, worst_s=phase.mean_s * (1 + 2 * variation))


def _case(workload: str, policy: str, seed: int) -> Record:
    jobs = generate("Mixed", seed, num_jobs=NUM_JOBS, switching=SWITCHING)
    jobs = [varying(job, _VARIATIONS[workload]) for job in jobs]
    record, result = measured(jobs, policy, seed, workload=workload, bound=Bound.NONE)
    return replace(record, slo_iterations=None, more={_MOVES: result.moves / NUM_JOBS})


def _run(options: Options) -> Report:
    policies = options.policies_of(_POLICIES)
    records: list[Record] = options.run_each(_case, _VARIATIONS, policies, (0,))
    return Report(
        scenario="weave-jitter",
        about=f"{NUM_JOBS} jobs whose phases vary, by coefficient of variation",
        parameters={"variations": list(_VARIATIONS.values()), "longest": "mean * (1 + 2 cv)"},
        records=records,
        targets=_targets(records),
    )


def _targets(records: list[Record]) -> list[Target]:
    by_run = groups_of(records)
    targets = []
    for workload in _VARIATIONS:
        strict, repacked = (by_run.get((workload, policy)) for policy in _POLICIES)
        if strict and repacked:
            least = mean_of(strict, "slo_draws") - _LOSS
            share = mean_of(repacked, "slo_draws")
            targets += [
                at_most(f"{workload}: moves of a job", mean_of(repacked, _MOVES), _MAX_MOVES),
                at_least(f"{workload}: SLO, same draws", share, least),
                at_most(f"{workload}: $", mean_of(repacked, "dollars"), mean_of(strict, "dollars")),
            ]
    return targets


def _draw(report: Report, path: Path) -> None:
    with canvas(path, 2) as (moves, slos):
        bars(moves, report.records, _MOVES, "moves of a job")
        bars(slos, report.records, "slo_draws", "share of jobs within their SLO, same draws")


SCENARIO = Scenario(
    about="jobs whose phases vary but do not drift: moves, SLO, dollars",
    run=_run,
    draw=_draw,
    policies=_POLICIES,
)
