"""Placement policies on a backlog: makespan and queueing delay (PlexRL §6.3, Fig. 8).

The jobs are drawn after PlexRL Table 2 (`workloads/plexrl.py`): 200 for each seed, at most two on a
node, with rollout on nodes of their own and training on a shared pool of 16 nodes.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadtest.papers.bounds import makespan_bound_s
from loadtest.papers.scenarios.pictures import distribution
from loadtest.papers.scenarios.report import at_most, only
from loadtest.papers.scenarios.scenario import Options, Scenario
from loadtest.papers.workloads.plexrl import Shape, plexrl
from phaseloom.common.contract.specs import SchedulerSettings
from phaseloom.simulator.comparison import workloadfile
from phaseloom.simulator.comparison.cases import Case
from phaseloom.simulator.comparison.clusters import LIVE, PRICES, config_of, record_of, run
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report, Target
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, SimJob
from phaseloom.simulator.nodes import PoolSpec

TRAIN_NODES = 16
TRAIN_HOST_BYTES = 1_200_000_000_000
ROLLOUT_NODES = 400
JOBS_A_NODE = 2
DUTY_LIMIT = 0.2
_POLICIES = (
    "isolated",
    "pack",
    "spread",
    "spread_backfill",
    "backfill_greedy",
    f"spread_backfill{LIVE}",
)
_SEEDS = (0, 1, 2, 3, 4)


def _case(policy: str, seed: int, own: list[SimJob] | None) -> tuple[Record, list[float]]:
    jobs = plexrl(seed) if own is None else own
    nodes = [
        PoolSpec(ROLLOUT, ROLLOUT_NODES, PRICES[ROLLOUT]),
        PoolSpec(TRAIN, TRAIN_NODES, PRICES[TRAIN], TRAIN_HOST_BYTES),
    ]
    ordering = f"{SchedulerSettings().ordering}{LIVE}" if policy.endswith(LIVE) else "hrrs"
    settings = config_of(
        ordering,
        policy.removesuffix(LIVE),
        max_group_jobs=JOBS_A_NODE,
        duty_limit=DUTY_LIMIT,
    )
    result, wall_s = run(jobs, nodes, settings, seed)
    record = record_of(result, wall_s, policy=policy, seed=seed)
    train = result.pools[TRAIN]
    num_nodes = {pool.pool: pool.num_nodes for pool in nodes}
    bound_s = makespan_bound_s(jobs, seed, num_nodes, jobs_a_node=JOBS_A_NODE)
    record = msgspec.structs.replace(
        record,
        utilisation=train.busy_s / (TRAIN_NODES * result.makespan_s),
        over_bound=result.makespan_s / bound_s,
        more={"mean_slowdown": sum(job.slowdown for job in result.jobs) / len(result.jobs)},
    )
    delays = [job.queueing_delay for job in result.jobs if job.queueing_delay >= 0]
    names = ("jobs", "makespan_s", "over_bound", "queueing_delay", "utilisation", "switches")
    return only(record, *names, "decision_ms_p50", "decision_ms_p99"), delays


def _run(options: Options) -> Report:
    policies = options.policies_of(_POLICIES)
    own = workloadfile.read(options.workload) if options.workload else None
    cases = [
        Case(f"{policy}, seed {seed}", _case, (policy, seed, own))
        for seed in options.seeds or _SEEDS
        for policy in policies
    ]
    found = options.run_cases(cases)
    isolated_s = {r.seed: r.makespan_s for r, _ in found if r.policy == "isolated"}
    records = [_relative(record, isolated_s) for record, _ in found]
    delays: dict[str, list[float]] = {}
    for record, of_run in found:
        delays.setdefault(record.policy, []).extend(of_run)
    return Report(
        scenario="plexrl-fig8",
        about=f"A backlog on {TRAIN_NODES} shared train nodes (PlexRL Fig. 8)",
        parameters={
            "workload": str(options.workload) if own else msgspec.to_builtins(Shape()),
            "train_nodes": TRAIN_NODES,
            "jobs_a_node": JOBS_A_NODE,
            "duty_limit": DUTY_LIMIT,
            "ordering": f"hrrs, and {SchedulerSettings().ordering} in the rows that end in live",
        },
        records=records,
        targets=_targets(records),
        series={"queueing_delay": delays},
    )


def _relative(record: Record, isolated_s: dict[int, float | None]) -> Record:
    of_isolated = isolated_s.get(record.seed)
    if not of_isolated or record.makespan_s is None:
        return record
    more = {**record.more, "over_isolated": record.makespan_s / of_isolated}
    return msgspec.structs.replace(record, more=more)


def _targets(records: list[Record]) -> list[Target]:
    makespan = {(r.policy, r.seed): r.makespan_s or 0.0 for r in records}
    ratios = [
        r.more["over_isolated"]
        for r in records
        if r.policy == "spread_backfill" and "over_isolated" in r.more
    ]
    targets = []
    if ratios:
        mean = sum(ratios) / len(ratios)
        targets.append(at_most("spread_backfill over isolated, makespan (mean)", mean, 0.56))
    for (policy, seed), makespan_s in makespan.items():
        if policy == "spread_backfill" and ("spread", seed) in makespan:
            ratio = makespan_s / makespan["spread", seed]
            targets.append(at_most(f"spread_backfill over spread, seed {seed}", ratio, 1.0))
    return targets


def _draw(report: Report, path: Path) -> None:
    with canvas(path, 2) as (makespans, delays):
        bars(makespans, report.records, "over_isolated", "makespan over isolated", aim=0.56)
        shown = report.series["queueing_delay"]
        distribution(delays, shown, "queueing delay of a job", "wait / duration")
        delays.set_xlim(left=0)


SCENARIO = Scenario(
    about="placement policies on a backlog: makespan, queueing delay (PlexRL Fig. 8)",
    run=_run,
    draw=_draw,
    policies=_POLICIES,
    accepts=frozenset({"workload"}),
)
