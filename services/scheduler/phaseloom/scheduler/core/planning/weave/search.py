"""A search over hypothetical groups, which are priced and changed without touching the cluster.

It places a single job (`SearchState.best`), and it finds moves that make groups cheaper (`replan`).
The latter is a local search. A step removes all members of a group, or one of them, and gives each
the cheapest placement, possibly on nodes of its own. It is worthwhile if its savings over the next
hours exceed the cost of its moves (WEAVE §6.6: a pause of 197-419 s each). The best step is taken,
and the search repeats a few times.

New nodes have placeholder names until a plan is carried out. A group's worth is its price minus the
value of the progress that it makes: of two ways to add a job at the same price, the one that slows
jobs down less wins. Cost: each pair of group and job is evaluated once per search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning.nodes import is_usable, other_jobs
from phaseloom.scheduler.core.planning.weave.candidates import (
    MOVE_S,
    HostOf,
    TimeShares,
    TrialGroup,
    TrialMember,
    View,
    by_load,
    has_shares,
    holds,
    in_turns,
    moved,
    nodes_of,
    progress,
    shares_of,
    side_by_side,
    signature,
    slowdowns_of,
    trial_member_of,
)
from phaseloom.scheduler.core.planning.weave.fifo import MAX_LAPS, WARM_LAPS
from phaseloom.scheduler.core.planning.weave.period import ROLLOUT, TRAIN
from phaseloom.scheduler.core.planning.weave.pool import pinned
from phaseloom.scheduler.core.state.cluster import Cluster, Group, Move, Placed, Pool

VALUE = 0.25
"""Value of a job's progress at full speed, as a fraction of the price of its own nodes."""
BROKEN = 10.0
"""Penalty for a group that exceeds a budget, in multiples of the price of one job's nodes."""
MOST_TRIED = 64
"""Maximum number of groups that are evaluated closely for one job, most promising first."""
FASTEST = 1.03
"""Upper bound of a job's speed. It can exceed 1 if an orbit did not close: one of the 44 laps in
the simulation may have started before it."""
NEW = "+"
"""Prefix of the placeholder name of a node that is not chosen yet."""


def host_of(cluster: Cluster) -> HostOf:
    """Return a lookup of nodes by name. A node that is not chosen yet counts as the worst free
    one."""
    worst = None
    if cluster.limits.counts_on_space:
        free = [cluster.hosts[node] for node in cluster.free.get(ROLLOUT, ())]
        worst = min(
            free, key=lambda host: (len(host.rollout_slowdowns), host.device_bytes), default=None
        )
    return lambda node: cluster.hosts.get(NodeId(node), worst)


def view_of(cluster: Cluster) -> View:
    """Return the model of how the jobs of a group share their nodes."""
    if not cluster.limits.counts_on_space:
        return in_turns
    hosts, switch_s = host_of(cluster), cluster.limits.switch_s
    return lambda group: side_by_side(group, hosts, switch_s)


def company_of(cluster: Cluster, group: TrialGroup, candidate: TrialMember) -> str:
    """Describe how many rollouts run next to a member's own, and their maximum slowdown.

    Empty if its rollouts take turns.
    """
    if not cluster.limits.counts_on_space:
        return ""
    slowdowns = slowdowns_of(group, host_of(cluster))
    for node in candidate.nodes:
        if node in slowdowns:
            num_others = sum(node in member.nodes for member in group) - 1
            return (
                f"; its rollouts run next to those of {other_jobs(num_others)} and take up to "
                f"{slowdowns[node]:.2f} times as long as alone"
            )
    return ""


class Best(NamedTuple):
    """The best placement of a job."""

    worth: float
    """Change of the group's worth in $/h; lowest is best."""
    group: str
    candidate: TrialMember


@dataclass
class SearchState:
    cluster: Cluster
    groups: Mapping[str, TrialGroup]
    """Groups by name to which jobs can be added."""

    def __post_init__(self) -> None:
        self.switch_s = self.cluster.limits.switch_s
        self.num_new = 0
        self._fresh = {pool: self._fresh_host(pool) for pool in (ROLLOUT, TRAIN)}
        self._worth: dict[object, float] = {}
        self._holds: dict[object, bool] = {}
        self._added: dict[object, list[tuple[float, TrialMember]]] = {}
        self._host_of = host_of(self.cluster)
        self._view = view_of(self.cluster)

    def _fresh_host(self, pool: Pool) -> tuple[float, int]:
        """Price and memory of a new node of the pool: the minima over its free nodes."""
        hosts = [self.cluster.hosts[node] for node in self.cluster.free.get(pool, ())]
        hosts = hosts or [h for h in self.cluster.hosts.values() if h.pool == pool]
        price = min((h.price_per_hour for h in hosts), default=0.0)
        return price or 1.0, min((h.host_bytes for h in hosts), default=0)

    # --- prices ----------------------------------------------------------------------------------

    def price(self, group: TrialGroup) -> float:
        """$/h of the group's nodes. If nodes have no prices, all count the same."""
        if not group:
            return 0.0
        rolling = sum(self._node_price(node) for node in nodes_of(group))
        return rolling + group[0].train.num_nodes * self._fresh[TRAIN][0]

    def _node_price(self, node: str) -> float:
        host = self.cluster.hosts.get(NodeId(node))
        return (host.price_per_hour if host is not None else 0.0) or self._fresh[ROLLOUT][0]

    def own_price(self, candidate: TrialMember) -> float:
        """$/h of the number of nodes that the candidate needs."""
        rolling = candidate.rollout.num_nodes * self._fresh[ROLLOUT][0]
        return rolling + candidate.train.num_nodes * self._fresh[TRAIN][0]

    def worth(self, group: TrialGroup) -> float:
        """Price of the group minus the value of its progress, in $/h."""
        if not group:
            return 0.0
        key = signature(group)
        if key not in self._worth:
            speeds = zip(group, progress(group, self.switch_s, self._view), strict=True)
            value = sum(VALUE * self.own_price(candidate) * speed for candidate, speed in speeds)
            self._worth[key] = self.price(group) - value
        return self._worth[key]

    def holds(self, group: TrialGroup, *, is_changed: bool) -> bool:
        key = signature(group), is_changed
        if key not in self._holds:
            self._holds[key] = holds(group, self.switch_s, is_changed=is_changed, view=self._view)
        return self._holds[key]

    def standing(self, group: TrialGroup) -> float:
        """Worth of a group in its present form, with a penalty if it exceeds a budget."""
        if not group:
            return 0.0
        broken = not self.holds(group, is_changed=False)
        return self.worth(group) + (BROKEN * self.own_price(group[0]) if broken else 0.0)

    # --- places ----------------------------------------------------------------------------------

    def alone(self, candidate: TrialMember) -> TrialMember:
        nodes = self._new_nodes(candidate.rollout.num_nodes)
        return candidate._replace(nodes=nodes, takes_turns=False)

    def new_group(self) -> str:
        """Name for a group that does not exist yet."""
        self.num_new += 1
        return f"{NEW}{self.num_new - 1}"

    def _new_nodes(self, count: int) -> tuple[str, ...]:
        first = self.num_new
        self.num_new += count
        return tuple(f"{NEW}{k}" for k in range(first, self.num_new))

    def best(
        self, groups: Mapping[str, TrialGroup], candidate: TrialMember, below: float
    ) -> Best | None:
        """Find the group and nodes where adding a job costs least, or None if nothing costs less
        than `below`.

        Expensive checks are limited to the most promising groups. The pace of a group is simulated
        only if it would be best at full speed, and its budgets are checked only if it is actually
        best. Ties go to the first group, and within it to the first nodes.
        """
        queue: list[tuple[float, bool, int, str, TrialMember]] = []
        for name, options in self._options_by_group(groups, candidate):
            for bound, option in options:
                if bound < below:
                    queue.append((bound, False, len(queue), name, option))
        heapify(queue)
        while queue:
            worth, is_exact, number, name, option = heappop(queue)
            grown = (*groups[name], option)
            if not is_exact:
                worth = self.worth(grown) - self.worth(groups[name])
                if worth < below:
                    heappush(queue, (worth, True, number, name, option))
            elif self.holds(grown, is_changed=True):
                return Best(worth, name, option)
        return None

    def _options_by_group(
        self, groups: Mapping[str, TrialGroup], candidate: TrialMember
    ) -> Iterator[tuple[str, list[tuple[float, TrialMember]]]]:
        """Yield the options of up to `MOST_TRIED` groups that have any."""
        full = self.cluster.limits.max_group_jobs
        tried = 0
        is_new = not self._added
        for name, group in groups.items():
            if is_new and tried >= MOST_TRIED:
                return
            if len(group) >= full or group[0].train.num_nodes != candidate.train.num_nodes:
                continue
            key = signature(group), candidate.job
            if key not in self._added:
                if tried >= MOST_TRIED:
                    continue
                self._added[key] = self._adding(group, candidate)
            if self._added[key]:
                tried += 1
                yield name, self._added[key]

    def _adding(self, group: TrialGroup, candidate: TrialMember) -> list[tuple[float, TrialMember]]:
        """Choices of nodes for adding the job, each with a lower bound of the change in $/h."""
        if not self._trains_fit(group, candidate):
            return []
        shares = shares_of(self._view(group)[0])
        if shares is None or not has_shares(shares, candidate, ()):
            return []
        options = [
            option
            for nodes in self._node_choices(group, candidate)
            if self._rollouts_fit(group, candidate, nodes)
            for option in self._ways(group, shares, candidate._replace(nodes=nodes))
        ]
        if not options:
            return []
        bound = self.price(group) - self._most_progress((*group, candidate)) - self.worth(group)
        present = set(nodes_of(group))
        return [
            (
                bound + sum(self._node_price(node) for node in option.nodes if node not in present),
                option,
            )
            for option in options
        ]

    def _ways(
        self, group: TrialGroup, shares: TimeShares, option: TrialMember
    ) -> Iterator[TrialMember]:
        """Yield the variants of a placement that pass a cheap check of the nodes' time.

        These are running side by side with others on the node, if possible, and taking turns with
        them.

        Args: shares: the shares that the group needs.
        """
        together = option._replace(takes_turns=False)
        if self._view is not in_turns and any(
            node in member.nodes for node in option.nodes for member in group
        ):
            grown = (*group, together)
            if slowdowns_of(grown, self._host_of):
                if shares_of(self._view(grown)[0]) is not None:
                    yield together
                together = option._replace(takes_turns=True)
        if has_shares(shares, together, together.nodes):
            yield together

    def _most_progress(self, group: TrialGroup) -> float:
        """Upper bound, in $/h, of the value of a group's progress for any choice of rollout nodes.

        No job is faster than alone, and the jobs train one after another. The bound gives the train
        nodes' time to the jobs for which it is worth most. An orbit that did not close may have
        ended with one training phase of each job in the queue.
        """
        uses = [
            (c.timing.train_s / c.timing.solo_s if c.timing.train_s else 0.0, self.own_price(c))
            for c in group
        ]
        uses.sort(key=_price_of_training, reverse=True)
        worth, remaining = 0.0, 1 + len(group) / (MAX_LAPS - WARM_LAPS)
        for train, price in uses:
            speed = FASTEST if train * FASTEST <= remaining else remaining / train
            worth += price * speed
            remaining -= train * speed
        return VALUE * worth

    def _node_choices(self, group: TrialGroup, candidate: TrialMember) -> Iterator[tuple[str, ...]]:
        """Yield choices of nodes: nodes of the group, then just enough additional new nodes (WEAVE
        §4.2)."""
        count = candidate.rollout.num_nodes
        present = nodes_of(group)
        free = len(self.cluster.free.get(ROLLOUT, ()))
        if count == 1:
            yield from ((node,) for node in present)
            if free:
                yield self._new_nodes(1)
            return
        same = dict.fromkeys(member.nodes for member in group if len(member.nodes) == count)
        yield from same
        ranked = by_load(group, present)
        for num_kept in range(min(count, len(ranked)), -1, -1):
            nodes = (*ranked[:num_kept], *self._new_nodes(count - num_kept))
            if nodes not in same and count - num_kept <= free:
                yield nodes

    def _trains_fit(self, group: TrialGroup, candidate: TrialMember) -> bool:
        used = sum(member.train.host_bytes for member in group) + candidate.train.host_bytes
        return _fits(used, self._fresh[TRAIN][1])

    def _rollouts_fit(
        self, group: TrialGroup, candidate: TrialMember, nodes: tuple[str, ...]
    ) -> bool:
        """Whether the rollout nodes hold all working sets including the job's. An exact fit is
        allowed."""
        for node in nodes:
            used = sum(member.rollout.host_bytes for member in group if node in member.nodes)
            host = self.cluster.hosts.get(NodeId(node))
            room = host.host_bytes if host is not None else self._fresh[ROLLOUT][1]
            is_there = host is None or is_usable(host, candidate.rollout)
            if not (is_there and _fits(used + candidate.rollout.host_bytes, room)):
                return False
        return True


def _price_of_training(use: tuple[float, float]) -> float:
    """$/h of a job's nodes per full use of the train nodes. Args: use: (share of the train nodes,
    $/h)."""
    train, price = use
    return price / train if train else inf


def _fits(taken_bytes: int, host_bytes: int) -> bool:
    return host_bytes == 0 or taken_bytes <= host_bytes


def is_plannable(cluster: Cluster, group: Group) -> bool:
    """Whether a group can be replanned: all cycles are known, all nodes up, all train nodes the
    same.

    Other groups stay unchanged.
    """
    # Every placement checks every group, so these are plain loops.
    if group.is_closed:
        return False
    trains = group.nodes.get(TRAIN, [])
    for member in group.members.values():
        used = member.nodes.get(TRAIN, [])
        if member.cycle is None or (used != trains and set(used) != set(trains)):
            return False
    hosts = cluster.hosts
    for names in group.nodes.values():
        for node in names:
            if not hosts[node].is_up:
                return False
    return True


class _Groups(Mapping[str, TrialGroup]):
    """The groups that can be replanned, built on access: placing one job reads only the first
    few."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._made: dict[str, TrialGroup] = {}

    def __getitem__(self, name: str) -> TrialGroup:
        if name not in self._made:
            members = self._cluster.groups[name].members.values()
            self._made[name] = tuple([trial_member_of(self._cluster, m) for m in members])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        groups = self._cluster.groups
        return (name for name in groups if is_plannable(self._cluster, groups[name]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def search_state_of(cluster: Cluster) -> SearchState:
    return SearchState(cluster, _Groups(cluster))


PRICE_OF_PAUSE = 0.6
"""Cost of a pause, as a multiple of the price of the job's own nodes: lost progress and idle
nodes."""
HORIZON_S = 7200.0
"""Maximum time over which a saving counts. By then, groups have changed again."""
MAX_STEPS = 6
MAX_SOURCES = 24
"""Maximum number of groups considered in a step: those that cost most relative to their
progress."""


class Plan(NamedTuple):
    groups: dict[str, TrialGroup]
    new_groups: dict[str, str]
    """Job → its new group, for each job that moves."""


def replan(cluster: Cluster) -> list[Move]:
    """Plan moves that make groups cheaper, in the order in which they must be made. May be
    empty."""
    state = search_state_of(cluster)
    plan = Plan(dict(state.groups), {})
    for _ in range(MAX_STEPS):
        better = _step(state, plan)
        if better is None:
            break
        plan = better
    return _moves(cluster, state.groups, plan)


def _step(state: SearchState, plan: Plan) -> Plan | None:
    """Return the most valuable step, or None if none is worth its moves. Ties go to the first."""
    best: tuple[float, Plan] | None = None
    for name, removed in _sources(state, plan):
        trial = _without(state, plan, name, removed)
        settled = _settle(state, plan, trial) if trial.gain > 0 else None
        if settled is not None and (best is None or settled[0] > best[0]):
            best = settled
    return best[1] if best is not None else None


def _sources(state: SearchState, plan: Plan) -> Iterator[tuple[str, TrialGroup]]:
    ranked = sorted(plan.groups, key=lambda n: -state.standing(plan.groups[n]))
    for name in ranked[:MAX_SOURCES]:
        group = plan.groups[name]
        yield name, group
        if len(group) > 1:
            yield from ((name, (candidate,)) for candidate in group)


class _Removal(NamedTuple):
    """A group with some members removed."""

    source: str
    removed: TrialGroup
    groups: dict[str, TrialGroup]
    gain: float
    """Savings in $/h from removing them."""


def _without(state: SearchState, plan: Plan, name: str, removed: TrialGroup) -> _Removal:
    group = plan.groups[name]
    remaining = tuple(candidate for candidate in group if candidate not in removed)
    groups = {key: members for key, members in plan.groups.items() if key != name}
    if remaining:
        groups[name] = remaining
    return _Removal(name, removed, groups, state.standing(group) - state.standing(remaining))


def _settle(state: SearchState, plan: Plan, trial: _Removal) -> tuple[float, Plan] | None:
    """Place each removed member elsewhere, the longest iteration first.

    Returns: the saving in $ per hour times seconds, minus the cost of the moves, and the plan. None
        if nothing is saved.
    """
    groups = trial.groups
    new_groups = dict(plan.new_groups)
    gain, pauses = trial.gain, 0.0
    for candidate in sorted(trial.removed, key=lambda s: -s.timing.solo_s):
        mover: TrialMember | None = candidate
        if candidate.job not in plan.new_groups:
            mover = moved(candidate, MOVE_S)
            pauses += PRICE_OF_PAUSE * state.own_price(candidate) * MOVE_S
        if mover is None:
            return None
        targets = {name: group for name, group in groups.items() if name != trial.source}
        alone = state.alone(mover)
        alone_worth = state.worth((alone,))
        target = state.best(targets, mover, alone_worth)
        if target is not None:
            gain -= target.worth
            name, mover = target.group, target.candidate
        elif len(plan.groups[trial.source]) > 1:
            gain -= alone_worth
            name, mover = state.new_group(), alone
        else:
            return None
        groups[name] = (*groups.get(name, ()), mover)
        new_groups[mover.job] = name
    saved = gain * min(HORIZON_S, max(candidate.work_s for candidate in trial.removed)) - pauses
    if saved <= 0 or not _has_nodes(state, groups):
        return None
    return saved, Plan(groups, new_groups)


def _has_nodes(state: SearchState, groups: dict[str, TrialGroup]) -> bool:
    new = sum(node.startswith(NEW) for group in groups.values() for node in nodes_of(group))
    trains = sum(g[0].train.num_nodes for name, g in groups.items() if name.startswith(NEW))
    free = state.cluster.free
    return new <= len(free.get(ROLLOUT, ())) and trains <= len(free.get(TRAIN, ()))


def _moves(cluster: Cluster, before: Mapping[str, TrialGroup], plan: Plan) -> list[Move]:
    """Convert a plan to moves, replacing placeholder names with real nodes.

    New nodes are chosen only from nodes that are free now. A node that a move releases may be
    needed by another job that shares it.
    """
    origin = {
        candidate.job: (name, candidate.nodes)
        for name, group in before.items()
        for candidate in group
    }
    rolling, training = iter(cluster.free.get(ROLLOUT, [])), iter(cluster.free.get(TRAIN, []))
    chosen: dict[str, NodeId] = {}
    created: dict[str, tuple[str, list[NodeId]]] = {}
    moves = []
    for job, name in _in_order(plan, origin):
        candidate = next(candidate for candidate in plan.groups[name] if candidate.job == job)
        for node in candidate.nodes:
            if node not in chosen:
                chosen[node] = next(rolling) if node.startswith(NEW) else NodeId(node)
        if not name.startswith(NEW):
            group, trains = name, cluster.groups[name].nodes.get(TRAIN, [])
        elif name in created:
            group, trains = created[name]
        else:
            group, trains = "", [next(training) for _ in range(candidate.train.num_nodes)]
            created[name] = f"g{cluster.num_groups + len(created) + 1}", trains
        nodes = pinned((chosen[node] for node in candidate.nodes), trains)
        neighbours = company_of(cluster, plan.groups[name], candidate)
        others_count = len(plan.groups[name]) - 1
        sharing = (
            f"shares with {other_jobs(others_count)}" if others_count else "alone on its own nodes"
        )
        reason = f"repacked: {sharing}{neighbours}"
        placed = Placed(group, nodes, reason, takes_turns=candidate.takes_turns)
        moves.append(Move(job, placed))
    return moves


def _in_order(plan: Plan, origin: dict[str, tuple[str, tuple[str, ...]]]) -> list[tuple[str, str]]:
    """Order the (job, group) pairs of the jobs that actually move.

    In this order, no group becomes empty while a job is still to join it. Empty if no such order
    exists.
    """
    is_at = {
        candidate.job: (name, candidate.nodes)
        for name, group in plan.groups.items()
        for candidate in group
    }
    movers = [(job, name) for job, name in plan.new_groups.items() if is_at[job] != origin[job]]
    num_inside = Counter(name for name, _ in origin.values())
    num_coming = Counter(name for _, name in movers)
    ordered: list[tuple[str, str]] = []
    while movers:
        for job, name in movers:
            source = origin[job][0]
            if source == name or num_inside[source] > 1 or not num_coming[source]:
                break
        else:
            return []
        movers.remove((job, name))
        ordered.append((job, name))
        num_inside[source] -= 1
        num_inside[name] += 1
        num_coming[name] -= 1
    return ordered
