"""What the round robin needs to know of a member: its worst-case phases and how slow it may get.

A cycle's segments are summed by pool: co-execution weaves a job's work on the rollout pool with
that of others on the train pool, in whatever pieces it comes (WEAVE §4.2). Worst case: every
response reaches its token limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from phaseloom.scheduler.core.planning.weave.period import Phases, cycle_s, load_s, period_s
from phaseloom.scheduler.core.state.cluster import Group, Member

ROLLOUT = "rollout"
TRAIN = "train"


class Timing(NamedTuple):
    rollout_s: float
    train_s: float
    gap_s: float
    """Of an iteration alone, on neither pool."""
    allowed_s: float
    """Longest mean iteration that the job's SLO tolerates; inf: best effort."""

    @property
    def solo_s(self) -> float:
        return self.rollout_s + self.train_s + self.gap_s


NOTHING = Timing(0.0, 0.0, 0.0, inf)
"""Of a job whose cycle is not known."""


def timing_of(member: Member) -> Timing:
    """Of a job that overlaps its own phases the gap is negative: alone it takes less than their
    sum."""
    cycle = member.cycle
    if cycle is None:
        return NOTHING
    rollout_s = train_s = beyond_s = 0.0
    for segment in cycle.segments:
        worst_s = segment.worst_s or segment.duration_s
        beyond_s += worst_s - segment.duration_s
        if segment.pool == TRAIN:
            train_s += worst_s
        else:
            rollout_s += worst_s
    solo_s = max(cycle.period_s + beyond_s, rollout_s, train_s)
    allowed_s = member.slo * solo_s if member.slo > 0 else inf
    return Timing(rollout_s, train_s, solo_s - rollout_s - train_s, allowed_s)


def phases(placed: Iterable[tuple[Timing, tuple[str, ...]]], switch_s: float) -> tuple[Phases, ...]:
    """Phases of jobs on their rollout nodes, a switch added to each on nodes that others use too.

    A node that serves one job keeps its state loaded.
    """
    jobs = list(placed)
    shared_s = switch_s if len(jobs) > 1 else 0.0
    if shared_s == 0.0:
        return tuple(Phases(t.rollout_s, t.train_s, nodes, t.gap_s) for t, nodes in jobs)
    counts: dict[str, int] = {}
    for _, nodes in jobs:
        for node in nodes:
            counts[node] = counts.get(node, 0) + 1
    return tuple(
        Phases(
            t.rollout_s + (shared_s if any(counts[n] > 1 for n in nodes) else 0.0),
            t.train_s + shared_s,
            nodes,
            t.gap_s,
        )
        for t, nodes in jobs
    )


def group_phases(group: Group, switch_s: float) -> tuple[Phases, ...]:
    return phases(
        ((timing_of(m), tuple(m.nodes.get(ROLLOUT, ()))) for m in group.members.values()), switch_s
    )


def is_overloaded(group: Group, switch_s: float = 0.0) -> bool:
    """Whether drift has brought a group of several jobs past saturation, or breaks an SLO.

    The job that drifted is then stopped and placed anew, that one alone (WEAVE §5.3). Past
    saturation is T_load > T_cycle: a group is let in to exactly full (T_load = T_cycle).
    """
    if len(group.members) < 2:
        return False
    jobs = group_phases(group, switch_s)
    if load_s(jobs) > cycle_s(jobs):
        return True
    settled_s = period_s(jobs)
    return any(settled_s > timing_of(m).allowed_s for m in group.members.values())
