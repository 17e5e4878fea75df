"""Co-execution without a barrier, repacked when jobs leave. Cheaper than strict round robin allows.

Use it with nodes that serve in order of arrival (`fcfs`). Deviations from WEAVE §4.2:

- Phases start as soon as their nodes are free, so a group does not run at the pace of its longest
  job.
- Saturated groups are not pruned. Only the SLO check decides, because a group with T_load >=
  T_cycle can still pass it.
- The SLO bounds the mean over a job's life, so the check compares with a budget
  (`weave/candidates.py`).
- The placement with the lowest price net of progress wins, not the one with the lowest price. A job
  that slows others down makes them pay for their nodes longer.
- If devices are shared in space according to a table of slowdowns, rollouts that can run side by
  side do not wait for each other. They count with the greatest measured slowdown
  (`weave/company.py`).
- When a job leaves, groups are dissolved if their members fit elsewhere (`weave/search.py`).
"""

from __future__ import annotations

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning.nodes import other_jobs
from phaseloom.scheduler.core.planning.weave.candidates import holds, trial_member_of
from phaseloom.scheduler.core.planning.weave.period import ROLLOUT, TRAIN
from phaseloom.scheduler.core.planning.weave.pool import fresh, no_place, pinned, share_blindly
from phaseloom.scheduler.core.planning.weave.search import (
    NEW,
    company_of,
    replan,
    search_state_of,
    view_of,
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


def _place(cluster: Cluster, member: Member) -> Decision:
    alone = fresh(cluster, member, "alone on its own nodes")
    if member.cycle is None:
        return alone or share_blindly(cluster, member) or Waits(no_place(cluster, member))
    state = search_state_of(cluster)
    candidate = trial_member_of(cluster, member)
    below = state.worth((state.alone(candidate),)) if alone is not None else float("inf")
    best = state.best(state.groups, candidate, below)
    if best is None:
        return alone or Waits(no_place(cluster, member))
    free = iter(cluster.free.get(ROLLOUT, ()))
    rolls = [next(free) if node.startswith(NEW) else NodeId(node) for node in best.candidate.nodes]
    trains = list(cluster.groups[best.group].nodes.get(TRAIN, ()))
    members = state.groups[best.group]
    neighbours = company_of(cluster, (*members, best.candidate), best.candidate)
    reason = f"shares with {other_jobs(len(members))}; all stay within their SLO budget{neighbours}"
    nodes, takes_turns = pinned(rolls, trains), best.candidate.takes_turns
    return Placed(best.group, nodes, reason, takes_turns=takes_turns)


def _is_overloaded(cluster: Cluster, group: Group) -> bool:
    """Whether the pace of some member exceeds its remaining budget."""
    everybody = tuple(trial_member_of(cluster, member) for member in group.members.values())
    switch_s = cluster.limits.switch_s
    return not holds(everybody, switch_s, is_changed=False, view=view_of(cluster))


coexec_repack = Placement(_place, replan, is_overloaded=_is_overloaded, counts_on_space=True)
