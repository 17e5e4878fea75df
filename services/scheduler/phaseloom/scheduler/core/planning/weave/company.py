"""Rollouts that run side by side on a device, as placement counts on them.

If the rollouts of all jobs of a node can run side by side, none of them waits for another. Each
then counts as if it always had all the others as neighbours, with the greatest measured slowdown.
All other phases take turns. Dispatch follows the same rule as placement's promises, so that no job
is slowed down by neighbours that placement has not counted (`dispatch/shares.py`).

The rollouts of some jobs can run side by side on a node if

- placement has decided so when the newest of the jobs joined, because taking turns can be better;
- the slowdowns of that many rollouts are known and certainly raise throughput
  (`Host.rollout_slowdowns`);
- every job's SLO allows that slowdown, and no job is exclusive;
- each job has one rank on one device there, in a runtime that computes the same bits with any
  share;
- the device holds the states of all of them, according to the sizes that their owners declared.

Called by placement for each group that it considers, and for each operation that could start next
to another. Cost: linear in the jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning.weave.period import ROLLOUT
from phaseloom.scheduler.core.state.cluster import Cluster, Group, Host, Member, Need


class Guest(NamedTuple):
    """A job on a node, with the facts that matter to its neighbours."""

    need: Need
    slo: float
    is_exclusive: bool
    takes_turns: bool


def slowdown_beside(host: Host, guests: Sequence[Guest]) -> float | None:
    """Upper bound of the slowdown of rollouts that run side by side on a node, relative to running
    alone.

    Args: guests: the jobs, in the order in which they came.
    Returns: 1 for a single job; None if the rollouts must take turns.
    """
    num_neighbours = len(guests) - 1
    if num_neighbours < 1:
        return 1.0
    if num_neighbours > len(host.rollout_slowdowns) or guests[-1].takes_turns:
        return None
    slowdown = host.rollout_slowdowns[num_neighbours - 1]
    taken_bytes = 0
    for guest in guests:
        need = guest.need
        is_willing = not guest.is_exclusive and (guest.slo <= 0 or guest.slo >= slowdown)
        if not is_willing or not need.host_bytes or not _is_divisible(host, need):
            return None
        taken_bytes += need.host_bytes
    return slowdown if taken_bytes <= host.device_bytes else None


def users_of(group: Group, node: NodeId) -> list[Member]:
    return [m for m in group.members.values() if node in m.nodes.get(ROLLOUT, ())]


def slowdown_on(cluster: Cluster, group: Group, node: NodeId) -> float | None:
    """Upper bound of the slowdown of the rollouts on a group's node. None: they take turns."""
    guests = [
        Guest(member.needs[ROLLOUT], member.slo, member.is_exclusive, member.takes_turns)
        for member in users_of(group, node)
    ]
    return slowdown_beside(cluster.hosts[node], guests)


def most_slowdown(cluster: Cluster, group: Group, member: Member) -> float:
    """Upper bound of the slowdown of a member's rollouts by their neighbours."""
    if not cluster.limits.counts_on_space:
        return 1.0
    nodes = member.nodes.get(ROLLOUT, ())
    return max([1.0, *(slowdown_on(cluster, group, node) or 1.0 for node in nodes)])


def _is_divisible(host: Host, need: Need) -> bool:
    """Whether a job's rollouts can run on part of a device of the node."""
    if need.num_nodes != 1 or need.num_devices != 1:
        return False
    for demand in need.demands:
        if demand.trains or demand.has_adapter:
            return False
        able = host.backends.get(demand.backend)
        if able is None:
            continue  # the node has not told what it can do, as in a simulation
        # A forward pass on all units divides like training.
        if not able.divides or (able.most_units != 1 and "forward" in able.kinds):
            return False
    return True
