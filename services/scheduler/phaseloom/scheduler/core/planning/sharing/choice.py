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
    held: int = 0
    """Placements that would delay the job at the head of the queue."""
    least_wait: float = 1.0


class _Asked(msgspec.Struct):
    """One decision: the job, the cluster and the policy's preferences."""

    cluster: Cluster
    member: Member
    most_first: bool
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
    asked = _Asked(cluster, member, most_first, accepts)
    by_jobs = _classes(asked, is_counted)
    for num_jobs in sorted({0, *by_jobs}, reverse=most_first):
        found = _best(asked, by_jobs[num_jobs]) if num_jobs else _on_its_own(asked)
        if found is not None:
            return msgspec.structs.replace(found, why=f"{name}: {found.why}")
    return Waits(f"{name}: {_why_none(asked)}")


def on_free_nodes(cluster: Cluster, member: Member) -> Placed | None:
    nodes = own_nodes(cluster, member)
    if nodes is None:
        return None
    takes = ", ".join(f"{len(names)} of {pool}" for pool, names in nodes.items())
    return Placed("", nodes, f"its own nodes, {takes}")


def _classes(asked: _Asked, is_counted: bool) -> dict[int, list[Group]]:
    """Groups with room, by their number of jobs."""
    by_jobs: dict[int, list[Group]] = {}
    for group in asked.cluster.groups.values():
        is_full = len(group.members) >= asked.cluster.limits.max_group_jobs
        if not group.is_closed and not (is_counted and is_full):
            by_jobs.setdefault(len(group.members), []).append(group)
        else:
            asked.refusals.full += 1
    return by_jobs


def _on_its_own(asked: _Asked) -> Placed | None:
    placed = on_free_nodes(asked.cluster, asked.member)
    if placed is None:
        return None
    if not asked.accepts("", placed.nodes):
        asked.refusals.held += 1
        return None
    return placed


def _best(asked: _Asked, groups: list[Group]) -> Placed | None:
    """Best placement among groups that have the same number of jobs."""
    sites = list(_sites(asked, groups))
    ranked = sorted(((_rank(asked, site), i, site) for i, site in sites), key=lambda r: r[:2])
    best: tuple[tuple[float, float, float, float], Placed] | None = None
    num_compared = 0
    for (band, mismatch, duty), _, site in ranked:
        if best is not None and (band > best[0][0] or num_compared == _MAX_COMPARED):
            break
        fitted = _fit(asked, site)
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


def _sites(asked: _Asked, groups: list[Group]) -> Iterator[tuple[int, Site]]:
    for i, group in enumerate(groups):
        site = site_in(asked.cluster, group, asked.member)
        if site is None:
            asked.refusals.no_nodes += 1
        else:
            yield i, site


def _rank(asked: _Asked, site: Site) -> tuple[float, float, float]:
    """Sort key, lowest first: band of duty, mismatch of periods, duty."""
    sign = -1 if asked.most_first else 1
    mismatch = period_mismatch(asked.member, site.group.members.values())
    return sign * int(_BANDS * site.duty), round(mismatch, 2), sign * site.duty


def _fit(asked: _Asked, site: Site) -> tuple[float, Placed] | None:
    """Place the job at the site with its best shift, and return the predicted interference with
    it."""
    was_held = False
    for candidate in sites_in(asked.cluster, site.group, asked.member, site):
        if not asked.accepts(candidate.group.name, candidate.nodes):
            was_held = True
            continue
        shift, interference = _shift(asked, candidate)
        share, keeps = longest_wait(asked.cluster.limits, candidate, asked.member, shift)
        if keeps:
            return interference, _placed(asked, candidate, shift, interference, share)
        asked.refusals.least_wait = min(asked.refusals.least_wait, share)
    if was_held:
        asked.refusals.held += 1
    else:
        asked.refusals.waits += 1
    return None


def _shift(asked: _Asked, site: Site) -> tuple[int, float]:
    """Return the micro-shift and the share of time in which the job meets others at it.

    If no shift keeps every period clear (periods that are no multiples of each other, for example),
    the shift is 0.
    """
    if asked.member.cycle is None:
        return 0, 0.0
    demand = RING.demand(asked.member.cycle)
    origin = int(asked.cluster.now_s)
    members = list(site.group.members.values())
    shift = RING.find_shift(members, site.nodes, demand, origin, int(ALPHA * RING.period(demand)))
    if shift is not None:
        return shift, 0.0
    return 0, round(RING.overlap_share(members, site.nodes, demand, origin), 3)


def _placed(asked: _Asked, site: Site, shift: int, interference: float, share: float) -> Placed:
    limits = asked.cluster.limits
    why = (
        f"joins {site.group.name} as job {len(site.group.members) + 1} of at most "
        f"{limits.max_group_jobs}; its nodes are in use {site.duty:.0%} of the time already; "
        f"shifted by {shift} s, it overlaps with other jobs {interference:.1%} of the time; the "
        f"longest predicted wait is {share:.1%} of a job's time (limit {limits.duty_limit:.0%})"
    )
    return Placed(site.group.name, site.nodes, why, float(shift))


def _why_none(asked: _Asked) -> str:
    refusals, limits = asked.refusals, asked.cluster.limits
    reasons = [
        (refusals.full, f"have {limits.max_group_jobs} jobs or are still being measured"),
        (refusals.no_nodes, "have too few nodes or too little host memory"),
        (
            refusals.waits,
            f"would make a job wait too long, at least {refusals.least_wait:.0%} of its time "
            f"(limit {limits.duty_limit:.0%})",
        ),
        (refusals.held, "would delay the job at the head of the queue"),
    ]
    groups = "; ".join(f"{count} {what}" for count, what in reasons if count)
    places = f"; of {len(asked.cluster.groups)} groups and the free nodes, {groups}"
    return f"needs {alone_takes(asked.cluster, asked.member)}{places if groups else ''}"
