"""Candidate nodes for a job: those of a group that it would join, and free ones.

A site is feasible if it keeps three limits: the group's number of jobs, the host memory of every
node (invariant I4), and the duty-ratio bound (PlexRL §7.2). An SLO tightens that bound, because a
job that waits for a share w of its time is 1 / (1 − w) times slower than alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning.admission import waiting_share
from phaseloom.scheduler.core.planning.nodes import Pinned, free_nodes, users, with_room
from phaseloom.scheduler.core.state.cluster import Cluster, Group, Limits, Member, Pool


class Site(msgspec.Struct, frozen=True):
    """A candidate placement, before the other jobs' cycles are considered."""

    group: Group
    nodes: Pinned
    duty: float
    """Share of time that the busiest of the nodes is used, without the new job."""
    load: float
    """Share of time that the busiest of the nodes would be used, with the new job. Above 1, some
    job waits."""


def sites_in(cluster: Cluster, group: Group, member: Member, site: Site) -> Iterator[Site]:
    """Yield a site, and a variant with free nodes in the pool that the job uses most.

    PlexRL shares training nodes and gives every job rollout nodes of its own (§6.2). Here the
    limits decide whether nodes of a pool can be shared.
    """
    yield site
    if len(member.needs) > 1 and member.cycle is not None:
        busiest = max(sorted(member.needs), key=lambda pool: duty_of(member, pool))
        apart = site_in(cluster, group, member, apart=(busiest,))
        if apart is not None:
            yield apart


def site_in(
    cluster: Cluster, group: Group, member: Member, apart: Sequence[Pool] = ()
) -> Site | None:
    """Choose the least used suitable nodes of a group, and free nodes if these are too few.

    Args: apart: pools in which to use free nodes only.
    Returns: None if there are too few nodes.
    """
    nodes: Pinned = {}
    duty = load = 0.0
    for pool, need in member.needs.items():
        shared = [] if pool in apart else with_room(cluster, group, pool, need)
        by_use = [(used_share(group, pool, name), index) for index, name in enumerate(shared)]
        chosen = sorted(by_use)[: need.num_nodes]
        missing = need.num_nodes - len(chosen)
        free = free_nodes(cluster, pool, need, missing) if missing else []
        if len(free) < missing:
            return None
        nodes[pool] = [shared[index] for _, index in chosen] + free
        busiest = max((used for used, _ in chosen), default=0.0)
        duty = max(duty, busiest)
        load = max(load, busiest + duty_of(member, pool))
    return Site(group, nodes, duty, load)


def used_share(group: Group, pool: Pool, node: NodeId) -> float:
    return sum(duty_of(m, pool) for m in users(group.members.values(), pool, node))


def duty_of(member: Member, pool: Pool) -> float:
    """Share of its time in which a job uses a pool when running alone. 0 if unknown."""
    cycle = member.cycle
    if cycle is None:
        return 0.0
    return sum(s.duration_s for s in cycle.segments if s.pool == pool) / cycle.period_s


def period_mismatch(member: Member, neighbours: Iterable[Member]) -> float:
    """Distance of the job's and the others' periods from being multiples of each other: 0 to 1/2.

    The worst of the others counts. Jobs with commensurate periods settle into one another's idle
    time (PlexRL §7.1).
    """
    worst = 0.0
    for neighbour in neighbours:
        if member.cycle is not None and neighbour.cycle is not None:
            periods = sorted((member.cycle.period_s, neighbour.cycle.period_s))
            ratio = periods[1] / periods[0]
            worst = max(worst, abs(ratio - round(ratio)) / ratio)
    return worst


def longest_wait(limits: Limits, site: Site, member: Member, shift_s: float) -> tuple[float, bool]:
    """Predict the largest share of its time that any member, including the new job, would wait.

    Returns: (that share, whether every member's bound is kept). A job of unknown cycle may use all
        the slack, so no SLO can be promised next to it.
    """
    newcomer = msgspec.structs.replace(member, nodes=site.nodes, shift_s=shift_s)
    members = [*site.group.members.values(), newcomer]
    if any(m.cycle is None for m in members):
        return 0.0, not any(m.slo for m in members)
    # At best, a node with a total load of `load` runs each job at 1/load of its speed.
    minimum = 1 - 1 / max(1.0, site.load)
    if minimum > limits.duty_limit:
        return minimum, False
    shares = waiting_share(members, limits.switch_s)
    keeps = all(shares[m.job] <= bound_of(m, limits) for m in members)
    return max(shares.values()), keeps


def bound_of(member: Member, limits: Limits) -> float:
    """Share of its time that a job may wait."""
    if not member.slo:
        return limits.duty_limit
    return min(limits.duty_limit, 1 - 1 / max(1.0, member.slo))
