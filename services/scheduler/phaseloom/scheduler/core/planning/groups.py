"""Node groups: sets of jobs and the nodes that they share, as plain functions of the cluster.

A placed job is a member of one group and is pinned to nodes of it. A node belongs to one group or
is free. A group has exactly the nodes to which its members are pinned: a node is released with its
last member, and a group ends with its last member (WEAVE §5.3). A node that goes down stays in its
group, whose members wait for it. If it is released while down, it becomes free once it is up.

Needs no core. Lists of nodes are replaced, never changed in place, so that copies can share them.
Cost: `join` and `leave` are linear in the group, `copy` in the cluster.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from copy import copy as shallow
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean

from msgspec.structs import replace

from phaseloom.common.contract.ids import JobKey, NodeId
from phaseloom.common.contract.specs import Batching, Cycle, DeploymentSpec, JobSpec
from phaseloom.scheduler.core.planning.weave.period import ROLLOUT, timing_of
from phaseloom.scheduler.core.state.cluster import (
    Bounds,
    Cluster,
    Demand,
    Group,
    Host,
    Member,
    Need,
    Placed,
    Pool,
)

LEAST_ITERATIONS = 8
"""Number of iterations from which a change of the cycle counts as drift. An earlier change may just
correct the owner's estimate."""
TREND = {5: 15.5, 10: 6.6, 20: 4.9, 40: 4.35}
"""Number of last iterations whose mean is compared with the cycle → standard errors by which it
must differ. Few iterations show a fast drift, many a slow one of a job that varies. The errors
are those of Student's t for a two-sided probability of 1e-4: a job of 1,000 iterations has few
samples that do not overlap, so it is hardly ever mistaken."""
LONGEST_TREND = max(TREND)
DRIFTS = 0.05
"""Relative difference of that mean from the cycle which is not worth following."""
SPREAD = 1.128
"""Mean difference of two successive iterations, in standard deviations, if they vary normally (d2
of a chart of moving ranges; Montgomery, Introduction to Statistical Quality Control, §6.4). Unlike
the deviation from the mean it stays small if a job drifts slowly."""
LONGEST = 2.0
"""Maximum length of an iteration, as a multiple of the cycle, that counts towards the SLO. Anything
beyond was caused by a fault or a pause, which does not relax the SLO."""
ROUNDING = 1e-6
"""Relative differences below this are rounding errors."""

# --- what a job needs ----------------------------------------------------------------------------


def member_of(job: JobKey, spec: JobSpec, submitted_s: float = 0.0) -> Member:
    """Build the placement's record of a job that is not placed yet."""
    return Member(
        job=str(job),
        slo=spec.slo,
        needs=needs_of(spec.deployments),
        cycle=spec.cycle,
        submitted_s=submitted_s,
        num_iterations=iterations_of(spec.cycle, spec.duration_s),
        is_exclusive=spec.exclusive,
    )


def iterations_of(cycle: Cycle | None, duration_s: float) -> int:
    """Number of iterations of a job that takes `duration_s` alone. 0 if unknown."""
    if cycle is None or not duration_s:
        return 0
    return max(1, round(duration_s / cycle.worst_period_s))


def needs_of(specs: Iterable[DeploymentSpec]) -> dict[Pool, Need]:
    """Sum up the needs of a job's deployments by pool. Deployments of a pool share nodes and host
    memory."""
    needs: dict[Pool, Need] = {}
    for spec in sorted(specs, key=lambda spec: spec.pool):
        before = needs.get(spec.pool, Need(0, 0, 0))
        needs[spec.pool] = Need(
            num_nodes=max(before.num_nodes, spec.num_nodes),
            num_devices=max(before.num_devices, devices_per_node(spec)),
            host_bytes=before.host_bytes + spec.host_bytes,
            demands=tuple(sorted({*before.demands, demand_of(spec)})),
        )
    return needs


def demand_of(spec: DeploymentSpec) -> Demand:
    config, layout = spec.model.config, spec.layout
    return Demand(
        spec.backend,
        spec.trainable,
        tuple(axis for axis in layout.__struct_fields__ if getattr(layout, axis) > 1),
        str(config.get("model_type", "")),
        str(config.get("dtype", config.get("torch_dtype")) or ""),
        spec.batching is Batching.SHARED,
        spec.prefix_cache,
        spec.model.adapter is not None,
    )


def devices_per_node(spec: DeploymentSpec) -> int:
    return -(-spec.layout.num_ranks // spec.num_nodes)


def set_end(cluster: Cluster, member: Member, duration_s: float) -> None:
    """Set the time at which a job would end if it were placed now.

    Args: duration_s: its duration alone. 0: unknown.
    """
    slowdown = member.slo or 1 / max(1e-9, 1 - cluster.limits.duty_limit)
    member.ends_s = cluster.now_s + duration_s * slowdown if duration_s else 0.0


# --- hosts ---------------------------------------------------------------------------------------


def host_up(cluster: Cluster, host: Host) -> None:
    """Add or update a node that is up. If it belongs to a group, it stays there."""
    old = cluster.hosts.get(host.node)
    group = old.group if old is not None else ""
    if old is not None:
        _take(cluster, old)
    # A group lists its nodes by pool, so a node cannot change its pool while it belongs to one.
    pool = old.pool if old is not None and group else host.pool
    leaving = old.leaving if old is not None else []
    host = replace(host, group=group, pool=pool, is_up=True, leaving=leaving)
    cluster.hosts[host.node] = host
    _release(cluster, host)


def host_down(cluster: Cluster, node: NodeId) -> None:
    host = cluster.hosts.get(node)
    if host is not None:
        _take(cluster, host)
        host.is_up = False


def _take(cluster: Cluster, host: Host) -> None:
    """Remove a node from the free nodes if it is among them."""
    free = cluster.free.get(host.pool, [])
    index = bisect_left(free, host.node)
    if index < len(free) and free[index] == host.node:
        del free[index]


def hold(cluster: Cluster, node: NodeId, deployment: str) -> None:
    """Prevent a node from becoming free until this deployment has left it."""
    host = cluster.hosts[node]
    _take(cluster, host)
    host.leaving = [*host.leaving, deployment]


def end_hold(cluster: Cluster, node: NodeId, deployment: str) -> None:
    """End a deployment's `hold` on a node, because it has left or will stay."""
    host = cluster.hosts[node]
    if deployment in host.leaving:
        host.leaving = [name for name in host.leaving if name != deployment]
        _release(cluster, host)


def _release(cluster: Cluster, host: Host) -> None:
    if host.is_up and not host.group and not host.leaving:
        insort(cluster.free.setdefault(host.pool, []), host.node)


# --- members -------------------------------------------------------------------------------------


def join(cluster: Cluster, member: Member, placed: Placed) -> Group:
    """Place a job in a group. Free nodes of the placement join the group.

    A first member without a known cycle closes the group; the next member opens it again.
    """
    assert member.job not in cluster.placed, f"{member.job} is already placed"
    cluster.waiting = [waiting for waiting in cluster.waiting if waiting.job != member.job]
    group = cluster.groups.get(placed.group)
    if group is None:
        assert not placed.group, f"group {placed.group} does not exist"
        cluster.num_groups += 1
        group = Group(f"g{cluster.num_groups}", is_closed=member.cycle is None)
        cluster.groups[group.name] = group
    else:
        group.is_closed = False
    if placed.merged:
        merge(cluster, group, cluster.groups[placed.merged])
    member.shift_s = placed.shift_s
    member.takes_turns = placed.takes_turns
    member.began_s = cluster.now_s + placed.shift_s
    group.members[member.job] = member
    cluster.placed[member.job] = group.name
    _pin(cluster, group, member, placed.nodes)
    return group


def merge(cluster: Cluster, group: Group, other: Group) -> None:
    """Merge two groups of different pools into `group`, whose members come first.

    The members of each node stay the same. The merge lasts as long as the group.
    """
    assert not group.nodes.keys() & other.nodes.keys(), f"{group.name} and {other.name} share pools"
    del cluster.groups[other.name]
    group.members = {**group.members, **other.members}
    group.nodes = {**group.nodes, **other.nodes}
    group.is_closed = False
    group.version += 1
    cluster.placed.update(dict.fromkeys(other.members, group.name))
    for names in other.nodes.values():
        for name in names:
            cluster.hosts[name].group = group.name


def _pin(cluster: Cluster, group: Group, member: Member, nodes: dict[Pool, list[NodeId]]) -> None:
    member.nodes = {pool: list(names) for pool, names in nodes.items() if names}
    _changed(group)
    for pool, names in member.nodes.items():
        for name in names:
            host = cluster.hosts[name]
            assert host.group in ("", group.name), (
                f"{name} belongs to {host.group}, not {group.name}"
            )
            if not host.group:
                _take(cluster, host)
                host.group = group.name
                group.nodes[pool] = [*group.nodes.get(pool, []), name]


def _changed(group: Group) -> None:
    """Record that the members of a group, or the facts about them, have changed."""
    group.version += 1
    group.bounds = bounds_of(group)


def bounds_of(group: Group) -> Bounds:
    """Bounds that the members of a group put on another member."""
    timings = [timing_of(member) for member in group.members.values()]
    busy: dict[NodeId, float] = {}
    for timing, member in zip(timings, group.members.values(), strict=True):
        for node in member.nodes.get(ROLLOUT, ()):
            busy[node] = busy.get(node, 0.0) + timing.rollout_s
    return Bounds(
        allowed_s=min((timing.allowed_s for timing in timings), default=inf),
        solo_s=max((timing.solo_s for timing in timings), default=0.0),
        train_s=sum(timing.train_s for timing in timings),
        are_known=all(member.cycle is not None for member in group.members.values()),
        rollout_s=min(busy.values(), default=0.0),
    )


def leave(cluster: Cluster, job: str) -> list[NodeId]:
    """Remove a job from its group or from the waiting jobs.

    Returns: the nodes that no longer belong to a group.
    """
    cluster.waiting = [member for member in cluster.waiting if member.job != job]
    name = cluster.placed.pop(job, "")
    if not name:
        return []
    group = cluster.groups[name]
    del group.members[job]
    _changed(group)
    released = _release_unused(cluster, group)
    if not group.members:
        del cluster.groups[name]
    return released


def repin(
    cluster: Cluster, job: str, needs: dict[Pool, Need], nodes: dict[Pool, list[NodeId]]
) -> list[NodeId]:
    """Pin a member to other nodes, which are those of its group or free ones.

    Returns: the nodes that no longer belong to a group.
    """
    group = group_of(cluster, job)
    member = group.members[job]
    member.needs = needs
    _pin(cluster, group, member, nodes)
    return _release_unused(cluster, group)


def _release_unused(cluster: Cluster, group: Group) -> list[NodeId]:
    used = {name for m in group.members.values() for names in m.nodes.values() for name in names}
    released = []
    for pool, names in list(group.nodes.items()):
        unused = [name for name in names if name not in used]
        if unused:
            group.nodes[pool] = [name for name in names if name in used]
            released += unused
        if not group.nodes[pool]:
            del group.nodes[pool]
    for name in released:
        host = cluster.hosts[name]
        host.group = ""
        _release(cluster, host)
    return released


def set_cycle(cluster: Cluster, job: str, cycle: Cycle) -> None:
    """Set a job's measured cycle, which opens its group to others."""
    group = group_of(cluster, job)
    member = group.members[job]
    before = member.cycle.num_optim_steps if member.cycle else 1
    steps = member.iterations * before + member.num_optim_steps
    member.iterations, member.num_optim_steps = divmod(steps, cycle.num_optim_steps)
    is_first = member.cycle is None
    member.cycle = cycle
    member.recent_s = []
    if is_first:
        reckon_alone(member)
    elif before != cycle.num_optim_steps:
        member.alone_s *= before / cycle.num_optim_steps
    else:
        member.has_drifted = member.has_drifted or member.iterations >= LEAST_ITERATIONS
    group.is_closed = False
    _changed(group)


def iterated(
    member: Member, now_s: float, began_s: float, lag_s: float, slowdown: float = 1.0
) -> None:
    """Record that a member has finished an iteration.

    Time that neighbours may have cost is attributed to them. Such an iteration counts with the
    cycle's usual length, unless it is longer than the neighbours can explain.

    Args: began_s: when the job's first operation was ready.
          lag_s: seconds since then for which other jobs or switches delayed the job.
          slowdown: upper bound on how much neighbours may have slowed its phases.
    """
    timing = timing_of(member)
    since_s = member.iterated_s if member.iterations else began_s
    alone_s = now_s - since_s - (lag_s - member.lag_s)
    if slowdown > 1 and member.cycle is not None:
        alone_s = min(alone_s, max(member.cycle.period_s, alone_s / slowdown))
    if not is_measurable(member) or alone_s <= 0:
        member.alone_s += member.cycle.period_s if member.cycle is not None else 0.0
    else:
        member.alone_s += min(alone_s, LONGEST * timing.solo_s)
        member.recent_s = [*member.recent_s[1 - LONGEST_TREND :], alone_s]
    member.num_late += now_s - since_s > timing.allowed_s * (1 + ROUNDING)
    member.iterations += 1
    member.iterated_s = now_s
    member.lag_s = lag_s


def is_measurable(member: Member) -> bool:
    """Whether a member's iterations tell what they would have taken alone.

    Overlapping phases wait at the same time, so the time such a job takes alone is unknown.
    """
    timing = timing_of(member)
    return member.cycle is not None and timing.gap_s >= -ROUNDING * timing.solo_s


def trend_of(member: Member) -> float | None:
    """Estimate the period of a member's cycle from its last iterations. None: they show no change.

    They do if their mean is certainly further from the cycle than `DRIFTS`, given how much
    successive iterations differ.
    """
    recent_s, cycle = member.recent_s, member.cycle
    if cycle is None or len(recent_s) < min(TREND):
        return None
    spread_s = fmean(abs(b - a) for a, b in pairwise(recent_s)) / SPREAD
    for count, errors in TREND.items():
        if count <= len(recent_s):
            mean_s = fmean(recent_s[-count:])
            margin_s = DRIFTS * cycle.period_s + errors * spread_s / sqrt(count)
            if abs(mean_s - cycle.period_s) > margin_s:
                return mean_s
    return None


def scaled(cycle: Cycle, period_s: float) -> Cycle:
    """Return a cycle of the same shape with another period."""
    factor = period_s / cycle.period_s
    segments = [
        replace(
            segment,
            offset_s=segment.offset_s * factor,
            duration_s=segment.duration_s * factor,
            worst_s=segment.worst_s * factor,
        )
        for segment in cycle.segments
    ]
    return replace(cycle, period_s=period_s, segments=segments)


def reckon_alone(member: Member) -> None:
    """Estimate from the cycle how long a member's unmeasured iterations would have taken alone."""
    member.alone_s = member.iterations * member.cycle.period_s if member.cycle else 0.0


def group_of(cluster: Cluster, job: str) -> Group:
    return cluster.groups[cluster.placed[job]]


# --- the whole -----------------------------------------------------------------------------------


def cost(cluster: Cluster) -> float:
    """Total $/h of the nodes that belong to groups."""
    return sum(host.price_per_hour for host in cluster.hosts.values() if host.group)


def copy(cluster: Cluster) -> Cluster:
    """Copy the cluster so that the copy can be changed independently."""
    return replace(
        cluster,
        hosts={name: shallow(host) for name, host in cluster.hosts.items()},
        groups={name: _copy_group(group) for name, group in cluster.groups.items()},
        free={pool: list(names) for pool, names in cluster.free.items()},
        placed=dict(cluster.placed),
        waiting=[shallow(member) for member in cluster.waiting],
    )


def _copy_group(group: Group) -> Group:
    members = {job: shallow(member) for job, member in group.members.items()}
    return replace(group, members=members, nodes=dict(group.nodes))


def validate(cluster: Cluster) -> None:
    """Check all invariants. Raises: AssertionError: names the invariant and the entity."""
    for pool, names in cluster.free.items():
        of_pool = [host for host in cluster.hosts.values() if host.pool == pool]
        free = [h.node for h in of_pool if h.is_up and not h.group and not h.leaving]
        assert names == sorted(free), f"free nodes of {pool}: {names}"
    listed = {name for names in cluster.free.values() for name in names}
    for host in cluster.hosts.values():
        is_taken = host.group or host.leaving or not host.is_up
        assert is_taken or host.node in listed, f"{host.node} should be listed as free"
        if host.group:
            group_nodes = cluster.groups[host.group].nodes[host.pool]
            assert host.node in group_nodes, f"{host.node} is missing in group {host.group}"
    for name, group in cluster.groups.items():
        assert name == group.name
        _validate_group(cluster, group)
    members = {job: name for name, group in cluster.groups.items() for job in group.members}
    assert members == cluster.placed, "`placed` differs from the members of the groups"
    waiting = [member.job for member in cluster.waiting]
    assert len(set(waiting)) == len(waiting), "a job waits twice"
    assert not set(waiting) & set(members), "a placed job is waiting"


def _validate_group(cluster: Cluster, group: Group) -> None:
    assert group.members, f"{group.name} has no members"
    assert not group.is_closed or len(group.members) == 1, f"{group.name} is closed and shared"
    assert group.bounds in (None, bounds_of(group)), f"{group.name}: {group.bounds} are out of date"
    pinned: dict[Pool, set[NodeId]] = {}
    for job, member in group.members.items():
        assert job == member.job
        for pool, need in member.needs.items():
            names = member.nodes[pool]
            assert len(set(names)) == len(names) >= need.num_nodes, f"{job} is pinned to {names}"
            pinned.setdefault(pool, set()).update(names)
        assert member.nodes.keys() == member.needs.keys(), (
            f"{job} is pinned to other pools than it needs"
        )
    nodes = {pool: set(names) for pool, names in group.nodes.items()}
    assert nodes == pinned, f"{group.name} has {nodes}, but its members use {pinned}"
    for pool, names in group.nodes.items():
        assert len(set(names)) == len(names), f"{group.name}: a node twice in {names}"
        for name in names:
            host = cluster.hosts[name]
            assert (host.group, host.pool) == (group.name, pool), (
                f"{name} belongs to {host.group} and pool {host.pool}"
            )
