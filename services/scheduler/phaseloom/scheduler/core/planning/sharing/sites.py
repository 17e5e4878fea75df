"""Nodes that a job could take: those of a group whose jobs it would join, or free ones.

A site is feasible where it keeps the limits: the group's number of jobs, host memory of every node
(I4), and the duty-ratio bound (PlexRL §7.2), which an SLO makes narrower: a job that waits the
share w of its time is 1 / (1 − w) times slower than alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning.admission import is_usable, waiting_share
from phaseloom.scheduler.core.state.cluster import Cluster, Group, Limits, Member, Need, Pool

Pinned = dict[Pool, list[NodeId]]


class Site(msgspec.Struct, frozen=True):
    """A place for one job, before the others' cycles are looked at."""

    group: Group
    nodes: Pinned
    duty: float
    """Share of time that the busiest of the nodes is used, without the job."""
    load: float
    """Share of time that the busiest of the nodes would be used with the job; above 1: somebody
    waits."""


def free_nodes(cluster: Cluster, pool: Pool, need: Need, count: int) -> list[NodeId]:
    """The first `count` free nodes that could take a job, as the cluster lists them; may be
    fewer."""
    free = cluster.free.get(pool, [])
    return list(islice((n for n in free if is_usable(cluster.hosts[n], need)), count))


def own_nodes(cluster: Cluster, member: Member) -> Pinned | None:
    """Free nodes for all that a job needs; None where there are too few."""
    nodes: Pinned = {}
    for pool, need in member.needs.items():
        nodes[pool] = free_nodes(cluster, pool, need, need.num_nodes)
        if len(nodes[pool]) < need.num_nodes:
            return None
    return nodes


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
        shared = [] if pool in apart else _with_room(cluster, group, pool, need)
        chosen = sorted(shared)[: need.num_nodes]
        missing = need.num_nodes - len(chosen)
        own = free_nodes(cluster, pool, need, missing) if missing else []
        if len(own) < missing:
            return None
        nodes[pool] = [name for _, _, name in chosen] + own
        busiest = max((used for used, _, _ in chosen), default=0.0)
        duty = max(duty, busiest)
        load = max(load, busiest + duty_of(member, pool))
    return Site(group, nodes, duty, load)


def _with_room(
    cluster: Cluster, group: Group, pool: Pool, need: Need
) -> list[tuple[float, int, NodeId]]:
    """(duty, position in the group, node) of nodes that are up and large enough beside the
    others."""
    found = []
    for place, name in enumerate(group.nodes.get(pool, [])):
        host = cluster.hosts[name]
        there = [m for m in group.members.values() if name in m.nodes.get(pool, ())]
        resident = sum(m.needs[pool].host_bytes for m in there)
        if is_usable(host, need) and resident + need.host_bytes <= host.host_bytes:
            found.append((sum(duty_of(m, pool) for m in there), place, name))
    return found


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
