"""Rollouts that run side by side on a device, as placement counts on them.

Where the rollouts of all jobs of a node can be side by side, none of them waits for another, and
each takes as long as beside all others at once, by the greatest slowdown that was measured. All
other phases take turns. What runs goes by the same rule as what is promised, so that nobody is
slowed down by company that placement has not counted (`dispatch/shares.py`).

The rollouts of some jobs can be side by side on a node if

- placement has chosen so, when the newest of the jobs joined: taking turns can be better;
- the slowdowns of so many at once are known, and surely get more done (`Host.beside`);
- no job's SLO is less than that slowdown, and none asks to be alone;
- each job has one rank on one device there, of a runtime that gives the same bits with any share;
- the device holds the states of all of them, as far as their owners have told the sizes.

Called by placement for each group that it looks at, and for each operation that could begin beside
another. Cost: linear in the jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning.weave.period import ROLLOUT
from phaseloom.scheduler.core.state.cluster import Cluster, Group, Host, Member, Need


class Guest(NamedTuple):
    """A job on a node, as far as it matters to others beside it."""

    need: Need
    slo: float
    is_exclusive: bool
    takes_turns: bool


def slowdown_beside(host: Host, guests: Sequence[Guest]) -> float | None:
    """How many times as long as alone the rollouts of some jobs take on a node at most, if they are
    side by side; None: they take turns. 1 for a job without company.

    Args: guests: in the order in which they came.
    """
    others = len(guests) - 1
    if others < 1:
        return 1.0
    if others > len(host.beside) or guests[-1].takes_turns:
        return None
    slowdown = host.beside[others - 1]
    taken_bytes = 0
    for guest in guests:
        need = guest.need
        is_willing = not guest.is_exclusive and (guest.slo <= 0 or guest.slo >= slowdown)
        if not is_willing or not need.host_bytes or not _is_divisible(host, need):
            return None
        taken_bytes += need.host_bytes
    return slowdown if taken_bytes <= host.device_bytes else None


def users_of(group: Group, node: NodeId) -> list[Member]:
    """The members of a group whose rollouts run on a node."""
    return [m for m in group.members.values() if node in m.nodes.get(ROLLOUT, ())]


def slowdown_on(cluster: Cluster, group: Group, node: NodeId) -> float | None:
    """How many times as long as alone the rollouts on a node of a group take at most, beside one
    another; None: they take turns."""
    guests = [
        Guest(member.needs[ROLLOUT], member.slo, member.is_exclusive, member.takes_turns)
        for member in users_of(group, node)
    ]
    return slowdown_beside(cluster.hosts[node], guests)


def most_slowdown(cluster: Cluster, group: Group, member: Member) -> float:
    """How many times as long as alone a member's rollouts may take because of company."""
    if not cluster.limits.counts_on_space:
        return 1.0
    nodes = member.nodes.get(ROLLOUT, ())
    return max([1.0, *(slowdown_on(cluster, group, node) or 1.0 for node in nodes)])


def _is_divisible(host: Host, need: Need) -> bool:
    """Whether a job's rollouts run on a part of a device of the node."""
    if need.num_nodes != 1 or need.num_devices != 1:
        return False
    for demand in need.demands:
        if demand.trains or demand.has_adapter:
            return False
        able = host.backends.get(demand.backend)
        if able is None:
            continue  # the node has not told what it can do, as in a simulation
        # A forward pass on all units divides as training does.
        if not able.divides or (able.most_units != 1 and "forward" in able.kinds):
            return False
    return True
