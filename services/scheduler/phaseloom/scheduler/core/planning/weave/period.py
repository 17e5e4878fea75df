"""Phases of a co-execution group's jobs, and the steady period of their strict round robin.

A cycle's segments are summed by pool: co-execution weaves a job's work on the rollout pool with
that of others on the train pool, in whatever pieces it comes (WEAVE §4.2). Durations are the worst
case: every response reaches its token limit.

In a meta-iteration every job runs one rollout on its nodes and one training phase on the group's
train nodes, each node in the order of the jobs (WEAVE §4.3). A rollout over several nodes starts
on all of them at once. That is a linear system in the max-plus algebra: its period is the greatest
mean weight of a cycle of its precedence graph. Where the jobs' node sets are equal or disjoint
(one rollout node a job, say) this is max(T_load, T_cycle); overlapping sets can exceed that, by
half and more.

Called by placement for every candidate: closed form first, memoised max-plus otherwise.
Source: WEAVE §4.2, §4.3, Theorem 1. Deviation: the steady state, not one meta-iteration from an
empty group, which is longer than any later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations
from math import inf
from typing import NamedTuple

from phaseloom.scheduler.core.state.cluster import Group, Member

NEVER = float("-inf")
MEMO = 8192
"""Groups with rollouts over several nodes whose period is remembered: some 10 MiB."""


class Phases(NamedTuple):
    """One job of a group, as the round robin sees it."""

    rollout_s: float
    train_s: float
    nodes: tuple[str, ...]
    """Rollout nodes that the job is pinned to, without repetition."""
    gap_s: float = 0.0
    """Time from the end of training to the next rollout, on no node (weight synchronisation)."""

    @property
    def solo_s(self) -> float:
        return self.rollout_s + self.train_s + self.gap_s


def load_s(jobs: Sequence[Phases]) -> float:
    """T_load: seconds of all phases on the busiest node; every train node carries the same."""
    busy: dict[str, float] = {}
    train_s = 0.0
    for job in jobs:
        train_s += job.train_s
        for node in job.nodes:
            busy[node] = busy.get(node, 0.0) + job.rollout_s
    return max(train_s, max(busy.values(), default=0.0))


def cycle_s(jobs: Sequence[Phases]) -> float:
    """T_cycle: the longest iteration of a job alone."""
    return max((job.solo_s for job in jobs), default=0.0)


def period_s(jobs: Sequence[Phases]) -> float:
    """Seconds of a settled meta-iteration. Cost: O(jobs), or that of `_max_plus`."""
    bound_s = max(load_s(jobs), cycle_s(jobs))
    if not _overlap(jobs):
        return bound_s
    return max(bound_s, _max_plus(_canonical(jobs)))


def _overlap(jobs: Sequence[Phases]) -> bool:
    """Whether two rollouts share some of their nodes, but not all."""
    return any(
        a.nodes != b.nodes and set(a.nodes) != set(b.nodes) and not set(a.nodes).isdisjoint(b.nodes)
        for a, b in combinations(jobs, 2)
        if len(a.nodes) > 1 or len(b.nodes) > 1
    )


_Shape = tuple[tuple[float, float, float, tuple[int, ...]], ...]


def _canonical(jobs: Sequence[Phases]) -> _Shape:
    """Nodes numbered as they appear, so that groups of one shape share a memo."""
    numbers: dict[str, int] = {}
    return tuple(
        (
            job.rollout_s,
            job.train_s,
            job.gap_s,
            tuple(numbers.setdefault(node, len(numbers)) for node in job.nodes),
        )
        for job in jobs
    )


def _width(shape: _Shape) -> int:
    """Length of the state: when the train pool, each job and each rollout node are free again."""
    return 1 + len(shape) + len({node for job in shape for node in job[3]})


def _lap(shape: _Shape, free_s: list[float]) -> list[float]:
    """One meta-iteration: the state after it, from the state before it."""
    after_s = list(free_s)
    base = 1 + len(shape)
    for i, (rollout_s, train_s, gap_s, nodes) in enumerate(shape):
        starts_s = after_s[1 + i]
        for node in nodes:
            starts_s = max(starts_s, after_s[base + node])
        rolled_s = starts_s + rollout_s
        for node in nodes:
            after_s[base + node] = rolled_s
        after_s[0] = max(after_s[0], rolled_s) + train_s
        after_s[1 + i] = after_s[0] + gap_s
    return after_s


@lru_cache(maxsize=MEMO)
def _max_plus(shape: _Shape) -> float:
    """Greatest cycle mean of the lap's matrix (Karp). Cost: O(width cubed), tens of thousands of
    steps for a full group."""
    width = _width(shape)
    columns = []
    for source in range(width):
        unit = [NEVER] * width
        unit[source] = 0.0
        columns.append(_lap(shape, unit))
    walks = [[0.0] * width]
    for _ in range(width):
        last = walks[-1]
        walks.append(
            [max(last[k] + columns[k][v] for k in range(width)) for v in range(width)],
        )
    longest = walks[-1]
    return max(
        min((longest[v] - walks[k][v]) / (width - k) for k in range(width))
        for v in range(width)
        if longest[v] > NEVER
    )


ROLLOUT = "rollout"
TRAIN = "train"


class Timing(NamedTuple):
    """A job's worst-case phases, and how slow it may get."""

    rollout_s: float
    train_s: float
    gap_s: float
    """Time of an iteration alone on neither pool."""
    allowed_s: float
    """Longest mean iteration that the job's SLO tolerates; inf: best effort."""

    @property
    def solo_s(self) -> float:
        return self.rollout_s + self.train_s + self.gap_s


NOTHING = Timing(0.0, 0.0, 0.0, inf)
"""The timing of a job whose cycle is not known."""


def timing_of(member: Member) -> Timing:
    """A member's timing.

    The gap is negative for a job that overlaps its own phases: alone it takes less than their sum.
    """
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
