"""Seals and the purge floor.

A seal is a committed copy of a deployment's whole state at a `seq`. After a loss the deployment is
rebuilt from its newest seal, and the operations after it are replayed.

The *purge floor* is the `seq` up to which a deployment's stored operations can be deleted. It is
the `seq` of the newest seal, unless a weights version published before it is still needed and not
yet as durable as the seal: replaying that publish must remain possible.
"""

from __future__ import annotations

from phaseloom.common.contract.commands import SealState
from phaseloom.common.contract.events import SealCommitted, SealFailed
from phaseloom.common.contract.ids import NodeId, OperationKey
from phaseloom.common.contract.specs import Durability
from phaseloom.scheduler.core.durability import holders, retention
from phaseloom.scheduler.core.operations import gradients
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Closing
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import JOB_ENDED, WpgState
from phaseloom.scheduler.core.state.tree import State

NUM_REMOTE_COPIES = 2
"""Copies of each part of a `remote` seal, including the one on the deployment's own node."""
_GRADIENT_FREE = frozenset({"optim_step", "publish_weights"})


def record_mutation(step: Step, deployment: Deployment, op: Op) -> None:
    """Record the effect of a mutating operation, and drop versions and operations that it made
    unnecessary."""
    gradients.took_effect(deployment, op)
    if op.kind == "publish_weights":
        retention.record_published(step, deployment, op)
    elif op.kind == "sync_weights":
        deployment.durability.hold(op.version)
        # A sync replaces the whole state, so a rebuild needs no operation before it.
        if not retention.volatile_versions(step, deployment) and not deployment.queue.snapshots:
            delete_operations(step, deployment, deployment.durability.forget_before_last())
        retention.release_versions(step, step.job_of(deployment))
    if deployment.spec.trainable:
        deployment.durability.count_change(op.num_bytes, step.now_s)


def is_outcome_needed(state: State, key: OperationKey) -> bool:
    """Whether the stored outcome of an operation that ended long ago must be kept.

    A rebuild compares replayed operations with their stored outcomes. An `attach` uses the stored
    outcomes to find gaps among the seqs.
    """
    deployment = state.deployments.get(key.deployment_name)
    if deployment is None or key.seq is None:
        return False
    if state.jobs[str(key.job_key)].state in JOB_ENDED:
        return False
    history = deployment.durability.history
    return key.seq >= (history[0].seq if history else deployment.queue.next_seq)


def is_due(step: Step, deployment: Deployment, times: int = 1) -> bool:
    """Whether to seal the deployment now: enough has changed, and a seal may be made.

    Args: times: factor on `seal_every`. It is 1 when the state leaves its device anyway, because a
              seal is cheapest then, and higher otherwise. The limits on bytes and age ignore it.
    """
    config, durability = step.config, deployment.durability
    may_seal = config.seal_every > 0 and durability.since_seal > 0
    has_enough = may_seal and (
        durability.since_seal >= config.seal_every * times
        or durability.since_seal_bytes >= config.seal_bytes
        or step.now_s - durability.changed_s >= config.seal_age_s
    )
    return (
        has_enough
        and not durability.sealing
        # If the save fails, the saved state is rebuilt from the seal before it.
        and not deployment.queue.snapshots
        and not deployment.is_on_its_way
        and not durability.replay
        and durability.last_kind in _GRADIENT_FREE
        # A refused step discards gradients; a seal with them would bring them back.
        and not gradients.pending(deployment)
    )


def seal(step: Step, deployment: Deployment) -> None:
    """Have every node of a deployment seal its part of the current state.

    A `remote` seal is skipped, with a notice, if too few nodes can keep copies.
    """
    durability = step.job_of(deployment).spec.durability
    replicas = _choose_replicas(step, deployment) if durability is Durability.REMOTE else {}
    if replicas is None:
        step.notify("not sealed", "no other node can keep a copy", deployment.name)
        deployment.durability.skip_seal()
        return
    # These nodes may keep a part even if the seal as a whole fails.
    copy_nodes = [name for copies in replicas.values() for name in copies]
    deployment.move.keep([*deployment.move.stale_holders, *copy_nodes])
    deployment.durability.seal()
    applied = deployment.durability.applied
    versions = [seq for seq in retention.needed_seqs(step, deployment) if seq <= applied]
    for node in step.nodes_of(deployment):
        step.send_for(
            SealState,
            node,
            deployment,
            seq=applied,
            versions=sorted(versions),
            durability=durability,
            replicas={} if not replicas else replicas[node.node],
            num_parts=len(deployment.wpg.assignments),
            ticket=holders.files_ticket(deployment, replicas[node.node]) if replicas else None,
        )


def committed(step: Step, event: SealCommitted) -> None:
    """Record that a node has committed its part of a seal. The last part completes the seal.

    A complete seal makes older stored operations and weights versions unnecessary; they are
    dropped.
    """
    deployment = step.deployment(event.deployment)
    if deployment is None or event.node not in deployment.nodes:
        return
    if event.seq <= max(deployment.durability.seal_seq, deployment.wpg.origin_seq):
        return
    versions = _record_part(deployment, event)
    if versions is None:
        return
    _record_replicas(step, deployment, event, versions)
    holders.drop_other_parts(step, deployment)
    deployment.durability.count_from_seal(step.now_s)
    floor = _purge_floor(step, deployment)
    delete_operations(step, deployment, deployment.durability.forget_up_to(floor))
    retention.release_versions(step, step.job_of(deployment))
    holders.clear_stale_holders(step, deployment)
    _review_copies(step)


def _review_copies(step: Step) -> None:
    """Look again at the nodes that are being vacated: copies that depend on them may have
    changed."""
    if step.state.closing:
        step.follow_up(FollowUp.PLACE)


def _record_part(deployment: Deployment, event: SealCommitted) -> list[int] | None:
    """Record a node's part of the seal that was requested last.

    Returns: seqs of the weights versions that are durable with the whole seal. None if parts are
             missing, or if the part belongs to another seal.
    """
    if len(deployment.wpg.assignments) == 1:
        return event.versions
    if event.seq != deployment.durability.requested_seal:
        return None
    parts = deployment.durability.seal_parts
    deployment.durability.note_part(event.node, event.versions, event.copies)
    if any(node not in parts for node in deployment.nodes):
        return None
    return sorted(set.intersection(*(set(part) for part in parts.values())))


def _record_replicas(
    step: Step, deployment: Deployment, event: SealCommitted, versions: list[int]
) -> None:
    """Record which nodes have the new seal.

    Nodes that only have the previous seal become stale holders, except those that the deployment is
    moving to.
    """
    previous = holders.copy_nodes(deployment)
    parts = (
        deployment.durability.part_copies
        if len(deployment.wpg.assignments) > 1
        else {event.node: event.copies}
    )
    # A node that is gone for good cannot serve its copy.
    gone_nodes = {
        name for name, leave in step.state.closing.items() if leave.reason is Closing.GONE
    }
    replicas = [
        [node, *(copy for copy in parts.get(node, []) if copy not in gone_nodes)]
        for node in deployment.nodes
    ]
    deployment.durability.sealed(event.seq, versions, replicas)
    for node in sorted(gone_nodes & {copy for copies in parts.values() for copy in copies}):
        holders.forget_at(step, deployment, node)  # in case it returns after all
    current_nodes = {node for part in deployment.durability.replicas for node in part}
    current_nodes.update(holders.move_targets(deployment))
    deployment.move.keep([*deployment.move.stale_holders, *previous], but=current_nodes)


def sources(step: Step, deployment: Deployment, index: int, *, but: NodeId) -> list[str]:
    """Endpoints of state managers that may have a part of a seal or the needed weights versions.

    Nodes that are down are left out. So are nodes with only another part of the seal: all parts
    have the same name, so such a node would send the wrong one.

    Args: but: the node that fetches, which is left out.
    """
    part_nodes = holders.nodes_with_part(deployment, index)
    parts = range(len(deployment.wpg.assignments))
    other_part_nodes = {
        node for i in parts if i != index for node in holders.nodes_with_part(deployment, i)
    }
    names = [
        *part_nodes,
        *(
            node
            for node in [*deployment.nodes, *deployment.move.stale_holders]
            if node not in other_part_nodes
        ),
    ]
    if deployment.durability.holds is not None:
        names += retention.nodes_of(step, deployment.durability.holds)
    nodes = [step.node(name) for name in dict.fromkeys(names) if name != but]
    return [node.state_endpoint for node in nodes if node.is_up]


def _choose_replicas(step: Step, deployment: Deployment) -> dict[NodeId, dict[NodeId, str]] | None:
    """Choose, for each node of a deployment, another node to copy its part of the seal.

    Returns: node → {copying node: its endpoint}. None if too few nodes can take a copy.
    """
    move_targets = holders.move_targets(deployment)
    names = holders.copy_candidates(step, deployment)
    remaining = [name for name in names if name not in move_targets]
    chosen: dict[NodeId, dict[NodeId, str]] = {}
    for index, node in enumerate(deployment.nodes):
        # If the deployment is moving, each new node copies the part that it will run.
        name = move_targets[index] if len(move_targets) == len(deployment.wpg.assignments) else None
        if name is None or name not in names:
            if not remaining:
                return None
            name = remaining.pop(0)
        chosen[node] = {name: step.node(name).state_endpoint}
    return chosen


def failed(step: Step, event: SealFailed) -> None:
    """Record that a node could not seal its part. The previous seal remains the newest one."""
    deployment = step.deployment(event.deployment)
    if deployment is None or event.node not in deployment.nodes:
        return
    step.notify("seal failed, the previous seal remains", event.error.message, deployment.name)
    if event.seq != deployment.durability.requested_seal:
        return  # another node failed first, and this seal was given up then
    deployment.durability.seal_failed()
    _review_copies(step)


def _purge_floor(step: Step, deployment: Deployment) -> int:
    """The purge floor of a deployment, as a seq; see the module."""
    pending = retention.volatile_versions(step, deployment)
    # A rebuild needs every operation after the seal that it started from, which may be older.
    is_rebuilding = deployment.wpg.state in (WpgState.STARTING, WpgState.RECOVERING)
    sealed = deployment.wpg.base if is_rebuilding else deployment.durability.seal_seq
    return min([sealed, *[seq - 1 for seq in pending]])


def delete_operations(step: Step, deployment: Deployment, seqs: list[int]) -> None:
    """Delete these seqs of a deployment from the operation stream."""
    if seqs:
        key = deployment.key
        keys = [OperationKey(key.tenant, key.job, key.deployment, str(seq)) for seq in seqs]
        step.emit(outputs.DeleteOperations(keys))
