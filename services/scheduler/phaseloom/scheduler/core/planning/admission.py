"""Admission: the part of placement that is common to all policies.

A job that needs nodes that cannot exist is refused. A job without a known cycle gets nodes of its
own if enough are free. The policy decides everything else. These are plain functions of the cluster
and need no core.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import combinations, islice

from msgspec.structs import replace

from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import PhaseTrace
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import Cycle, Segment
from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.planning.nodes import (
    can_run,
    could_take,
    free_nodes,
    has_room,
    is_usable,
    lacks,
    meets,
    users,
)
from phaseloom.scheduler.core.state.cluster import (
    Cluster,
    Decision,
    Group,
    Host,
    Member,
    Need,
    Placed,
    Placement,
    Pool,
    Refused,
    Waits,
)

DEPLOYMENTS = "spec.deployments"
"""Prefix of the field named in refusals."""


def decide(cluster: Cluster, member: Member, policy: Placement) -> Decision:
    """Decide where to place a job, or why it must wait or is refused.

    A group is closed while its only job is measured. If the policy finds no placement without the
    closed groups, it is consulted again with them open. A job that must be measured itself sees
    them open from the start. Its cycle is measured net of waiting, so it tolerates neighbours, and
    equal groups then fill evenly.

    Jobs of one pool form groups of that pool. A job of several pools that fits nowhere else may
    join two such groups, which are then merged.
    """
    nowhere = fits_nowhere(cluster, member)
    if nowhere is not None:
        return nowhere
    decision: Decision
    if member.cycle is None:
        alone = nodes_of_its_own(cluster, member)
        decision = alone or _place_among_all(cluster, member, policy)
    else:
        decision = policy.place(cluster, member)
        if isinstance(decision, Waits) and any(g.is_closed for g in cluster.groups.values()):
            decision = _place_among_all(cluster, member, policy)
    if isinstance(decision, Waits):
        return _place_in_two(cluster, member, policy) or decision
    return decision


_MAX_MERGED = 4
"""Maximum number of groups per set of pools that are considered for a merge."""


def _place_in_two(cluster: Cluster, member: Member, policy: Placement) -> Placed | None:
    """Let the policy place the job in two merged groups that cover different pools of the job.

    Groups with the fewest jobs are tried first.
    """
    by_pools: dict[frozenset[Pool], list[Group]] = {}
    for group in cluster.groups.values():
        pools = frozenset(group.nodes)
        if pools & member.needs.keys() and member.needs.keys() - pools:
            by_pools.setdefault(pools, []).append(group)
    partial = [
        group
        for same_pools in by_pools.values()
        for group in sorted(same_pools, key=lambda group: len(group.members))[:_MAX_MERGED]
    ]
    for first, second in combinations(partial, 2):
        if first.nodes.keys() & second.nodes.keys():
            continue
        trial = groups.copy(cluster)
        groups.merge(trial, trial.groups[first.name], trial.groups[second.name])
        decision = _place_among_all(trial, member, policy)
        if isinstance(decision, Placed) and decision.group == first.name:
            reason = f"{decision.reason}; group {second.name} was merged into {first.name}"
            return replace(decision, merged=second.name, reason=reason)
    return None


def _place_among_all(cluster: Cluster, member: Member, policy: Placement) -> Decision:
    """Let the policy decide with all closed groups temporarily open."""
    closed = [group for group in cluster.groups.values() if group.is_closed]
    for group in closed:
        group.is_closed = False
    decision = policy.place(cluster, member)
    for group in closed:
        group.is_closed = True
    return decision


def fits_nowhere(cluster: Cluster, member: Member) -> Waits | Refused | None:
    """Explain why some pool can never or not now take the job, regardless of other jobs. None: it
    can."""
    for pool, need in sorted(member.needs.items()):
        if any(is_usable(cluster.hosts[name], need) for name in cluster.free.get(pool, [])):
            continue
        hosts = [host for host in cluster.hosts.values() if host.pool == pool]
        if any(is_usable(host, need) for host in hosts):
            continue
        refused = _too_small(pool, need, hosts)
        if refused is not None:
            return refused
        return Waits(f"pool {pool!r}: {_why_none(hosts)}")
    return None


def _too_small(pool: Pool, need: Need, hosts: list[Host]) -> Refused | None:
    """Refuse a job for which no known node of the pool is large enough."""
    if not hosts or any(could_take(host, need) for host in hosts):
        return None
    if not any(can_run(host, need) for host in hosts):
        return _cannot_run(pool, need, hosts)
    hosts = [host for host in hosts if can_run(host, need)]
    largest = max(host.num_devices for host in hosts)
    if largest < need.num_devices:
        needs = f"needs {need.num_devices} devices on one node of pool {pool!r}"
        limit = f"no node has more than {largest}"
        remedy = f"use a layout with at most {largest} ranks per node, or start a node with "
        remedy += f"{need.num_devices} devices"
    else:
        largest = max(h.host_bytes for h in hosts if h.num_devices >= need.num_devices)
        needs = f"needs {need.host_bytes} bytes of host memory on one node of pool {pool!r}"
        limit = f"no node with {need.num_devices} devices has more than {largest}"
        remedy = f"spread it over more nodes, or start a node with {need.host_bytes} bytes of "
        remedy += "host memory"
    error = ErrorInfo(
        Code.RESOURCE_EXHAUSTED,
        f"the job {needs}, but {limit}",
        field="spec.deployments",
        remedy=remedy,
    )
    return Refused(error)


def _cannot_run(pool: Pool, need: Need, hosts: list[Host]) -> Refused:
    """Refuse a job whose demands on the backend no known node of the pool meets."""
    for demand in need.demands:
        if any(meets(host, demand) for host in hosts):
            continue
        able = [host.backends[demand.backend] for host in hosts if demand.backend in host.backends]
        if able:
            lack = next(lacks(able[0], demand))
            return _refused(
                lack.field,
                f"no node of pool {pool!r} supports {lack.feature} with backend {demand.backend!r}",
                f"use one of these: {', '.join(lack.instead)}; or use another backend",
            )
        break
    offered = sorted({name for host in hosts for name in host.backends})
    required = ", ".join(sorted({demand.backend for demand in need.demands}))
    return _refused(
        "backend",
        f"the job needs the backend {required} on pool {pool!r}, whose nodes offer "
        f"{', '.join(offered)}",
        "use a backend that they offer, or start a node that has its runtime installed, or that "
        "has an interpreter for it (worker.interpreters)",
    )


def _refused(field: str, message: str, remedy: str) -> Refused:
    field = f"{DEPLOYMENTS}.{field}"
    return Refused(ErrorInfo(Code.FAILED_PRECONDITION, message, field=field, remedy=remedy))


def _why_none(hosts: list[Host]) -> str:
    if not hosts:
        return "no node of this pool has ever registered"
    if any(host.is_up for host in hosts):
        return "every node that is large enough is down or drained"
    return "every node is down or drained"


def nodes_of_its_own(cluster: Cluster, member: Member) -> Placed | None:
    """Cold start: give the job free nodes of its own until its cycle is measured (PlexRL §4.3,
    WEAVE §4.2).

    Returns: None if there are too few.
    """
    nodes: dict[Pool, list[NodeId]] = {}
    for pool, need in member.needs.items():
        free = [cluster.hosts[name] for name in cluster.free.get(pool, [])]
        fitting = [host for host in free if is_usable(host, need)]
        if len(fitting) < need.num_nodes:
            return None
        fitting.sort(key=lambda host: (host.num_devices, host.price_per_hour, host.node))
        nodes[pool] = [host.node for host in fitting[: need.num_nodes]]
    return Placed("", nodes, "alone on free nodes at first, to measure its cycle")


def nodes_among(
    cluster: Cluster,
    group: Group,
    member: Member,
    *,
    first: Sequence[NodeId] = (),
    is_additional: bool = False,
) -> dict[Pool, list[NodeId]] | None:
    """Choose nodes for a job from a group, adding free nodes if the group has too few.

    Prefers the nodes with the fewest members among those with enough host memory.

    Args: first: nodes to prefer.
          is_additional: whether the need adds to what the job already has there. If not, it
              replaces it.
    Returns: nodes by pool, or None if the job does not fit.
    """
    nodes: dict[Pool, list[NodeId]] = {}
    for pool, need in member.needs.items():
        ranked = []
        for name in group.nodes.get(pool, []):
            present = users(group.members.values(), pool, name)
            neighbours = [m for m in present if is_additional or m.job != member.job]
            if has_room(cluster.hosts[name], need, neighbours):
                ranked.append((name not in first, len(present), name))
        usable = [name for _, _, name in sorted(ranked)]
        free = free_nodes(cluster, pool, need, need.num_nodes)
        nodes[pool] = [*usable, *free][: need.num_nodes]
        if len(nodes[pool]) < need.num_nodes:
            return None
    return nodes


def blocked_pools(cluster: Cluster, waiting: Member) -> set[Pool]:
    """Pools whose nodes later jobs may not get while this job waits, under a policy without
    overtaking.

    These are all pools that the waiting job needs. The exception is a job that waits for more nodes
    to come up: no other job's end can help it, so it blocks nothing.
    """
    is_served = all(_has_enough(cluster, pool, need) for pool, need in waiting.needs.items())
    return set(waiting.needs) if is_served else set()


def _has_enough(cluster: Cluster, pool: Pool, need: Need) -> bool:
    """Whether enough nodes of the pool could take the job if they were empty."""
    usable = (h for h in cluster.hosts.values() if h.pool == pool and is_usable(h, need))
    return len(list(islice(usable, need.num_nodes))) == need.num_nodes


# --- what a job does -----------------------------------------------------------------------------


def cycle_of(trace: PhaseTrace) -> Cycle | None:
    """Convert a profiler's trace, which is net of waiting and switches, to a cycle. None: no cycle
    found.

    The excess of the worst case is spread over the segments in proportion to their duration.
    """
    if trace.period_s <= 0:
        return None
    worst = max(1.0, trace.worst_period_s / trace.period_s)
    segments = [
        Segment(pool, offset_s, duration_s, worst_s=worst * duration_s)
        for segment in trace.segments
        for pool, offset_s, duration_s in _within(segment, trace.period_s)
    ]
    segments.sort(key=lambda s: (s.offset_s, s.pool))
    return Cycle(trace.period_s, segments, max(1, trace.num_optim_steps))


def _within(segment: Segment, period_s: float) -> Iterator[tuple[Pool, float, float]]:
    """Yield (pool, offset, duration) of a segment within the cycle. A part beyond the end wraps
    around."""
    offset_s = segment.offset_s % period_s
    duration_s = min(segment.duration_s, period_s)
    over_s = offset_s + duration_s - period_s
    if over_s > 0:
        yield segment.pool, 0.0, over_s
        duration_s -= over_s
    if duration_s > 0:
        yield segment.pool, offset_s, duration_s


# --- the duty-ratio bound ------------------------------------------------------------------------

_NUM_CYCLES = 8
"""Number of simulated cycles per member. Only the second half counts, after the jobs have
settled."""
_MAX_SEGMENTS = 4096
"""Maximum number of simulated segments, however much the members' periods differ."""


def waiting_share(members: Iterable[Member], switch_s: float = 0.0) -> dict[str, float]:
    """Predict the share of its time that each member waits for the others (PlexRL §7.2).

    The paper bounds this share without saying how to predict it. Here the members' cycles are
    simulated against one another: first come, first served on each node, with all nodes of a
    segment occupied at once. Each cycle starts when the preceding one ends; the first ones start at
    the members' shifts. The simulation uses usual durations instead of worst cases, because the
    share is a long-run average.

    Args: members: jobs with their actual or intended nodes. Jobs of unknown cycle are skipped.
          switch_s: added to a segment on a node that another member used last.
    Returns: job → share, from 0 to 1.
    Cost: O(n log n) in the segments of about eight cycles per member.
    """
    runs = [_CycleRun(m.job, m.cycle, m.nodes, m.shift_s) for m in members if m.cycle is not None]
    used: dict[NodeId, _NodeUse] = {}
    for run in runs:
        for name in {name for names in run.nodes.values() for name in names}:
            used.setdefault(name, _NodeUse()).num_members += 1
    if all(busy.num_members < 2 for busy in used.values()):
        return {run.job: 0.0 for run in runs}
    ready: list[tuple[float, int, int]] = []
    for rank, run in enumerate(runs):
        for index in run.begin(run.began_s):
            heappush(ready, (run.ready_s(index), rank, index))
    for _ in range(_MAX_SEGMENTS):
        if not ready or all(len(run.lates_s) >= _NUM_CYCLES for run in runs):
            break
        ready_s, rank, index = heappop(ready)
        run = runs[rank]
        end_s = _serve(run, index, ready_s, used, switch_s)
        for following in run.ended(index, end_s):
            heappush(ready, (run.ready_s(following), rank, following))
    return {run.job: run.share for run in runs}


@dataclass(slots=True)
class _NodeUse:
    """Occupation of one node."""

    until_s: float = 0.0
    last: str = ""
    """Job that used the node last."""
    num_members: int = 0


@dataclass(slots=True)
class _CycleRun:
    """A member that repeats its cycle."""

    job: str
    cycle: Cycle
    nodes: dict[Pool, list[NodeId]]
    began_s: float
    lates_s: list[float] = field(default_factory=list)
    """Seconds by which each finished cycle exceeded its length alone."""
    ends_s: dict[int, float] = field(default_factory=dict)
    """Segment index → its end, for the finished segments of the current cycle."""
    begun: set[int] = field(default_factory=set)
    _planned_s: list[float] = field(init=False)
    """End of each segment within the cycle when running alone."""
    _before: list[list[int]] = field(init=False)
    """For each segment, the segments that end before it starts; it waits for them."""

    def __post_init__(self) -> None:
        self._planned_s = [s.offset_s + s.duration_s for s in self.cycle.segments]
        slack_s = 1e-9 * self.cycle.period_s
        self._before = [
            [
                i
                for i, end_s in enumerate(self._planned_s)
                if i != k and end_s <= s.offset_s + slack_s
            ]
            for k, s in enumerate(self.cycle.segments)
        ]

    @property
    def share(self) -> float:
        settled_s = self.lates_s[len(self.lates_s) // 2 :]
        late_s = sum(settled_s)
        return late_s / (late_s + max(1, len(settled_s)) * self.cycle.period_s)

    def begin(self, at_s: float) -> list[int]:
        """Start the next cycle and return its first segments, which depend on no others."""
        self.began_s = at_s
        self.ends_s = {}
        first = [i for i, before in enumerate(self._before) if not before]
        self.begun = set(first)
        return first

    def ready_s(self, index: int) -> float:
        """Earliest start of a segment: it keeps the same distance to its predecessors as when
        alone."""
        offset_s = self.cycle.segments[index].offset_s
        late_s = max((self._late_s(i) for i in self._before[index]), default=0.0)
        return self.began_s + offset_s + late_s

    def _late_s(self, index: int) -> float:
        planned_s = self.began_s + self._planned_s[index]
        return max(0.0, self.ends_s[index] - planned_s)

    def ended(self, index: int, end_s: float) -> list[int]:
        """Record the end of a segment and return the segments that become ready.

        After the last segment these belong to the next cycle.
        """
        self.ends_s[index] = end_s
        if len(self.ends_s) == len(self._before):
            late_s = max(self._late_s(i) for i in self.ends_s)
            self.lates_s.append(late_s)
            return self.begin(self.began_s + self.cycle.period_s + late_s)
        following = [
            i
            for i, before in enumerate(self._before)
            if i not in self.begun and all(predecessor in self.ends_s for predecessor in before)
        ]
        self.begun.update(following)
        return following


def _serve(
    run: _CycleRun, index: int, ready_s: float, used: dict[NodeId, _NodeUse], switch_s: float
) -> float:
    """Run a segment as soon as all of its nodes are free, and return its end."""
    segment = run.cycle.segments[index]
    nodes = [used[name] for name in run.nodes.get(segment.pool, [])]
    start_s = max([ready_s, *(node.until_s for node in nodes)])
    if any(node.last not in ("", run.job) for node in nodes):
        start_s += switch_s
    end_s = start_s + segment.duration_s
    for node in nodes:
        node.until_s = end_s
        node.last = run.job
    return end_s
