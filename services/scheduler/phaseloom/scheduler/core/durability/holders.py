"""Which nodes have the parts of a deployment's newest seal, will get one, or must forget one."""

from __future__ import annotations

from collections.abc import Iterable

from phaseloom.common.contract.commands import FilesTicket, StopWpg
from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.step import Step

RETRY_PAUSE_S = 5.0
"""First pause before a failed copy is requested again. It doubles with each failure."""
MAX_RETRY_PAUSE_S = 80.0


def nodes_with_part(deployment: Deployment, index: int) -> list[NodeId]:
    """Nodes that have this part of a deployment's newest seal; empty without a seal."""
    if not deployment.durability.seal_seq:
        return []
    # Without recorded replicas the seal is on the deployment's own nodes.
    return (
        deployment.durability.replicas[index]
        if deployment.durability.replicas
        else [deployment.nodes[index]]
    )


def add_replica(deployment: Deployment, index: int, node: NodeId) -> None:
    """Record that one more node has this part of a deployment's newest seal."""
    if not deployment.durability.replicas:
        deployment.durability.set_replicas([[leader] for leader in deployment.nodes])
    deployment.durability.note_replica(index, node)


def nodes_with(deployment: Deployment) -> list[NodeId]:
    """All nodes that have, or may have, any data of a deployment."""
    every = [
        *deployment.nodes,
        *deployment.move.stale_holders,
        *copy_nodes(deployment),
        *move_targets(deployment),
    ]
    return list(dict.fromkeys(every))


def nodes_in_use(deployment: Deployment) -> set[NodeId]:
    """Nodes that have, or will have, a part of a deployment's newest seal.

    Such a node cannot take another part.
    """
    return {*deployment.nodes, *copy_nodes(deployment), *move_targets(deployment)}


def copy_nodes(deployment: Deployment) -> list[NodeId]:
    copies = [node for part in deployment.durability.replicas for node in part]
    return [*copies, *(copying.node for copying in deployment.durability.copying)]


def move_targets(deployment: Deployment) -> list[NodeId]:
    """Nodes that a deployment is moving to, by part; empty if it does not move."""
    return (
        []
        if deployment.move.relocation is None
        else [assigned.node for assigned in deployment.move.relocation.assignments]
    )


def drop_replicas(deployment: Deployment) -> None:
    """Record that a deployment no longer has a seal.

    Other nodes with the old seal become stale holders, which are told later to forget it.
    """
    deployment.move.keep(nodes_with(deployment), but=deployment.nodes)
    deployment.durability.drop_replicas()


def is_readable(step: Step, deployment: Deployment) -> bool:
    """Whether every part of the seal that a deployment is rebuilt from is on a node that is up.

    Without a seal there is nothing to read, which counts as readable.
    """
    if not deployment.durability.seal_seq:
        return True
    return all(
        any(step.node(node).is_up for node in nodes_with_part(deployment, index))
        for index in range(len(deployment.wpg.assignments))
    )


def drop_other_parts(step: Step, deployment: Deployment) -> None:
    """Have each node that will get one part of a seal forget any other part.

    A node has at most one part of a deployment's seal.
    """
    for index, node in enumerate(move_targets(deployment)):
        other_parts = [part for i, part in enumerate(deployment.durability.replicas) if i != index]
        if node not in deployment.nodes and any(node in part for part in other_parts):
            deployment.durability.drop_replicas_on({node})
            forget_at(step, deployment, node)


def give_up_copy(step: Step, deployment: Deployment, node: NodeId) -> None:
    """Record that a copy, which a node was told to fetch and may have by now, is not needed.

    If the seal has several parts, the node forgets the copy at once. Otherwise it becomes a stale
    holder, which forgets it after the next seal.
    """
    if len(deployment.wpg.assignments) > 1:
        forget_at(step, deployment, node)  # the node may get another part next
    elif node not in deployment.move.stale_holders:
        deployment.move.keep([*deployment.move.stale_holders, node])


def stop_copying(step: Step, deployment: Deployment) -> None:
    """Give up every copy of a deployment's seal that is being made because a node is vacated."""
    for copying in deployment.durability.copying:
        give_up_copy(step, deployment, copying.node)
    deployment.durability.stop_copying()


def clear_stale_holders(step: Step, deployment: Deployment) -> None:
    """Have the nodes that a deployment has left drop its remaining data."""
    retained = step.job_of(deployment).versions.retained
    if any(name.startswith(f"{deployment.name}.") for name in retained):
        return  # versions of a deleted policy of the same name stay there until the job ends
    for node in deployment.move.stale_holders:
        forget_at(step, deployment, node)
    deployment.move.keep([])


def forget_at(step: Step, deployment: Deployment, node: NodeId) -> None:
    """Have a node drop all data of a deployment that is not placed on it."""
    step.state.request_forget(node, deployment.name, deployment.wpg.incarnation)
    step.send_for(StopWpg, step.node(node), deployment, forget=True)


def copy_candidates(step: Step, deployment: Deployment) -> list[NodeId]:
    """Other nodes that could take a copy of a part of a deployment's seal, best first.

    First come the nodes that the deployment is moving to or that have a copy of an earlier seal,
    then nodes of its pool, for a fast rebuild, then all others.
    """
    familiar = nodes_with(deployment)
    fit = [
        host
        for host in step.state.cluster.hosts.values()
        if host.is_up
        and host.node not in deployment.nodes
        and deployment.name not in step.state.stopping.get(host.node, {})
    ]
    fit.sort(
        key=lambda host: (
            host.node not in familiar,
            host.pool != deployment.spec.pool,
            host.node,
        )
    )
    return [host.node for host in fit]


def files_ticket(deployment: Deployment, nodes: Iterable[NodeId]) -> FilesTicket:
    """A ticket with which these nodes may fetch a deployment's seals and durable versions.

    It is not signed yet, because only the shell knows the secret.
    """
    return FilesTicket(deployment.key, deployment.wpg.incarnation, [str(node) for node in nodes])


def retry_pause_s(num_failures: int) -> float:
    """Pause after this many failures in a row to copy a seal or a version to another node."""
    return min(RETRY_PAUSE_S * 2.0 ** (num_failures - 1), MAX_RETRY_PAUSE_S)
