"""Why `random` and `most_idle` cost less here than in the paper (WEAVE Fig. 15, 17).

With one node of each pool per job, a group of the strict round robin is never dearer than its
members alone: its period is at most the sum of their iterations, and it rents the nodes of one. If
nodes are given back, no choice of groups can therefore cost more than `solo`. The paper's baselines
do cost more. This scenario varies what the paper leaves open: jobs of one node or of 1, 2, 4
(*B*), new rollout nodes among the random choices (`random_scaling`), and groups that keep every
node until their last job ends (*kept*).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import NamedTuple
from zlib import crc32

from msgspec.structs import replace

from loadtest.papers.scenarios.report import at_most
from loadtest.papers.scenarios.scenario import Bound, Options, Scenario
from loadtest.papers.scenarios.weaving import MAX_GROUP_JOBS, ORDERINGS, compared, measured
from loadtest.papers.workloads.weave import generate
from phaseloom.scheduler.core.planning.nodes import free_nodes
from phaseloom.scheduler.core.planning.weave.period import ROLLOUT
from phaseloom.scheduler.core.planning.weave.pool import (
    fresh,
    groups_with_room,
    need_of,
    pinned,
)
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placed, Placement
from phaseloom.simulator.comparison.clusters import PRICES, SWITCHING
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report
from phaseloom.simulator.jobs import SimJob
from phaseloom.simulator.metrics import Result

NUM_JOBS = 100
_RIVALS = ("solo", "random", "most_idle", "random_scaling")


class Jobs(NamedTuple):
    name: str
    nodes: str
    seed: int
    num_jobs: int
    max_group_jobs: int = MAX_GROUP_JOBS

    def jobs(self) -> list[SimJob]:
        return generate(
            "Mixed", self.seed, nodes=self.nodes, num_jobs=self.num_jobs, switching=SWITCHING
        )


class _Joined(NamedTuple):
    group: str
    at_s: float
    nodes: dict[str, list[str]]


def _random_scaling(cluster: Cluster, member: Member) -> Decision:
    """Choose between every group's nodes, every group with new rollout nodes, and a new group."""
    alone = fresh(cluster, member, "alone")
    assert alone is not None
    new = free_nodes(cluster, ROLLOUT, need_of(member, ROLLOUT), need_of(member, ROLLOUT).num_nodes)
    options = [alone]
    for room in groups_with_room(cluster, member):
        ranked = sorted(room.rolls, key=lambda node: crc32(f"{member.job}/{node}".encode()))
        for rolls in (ranked[: len(new)], new):
            options.append(Placed(room.group.name, pinned(rolls, room.trains), "by random choice"))
    return options[crc32(f"{member.job}/{cluster.num_groups}".encode()) % len(options)]


@contextmanager
def _recorded(policy: str) -> Iterator[dict[str, _Joined]]:
    """Run `policy` as `random` inside the block, and record the group that each job joins."""
    joined: dict[str, _Joined] = {}
    original = PLACEMENT["random"]
    chosen = Placement(_random_scaling) if policy == "random_scaling" else PLACEMENT[policy]

    def place(cluster: Cluster, member: Member) -> Decision:
        decision = chosen.place(cluster, member)
        if isinstance(decision, Placed):
            group = decision.group or f"g{cluster.num_groups + 1}"
            nodes = {pool: [str(node) for node in names] for pool, names in decision.nodes.items()}
            joined[member.job] = _Joined(group, cluster.now_s, nodes)
        return decision

    PLACEMENT["random"] = Placement(place)
    try:
        yield joined
    finally:
        PLACEMENT["random"] = original


def _kept_dollars(joined: dict[str, _Joined], result: Result) -> float:
    """The price if a group kept each node from its first use until the group's last job ended."""
    ended_s: dict[str, float] = {}
    used_s: dict[tuple[str, str, str], float] = {}
    for job in result.jobs:
        of_job = joined[f"sim.{job.name}"]
        ended_s[of_job.group] = max(ended_s.get(of_job.group, 0.0), job.ended_s)
        for pool, names in of_job.nodes.items():
            for name in names:
                key = of_job.group, pool, name
                used_s[key] = min(used_s.get(key, of_job.at_s), of_job.at_s)
    return sum(
        PRICES[pool] * (ended_s[group] - start_s) / 3600
        for (group, pool, _), start_s in used_s.items()
    )


def _case(setting: Jobs, policy: str, bound: Bound) -> tuple[Record, None]:
    with _recorded(policy) as joined:
        record, result = measured(
            setting.jobs(), "random", setting.seed, workload=setting.name, bound=bound
        )
    more = {
        "mean_slowdown": mean(job.slowdown for job in result.jobs),
        "kept_dollars": _kept_dollars(joined, result),
    }
    return replace(record, policy=policy, more=more), None


def _run(options: Options) -> Report:
    policies = dict.fromkeys(("solo", *options.policies_of(_RIVALS)))
    settings = [
        Jobs(f"Mixed{suffix}", nodes, seed, NUM_JOBS)
        for nodes, suffix in (("A", ""), ("B", ", B"))
        for seed in options.seeds or (0,)
    ]
    runs = [(setting, policy) for setting in settings for policy in policies]
    records = [record for record, _ in compared(options, runs, _case)]
    solo = {(r.workload, r.seed): r.dollars or 0.0 for r in records if r.policy == "solo"}
    for record in records:
        base = solo[record.workload, record.seed]
        record.more["over_solo"] = (record.dollars or 0.0) / base
        record.more["kept_over_solo"] = record.more.pop("kept_dollars") / base
    return Report(
        scenario="weave-rivals",
        about="What the cost of random placement depends on (WEAVE Fig. 15)",
        parameters={"jobs": NUM_JOBS, "ordering": ORDERINGS["random"]},
        records=records,
        targets=[
            at_most(f"{r.workload}, {r.policy}: over solo", r.more["over_solo"], 1.0)
            for r in records
            if r.workload == "Mixed"
        ],
    )


def _draw(report: Report, path: Path) -> None:
    with canvas(path, 2) as (given_back, kept):
        bars(given_back, report.records, "over_solo", "cost over solo", aim=1.0)
        bars(kept, report.records, "kept_over_solo", "the same, nodes kept", aim=1.0)


SCENARIO = Scenario(
    about="what the cost of random placement depends on (WEAVE Fig. 15)",
    run=_run,
    draw=_draw,
    policies=_RIVALS,
    accepts=frozenset({"bound"}),
)
