"""Candidate placements: members on given nodes, with the time budgets that their SLOs leave them.

An SLO bounds the mean iteration over a job's life. So each member has a budget of seconds for its
remaining iterations. Time saved while running alone may be spent next to others, and the pause of a
move must be made up for. These budgets replace the barrier as a safeguard:

- A group may grow only if every member's settled pace, in the worst of several orbits, fits its
  budget, with a reserve for joining midway and for the move itself.
- This must still hold after any set of members has left, because in a first-in-first-out queue a
  departure can delay the remaining jobs.
- If a percentage of single iterations must also meet the SLO, a member has a second budget for the
  number of late iterations, with the same rules.
- A group that exceeds a budget counts as expensive, so the next replan changes it.

If placement counts on sharing in space, all of this applies to the group as `side_by_side` models
it: rollouts that can run side by side do not wait for each other, but take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from math import inf
from typing import NamedTuple

from phaseloom.scheduler.core.planning.weave.company import Guest, slowdown_beside
from phaseloom.scheduler.core.planning.weave.fifo import (
    MAX_LAPS,
    WARM_LAPS,
    Rollout,
    late_shares,
    mean_iterations_s,
    worst_iterations_s,
)
from phaseloom.scheduler.core.planning.weave.period import ROLLOUT, TRAIN, Timing, timing_of
from phaseloom.scheduler.core.planning.weave.pool import need_of
from phaseloom.scheduler.core.state.cluster import Cluster, Host, Member, Need

SLACK = 1e-6
UNKNOWN_LEFT = 20
"""Assumed number of remaining iterations of a job of unknown length."""
MOVE_S = 308.0
"""Pause of a job that moves: the mean of WEAVE's 197 s (7B) to 419 s (32B)."""
RESERVE = 0.08
"""Fraction of the remaining work kept in reserve for a job whose cycle drifts: its next iterations
may be shorter than the last ones, which shrinks its budget."""
TRANSIENT = 1.0
"""Fraction of the longest single wait that is reserved when a group changes."""


class TrialMember(NamedTuple):
    """A member of a group, with its actual or intended rollout nodes."""

    job: str
    timing: Timing
    num_left: int
    """Remaining iterations."""
    budget_s: float
    """Seconds that these iterations may take. inf: best effort."""
    nodes: tuple[str, ...]
    rollout: Need
    train: Need
    late: float = inf
    """Number of iterations that may still exceed the SLO individually. inf: no limit."""
    slo: float = 0.0
    is_exclusive: bool = False
    takes_turns: bool = False
    """Whether rollouts on its node take turns if this is the node's newest job."""

    @property
    def work_s(self) -> float:
        """Seconds that the remaining iterations would take alone."""
        return self.num_left * self.timing.solo_s


TrialGroup = tuple[TrialMember, ...]
"""A group, in the order of its members."""


Budget = tuple[int, float]
"""(remaining iterations, seconds that they may take). inf seconds: best effort."""


def budget_of(cluster: Cluster, member: Member, timing: Timing) -> Budget:
    """Compute the budget of a member in its present placement.

    If a job can no longer meet its mean even alone, its SLO is lost. Its budget then restarts, so
    that the job is not starved.
    """
    promised_s = member.slo * member.alone_s if member.slo > 0 else inf
    saved_s = promised_s - _lived_s(cluster, member, timing)
    if saved_s < 0 and member.cycle is not None:
        # Iterations are planned at their worst case. As many as usual ones must make up for it.
        saved_s *= timing.solo_s / member.cycle.period_s
    if member.num_iterations:
        num_left = max(1, member.num_iterations - member.iterations)
    else:
        num_left = UNKNOWN_LEFT
        saved_s = min(0.0, saved_s)
    budget_s = timing.allowed_s * num_left + saved_s
    if budget_s < (num_left - 1) * timing.solo_s:
        budget_s = num_left * timing.allowed_s
    if member.has_drifted:
        work_s = num_left * timing.solo_s
        budget_s = max(min(budget_s, work_s), budget_s - RESERVE * work_s)
    return num_left, budget_s


def trial_member_of(cluster: Cluster, member: Member) -> TrialMember:
    """Build the candidate for a member in its present placement."""
    timing = timing_of(member)
    num_left, budget_s = budget_of(cluster, member, timing)
    return TrialMember(
        member.job,
        timing,
        num_left,
        budget_s,
        tuple(member.nodes.get(ROLLOUT, ())),
        need_of(member, ROLLOUT),
        need_of(member, TRAIN),
        _late(member, num_left, cluster.limits.slo_percentile),
        member.slo,
        member.is_exclusive,
        member.takes_turns,
    )


def _late(member: Member, num_left: int, percentile: float) -> float:
    """Number of iterations with which a member may still be late.

    If the job has already been late too often, its percentile is lost and the count restarts.
    """
    if not percentile or member.slo <= 0:
        return inf
    share = 1 - percentile / 100
    late = share * (member.iterations + num_left) - member.num_late
    return late if late >= 0 else share * num_left


def _lived_s(cluster: Cluster, member: Member, timing: Timing) -> float:
    """Seconds from a job's submission to the end of its last iteration.

    The current iteration belongs to the remaining ones; only the time by which it is overdue counts
    here. The pause of a move that the job has not made up for yet is added.
    """
    now_s = max(0.0, cluster.now_s - member.submitted_s)
    if not member.iterations:
        return now_s
    lived_s = member.iterated_s - member.submitted_s
    if member.began_s > member.iterated_s:
        lived_s += MOVE_S
    return max(lived_s, now_s - 2 * timing.solo_s)


def signature(group: TrialGroup) -> tuple[tuple[str, tuple[str, ...], bool], ...]:
    """Key of a group within one replan: its members, their nodes, and whether they take turns
    there."""
    return tuple((candidate.job, candidate.nodes, candidate.takes_turns) for candidate in group)


class TimeShares(NamedTuple):
    """Share of its time that each node must give the members to keep their budgets."""

    train: float
    """Share of the train nodes' time."""
    rollout: dict[str, float]


def shares_of(group: TrialGroup) -> TimeShares | None:
    """Compute the shares that a group needs. None if it exceeds a member's budget or a node's
    time."""
    train = 0.0
    rollout: dict[str, float] = {}
    for candidate in group:
        budget_s = candidate.budget_s
        if budget_s == inf:
            continue
        if candidate.work_s > budget_s + SLACK:
            return None
        timing, num_left = candidate.timing, candidate.num_left
        train += timing.train_s * num_left / budget_s
        if train > 1.0:
            return None
        share = timing.rollout_s * num_left / budget_s
        for node in candidate.nodes:
            rollout[node] = used = rollout.get(node, 0.0) + share
            if used > 1.0:
                return None
    return TimeShares(train, rollout)


def has_shares(shares: TimeShares, candidate: TrialMember, nodes: Iterable[str]) -> bool:
    """Whether a group that needs these shares leaves enough for one more job on some nodes."""
    budget_s = candidate.budget_s
    if budget_s == inf:
        return True
    timing, num_left = candidate.timing, candidate.num_left
    if candidate.work_s > budget_s + SLACK:
        return False
    if shares.train + timing.train_s * num_left / budget_s > 1.0:
        return False
    share = timing.rollout_s * num_left / budget_s
    return all(shares.rollout.get(node, 0.0) + share <= 1.0 for node in nodes)


View = Callable[[TrialGroup], list[TrialGroup]]
"""Models how a group runs: longer phases if rollouts share a device, no queueing on those nodes.
Returns alternatives, of which the first has the longest phases."""


def in_turns(group: TrialGroup) -> list[TrialGroup]:
    """Model a group in which all phases on a node take turns."""
    return [group]


HostOf = Callable[[str], Host | None]
"""Look up a node by name. None: unknown."""


def slowdowns_of(group: TrialGroup, host_of: HostOf) -> dict[str, float]:
    """Nodes on which rollouts run side by side → upper bound of their slowdown there."""
    # Called for every choice of nodes, so nodes with a single user are skipped early.
    users: dict[str, list[TrialMember]] = {}
    for candidate in group:
        for node in candidate.nodes:
            users.setdefault(node, []).append(candidate)
    slowdowns: dict[str, float] = {}
    for node, guests_here in users.items():
        host = host_of(node) if len(guests_here) > 1 and not guests_here[-1].takes_turns else None
        if host is None or not host.rollout_slowdowns:
            continue
        guests = [Guest(c.rollout, c.slo, c.is_exclusive, c.takes_turns) for c in guests_here]
        slowdown = slowdown_beside(host, guests)
        if slowdown is not None:
            slowdowns[node] = slowdown
    return slowdowns


COMPANY = (1.0, 0.5, 0.0)
"""Fractions of the neighbours' maximum cost at which a group is evaluated. A rollout may have fewer
neighbours than possible, and in a first-in-first-out queue a faster job can delay another."""


def side_by_side(group: TrialGroup, host_of: HostOf, switch_s: float) -> list[TrialGroup]:
    """Model a group whose rollouts run side by side where possible.

    On such nodes a job does not queue, so it is listed without nodes. Its rollouts take up to as
    long as with all neighbours at once. Before each rollout it may wait for another job's switch
    and for its own.
    """
    slowdowns = slowdowns_of(group, host_of) if len(group) > 1 else {}
    if not slowdowns:
        return [group]
    return [
        tuple([_slowed(candidate, slowdowns, share, switch_s) for candidate in group])
        for share in COMPANY
    ]


def _slowed(
    candidate: TrialMember, slowdowns: dict[str, float], share: float, switch_s: float
) -> TrialMember:
    slowdown = slowdowns.get(candidate.nodes[0]) if len(candidate.nodes) == 1 else None
    if slowdown is None:
        return candidate
    longer_s = (slowdown - 1) * candidate.timing.rollout_s + 2 * switch_s
    rollout_s = candidate.timing.rollout_s + share * longer_s
    return candidate._replace(timing=candidate.timing._replace(rollout_s=rollout_s), nodes=())


def shape(group: TrialGroup) -> tuple[Rollout, ...]:
    """Convert the group for the simulation in `fifo`: nodes are numbered in order of appearance."""
    numbers: dict[str, int] = {}
    return tuple(
        [
            (
                candidate.timing.rollout_s,
                candidate.timing.train_s,
                candidate.timing.gap_s,
                tuple([numbers.setdefault(node, len(numbers)) for node in candidate.nodes]),
            )
            for candidate in group
        ]
    )


def progress(group: TrialGroup, switch_s: float, view: View = in_turns) -> list[float]:
    """Speed of each member relative to running alone: 1 means no delay."""
    means = mean_iterations_s(shape(view(group)[0]), switch_s)
    return [
        candidate.timing.solo_s / mean if mean > 0 else 1.0
        for candidate, mean in zip(group, means, strict=True)
    ]


def holds(group: TrialGroup, switch_s: float, *, is_changed: bool, view: View = in_turns) -> bool:
    """Whether all members keep their budgets, now and after any departures.

    Args: is_changed: whether a member has just joined, so that all of them may have to wait once
        more.
    """
    if len(group) == 1:
        return True
    full = view(group)[0]
    if shares_of(full) is None:
        return False
    tight = _tight(full, switch_s)
    parts = [part for size in range(len(group), 1, -1) for part in combinations(group, size)]
    if view is not in_turns:
        # With fewer jobs, a node whose jobs took turns may run them side by side.
        views = [view(part) for part in parts]
        tight = tight.union(*(_tight(longest, switch_s) for longest, *_ in views))
        parts = [way for alternatives in views for way in alternatives]
    return all(
        _keep_time(part, switch_s, is_changed, tight)
        and _are_punctual(part, switch_s, is_changed, tight)
        for part in parts
        if any(candidate.job in tight for candidate in part)
    )


def _tight(group: TrialGroup, switch_s: float) -> set[str]:
    """Members that could exceed their budgets and must therefore be simulated."""
    return {candidate.job for i, candidate in enumerate(group) if not _is_safe(group, i, switch_s)}


def _is_safe(group: TrialGroup, i: int, switch_s: float) -> bool:
    """Whether a member keeps its budget even if it waits for all others in every iteration.

    Such a member needs no simulation, whichever members leave.
    """
    candidate, longest_s = group[i], _longest_s(group, i, switch_s)
    if candidate.late < inf and longest_s > candidate.timing.allowed_s + SLACK:
        return False
    return longest_s * candidate.num_left <= candidate.budget_s + SLACK


def _longest_s(group: TrialGroup, i: int, switch_s: float) -> float:
    """Length of an iteration in which a member waits for all others."""
    queued_s, num_queued = _queue_s(group, i)
    return group[i].timing.solo_s + queued_s + (num_queued + 2) * switch_s


def _is_within(group: TrialGroup, i: int, switch_s: float, reserve_s: float) -> bool:
    """Whether a member keeps its budget for every possible result of the simulation.

    A simulation that ends in the middle of an iteration counts that time towards earlier
    iterations.
    """
    longest_s = _longest_s(group, i, switch_s)
    seen_s = (MAX_LAPS - WARM_LAPS) * max(candidate.timing.solo_s for candidate in group)
    if longest_s >= seen_s:
        return False
    mean_s = longest_s / (1 - longest_s / seen_s)
    return mean_s * group[i].num_left + reserve_s <= group[i].budget_s


def _queue_s(group: TrialGroup, i: int) -> tuple[float, int]:
    """Total seconds and number of the phases that can run before a member's own in an iteration.

    That is one phase of each other job on the train nodes. On the rollout nodes it is also one
    phase of each other job if they share a node or if any member spans several nodes.
    """
    own_nodes = set(group[i].nodes)
    spans = any(len(candidate.nodes) > 1 for candidate in group)
    total_s, count = 0.0, 0
    for k, candidate in enumerate(group):
        if k != i:
            total_s += candidate.timing.train_s
            count += 1
            if spans or not own_nodes.isdisjoint(candidate.nodes):
                total_s += candidate.timing.rollout_s
                count += 1
    return total_s, count


def _keep_time(group: TrialGroup, switch_s: float, is_changed: bool, tight: set[str]) -> bool:
    """Whether the members in `tight` keep their budgets in every simulated orbit."""
    reserves_s = [
        TRANSIENT * _longest_wait_s(group, i) if is_changed else 0.0 for i in range(len(group))
    ]
    if all(
        _is_within(group, i, switch_s, reserves_s[i])
        for i, candidate in enumerate(group)
        if candidate.job in tight
    ):
        return True
    jobs = shape(group)
    return all(
        all(
            mean * candidate.num_left + reserve_s <= candidate.budget_s + SLACK
            for mean, candidate, reserve_s in zip(
                means(jobs, switch_s), group, reserves_s, strict=True
            )
            if candidate.job in tight
        )
        for means in (mean_iterations_s, worst_iterations_s)
    )


def _are_punctual(group: TrialGroup, switch_s: float, is_changed: bool, tight: set[str]) -> bool:
    """Whether the members in `tight` are late no more often than allowed, in every simulated orbit.

    A change of the group makes one more iteration late.
    """
    if all(candidate.late == inf or candidate.job not in tight for candidate in group):
        return True
    allowed_s = tuple([candidate.timing.allowed_s for candidate in group])
    shares = late_shares(shape(group), switch_s, allowed_s)
    return all(
        share * candidate.num_left + is_changed <= candidate.late + SLACK
        for share, candidate in zip(shares, group, strict=True)
        if candidate.job in tight
    )


def _longest_wait_s(group: TrialGroup, i: int) -> float:
    """Maximum delay of a single iteration because the group has changed."""
    longest_s = max(candidate.timing.solo_s for k, candidate in enumerate(group) if k != i)
    return min(_queue_s(group, i)[0], 2 * longest_s)


def moved(candidate: TrialMember, move_s: float) -> TrialMember | None:
    """Return a candidate after a move, which makes one iteration late. None if its budget cannot
    cover the pause."""
    left_s, late = candidate.budget_s - move_s, candidate.late - 1
    if left_s < candidate.work_s or late < 0:
        return None
    return candidate._replace(budget_s=left_s, late=late)


def nodes_of(group: Iterable[TrialMember]) -> list[str]:
    """Rollout nodes of the group, in the order in which members acquired them."""
    nodes: dict[str, None] = {}
    for candidate in group:
        for node in candidate.nodes:
            nodes[node] = None
    return list(nodes)


def by_load(group: TrialGroup, nodes: Sequence[str]) -> list[str]:
    """Sort nodes by load, least first; ties keep the given order."""
    load = dict.fromkeys(nodes, 0.0)
    for candidate in group:
        for node in candidate.nodes:
            if node in load:
                load[node] += candidate.timing.rollout_s
    return sorted(nodes, key=lambda node: load[node])
