"""Nodes that a job could take: those of a group whose jobs it would join, or free ones.

A site is feasible where it keeps the limits: the group's number of jobs, host memory of every node
(I4), and the duty-ratio bound (PlexRL §7.2), which an SLO makes narrower: a job that waits the
share w of its time is 1 / (1 − w) times slower than alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning.admission import waiting_share
from phaseloom.scheduler.core.planning.nodes import Pinned, free_nodes, users, with_room
from phaseloom.scheduler.core.state.cluster import Cluster, Group, Limits, Member, Pool


class Site(msgspec.Struct, frozen=True):
    """A place for one job, before the others' cycles are looked at."""

    group: Group
    nodes: Pinned
    duty: float
    """Share of time that the busiest of the nodes is used, without the job."""
    load: float
    """Share of time that the busiest of the nodes would be used with the job; above 1: somebody
    waits."""


def sites_in(cluster: Cluster, group: Group, member: Member, site: Site) -> Iterator[Site]:
    """A place in a group, then the same with free nodes of the pool that the job uses most.

    PlexRL shares training nodes and gives every job rollout nodes of its own (§6.2); whether nodes
    of a pool can be shared is for the bounds to say.
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
    """The least used nodes of a group that can take the job, and free ones where they are too few.

    Args: apart: pools of which it takes free nodes only.
    """
    nodes: Pinned = {}
    duty = load = 0.0
    for pool, need in member.needs.items():
        shared = [] if pool in apart else with_room(cluster, group, pool, need)
        by_use = [(used_share(group, pool, name), place) for place, name in enumerate(shared)]
        chosen = sorted(by_use)[: need.num_nodes]
        missing = need.num_nodes - len(chosen)
        own = free_nodes(cluster, pool, need, missing) if missing else []
        if len(own) < missing:
            return None
        nodes[pool] = [shared[place] for _, place in chosen] + own
        busiest = max((used for used, _ in chosen), default=0.0)
        duty = max(duty, busiest)
        load = max(load, busiest + duty_of(member, pool))
    return Site(group, nodes, duty, load)


def used_share(group: Group, pool: Pool, node: NodeId) -> float:
    """Share of time in which the members of a group use one of its nodes."""
    return sum(duty_of(m, pool) for m in users(group.members.values(), pool, node))


def duty_of(member: Member, pool: Pool) -> float:
    """Share of its time alone in which a job uses a pool; 0: not known."""
    cycle = member.cycle
    if cycle is None:
        return 0.0
    return sum(s.duration_s for s in cycle.segments if s.pool == pool) / cycle.period_s


def period_mismatch(member: Member, others: Iterable[Member]) -> float:
    """Distance of periods from being multiples of one another, for the worst of the others: 0 to
    1/2.

    Jobs with commensurate periods settle into one another's gaps (PlexRL §7.1).
    """
    worst = 0.0
    for other in others:
        if member.cycle is not None and other.cycle is not None:
            periods = sorted((member.cycle.period_s, other.cycle.period_s))
            ratio = periods[1] / periods[0]
            worst = max(worst, abs(ratio - round(ratio)) / ratio)
    return worst


def longest_wait(limits: Limits, site: Site, member: Member, shift_s: float) -> tuple[float, bool]:
    """The largest share of its time that a member of the group, the newcomer included, would wait.

    Returns: (that share, whether every member's bound is kept). A job whose cycle is not known may
    take all the slack there is: nothing can be promised beside it.
    """
    newcomer = msgspec.structs.replace(member, nodes=site.nodes, shift_s=shift_s)
    members = [*site.group.members.values(), newcomer]
    if any(m.cycle is None for m in members):
        return 0.0, not any(m.slo for m in members)
    # At best, a node that is asked for `load` of its time serves each job at 1/load of its speed.
    least = 1 - 1 / max(1.0, site.load)
    if least > limits.duty_limit:
        return least, False
    shares = waiting_share(members, limits.switch_s)
    keeps = all(shares[m.job] <= bound_of(m, limits) for m in members)
    return max(shares.values()), keeps


def bound_of(member: Member, limits: Limits) -> float:
    """Share of its time that a job may wait."""
    if not member.slo:
        return limits.duty_limit
    return min(limits.duty_limit, 1 - 1 / max(1.0, member.slo))
