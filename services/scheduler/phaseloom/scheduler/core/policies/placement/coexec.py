"""WEAVE's co-execution groups, as published (WEAVE §4.2, Algorithm 1).

A new job goes where its marginal price is lowest. The options are the idle gaps of a group's nodes,
a group extended by just enough new rollout nodes, or nodes of its own. No placement may overcommit
host memory or violate an SLO, given the steady period of the strict round robin at worst-case
durations.

Pure. Cost: linear in the groups, which are tried in order of creation. The first of equal prices
wins (line 13 is strict), so the search stops at the first option that costs nothing.

Deviations: an exact fit in host memory is allowed. The SLO check uses the settled period instead of
one meta-iteration of an empty group. A switch is planned for each phase on shared nodes
(`Limits.switch_s`). A group holds at most `Limits.max_group_jobs`. A job with few iterations is
admitted only if they suffice to make up for joining midway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning.groups import bounds_of
from phaseloom.scheduler.core.planning.nodes import free_nodes, other_jobs
from phaseloom.scheduler.core.planning.weave.candidates import Budget, budget_of
from phaseloom.scheduler.core.planning.weave.period import (
    ROLLOUT,
    Timing,
    cycle_s,
    load_s,
    period_s,
    phases,
    timing_of,
)
from phaseloom.scheduler.core.planning.weave.pool import (
    fresh,
    need_of,
    no_place,
    pinned,
    price_per_hour,
    rolls_on,
    share_blindly,
    trains_on,
)
from phaseloom.scheduler.core.state.cluster import (
    Cluster,
    Decision,
    Group,
    Member,
    Placed,
    Placement,
    Waits,
)

SLACK = 1e-9
"""Tolerance when comparing seconds."""


class _Settled:
    """A candidate group, with the facts that all placements of the job in it share."""

    def __init__(self, cluster: Cluster, group: Group, member: Member, job: Timing) -> None:
        self.cluster = cluster
        self.group = group
        self.member = member
        self.job = job
        self.members = [
            (timing_of(m), tuple(m.nodes.get(ROLLOUT, ()))) for m in group.members.values()
        ]
        self.switch_s = cluster.limits.switch_s

    def has_slack(self) -> bool:
        """Whether the group is unsaturated (line 4)."""
        jobs = phases(self.members, self.switch_s)
        return load_s(jobs) < cycle_s(jobs)

    def period_with(self, nodes: tuple[str, ...], budgets: list[Budget]) -> float | None:
        """Steady period with the job on these rollout nodes, or None if that violates an SLO.

        Args: budgets: the budgets of all jobs, which must also cover the cost of joining midway.
        """
        everybody = [*self.members, (self.job, nodes)]
        settled_s = period_s(phases(everybody, self.switch_s))
        allowed_s = min([timing.allowed_s for timing, _ in everybody])
        if settled_s > allowed_s + SLACK:
            return None
        return settled_s if _can_be_joined(budgets, settled_s) else None

    def budgets(self) -> list[Budget]:
        """Budgets of the jobs with a known number of iterations, including the new job."""
        timings = [*(timing for timing, _ in self.members), self.job]
        everybody = zip((*self.group.members.values(), self.member), timings, strict=True)
        return [budget_of(self.cluster, m, timing) for m, timing in everybody if m.num_iterations]


def _can_be_joined(budgets: list[Budget], settled_s: float) -> bool:
    """Whether all jobs' mean iteration times stay within their SLOs if the job joins midway.

    Once, at the start, the new job waits for its turn and the others wait for it. A job with few
    remaining iterations cannot make up for that. If the number of iterations is unknown, the job is
    assumed to have enough.
    """
    return all([settled_s * (num_left + 1) <= budget_s + SLACK for num_left, budget_s in budgets])


@dataclass
class _Best:
    """Cheapest placement among the groups already evaluated."""

    price: float = inf
    placed: Placed | None = None


def _promising(cluster: Cluster, member: Member, job: Timing, best: _Best) -> Iterator[Group]:
    """Yield the groups that could have room for the job.

    Checks the train pool and the longest iteration. If a new rollout node would not be cheaper than
    the best known placement, it also checks the rollout nodes. Every placement checks every group,
    so this is a single loop without calls.
    """
    full, switch_s = cluster.limits.max_group_jobs, cluster.limits.switch_s
    allowed_s, train_s, solo_s = job.allowed_s, job.train_s, job.solo_s
    has_promise = member.slo > 0
    need = need_of(member, ROLLOUT)
    # A shared node has the switches of at least two jobs.
    rollout_s = job.rollout_s + 2 * switch_s if need.num_nodes else -inf
    new = free_nodes(cluster, ROLLOUT, need, 1)
    new_price = price_per_hour(cluster, new) if new else inf
    for group in cluster.groups.values():
        count = len(group.members)
        if count >= full or group.is_closed:
            continue
        bounds = group.bounds or bounds_of(group)
        if has_promise and not bounds.are_known:
            continue  # No SLO can be promised next to a job of unknown cycle.
        limit_s = (bounds.allowed_s if bounds.allowed_s < allowed_s else allowed_s) + SLACK
        if bounds.train_s + train_s + switch_s * (count + 1) > limit_s:
            continue
        # The train nodes alone saturate the group: an iteration has at most two switches.
        if bounds.train_s + switch_s * (count - 2) >= bounds.solo_s + SLACK:
            continue
        if best.price <= new_price and bounds.rollout_s + rollout_s > limit_s:
            continue
        if bounds.solo_s <= limit_s and solo_s <= limit_s:
            yield group


def _by_load(settled: _Settled, nodes: list[NodeId]) -> list[NodeId]:
    """Nodes sorted by load, least first; ties keep the group's order."""
    busy = dict.fromkeys(nodes, 0.0)
    for timing, used in settled.members:
        for node in used:
            if node in busy:
                busy[NodeId(node)] += timing.rollout_s
    return sorted(nodes, key=lambda n: busy[n])


def _placements(settled: _Settled) -> Iterator[tuple[list[NodeId], list[NodeId]]]:
    """Yield candidate (nodes of the group, new nodes) pairs: direct packing, then scaling (line 6).

    For a job with one rollout node: each node of the group, then a new node. For a job with
    several: node sets of members of the same size, then windows over the nodes sorted by load, then
    progressively fewer nodes of the group combined with new ones. The number of candidates grows
    with the number of nodes, not of subsets.
    """
    cluster, member = settled.cluster, settled.member
    need = need_of(member, ROLLOUT)
    usable = rolls_on(cluster, settled.group, member)
    count = need.num_nodes
    if count == 0:
        yield [], []
    elif count == 1:
        yield from (([node], []) for node in usable)
    else:
        ranked = _by_load(settled, usable)
        sets = [list(used) for _, used in settled.members if len(used) == count]
        windows = [ranked[i : i + count] for i in range(len(ranked) - count + 1)]
        seen: set[frozenset[str]] = set()
        for nodes in [*sets, *windows]:
            key = frozenset(nodes)
            if key not in seen and key <= set(usable):
                seen.add(key)
                yield [NodeId(n) for n in nodes], []
        usable = ranked
    for num_new in range(1, count + 1):
        new = free_nodes(cluster, ROLLOUT, need, num_new)
        if len(new) < num_new or count - num_new > len(usable):
            continue
        yield usable[: count - num_new], new


def _place(cluster: Cluster, member: Member) -> Decision:
    alone = fresh(cluster, member, "alone on its own nodes")
    if member.cycle is None:
        return alone or share_blindly(cluster, member) or Waits(no_place(cluster, member))
    job = timing_of(member)
    best = _Best()
    for group in _promising(cluster, member, job, best):
        cheapest = _cheapest(_Settled(cluster, group, member, job), best.price)
        if cheapest is not None:
            best.price, best.placed = cheapest
            if best.price == 0.0:
                break
    if alone is not None and _price(cluster, alone) < best.price:
        return alone
    return best.placed or Waits(no_place(cluster, member))


def _cheapest(settled: _Settled, below: float) -> tuple[float, Placed] | None:
    """Return the cheapest placement in a group and its price, or None if none costs less than
    `below`."""
    cluster, group, member = settled.cluster, settled.group, settled.member
    if not settled.has_slack():
        return None
    train = trains_on(cluster, group, member)
    if train is None:
        return None
    budgets = settled.budgets()
    # Without rollout nodes the period is shortest. Most groups are ruled out here.
    if settled.period_with((), budgets) is None:
        return None
    best: tuple[float, Placed] | None = None
    for existing, new in _placements(settled):
        price = price_per_hour(cluster, new)
        if price >= below:
            continue
        period = settled.period_with((*existing, *new), budgets)
        if period is not None:
            nodes = pinned((*existing, *new), train)
            reason = f"shares with {other_jobs(len(group.members))}: a meta-iteration takes "
            reason += f"{period:.1f} s, at an extra cost of {price:.2f} $/h"
            best = price, Placed(group.name, nodes, reason)
            below = price
    return best


def _price(cluster: Cluster, placed: Placed) -> float:
    return sum(price_per_hour(cluster, nodes) for nodes in placed.nodes.values())


coexec = Placement(_place)
