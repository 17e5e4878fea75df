"""Choosing among the groups that could take a job (PlexRL §4.3.2, §6.3).

Groups are grouped by their number of jobs, in the policy's order. The first class with a feasible
group decides. Within a class, groups are ordered by duty in bands of a tenth, then by the predicted
interference at the best shift, then by how close the periods are to multiples of each other (§7.1),
then by exact duty, and finally by age.

Cost: linear in the groups with room. The timeline and the other jobs' cycles are read one group at
    a time, until a group without interference or `_MAX_COMPARED` feasible groups are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from phaseloom.scheduler.core.planning.nodes import Pinned, alone_takes, own_nodes
from phaseloom.scheduler.core.planning.sharing.sites import (
    Site,
    longest_wait,
    period_mismatch,
    site_in,
    sites_in,
)
from phaseloom.scheduler.core.planning.timeline import RING
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Group, Member, Placed, Waits

ALPHA = 1.0
"""Longest shift, as a fraction of the period."""
_MAX_COMPARED = 4
_BANDS = 10

Accepts = Callable[[str, Pinned], bool]
"""Predicate (group name, nodes) -> whether the job may go there. The name of a new group is
empty."""


class Refusals(msgspec.Struct):
    """Number of rejected groups, by reason."""

    full: int = 0
    no_nodes: int = 0
    waits: int = 0
    delaying: int = 0
    """Placements that would delay the job at the head of the queue."""
    least_wait: float = 1.0


class _Choice(msgspec.Struct):
    """One decision: the job, the cluster and the policy's preferences."""

    cluster: Cluster
    member: Member
    most_first: bool
    is_counted: bool
    accepts: Accepts
    refusals: Refusals = msgspec.field(default_factory=Refusals)


def join_or_open(
    cluster: Cluster,
    member: Member,
    name: str,
    *,
    most_first: bool,
    is_counted: bool = True,
    accepts: Accepts = lambda *_: True,
) -> Decision:
    """Place the job in a group with room or on free nodes, or return the reason to wait.

    Args: name: the policy's name.
          most_first: whether to prefer the fullest groups to free nodes.
          is_counted: whether the limit on jobs per group applies to this job.
          accepts: further condition on a placement.
    """
    choice = _Choice(cluster, member, most_first, is_counted, accepts)
    by_jobs = _classes(choice)
    for num_jobs in sorted({0, *by_jobs}, reverse=most_first):
        placed = _best(choice, by_jobs[num_jobs]) if num_jobs else _on_its_own(choice)
        if placed is not None:
            return msgspec.structs.replace(placed, reason=f"{name}: {placed.reason}")
    return Waits(f"{name}: {_why_none(choice)}")


def on_free_nodes(cluster: Cluster, member: Member) -> Placed | None:
    nodes = own_nodes(cluster, member)
    if nodes is None:
        return None
    takes = ", ".join(f"{len(names)} of {pool}" for pool, names in nodes.items())
    return Placed("", nodes, f"its own nodes, {takes}")


def _classes(choice: _Choice) -> dict[int, list[Group]]:
    """Groups with room, by their number of jobs."""
    by_jobs: dict[int, list[Group]] = {}
    for group in choice.cluster.groups.values():
        is_full = len(group.members) >= choice.cluster.limits.max_group_jobs
        if not group.is_closed and not (choice.is_counted and is_full):
            by_jobs.setdefault(len(group.members), []).append(group)
        else:
            choice.refusals.full += 1
    return by_jobs


def _on_its_own(choice: _Choice) -> Placed | None:
    placed = on_free_nodes(choice.cluster, choice.member)
    if placed is None:
        return None
    if not choice.accepts("", placed.nodes):
        choice.refusals.delaying += 1
        return None
    return placed


def _best(choice: _Choice, groups: list[Group]) -> Placed | None:
    """Best placement among groups that have the same number of jobs."""
    sites = list(_sites(choice, groups))
    ranked = sorted(((_rank(choice, site), i, site) for i, site in sites), key=lambda r: r[:2])
    best: tuple[tuple[float, float, float, float], Placed] | None = None
    num_compared = 0
    for (band, mismatch, duty), _, site in ranked:
        if best is not None and (band > best[0][0] or num_compared == _MAX_COMPARED):
            break
        fitted = _fit(choice, site)
        if fitted is None:
            continue
        interference, placed = fitted
        num_compared += 1
        key = (band, interference, mismatch, duty)
        if best is None or key < best[0]:
            best = (key, placed)
        if interference == 0:
            break
    return None if best is None else best[1]


def _sites(choice: _Choice, groups: list[Group]) -> Iterator[tuple[int, Site]]:
    for i, group in enumerate(groups):
        site = site_in(choice.cluster, group, choice.member)
        if site is None:
            choice.refusals.no_nodes += 1
        else:
            yield i, site


def _rank(choice: _Choice, site: Site) -> tuple[float, float, float]:
    """Sort key, lowest first: band of duty, mismatch of periods, duty."""
    sign = -1 if choice.most_first else 1
    mismatch = period_mismatch(choice.member, site.group.members.values())
    return sign * int(_BANDS * site.duty), round(mismatch, 2), sign * site.duty


def _fit(choice: _Choice, site: Site) -> tuple[float, Placed] | None:
    """Place the job at the site with its best shift, and return the predicted interference with
    it."""
    was_held = False
    for candidate in sites_in(choice.cluster, site.group, choice.member, site):
        if not choice.accepts(candidate.group.name, candidate.nodes):
            was_held = True
            continue
        shift, interference = _shift(choice, candidate)
        share, keeps = longest_wait(choice.cluster.limits, candidate, choice.member, shift)
        if keeps:
            return interference, _placed(choice, candidate, shift, interference, share)
        choice.refusals.least_wait = min(choice.refusals.least_wait, share)
    if was_held:
        choice.refusals.delaying += 1
    else:
        choice.refusals.waits += 1
    return None


def _shift(choice: _Choice, site: Site) -> tuple[int, float]:
    """Return the micro-shift and the share of time in which the job meets others at it.

    If no shift keeps every period clear (periods that are not multiples of each other, for
    example), the shift is 0.
    """
    if choice.member.cycle is None:
        return 0, 0.0
    demand = RING.demand(choice.member.cycle)
    origin = int(choice.cluster.now_s)
    members = list(site.group.members.values())
    shift = RING.find_shift(members, site.nodes, demand, origin, int(ALPHA * RING.period(demand)))
    if shift is not None:
        return shift, 0.0
    return 0, round(RING.overlap_share(members, site.nodes, demand, origin), 3)


def _placed(choice: _Choice, site: Site, shift: int, interference: float, share: float) -> Placed:
    limits = choice.cluster.limits
    limit = f" of at most {limits.max_group_jobs}" if choice.is_counted else ""
    reason = (
        f"joins {site.group.name} as job {len(site.group.members) + 1}{limit}; its nodes "
        f"are in use {site.duty:.0%} of the time already; "
        f"shifted by {shift} s, it overlaps with other jobs {interference:.1%} of the time; the "
        f"longest predicted wait is {share:.1%} of a job's time (limit {limits.duty_limit:.0%})"
    )
    return Placed(site.group.name, site.nodes, reason, float(shift))


def _why_none(choice: _Choice) -> str:
    refusals, limits = choice.refusals, choice.cluster.limits
    reasons = [
        (refusals.full, f"have {limits.max_group_jobs} jobs or are still being measured"),
        (refusals.no_nodes, "have too few nodes or too little host memory"),
        (
            refusals.waits,
            f"would make a job wait too long, at least {refusals.least_wait:.0%} of its time "
            f"(limit {limits.duty_limit:.0%})",
        ),
        (refusals.delaying, "would delay the job at the head of the queue"),
    ]
    groups = "; ".join(f"{count} {reason}" for count, reason in reasons if count)
    rejections = f"; of {len(choice.cluster.groups)} groups and the free nodes, {groups}"
    return f"needs {alone_takes(choice.cluster, choice.member)}{rejections if groups else ''}"
