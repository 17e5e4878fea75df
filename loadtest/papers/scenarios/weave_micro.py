"""Three groups of WEAVE Fig. 10: throughput for the same money, and the cost of sharing.

The job types are those of WEAVE Table 3. The paper publishes iteration times (Table 4) and ratios
of rollout to training, from which the phases follow: A 128.85 + 128.85 s, D 375 + 150, E 450 + 75,
and in (c) C 200 + 374.6 on two nodes a pool, D 300 + 75 beside it (its data parallelism matches C's
train pool). Gavel+ shares nodes without knowing phases; veRL runs both phases on the train nodes,
1.0 times as long. A switch of a phase takes 2 s.
"""

from __future__ import annotations

from pathlib import Path

from loadtest.papers.optimum import Terms, cheapest_partition
from loadtest.papers.scenarios.pictures import gantt
from loadtest.papers.scenarios.report import at_least, at_most, mean_of
from loadtest.papers.scenarios.scenario import Options, Scenario
from loadtest.papers.scenarios.weaving import colocated, planned
from phaseloom.simulator.comparison.cases import Case
from phaseloom.simulator.comparison.clusters import HOST_BYTES, PRICES, ample, config, run
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report, Target
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob
from phaseloom.simulator.metering import Span

ITERATIONS = 40
SWITCH_S = 2.0
"""The offload and the load at a switch of a phase, together; Table 4 (a) shows 4.1 s for two."""
_PAPER = {
    "a temporal": {"solo": 1.82, "gavel": 1.73, "colocated": 1.47},
    "b train": {"solo": 1.90, "gavel": 1.43, "colocated": 1.35},
    "c spatial": {"solo": 1.99, "gavel": 1.78, "colocated": 1.43},
}
"""The factor by which WEAVE beats a baseline's throughput for the same money (Fig. 10)."""
_ORDERINGS = {"coexec": "round_robin", "solo": "fcfs", "gavel": "fcfs", "colocated": "fcfs"}


def jobs_of(group: str) -> list[SimJob]:
    """The jobs of a group: `a temporal`, `b train` or `c spatial`."""
    match group[0]:
        case "a":
            return [_job("A1", 128.85, 128.85, (1, 1)), _job("A2", 128.85, 128.85, (1, 1))]
        case "b":
            heavy = [_job(name, 375.0, 150.0, (1, 1)) for name in ("D1", "D2")]
            return [*heavy, _job("E", 450.0, 75.0, (1, 1))]
        case _:
            small = [_job(name, 300.0, 75.0, (1, 2), slo=1.6) for name in ("D1", "D2")]
            return [_job("C", 200.0, 374.6, (2, 2)), *small]


def _job(
    name: str, rollout_s: float, train_s: float, nodes: tuple[int, int], slo: float = 1.2
) -> SimJob:
    """A job.

    Args: nodes: the number of nodes of the rollout and of the train pool.
    """
    rollout, train = nodes
    return SimJob(
        name=name,
        arrival_s=0.0,
        iterations=ITERATIONS,
        phases=(Phase(ROLLOUT, rollout_s), Phase(TRAIN, train_s)),
        demands={ROLLOUT: _take(rollout), TRAIN: _take(train)},
        slo=slo,
    )


def _take(num_nodes: int) -> Demand:
    return Demand(num_nodes=num_nodes, load_s=SWITCH_S / 2, offload_s=SWITCH_S / 2)


def _case(group: str, policy: str) -> tuple[Record, list[Span]]:
    jobs = jobs_of(group)
    nodes = ample(jobs)
    shared = [colocated(job) for job in jobs] if policy == "colocated" else jobs
    settings = config(policy, _ORDERINGS[policy])
    result, wall_s = run(shared, nodes, settings, 0, records_spans=True)
    rates = [3600.0 / job.mean_iteration_s for job in result.jobs]
    alone = [3600.0 / job.solo_s for job in jobs]
    # The rent while all jobs are there: afterwards nodes are given back.
    rent = max(price for _, price, _ in result.cost_steps)
    longest = min(range(len(jobs)), key=alone.__getitem__)
    optimum = cheapest_partition(map(planned, jobs), Terms(host_bytes=HOST_BYTES))
    share = sum(rate / solo for rate, solo in zip(rates, alone, strict=True)) / len(jobs)
    record = Record(
        policy=policy,
        seed=0,
        workload=group,
        jobs=len(jobs),
        cost_per_hour=rent,
        cost_over_optimal=rent / optimum.price_per_hour,
        slo_attainment=result.slo_attainment,
        simulated_in_s=wall_s,
        more={
            "throughput_per_dollar": share / rent,
            # The others wait for it: a meta-iteration takes as long as its longest member.
            "longest_over_alone": alone[longest] / rates[longest],
        },
    )
    return record, result.spans


def _run(options: Options) -> Report:
    policies = options.policies_of(_ORDERINGS)
    cases = [
        Case(f"{group}, {policy}", _case, (group, policy))
        for group in _PAPER
        for policy in policies
    ]
    found = options.run_cases(cases)
    records = [record for record, _ in found]
    return Report(
        scenario="weave-micro",
        about="Three co-execution groups (WEAVE Fig. 10)",
        parameters={
            "iterations": ITERATIONS,
            "switch_s": SWITCH_S,
            "prices": PRICES,
            "paper": _PAPER,
        },
        records=records,
        targets=_targets(records),
        series={
            "spans": [
                (r.workload, spans)
                for r, (_, spans) in zip(records, found, strict=True)
                if r.policy == "coexec"
            ]
        },
    )


def _targets(records: list[Record]) -> list[Target]:
    value = {(r.workload, r.policy): r.more["throughput_per_dollar"] for r in records}
    targets: list[Target] = []
    for group, paper in _PAPER.items():
        ours = [r for r in records if (r.workload, r.policy) == (group, "coexec")]
        if not ours:
            continue
        slowdown = mean_of(ours, "longest_over_alone")
        targets.append(at_most(f"{group}: longest iteration over alone", slowdown, 1.10))
        for baseline, ratio in paper.items():
            if (group, baseline) in value:
                gain = value[group, "coexec"] / value[group, baseline]
                targets.append(at_least(f"{group}: throughput over {baseline}", gain, ratio))
    return targets


def _draw(report: Report, path: Path) -> None:
    spans = report.series["spans"]
    with canvas(path, 1 + len(spans), width=8.0, height=2.4, across=False) as panels:
        what = "throughput for a dollar an hour (each job's rate over its rate alone)"
        bars(panels[0], report.records, "throughput_per_dollar", what)
        for axes, (group, of_group) in zip(panels[1:], spans, strict=True):
            shown = [Span(*span) for span in of_group if span[3] < 4000.0]
            gantt(axes, shown, f"coexec, {group}")


SCENARIO = Scenario(
    about="three co-execution groups against solo, Gavel+ and co-location (WEAVE Fig. 10)",
    run=_run,
    draw=_draw,
    policies=tuple(_ORDERINGS),
)
