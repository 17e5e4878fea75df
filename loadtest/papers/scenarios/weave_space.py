"""A bound on what placement could save by counting on jobs that share nodes in space.

Jobs of WEAVE Table 6 are put into their cheapest groups, once as the jobs of a node take turns, and
once as if two phases on a node were done sooner side by side, so that a group has room for more. No
job is taken to lose anything by its company: no policy that keeps to the strict round robin can
save more. Nothing is run; `weave_company` runs what the scheduler does of it.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from loadtest.papers.optimum import Terms, cheapest_partition
from loadtest.papers.scenarios.scenario import Options, Scenario
from loadtest.papers.scenarios.weaving import planned
from loadtest.papers.workloads.weave import generate
from phaseloom.simulator.comparison.clusters import HOST_BYTES, SWITCHING
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report

NUM_JOBS = 13
"""As many as WEAVE's own optimum has (§6.5)."""
_PROFILES = ("Mixed", "BL", "RH", "TH")
_SEEDS = tuple(range(10))
_IN_TURNS = "in turns"
_GAINS = {
    _IN_TURNS: (1.0, 1.0),
    "rollouts 1.25": (1.25, 1.0),
    "rollouts 1.5": (1.5, 1.0),
    "rollouts 2": (2.0, 1.0),
    "training 1.08": (1.0, 1.08),
    "rollouts 2, training 1.08": (2.0, 1.08),
}
"""By which factors rollouts and training are done sooner side by side. 2 and 1.08 were measured
on two cores (`slowdowns_two_cores.json`)."""


def _case(profile: str, setting: str, seed: int) -> Record:
    jobs = generate(profile, seed, num_jobs=NUM_JOBS, switching=SWITCHING)
    rollout_gain, train_gain = _GAINS[setting]
    terms = Terms(host_bytes=HOST_BYTES, rollout_gain=rollout_gain, train_gain=train_gain)
    best = cheapest_partition(map(planned, jobs), terms)
    return Record(
        policy=setting,
        seed=seed,
        workload=profile,
        jobs=NUM_JOBS,
        cost_per_hour=best.price_per_hour,
    )


def _run(options: Options) -> Report:
    settings = dict.fromkeys((_IN_TURNS, *options.policies_of(_GAINS)))
    records: list[Record] = options.run_each(_case, _PROFILES, settings, _SEEDS)
    prices = {(r.workload, r.policy, r.seed): r.cost_per_hour or 0.0 for r in records}
    return Report(
        scenario="weave-space",
        about=f"The cheapest groups of {NUM_JOBS} jobs, if they shared nodes in space",
        parameters={"gains": _GAINS},
        records=[
            replace(r, more={"over_in_turns": price / prices[r.workload, _IN_TURNS, r.seed]})
            for r in records
            if (price := r.cost_per_hour)
        ],
    )


def _draw(report: Report, path: Path) -> None:
    with canvas(path, 1, width=7.0, height=4.0) as (axes,):
        bars(axes, report.records, "over_in_turns", "price over that in turns", aim=1.0)


SCENARIO = Scenario(
    about="what placement could save at most by sharing nodes in space",
    run=_run,
    draw=_draw,
    policies=tuple(_GAINS),
)
