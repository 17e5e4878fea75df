"""Evacuation of nodes that are drained on request or do not come back.

A drained node accepts nothing new. Each of its deployments moves, with its state, to another node
of the same pool as soon as there is room: first on the nodes of its own group, then on free nodes,
then on the nodes that a new job would get. The node stays drained until an operator undoes it,
even if its agent restarts or is lost.

If a node is away for longer than a grace period, deployments that can be rebuilt without it move
elsewhere: those without a seal, and those with a copy of their seal on another node. The others
wait for the node. Once the node counts as permanently gone, data that only it had is lost. Jobs
that need such data fall back as a whole to their last checkpoint, or fail. If the node comes back
later, it is instructed to delete that data.
"""

from __future__ import annotations

from msgspec.structs import replace

from phaseloom.common.contract.api import NodeStatus
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import NodeDrainRequested
from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.durability import holders, replicas
from phaseloom.scheduler.core.placement import assignment, repack
from phaseloom.scheduler.core.planning import admission, groups
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.state.cluster import Member
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.node import Closing, Leave, Node
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import WpgState
from phaseloom.scheduler.core.wpgs import moves, wpgs


def requested(step: Step, event: NodeDrainRequested) -> None:
    """Handle an operator's request: drain a node, undo a drain, or write the node off."""
    node = step.state.nodes.get(event.node)
    error = _refusal(step, node, event)
    if node is None or error is not None:
        step.emit(outputs.Answer(event.request, error=error))
        return
    if event.undo:
        _undo(step, node)
    else:
        _close(step, node, Closing.GONE if event.gone else Closing.DRAIN)
        go_on(step)
    step.emit(outputs.Answer(event.request, node=status(step, node.node)))


def _refusal(step: Step, node: Node | None, event: NodeDrainRequested) -> ErrorInfo | None:
    if node is None:
        return ErrorInfo(
            Code.NOT_FOUND,
            f"node {event.node} is not known",
            field="node",
            remedy=f"known nodes: {', '.join(sorted(step.state.nodes)) or 'none'}",
        )
    if event.gone and node.is_up:
        return ErrorInfo(
            Code.FAILED_PRECONDITION,
            f"node {node.node} is up",
            field="gone",
            remedy="drain it instead; declare it gone only while it is down",
        )
    return None


def _close(step: Step, node: Node, reason: Closing) -> None:
    leave = step.state.closing.get(node.node)
    was_drained = leave is not None and leave.is_drained
    is_requested = reason is Closing.DRAIN
    if is_requested and not was_drained:
        step.notify("node draining", "on request", node.node)
    if leave is not None and (is_requested or leave.reason is reason):
        if is_requested:
            leave.is_drained = True
        return
    step.state.close_node(node.node, Leave(reason, is_drained=was_drained or is_requested))
    step.follow_up(FollowUp.PLACE)
    if is_requested:
        groups.host_down(step.state.cluster, node.node)
    elif reason is Closing.GONE:
        step.notify("node gone", "it will not come back; data that only it had is lost", node.node)
        _write_off(step, node.node)


def _undo(step: Step, node: Node) -> None:
    leave = step.state.closing.get(node.node)
    if leave is None or not leave.is_drained:
        return
    leave.is_drained = False
    step.notify("node no longer draining", "on request", node.node)
    if leave.reason is not Closing.DRAIN:
        return  # the node is away: it may be used again once it is back
    step.state.reopen_node(node.node)
    if node.is_up:
        cluster = step.state.cluster
        groups.host_up(cluster, replace(cluster.hosts[node.node], pool=node.pool))
        step.follow_up(FollowUp.PLACE)


def missed(step: Step, closing: str, name: str, revision: int) -> None:
    """Close a node if it has been away since this timer was set.

    Args: what: the `Closing` for which the timer was set.
    """
    node = step.state.nodes.get(name)
    if node is None or node.is_up or node.revision != revision:
        return
    leave = step.state.closing.get(node.node)
    if closing == Closing.GONE or leave is None or leave.reason is Closing.DRAIN:
        _close(step, node, Closing(closing))


def go_on(step: Step) -> None:
    """Move deployments off the closed nodes if there is room, and start replacement copies.

    Called whenever there may be new room.
    """
    for name, leave in sorted(step.state.closing.items()):
        for job in _jobs_on(step, name):
            _leave(step, job, name, leave.reason)
    replicas.request_copies(step)
    for name, leave in sorted(step.state.closing.items()):
        is_in_use = bool(_deployments_on(step, name)) or bool(
            replicas.describe_needed_copies(step, name)
        )
        if not leave.is_reported and not is_in_use:
            leave.is_reported = True
            step.notify("node is empty", f"nothing is left on it ({leave.reason})", name)


def _jobs_on(step: Step, node: NodeId) -> list[Job]:
    cluster = step.state.cluster
    group = cluster.groups.get(cluster.hosts[node].group)
    members = [] if group is None else group.members.values()
    pinned = [m.job for m in members if any(node in names for names in m.nodes.values())]
    return [step.state.jobs[name] for name in pinned]


def _deployments_on(step: Step, node: NodeId) -> list[Deployment]:
    """Deployments that are on the node or moving to it."""
    return [
        deployment
        for deployment in step.state.deployments.values()
        if deployment.wpg.state is not WpgState.STOPPED
        and (
            node in deployment.nodes
            or any(assigned.node == node for assigned in deployment.destination)
        )
    ]


def _write_off(step: Step, node: NodeId) -> None:
    """Write off the seals and versions on a node. Jobs that need data that only it had fall
    back."""
    for deployment in step.state.deployments.values():
        if deployment.wpg.state is WpgState.STOPPED:
            continue
        had_seal = deployment.durability.seal_seq > 0
        if node in holders.nodes_with(deployment) and node not in deployment.nodes:
            holders.forget_at(step, deployment, node)  # the node is told so once it is back
        deployment.durability.set_replicas(
            [
                [name for name in holders.nodes_with_part(deployment, index) if name != node]
                for index in range(len(deployment.wpg.assignments) if had_seal else 0)
            ]
        )
        deployment.move.keep(deployment.move.stale_holders, but=[node])
        if had_seal and not all(deployment.durability.replicas):
            error = ErrorInfo(
                Code.DATA_LOSS,
                f"node {node} is gone, and no other node has the seal of {deployment.name}",
                remedy="submit jobs with durability `remote` if nodes may be lost permanently",
                details={"node": node, "deployment": deployment.name},
            )
            step.follow_up(FollowUp.FALL_BACK, deployment.job_name, error)


def _leave(step: Step, job: Job, node: NodeId, reason: Closing) -> None:
    """Move a job's deployments off the node if other nodes have room."""
    deployments = [
        deployment
        for deployment in step.deployments_of(job)
        if any(assigned.node == node for assigned in deployment.destination)
        and deployment.wpg.state is not WpgState.STOPPED
    ]
    if not deployments:
        assignment.repin(step, job)
        return
    if reason is Closing.AWAY and not all(
        _needs_no(node, deployment) for deployment in deployments
    ):
        return
    if not _leave_within_group(step, job, node, deployments):
        _leave_group(step, job, node)


def _needs_no(node: NodeId, deployment: Deployment) -> bool:
    parts = range(len(deployment.wpg.assignments) if deployment.durability.seal_seq else 0)
    return all(set(holders.nodes_with_part(deployment, index)) - {node} for index in parts)


def _leave_within_group(step: Step, job: Job, node: NodeId, deployments: list[Deployment]) -> bool:
    """Move a job's deployments to other nodes of its group, or to free nodes that join it."""
    cluster = step.state.cluster
    group = groups.group_of(cluster, str(job.key))
    member = group.members[str(job.key)]
    pool = cluster.hosts[node].pool
    remaining = [name for name in member.nodes[pool] if name != node]
    need = Member(job=member.job, slo=0.0, needs={pool: member.needs[pool]})
    among = admission.nodes_among(cluster, group, need, first=remaining)
    if among is None:
        return False
    chosen = [*remaining, *(name for name in among[pool] if name not in remaining)]
    released = groups.repin(cluster, member.job, member.needs, {**member.nodes, pool: chosen})
    assignment.note_free(step, released)
    step.notify("job moved", f"moved off {node} to {', '.join(chosen)}", member.job)
    for deployment in deployments:
        wpgs.move(step, deployment, assignment.assign(step, deployment.spec, member))
    for name in group.members:
        step.job_changed(name)
    return True


def _leave_group(step: Step, job: Job, node: NodeId) -> bool:
    """Move a job to where it would be placed if it were new."""
    _, placed = repack.placed_anew(step, job)
    if placed is None or any(node in names for names in placed.nodes.values()):
        return False
    assignment.move(step, job, replace(placed, reason=f"moved off {node}; {placed.reason}"))
    return True


def status(step: Step, name: NodeId) -> NodeStatus:
    """Describe a node: its deployments, and the reasons why they are still there. Changes
    nothing."""
    node = step.state.nodes[name]
    leave = step.state.closing.get(name)
    deployments = _deployments_on(step, name)
    waits = [] if leave is None else [_why_there(step, d, name) for d in deployments]
    if leave is not None and leave.reason is Closing.DRAIN:
        waits += replicas.describe_needed_copies(step, name)
    return NodeStatus(
        node=name,
        is_up=node.is_up,
        is_draining=leave is not None and leave.is_drained,
        is_gone=leave is not None and leave.reason is Closing.GONE,
        deployments=[deployment.key for deployment in deployments],
        waits_for=waits,
    )


def _why_there(step: Step, deployment: Deployment, node: NodeId) -> str:
    if all(assigned.node != node for assigned in deployment.destination):
        return f"{deployment.name} moves {moves.describe(deployment)}"
    pool, job = deployment.spec.pool, deployment.job_name
    return f"{deployment.name}: no other node of pool {pool!r} has room for {job}"
