"""Node groups: sets of jobs and the nodes that they share; functions on what placement sees.

A job that has a place is a member of one group and pinned to nodes of it; a node belongs to one
group or is free. The nodes of a group are exactly those that its members are pinned to: with the
last member of a node the node is released, with the last of a group the group (WEAVE §5.3).
A node that is down keeps its group, whose members wait for it; released, it is free once it is up.

Usable without a core. Lists of nodes are replaced and never changed in place, so that copies share
them. Cost: `join` and `leave` are linear in the group, `copy` in the cluster.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from copy import copy as shallow
from math import inf

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
"""A change of a job's cycle counts as drift from so many iterations on; before, it may be that its
owner's estimate was wrong."""
TREND = 3
"""So many last iterations of a job must all be longer than its cycle says, or all shorter, for the
cycle to follow them."""
DRIFTS = 0.05
"""The least share of the cycle by which each of them must differ from it."""
LONGEST = 2.0
"""An iteration counts for at most so many times its cycle: what is longer was held up by a fault or
a pause, which an SLO does not excuse."""
ROUNDING = 1e-6
"""A difference of less than this share of an iteration is an error of rounding."""

# --- what a job needs ----------------------------------------------------------------------------


def member_of(job: JobKey, spec: JobSpec, submitted_s: float = 0.0) -> Member:
    """The job as placement sees it, without a place."""
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
    """Number of iterations of a job that takes `duration_s` alone; 0: not known."""
    if cycle is None or not duration_s:
        return 0
    return max(1, round(duration_s / cycle.worst_period_s))


def needs_of(specs: Iterable[DeploymentSpec]) -> dict[Pool, Need]:
    """Needs of a job's deployments by pool: on the same nodes, their host memory added up."""
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
    """Note when a job would end if it were placed now.

    Args: duration_s: its duration alone; 0: not known.
    """
    slowdown = member.slo or 1 / max(1e-9, 1 - cluster.limits.duty_limit)
    member.ends_s = cluster.now_s + duration_s * slowdown if duration_s else 0.0


# --- hosts ---------------------------------------------------------------------------------------


def host_up(cluster: Cluster, host: Host) -> None:
    """Note that a node came, or came back. A group that holds it keeps it."""
    old = cluster.hosts.get(host.node)
    group = old.group if old is not None else ""
    if old is not None:
        _take(cluster, old)
    # A group knows its nodes by pool: as long as one holds it, it is of the pool that it was.
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
    """Take a node from the free ones, if it is one of them."""
    free = cluster.free.get(host.pool, [])
    index = bisect_left(free, host.node)
    if index < len(free) and free[index] == host.node:
        del free[index]


def hold(cluster: Cluster, node: NodeId, deployment: str) -> None:
    """Keep a node from becoming free until a deployment, which is to leave it, has left."""
    host = cluster.hosts[node]
    _take(cluster, host)
    host.leaving = [*host.leaving, deployment]


def end_hold(cluster: Cluster, node: NodeId, deployment: str) -> None:
    """End a deployment's `hold` on a node: it has left, or stays after all."""
    host = cluster.hosts[node]
    if deployment in host.leaving:
        host.leaving = [name for name in host.leaving if name != deployment]
        _release(cluster, host)


def _release(cluster: Cluster, host: Host) -> None:
    if host.is_up and not host.group and not host.leaving:
        insort(cluster.free.setdefault(host.pool, []), host.node)


# --- members -------------------------------------------------------------------------------------


def join(cluster: Cluster, member: Member, placed: Placed) -> Group:
    """Give a job its place; the free nodes of that place become the group's.

    The first member of a group without a known cycle closes it, the next one opens it.
    """
    assert member.job not in cluster.placed, f"{member.job} has a place"
    cluster.waiting = [other for other in cluster.waiting if other.job != member.job]
    group = cluster.groups.get(placed.group)
    if group is None:
        assert not placed.group, f"{placed.group} is no group"
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
    """Make two groups of different pools one: `group`, whose members come first. No node has other
    members by that. They stay one while any of the members does."""
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
            assert host.group in ("", group.name), f"{name} is of {host.group}, not {group.name}"
            if not host.group:
                _take(cluster, host)
                host.group = group.name
                group.nodes[pool] = [*group.nodes.get(pool, []), name]


def _changed(group: Group) -> None:
    """Note that the members of a group, or what is known of them, have changed."""
    group.version += 1
    group.bounds = bounds_of(group)


def bounds_of(group: Group) -> Bounds:
    """What the members of a group leave to one more."""
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
    """Take a job's place away, or its place among the waiting jobs.

    Returns: the nodes that no group has any more.
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
    """Pin a member to more or fewer nodes: those of its group, or free ones.

    Returns: the nodes that no group has any more.
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
        gone = [name for name in names if name not in used]
        if gone:
            group.nodes[pool] = [name for name in names if name in used]
            released += gone
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
    """Note that a member has finished an iteration.

    What company may have cost counts as company's: such an iteration takes no longer alone than the
    cycle says, unless it is longer than company explains.

    Args: began_s: when the job's first operation was ready.
          lag_s: seconds since then for which others, or a switch, have kept the job from running.
          slowdown: how many times as long as alone its phases may have taken beside others.
    """
    timing = timing_of(member)
    since_s = member.iterated_s if member.iterations else began_s
    alone_s = now_s - since_s - (lag_s - member.lag_s)
    if slowdown > 1 and member.cycle is not None:
        alone_s = min(alone_s, max(member.cycle.period_s, alone_s / slowdown))
    # The waits of phases that overlap pass at once, so what such a job takes alone is not known.
    overlaps = timing.gap_s < -ROUNDING * timing.solo_s
    if member.cycle is None or overlaps or alone_s <= 0:
        member.alone_s += timing.solo_s
    else:
        worst_s = alone_s * timing.solo_s / member.cycle.period_s
        member.alone_s += min(worst_s, LONGEST * timing.solo_s)
        member.recent_s = [*member.recent_s[1 - TREND :], alone_s]
    member.num_late += now_s - since_s > timing.allowed_s * (1 + ROUNDING)
    member.iterations += 1
    member.iterated_s = now_s
    member.lag_s = lag_s


def trend_of(member: Member) -> Cycle | None:
    """A member's cycle as its last iterations were; None where these were as the cycle says.

    Of iterations that are all longer, the shortest counts, and of shorter ones the longest. Where
    iterations vary by themselves, as their worst case tells, drift has to be larger to be seen.
    """
    cycle = member.cycle
    if cycle is None or len(member.recent_s) < TREND:
        return None
    least = max(DRIFTS, (cycle.worst_period_s / cycle.period_s - 1) / 2)
    shortest, longest = (pick(member.recent_s) / cycle.period_s for pick in (min, max))
    if shortest > 1 + least:
        return _scaled(cycle, shortest)
    if longest < 1 - least:
        return _scaled(cycle, longest)
    return None


def _scaled(cycle: Cycle, factor: float) -> Cycle:
    segments = [
        replace(
            segment,
            offset_s=segment.offset_s * factor,
            duration_s=segment.duration_s * factor,
            worst_s=segment.worst_s * factor,
        )
        for segment in cycle.segments
    ]
    return replace(cycle, period_s=cycle.period_s * factor, segments=segments)


def reckon_alone(member: Member) -> None:
    """Set what a member's iterations so far would have taken alone, by its present cycle: what each
    of them took was not measured."""
    member.alone_s = member.iterations * timing_of(member).solo_s


def group_of(cluster: Cluster, job: str) -> Group:
    return cluster.groups[cluster.placed[job]]


# --- the whole -----------------------------------------------------------------------------------


def cost(cluster: Cluster) -> float:
    """$/h of all nodes that belong to groups."""
    return sum(host.price_per_hour for host in cluster.hosts.values() if host.group)


def copy(cluster: Cluster) -> Cluster:
    """A copy that may be changed while the original stays as it is."""
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
    """Raises: AssertionError: names the invariant and the entity."""
    for pool, names in cluster.free.items():
        of_pool = [host for host in cluster.hosts.values() if host.pool == pool]
        free = [h.node for h in of_pool if h.is_up and not h.group and not h.leaving]
        assert names == sorted(free), f"free nodes of {pool}: {names}"
    listed = {name for names in cluster.free.values() for name in names}
    for host in cluster.hosts.values():
        is_taken = host.group or host.leaving or not host.is_up
        assert is_taken or host.node in listed, f"{host.node} is not free"
        if host.group:
            own = cluster.groups[host.group].nodes[host.pool]
            assert host.node in own, f"{host.node} is not of {host.group}"
    for name, group in cluster.groups.items():
        assert name == group.name
        _validate_group(cluster, group)
    members = {job: name for name, group in cluster.groups.items() for job in group.members}
    assert members == cluster.placed, "not every job that has a place is known to"
    waiting = [member.job for member in cluster.waiting]
    assert len(set(waiting)) == len(waiting), "a job waits twice"
    assert not set(waiting) & set(members), "a job that has a place waits for one"


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
        assert member.nodes.keys() == member.needs.keys(), f"{job} is pinned beside its needs"
    nodes = {pool: set(names) for pool, names in group.nodes.items()}
    assert nodes == pinned, f"{group.name} has {nodes}, of which its members use {pinned}"
    for pool, names in group.nodes.items():
        assert len(set(names)) == len(names), f"{group.name}: a node twice in {names}"
        for name in names:
            host = cluster.hosts[name]
            assert (host.group, host.pool) == (group.name, pool), f"{name} is of another group"
