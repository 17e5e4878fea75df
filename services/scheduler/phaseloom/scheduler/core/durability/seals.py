"""Seals, and the purge floor.

The *purge floor* of a deployment is the seq up to which its stored operations are not needed any
more. It is the seq of its newest committed seal, or less while a `publish_weights` under that made
a version that is needed and is not yet as durable as the seal.
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
"""Copies of each part of a `remote` seal, the one on the deployment's own node included."""
_GRADIENT_FREE = frozenset({"optim_step", "publish_weights"})


def record_mutation(step: Step, deployment: Deployment, op: Op) -> None:
    """Note that a mutating operation of a deployment took effect.

    Weights versions and stored operations that nothing needs after it are dropped.
    """
    gradients.took_effect(deployment, op)
    if op.kind == "publish_weights":
        retention.record_published(step, deployment, op)
    elif op.kind == "sync_weights":
        deployment.durability.hold(op.version)
        # A sync replaces the whole state: no operation before it is needed to rebuild that.
        if not retention.volatile_versions(step, deployment) and not deployment.queue.snapshots:
            delete_operations(step, deployment, deployment.durability.forget_before_last())
        retention.release_versions(step, step.job_of(deployment))
    if deployment.spec.trainable:
        deployment.durability.count_change(op.num_bytes, step.now_s)


def is_outcome_needed(state: State, key: OperationKey) -> bool:
    """Whether the outcome of an operation that ended long ago must still be kept.

    A rebuild compares the outcomes of the operations that it runs again with the stored ones. An
    `attach` tells by stored outcomes which seqs are gaps.
    """
    deployment = state.deployments.get(key.deployment_name)
    if deployment is None or key.seq is None:
        return False
    if state.jobs[str(key.job_key)].state in JOB_ENDED:
        return False
    history = deployment.durability.history
    return key.seq >= (history[0].seq if history else deployment.queue.next_seq)


def is_due(step: Step, deployment: Deployment, times: int = 1) -> bool:
    """Whether to seal now: enough has changed since the last seal, and no gradients are pending.

    Args: times: factor on the number of mutations that make a seal due. It is 1 where the state
              leaves its device anyway, when a seal costs least, and higher elsewhere. It does not
              apply to the limits on bytes and on age.
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
        # A state that is being saved may have to be made again, from the seal before it.
        and not deployment.queue.snapshots
        and not deployment.is_on_its_way
        and not durability.replay
        and durability.last_kind in _GRADIENT_FREE
        # A refused step throws gradients away: a seal must not bring them back.
        and not gradients.pending(deployment)
    )


def seal(step: Step, deployment: Deployment) -> None:
    """Ask every node of a deployment to seal its part of the state as it is now.

    A `remote` seal is skipped, and people are told so, where too few nodes can take copies of it.
    """
    durability = step.job_of(deployment).spec.durability
    replicas = _choose_replicas(step, deployment) if durability is Durability.REMOTE else {}
    if replicas is None:
        step.notify("not sealed", "no other node is there to keep a copy of it", deployment.name)
        deployment.durability.skip_seal()
        return
    # Should the seal come to nothing, they may have a part of it all the same.
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
    """Note that a node has its part of a seal on disk; the last part completes the seal.

    With the seal, stored operations and weights versions are dropped that are not needed any more.
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
    """Look again at the nodes that are to be left: the copies that count on them may have changed.

    Nothing is done where no node is to be left.
    """
    if step.state.closing:
        step.follow_up(FollowUp.PLACE)


def _record_part(deployment: Deployment, event: SealCommitted) -> list[int] | None:
    """Note a node's part of the seal that was asked for last.

    Returns: the seqs of the weights versions that are durable with the whole seal; None while parts
             are missing, or where the part belongs to another seal.
    """
    if len(deployment.wpg.assignments) == 1:
        return event.versions
    if event.seq != deployment.durability.seal_asked:
        return None
    parts = deployment.durability.seal_parts
    deployment.durability.note_part(event.node, event.versions, event.copies)
    if any(node not in parts for node in deployment.nodes):
        return None
    return sorted(set.intersection(*(set(part) for part in parts.values())))


def _record_replicas(
    step: Step, deployment: Deployment, event: SealCommitted, versions: list[int]
) -> None:
    """Note which nodes have a deployment's new seal.

    Nodes that have only the seal before it become stale holders, except those that the deployment
    is about to move to.
    """
    previous = holders.copy_nodes(deployment)
    parts = (
        deployment.durability.part_copies
        if len(deployment.wpg.assignments) > 1
        else {event.node: event.copies}
    )
    # A part that was noted by a core that knew of no copies has none.
    gone_nodes = {name for name, leave in step.state.closing.items() if leave.why is Closing.GONE}
    replicas = [
        [node, *(copy for copy in parts.get(node, []) if copy not in gone_nodes)]
        for node in deployment.nodes
    ]
    deployment.durability.sealed(event.seq, versions, replicas)
    for node in sorted(gone_nodes & {copy for copies in parts.values() for copy in copies}):
        holders.forget_at(step, deployment, node)  # in case the node comes back all the same
    current_nodes = {node for part in deployment.durability.replicas for node in part}
    current_nodes.update(holders.move_targets(deployment))
    deployment.move.keep([*deployment.move.stale_holders, *previous], but=current_nodes)


def sources(step: Step, deployment: Deployment, index: int, *, but: NodeId) -> list[str]:
    """Endpoints of the state managers that may have this part of a seal, or the versions needed.

    Nodes that are down are left out, and nodes that only have another part of the seal, which goes
    by the same name.

    Args: but: a node that is left out: the one that fetches.
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
    """For each node of a deployment, the other node (with its endpoint) that copies its part.

    Returns: None where too few nodes can take a copy.
    """
    move_targets = holders.move_targets(deployment)
    names = holders.copy_candidates(step, deployment)
    remaining = [name for name in names if name not in move_targets]
    chosen: dict[NodeId, dict[NodeId, str]] = {}
    for index, node in enumerate(deployment.nodes):
        # A node that the deployment is moving to gets the part that it is to run.
        name = move_targets[index] if len(move_targets) == len(deployment.wpg.assignments) else None
        if name is None or name not in names:
            if not remaining:
                return None
            name = remaining.pop(0)
        chosen[node] = {name: step.node(name).state_endpoint}
    return chosen


def failed(step: Step, event: SealFailed) -> None:
    """Note that a node could not seal its part of the state: the previous seal stands."""
    deployment = step.deployment(event.deployment)
    if deployment is None or event.node not in deployment.nodes:
        return
    step.notify("seal failed, the previous one stands", event.error.message, deployment.name)
    if event.seq != deployment.durability.seal_asked:
        return  # this seal is given up already, since another node failed first
    deployment.durability.seal_failed()
    _review_copies(step)


def _purge_floor(step: Step, deployment: Deployment) -> int:
    """The purge floor of a deployment: a seq; see the module."""
    pending = retention.volatile_versions(step, deployment)
    # An incarnation that is being rebuilt needs every operation after the seal it began with.
    is_rebuilding = deployment.wpg.state in (WpgState.STARTING, WpgState.RECOVERING)
    sealed = deployment.wpg.base if is_rebuilding else deployment.durability.seal_seq
    return min([sealed, *[seq - 1 for seq in pending]])


def delete_operations(step: Step, deployment: Deployment, seqs: list[int]) -> None:
    """Have the stored operations of a deployment that have these seqs deleted."""
    if seqs:
        key = deployment.key
        keys = [OperationKey(key.tenant, key.job, key.deployment, str(seq)) for seq in seqs]
        step.emit(outputs.DeleteOperations(keys))
