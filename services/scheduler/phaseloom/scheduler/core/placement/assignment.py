"""Assignment of jobs to node groups, and of their deployments to devices of the group's nodes.

On each of its nodes, a deployment gets the devices with the fewest other deployments.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import NodeLost, NodeUp
from phaseloom.common.contract.ids import JobKey, NodeId
from phaseloom.common.contract.specs import DeploymentSpec, Residency, SchedulerConfig
from phaseloom.scheduler.core.devices import devices
from phaseloom.scheduler.core.planning import admission, groups
from phaseloom.scheduler.core.planning.weave import company
from phaseloom.scheduler.core.policies.registry import MULTIPLEXING, ORDERING, PLACEMENT
from phaseloom.scheduler.core.policies.sharing_view import rollouts_beside
from phaseloom.scheduler.core.state.cluster import (
    Cluster,
    Decision,
    Group,
    Host,
    Limits,
    Member,
    Placed,
    Placement,
    Waits,
)
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.node import Closing, Leave
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import WpgState
from phaseloom.scheduler.core.state.wpg import RankAssignment
from phaseloom.scheduler.core.wpgs import wpgs

_MAX_NAMED = 8
"""Maximum number of other jobs that a job's status names. The cost is quadratic in this number."""

# --- what there is -------------------------------------------------------------------------------


def configured(step: Step, config: SchedulerConfig) -> None:
    cluster = step.state.cluster
    cluster.limits = Limits(
        config.max_group_jobs,
        config.duty_limit,
        config.switch_s,
        config.slo_percentile,
        _counts_on_space(config),
    )
    for host in cluster.hosts.values():
        host.rollout_slowdowns = _rollout_slowdowns(step, host.node)
    step.follow_up(FollowUp.PLACE)


def _counts_on_space(config: SchedulerConfig) -> bool:
    """Whether placement counts on jobs running side by side.

    That needs a placement policy that can, measured slowdowns, and a multiplexing policy that
    shares as soon as it gains.
    """
    return (
        PLACEMENT[config.placement].counts_on_space
        and MULTIPLEXING[config.multiplexing].is_eager
        and not ORDERING[config.ordering].is_strict
        and config.slowdowns is not None
    )


def _rollout_slowdowns(step: Step, name: NodeId) -> tuple[float, ...]:
    """Worst-case slowdowns of rollouts that share a device of the node, by number of neighbours."""
    config, node = step.state.config, step.state.nodes.get(name)
    if config is None or config.slowdowns is None or node is None:
        return ()
    if not _counts_on_space(config) or node.residency is Residency.JOB:
        return ()
    return rollouts_beside(
        config.slowdowns, min((device.units for device in node.devices), default=1)
    )


def node_up(step: Step, event: NodeUp) -> None:
    node = step.node(event.node)
    if node.revision != event.revision or not node.is_up:
        return  # sent by an earlier incarnation of the agent, or by one that has ended since
    host = Host(
        node=event.node,
        pool=event.pool,
        num_devices=len(event.devices),
        host_bytes=event.host_memory_bytes,
        price_per_hour=event.price_per_hour,
        backends=event.backends,
        device_bytes=min((device.memory_bytes for device in event.devices), default=0),
        rollout_slowdowns=_rollout_slowdowns(step, event.node),
    )
    if event.node not in step.state.cluster.hosts:
        step.state.cluster.joined_s = step.now_s
    groups.host_up(step.state.cluster, host)
    leave = step.state.closing.get(event.node)
    if leave is not None and leave.is_drained:
        step.state.close_node(event.node, Leave(Closing.DRAIN, is_drained=True))
        groups.host_down(step.state.cluster, event.node)
    elif leave is not None:
        step.state.reopen_node(event.node)


def node_lost(step: Step, event: NodeLost) -> None:
    node = step.state.nodes.get(event.node)
    if node is not None and not node.is_up:
        groups.host_down(step.state.cluster, event.node)


def policy_of(step: Step) -> Placement:
    return PLACEMENT[step.config.placement]


# --- a job gets a place --------------------------------------------------------------------------


def seek(step: Step, job: Job, member: Member) -> Decision:
    """Decide on a placement for a waiting job."""
    cluster = step.state.cluster
    groups.set_end(cluster, member, job.spec.duration_s)
    return admission.decide(cluster, member, policy_of(step))


def put(step: Step, job: Job, member: Member, placed: Placed) -> Group:
    """Add a job to a group and start its deployments."""
    group = groups.join(step.state.cluster, member, placed)
    job.placement_reason = placed.reason
    count_iterations(step, job)
    _note_peers(step, group)
    for deployment in step.deployments_of(job):
        wpgs.place(step, deployment, assign(step, deployment.spec, member))
    return group


def count_iterations(step: Step, job: Job) -> None:
    """Set a job's number of iterations if its spec declares how long it would run alone.

    The first known cycle decides: a job whose iterations get longer later does not run fewer of
    them.
    """
    cluster = step.state.cluster
    member = groups.group_of(cluster, str(job.key)).members[str(job.key)]
    if not member.num_iterations:
        member.num_iterations = groups.iterations_of(member.cycle, job.spec.duration_s)


def stepped(step: Step, job: JobKey) -> bool:
    """Count an `optim_step` of a job. The last one of an iteration ends the iteration.

    Before the cycle is known, each step counts as an iteration; `groups.set_cycle` corrects that.

    Returns: whether an iteration has ended.
    """
    cluster = step.state.cluster
    name = cluster.placed.get(str(job))
    if name is None:
        return False
    member = cluster.groups[name].members[str(job)]
    member.num_optim_steps += 1
    if member.num_optim_steps < (member.cycle.num_optim_steps if member.cycle else 1):
        return False
    member.num_optim_steps = 0
    progress = step.job(job).progress
    slowdown = company.most_slowdown(cluster, cluster.groups[name], member)
    groups.iterated(member, step.now_s, progress.began_s, progress.lag_s, slowdown)
    return True


def move(step: Step, job: Job, placed: Placed) -> None:
    """Move a job, and its deployments with their state, to another placement."""
    cluster = step.state.cluster
    old = groups.group_of(cluster, str(job.key))
    member = old.members[str(job.key)]
    released = groups.leave(cluster, member.job)
    groups.join(cluster, member, placed)
    note_free(step, [name for name in released if not cluster.hosts[name].group])
    step.job_changed(member.job)
    _note_peers(step, old)
    _note_peers(step, groups.group_of(cluster, member.job))
    step.notify("job moved", f"{describe(step, job)}: {placed.reason}", member.job)
    job.placement_reason = placed.reason
    _move_all(step, job, member)
    step.follow_up(FollowUp.PLACE)


def _move_all(step: Step, job: Job, member: Member) -> None:
    """Move the deployments that are neither on the job's nodes nor on their way there."""
    for deployment in step.deployments_of(job):
        pins = set(member.nodes.get(deployment.spec.pool, []))
        if not pins.issuperset(assigned.node for assigned in deployment.destination):
            wpgs.move(step, deployment, assign(step, deployment.spec, member))


def release(step: Step, job: Job) -> None:
    """Release the nodes of a job that has ended, or drop it from the waiting jobs."""
    cluster = step.state.cluster
    name = str(job.key)
    if name in cluster.placed:
        _note_peers(step, groups.group_of(cluster, name))
        step.state.set_replan_due()
        step.follow_up(FollowUp.REPLAN)
    note_free(step, groups.leave(cluster, name))
    step.follow_up(FollowUp.PLACE)


def note_free(step: Step, nodes: list[NodeId]) -> None:
    """Update the pool of released nodes: a node may have come back in another pool while a group
    held it."""
    cluster = step.state.cluster
    for name in nodes:
        host, pool = cluster.hosts[name], step.node(name).pool
        if host.is_up and host.pool != pool:
            groups.host_up(cluster, replace(host, pool=pool))


def assign(step: Step, spec: DeploymentSpec, member: Member) -> list[RankAssignment]:
    """Choose nodes and devices for a deployment: the least loaded of its job's nodes."""
    return _assign(step, spec, member.nodes[spec.pool])


def _assign(step: Step, spec: DeploymentSpec, nodes: list[NodeId]) -> list[RankAssignment]:
    if spec.num_nodes < len(nodes):
        load = {name: len(devices.placed_on(step.node(name))) for name in nodes}
        chosen = set(sorted(nodes, key=lambda name: load[name])[: spec.num_nodes])
        nodes = [name for name in nodes if name in chosen]
    num_devices = groups.devices_per_node(spec)
    return [RankAssignment(name, _least_loaded(step, name, num_devices)) for name in nodes]


def _least_loaded(step: Step, node: NodeId, num_devices: int) -> list[int]:
    """Choose the devices of a node with the fewest deployments."""
    slots = devices.slots_on(step.node(node))
    slots.sort(key=lambda slot: len(slot.placed))
    return sorted(slot.device for slot in slots[:num_devices])


# --- deployments that come and go while their job runs --------------------------------------------


def room_for(step: Step, job: Job, spec: DeploymentSpec) -> list[RankAssignment] | ErrorInfo:
    """Find room for another deployment of a placed job.

    Tries the job's own nodes, then other nodes of its group, then free nodes.
    """
    cluster = step.state.cluster
    needs = groups.needs_of([spec])
    extra = Member(job=str(job.key), slo=0.0, needs=needs)
    nowhere = admission.fits_nowhere(cluster, extra)
    if isinstance(nowhere, Waits):
        return ErrorInfo(
            Code.UNAVAILABLE,
            f"no node can take the deployment: {nowhere.reason}",
            field="spec.pool",
            remedy=f"start a node of that pool; known pools: {known_pools(cluster)}",
        )
    if nowhere is not None:
        return ErrorInfo(
            nowhere.error.code,
            nowhere.error.message,
            field="spec" + (nowhere.error.field.removeprefix(admission.DEPLOYMENTS) or ".layout"),
            remedy=nowhere.error.remedy,
        )
    group = groups.group_of(cluster, str(job.key))
    job_nodes = group.members[str(job.key)].nodes.get(spec.pool, [])
    among = admission.nodes_among(cluster, group, extra, first=job_nodes, is_additional=True)
    if among is None:
        return ErrorInfo(
            Code.RESOURCE_EXHAUSTED,
            f"every suitable node of pool {spec.pool!r} is used by other jobs",
            field="spec.pool",
            remedy="try again when one of those jobs has ended",
        )
    return _assign(step, spec, among[spec.pool])


def extend(step: Step, job: Job, deployment: Deployment, where: list[RankAssignment]) -> None:
    """Place an additional deployment of a job.

    Args: where: the result of `room_for`.
    """
    wpgs.place(step, deployment, where)
    repin(step, job)


def repin(step: Step, job: Job) -> None:
    """Update a job's nodes after its deployments have changed.

    Nodes that the job no longer uses are released. If the job is still waiting, its needs are
    updated.
    """
    cluster = step.state.cluster
    name = str(job.key)
    if name not in cluster.placed:
        for member in cluster.waiting:
            if member.job == name:
                member.needs = groups.needs_of(job.spec.deployments)
        step.follow_up(FollowUp.PLACE)
        return
    alive = [d for d in step.deployments_of(job) if d.wpg.state is not WpgState.STOPPED]
    if not alive:
        return
    nodes: dict[str, list[NodeId]] = {}
    for deployment in alive:
        pool = deployment.spec.pool
        names = nodes.setdefault(pool, [])
        names += [
            assigned.node for assigned in deployment.destination if assigned.node not in names
        ]
    needs = groups.needs_of(d.spec for d in alive)
    note_free(step, groups.repin(cluster, name, needs, nodes))
    step.job_changed(name)
    step.follow_up(FollowUp.PLACE)


# --- in words ------------------------------------------------------------------------------------


def describe(step: Step, job: Job) -> str:
    """Describe a job's placement: its nodes, the other jobs there and the reason. Empty if it has
    none.

    Jobs of other tenants are counted but not named.
    """
    cluster = step.state.cluster
    name = cluster.placed.get(str(job.key))
    if name is None:
        return ""
    group = cluster.groups[name]
    member = group.members[str(job.key)]
    nodes = sorted(member.nodes.items())
    place = "; ".join(f"{pool}: {', '.join(names)}" for pool, names in nodes)
    reason = f" (reason when placed: {job.placement_reason})" if job.placement_reason else ""
    measured = "" if member.cycle else ", its cycle is being measured"
    return f"group {name}, {place}{_others(job, group.members)}{reason}{measured}"


def _note_peers(step: Step, group: Group) -> None:
    """Republish the members' statuses, which name the other jobs, because a job comes or goes."""
    if len(group.members) <= _MAX_NAMED + 1:
        for name in group.members:
            step.job_changed(name)


def _others(job: Job, members: Collection[str]) -> str:
    if len(members) > _MAX_NAMED:
        return f", with {_MAX_NAMED} or more other jobs"
    prefix = f"{job.key.tenant}."
    own_tenant = [
        m.removeprefix(prefix) for m in members if m.startswith(prefix) and m != str(job.key)
    ]
    num_foreign = sum(not m.startswith(prefix) for m in members)
    named = [*own_tenant, *([f"{num_foreign} of other tenants"] if num_foreign else [])]
    return f", with {', '.join(named)}" if named else ", alone"


def known_pools(cluster: Cluster) -> str:
    return ", ".join(sorted({host.pool for host in cluster.hosts.values()})) or "none"
