"""Ordering policies in contention: jobs of PlexRL Table 2 share one train node (PlexRL §4.4).

A job's cycle is compute_log_prob, update_actor and sync_weight on the train node; the rollout
before them runs on GPUs of its own. A switch offloads for 8 s and loads for 12 s. *serial*: a
controller publishes an operation when the one before has ended; *queued*: a cycle's operations
together; *crowded*: four jobs of two sizes, serial, durations lognormal. As in the paper, only the
policy decides; rows that end in *live* have the quantum, grace and speculation of a mesh.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from loadtest.papers.bounds import makespan_bound_s
from loadtest.papers.scenarios.report import at_most, mean_of, only
from loadtest.papers.scenarios.scenario import Options, Scenario
from phaseloom.common.contract.specs import SchedulerSettings
from phaseloom.simulator.comparison.cases import Case
from phaseloom.simulator.comparison.clusters import (
    HOST_BYTES,
    LIVE,
    PRICES,
    config_of,
    record_of,
    run,
)
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report, Target
from phaseloom.simulator.jobs import TRAIN, Demand, Phase, SimJob, Submission
from phaseloom.simulator.nodes import PoolSpec

CYCLES = 40
OFFLOAD_S, LOAD_S = 8.0, 12.0
JITTER = 0.25
"""The sigma of the lognormal in *crowded*."""
_TABLE_2 = {
    "7B": (289.03, (9.66, 38.08, 9.76)),
    "30B": (284.80, (19.62, 56.35, 7.57)),
}
"""The seconds of each model's cycle, compute_log_prob, update_actor and sync_weight."""
_KINDS = ("forward", "optim_step", "publish_weights")
_WORKLOADS = ("serial", "queued", "crowded")
DEFAULT = SchedulerSettings().ordering
_ORDERINGS = (
    "fcfs",
    "sjf",
    "hrrn",
    "hrrs",
    "hrrs_literal",
    "lrs",
    "fifo_lock",
    "round_robin",
    DEFAULT,
    f"hrrs{LIVE}",
    f"{DEFAULT}{LIVE}",
)
_SEEDS = (0, 1, 2, 3, 4)


def _job(name: str, model: str, submission: Submission, sigma: float = 0.0) -> SimJob:
    cycle_s, works = _TABLE_2[model]
    rollout_s = cycle_s - sum(works)
    phases = [
        Phase(TRAIN, work, 4.0 * work if sigma else work, sigma, kind)
        for work, kind in zip(works, _KINDS, strict=True)
    ]
    last = phases[-1]
    phases[-1] = Phase(TRAIN, last.mean_s, last.worst_s, last.sigma, last.kind, think_s=rollout_s)
    return SimJob(
        name=name,
        arrival_s=0.0,
        iterations=CYCLES,
        phases=tuple(phases),
        demands={TRAIN: Demand(load_s=LOAD_S, offload_s=OFFLOAD_S)},
        submission=submission,
        model=model,
    )


def _jobs(workload: str) -> list[SimJob]:
    if workload == "crowded":
        models = ("7B", "30B", "7B", "30B")
        return [_job(f"j{i}", m, Submission.SERIAL, JITTER) for i, m in enumerate(models)]
    submission = Submission.SERIAL if workload == "serial" else Submission.CYCLE
    return [_job(f"j{i}", "30B", submission) for i in range(2)]


def _case(workload: str, ordering: str, seed: int) -> Record:
    nodes = [PoolSpec(TRAIN, 1, PRICES[TRAIN], HOST_BYTES)]
    settings = config_of(ordering, duty_limit=1.0)
    jobs = _jobs(workload)
    result, wall_s = run(jobs, nodes, settings, seed)
    record = record_of(result, wall_s, policy=ordering, seed=seed, workload=workload)
    ratio = result.makespan_s / makespan_bound_s(jobs, seed, {TRAIN: 1})
    kept = only(record, "switches", "mean_wait_s", "utilisation", "makespan_s")
    return replace(kept, over_bound=ratio)


def _run(options: Options) -> Report:
    orderings = options.policies_of(_ORDERINGS)
    cases = [
        Case(f"{workload}, {ordering}, seed {seed}", _case, (workload, ordering, seed))
        for workload in _WORKLOADS
        for ordering in orderings
        for seed in (options.seeds or _SEEDS if workload == "crowded" else (0,))
    ]
    records: list[Record] = options.run_cases(cases)
    return Report(
        scenario="plexrl-hrrs",
        about="Ordering policies in contention on one train node (PlexRL §4.4)",
        parameters={"cycles": CYCLES, "offload_s": OFFLOAD_S, "load_s": LOAD_S, "sigma": JITTER},
        records=records,
        targets=_targets(records),
    )


def _targets(records: list[Record]) -> list[Target]:
    by_row = {(r.policy, r.workload, r.seed): r for r in records}
    targets = []
    for end in ("", LIVE):
        ours, theirs = f"{DEFAULT}{end}", f"hrrs{end}"
        if (ours, "serial", 0) in by_row:
            serial = mean_of([by_row[ours, "serial", 0]], "switches")
            targets.append(at_most(f"{ours}: switches, serial", serial, 90))
        for policy, workload, seed in by_row:
            if policy != ours or (theirs, workload, seed) not in by_row:
                continue
            name = f"{workload}, seed {seed}: {ours} over {theirs}"
            for figure in ("switches", "mean_wait_s"):
                of_ours = mean_of([by_row[ours, workload, seed]], figure)
                of_theirs = mean_of([by_row[theirs, workload, seed]], figure)
                targets.append(at_most(f"{name}, {figure}", of_ours / max(of_theirs, 1e-9), 1.0))
    return sorted(targets, key=lambda target: target.what)


def _draw(report: Report, path: Path) -> None:
    with canvas(path, 3) as (switches, waits, busy):
        bars(switches, report.records, "switches", "switches")
        bars(waits, report.records, "mean_wait_s", "mean wait of an operation, s")
        bars(busy, report.records, "utilisation", "utilisation of the node")


SCENARIO = Scenario(
    about="ordering policies in contention: switches, waits, utilisation",
    run=_run,
    draw=_draw,
    policies=_ORDERINGS,
)
