"""How long a decision takes, by the number of jobs that run (WEAVE Table 5).

The policy itself fills a cluster to so many jobs; then, again and again, the oldest job leaves and
another arrives. The policy's decision is timed, on one core, in CPU seconds. The exact optimum is
timed for small numbers. A second part runs the whole core and times its steps.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import msgspec

from loadtest.papers.optimum import BY_SUBSETS, cheapest_partition
from loadtest.papers.scenarios.pictures import lines
from loadtest.papers.scenarios.report import at_most
from loadtest.papers.scenarios.scenario import Options, Scenario
from loadtest.papers.scenarios.weaving import ORDERINGS, planned
from loadtest.papers.workloads.weave import generate
from phaseloom.common.contract.errors import InternalError
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.process import collector
from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import Cluster, Host, Limits, Placed
from phaseloom.simulator.comparison.cases import Case
from phaseloom.simulator.comparison.clusters import HOST_BYTES, PRICES, ample, config, run
from phaseloom.simulator.comparison.pictures import canvas
from phaseloom.simulator.comparison.report import Record, Report, Target
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, SimJob, spec_of

SIZES = (5, 9, 13, 100, 500, 1000, 2000)
LARGEST_REPACKED = 500
"""The most jobs with which `coexec_repack` is timed, since it looks further for a place."""
DECISIONS = 200
RUNS = 5
STEP_JOBS = 2000
STEP_HOURS = 0.5
_PAPER_MS = {5: 5.6, 9: 6.5, 13: 7.6, 100: 41.9, 500: 198.0, 1000: 318.0, 2000: 591.0}
_POLICIES = ("coexec", "coexec_repack")


def _cluster(num_nodes: int) -> Cluster:
    cluster = Cluster(limits=Limits())
    for pool in (ROLLOUT, TRAIN):
        for index in range(num_nodes):
            name = NodeId(f"{pool}-{index:05}")
            groups.host_up(cluster, Host(name, pool, 1, HOST_BYTES, PRICES[pool]))
    return cluster


def _decide(cluster: Cluster, policy: str, job: SimJob) -> float:
    """Place a job; the CPU seconds of the decision."""
    spec = spec_of(job, iterations=job.iterations)
    member = groups.member_of(job.key, spec, cluster.now_s)
    began_s = time.thread_time()
    decision = PLACEMENT[policy].place(cluster, member)
    taken_s = time.thread_time() - began_s
    if not isinstance(decision, Placed):
        raise InternalError(f"{policy} has no place for {job.name}: {decision}")
    groups.join(cluster, member, decision)
    return taken_s


def _case(policy: str, num_jobs: int, seed: int) -> Record:
    # As the scheduler's process does, so that decisions wait for collections here as there.
    collector.collect_rarely()
    jobs = generate("Mixed", seed, num_jobs=num_jobs + DECISIONS)
    cluster = _cluster(num_jobs + 1)
    for job in jobs[:num_jobs]:
        _decide(cluster, policy, job)
    seconds = []
    for leaver, comer in zip(jobs, jobs[num_jobs:], strict=False):
        groups.leave(cluster, str(leaver.key))
        seconds.append(_decide(cluster, policy, comer))
    ordered = sorted(1e3 * s for s in seconds)
    return Record(
        policy=policy,
        seed=seed,
        workload=f"{num_jobs} jobs",
        jobs=num_jobs,
        decision_ms_p50=median(ordered),
        decision_ms_p99=ordered[int(0.99 * len(ordered))],
        more={"groups": float(len(cluster.groups))},
    )


def _optimum(num_jobs: int) -> Record:
    jobs = [planned(job) for job in generate("Mixed", 0, num_jobs=num_jobs)]
    began_s = time.thread_time()
    cheapest_partition(jobs)
    taken_ms = 1e3 * (time.thread_time() - began_s)
    return Record(
        policy="optimum",
        seed=0,
        workload=f"{num_jobs} jobs",
        jobs=num_jobs,
        decision_ms_p50=taken_ms,
        decision_ms_p99=taken_ms,
    )


def _steps(policy: str, seed: int) -> Record:
    """Time the steps of the whole core that take a queued operation."""
    jobs = [
        _at_once(job, index)
        for index, job in enumerate(generate("Mixed", seed, num_jobs=STEP_JOBS))
    ]
    settings = config(policy, ORDERINGS[policy])
    until_s = 3600.0 * STEP_HOURS
    result, _ = run(jobs, ample(jobs), settings, seed, until_s=until_s, times_steps=True)
    queued = sorted(1e6 * s for s in result.step_s["QueuedOperation"])
    return Record(
        policy=policy,
        seed=seed,
        workload=f"core steps, {STEP_JOBS} jobs",
        jobs=STEP_JOBS,
        more={
            "step_us_p50": median(queued),
            "step_us_p99": queued[int(0.99 * len(queued))],
        },
    )


def _at_once(job: SimJob, index: int) -> SimJob:
    return msgspec.structs.replace(job, arrival_s=0.01 * index, iterations=10_000)


def _run(options: Options) -> Report:
    policies = options.policies_of(_POLICIES)
    seeds = options.seeds or tuple(range(RUNS))
    cases = [
        Case(f"{policy}, {size} jobs", _case, (policy, size, seed))
        for policy in policies
        for size in SIZES
        if policy == "coexec" or size <= LARGEST_REPACKED
        for seed in (seeds if policy == "coexec" else seeds[:1])
    ]
    cases += [Case(f"optimum of {n}", _optimum, (n,)) for n in (5, BY_SUBSETS)]
    cases += [
        Case(f"steps, {policy}", _steps, (policy, seeds[0]))
        for policy in policies
        if policy == "coexec"
    ]
    records: list[Record] = options.run_cases(cases)
    return Report(
        scenario="weave-table5",
        about="Decision latency by the number of jobs (WEAVE Table 5)",
        parameters={"decisions": DECISIONS, "paper_ms": _PAPER_MS},
        records=records,
        targets=_targets(records),
    )


def _targets(records: list[Record]) -> list[Target]:
    targets = []
    for policy in dict.fromkeys(r.policy for r in records if r.policy != "optimum"):
        mine = [r for r in records if r.policy == policy]
        p99 = {size: _p99(mine, size) for size in SIZES if any(r.jobs == size for r in mine)}
        if p99.get(2000):
            targets.append(at_most(f"{policy}: decision p99 at 2,000 jobs, ms", p99[2000], 25.0))
            growth = p99[2000] / max(p99[1000], 1e-9)
            targets.append(at_most(f"{policy}: p99 at 2,000 over at 1,000 jobs", growth, 2.2))
        elif LARGEST_REPACKED in p99:
            what = f"{policy}: decision p99 at {LARGEST_REPACKED} jobs, ms"
            targets.append(at_most(what, p99[LARGEST_REPACKED], 30.0))
        steps = [r.more["step_us_p50"] for r in mine if "step_us_p50" in r.more]
        targets += [at_most(f"{policy}: core step p50, us", s, 40.0) for s in steps]
    return targets


def _p99(records: list[Record], size: int) -> float:
    """The median of the p99 over the runs that time decisions."""
    found = [r.decision_ms_p99 for r in records if r.jobs == size]
    return median([p99 for p99 in found if p99 is not None] or [0.0])


def _draw(report: Report, path: Path) -> None:
    series = {}
    for policy in dict.fromkeys(r.policy for r in report.records):
        mine = [r for r in report.records if r.policy == policy and r.decision_ms_p99]
        points = {}
        for size in sorted({r.jobs or 0 for r in mine}):
            points[size] = median(r.decision_ms_p99 or 0.0 for r in mine if r.jobs == size)
        series[f"{policy}, p99"] = sorted(points.items())
    series["paper"] = sorted(_PAPER_MS.items())
    with canvas(path, 1, width=6.0, height=4.0) as (axes,):
        lines(axes, series, "milliseconds for a decision", "jobs that run")
        axes.set_xscale("log")
        axes.set_yscale("log")


SCENARIO = Scenario(
    about="decision latency at 5 to 2,000 jobs (WEAVE Table 5)",
    run=_run,
    draw=_draw,
    policies=_POLICIES,
)
