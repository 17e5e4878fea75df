"""Why a job finds no place, with the numbers that its owner can act on."""

from __future__ import annotations

from math import inf

from phaseloom.scheduler.core.planning.weave.period import period_s
from phaseloom.scheduler.core.planning.weave.pool import alone_takes, need_of, rolls_on, trains_on
from phaseloom.scheduler.core.planning.weave.timing import ROLLOUT, phases, timing_of
from phaseloom.scheduler.core.state.cluster import Cluster, Group, Member


def no_place(cluster: Cluster, member: Member) -> str:
    """One sentence: what sharing would take, and what being alone would."""
    return f"{_sharing(cluster, member)}; alone it takes {alone_takes(cluster, member)}"


def _sharing(cluster: Cluster, member: Member) -> str:
    if member.cycle is None:
        return "its cycle is not known, so no group can tell what it would cost the others"
    best_s, allowed_s, whose = inf, 0.0, member
    for group in cluster.groups.values():
        settled_s = _settled_s(cluster, group, member)
        if settled_s is not None and settled_s < best_s:
            whose = min((*group.members.values(), member), key=lambda m: timing_of(m).allowed_s)
            best_s, allowed_s = settled_s, timing_of(whose).allowed_s
    if best_s == inf:
        return "no group has a seat, the nodes and the host memory left that it needs"
    # Not its name: it may be another tenant's.
    who = "it" if whose is member else "another job"
    if best_s > allowed_s:
        return (
            f"the best group would need {best_s:.1f} s an iteration where {allowed_s:.1f} s are "
            f"allowed (SLO {whose.slo:g} of {who})"
        )
    return (
        f"the best group would settle at {best_s:.1f} s an iteration where {allowed_s:.1f} s are "
        f"allowed (SLO {whose.slo:g} of {who}), but has no slack for a job that joins midway"
    )


def _settled_s(cluster: Cluster, group: Group, member: Member) -> float | None:
    """Period with the job on the group's first nodes that have room; None: there are none."""
    full = len(group.members) >= cluster.limits.max_group_jobs
    if group.is_closed or full or trains_on(cluster, group, member) is None:
        return None
    rolls = rolls_on(cluster, group, member)
    count = need_of(member, ROLLOUT).num_nodes
    if len(rolls) < count:
        return None
    others = group.members.values()
    everybody = [(timing_of(m), tuple(m.nodes.get(ROLLOUT, ()))) for m in others]
    joined = (*everybody, (timing_of(member), tuple(rolls[:count])))
    return period_s(phases(joined, cluster.limits.switch_s))
