"""Phases of a co-execution group's jobs, and the steady period of their strict round robin.

A cycle's segments are summed up by pool. Co-execution interleaves a job's work on the rollout pool
with other jobs' work on the train pool, however it is split (WEAVE §4.2). Durations are worst-case:
every response reaches its token limit.

In a meta-iteration every job runs one rollout on its nodes and one training phase on the group's
train nodes; each node serves the jobs in order (WEAVE §4.3). A rollout over several nodes starts on
all of them at once. This is a linear system in the max-plus algebra. Its period is the greatest
mean weight of a cycle of its precedence graph. If the jobs' node sets are equal or disjoint (one
rollout node per job, for example), this is max(T_load, T_cycle). Overlapping sets can exceed that
by half and more.

Called by placement for every candidate: the closed form first, the memoised max-plus otherwise.
Source: WEAVE §4.2, §4.3, Theorem 1. Deviation: the steady state, instead of one meta-iteration from
an empty group, which is longer than any later one.
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
"""Number of memoised groups with rollouts over several nodes: some 10 MiB."""


class Phases(NamedTuple):
    """One job of a group in the round robin."""

    rollout_s: float
    train_s: float
    nodes: tuple[str, ...]
    """Rollout nodes of the job, without repetition."""
    gap_s: float = 0.0
    """Time from the end of training to the next rollout, on no node (weight synchronisation)."""

    @property
    def solo_s(self) -> float:
        return self.rollout_s + self.train_s + self.gap_s


def load_s(jobs: Sequence[Phases]) -> float:
    """T_load: seconds of all phases on the busiest node. All train nodes carry the same load."""
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
    """Length of a settled meta-iteration in seconds. Cost: O(jobs), or that of `_max_plus`."""
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
    """Number the nodes in order of appearance, so that groups of the same shape share a memo."""
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
    """Length of the state vector: when the train pool, each job and each rollout node are free
    again."""
    return 1 + len(shape) + len({node for job in shape for node in job[3]})


def _lap(shape: _Shape, free_s: list[float]) -> list[float]:
    """Advance the state by one meta-iteration."""
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
    """Greatest cycle mean of the matrix of a meta-iteration (Karp's algorithm).

    Cost: O(width cubed), tens of thousands of steps for a full group.
    """
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
    """A job's worst-case phases and the slowest pace that it accepts."""

    rollout_s: float
    train_s: float
    gap_s: float
    """Time of an iteration alone that is spent on neither pool."""
    allowed_s: float
    """Longest mean iteration that the job's SLO allows. inf: best effort."""

    @property
    def solo_s(self) -> float:
        return self.rollout_s + self.train_s + self.gap_s


NOTHING = Timing(0.0, 0.0, 0.0, inf)
"""Timing of a job of unknown cycle."""


def timing_of(member: Member) -> Timing:
    """Compute a member's timing.

    The gap is negative for a job that overlaps its own phases, because alone it takes less time
    than their sum.
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
    """Phases of jobs on their rollout nodes. On shared nodes, each phase includes a switch.

    A node that serves only one job keeps its state loaded.
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
    """Whether changed cycles have saturated a group of several jobs or violate an SLO.

    Only the job whose cycle changed is then stopped and placed again (WEAVE §5.3). Saturated means
    T_load > T_cycle; a job may be admitted up to exactly full (T_load = T_cycle).
    """
    if len(group.members) < 2:
        return False
    jobs = group_phases(group, switch_s)
    if load_s(jobs) > cycle_s(jobs):
        return True
    settled_s = period_s(jobs)
    return any(settled_s > timing_of(m).allowed_s for m in group.members.values())
