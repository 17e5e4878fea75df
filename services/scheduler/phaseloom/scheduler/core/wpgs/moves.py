"""Moves: a deployment goes to other nodes and takes its state along.

The stages of a move and their transitions are in `state/transitions.py`. First a deployment that
trains and has changed is sealed. It continues to run while its new nodes fetch the seal and the
weights versions that it needs. Then it finishes its running operations and gets no new ones. If a
replay of the operations since the seal would take longer than the copy took, the deployment is
sealed and copied again, this time at rest. Finally it is stopped, and its next incarnation
starts on the new nodes as after a loss: from the seal, with the later operations replayed.
Operations that arrive in the meantime wait.

While a `save_state` is being written, its deployment is neither sealed nor stopped, because the
saved state would have to be rebuilt from the seal before it. The deployment continues to run until
the saved state is durable. A second `save_state` waits until the move is over; otherwise the right
moment for the move might never come.

If a new node is down or cannot take its copy, the deployment runs where it is until the node can.
If the deployment dies during the move, its next incarnation starts wherever its state is and all
nodes are up. The old nodes keep the seal that it was rebuilt from until the next seal.
"""

from __future__ import annotations

from collections.abc import Callable

from phaseloom.common.contract.commands import MirrorState, Ticket
from phaseloom.common.contract.events import StateMirrored
from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.devices import devices
from phaseloom.scheduler.core.durability import holders, retention, seals
from phaseloom.scheduler.core.operations import gradients
from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.move import Relocation
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import MoveEvent, MoveStage
from phaseloom.scheduler.core.state.wpg import RankAssignment


def start(step: Step, deployment: Deployment, assignments: list[RankAssignment]) -> None:
    """Start to move a deployment to these nodes and devices.

    A move to its present place only ends a move in progress.
    """
    name = deployment.name
    assignments = _ordered_by_rank(deployment, assignments)
    release_nodes(step, deployment)
    holders.stop_copying(step, deployment)
    if deployment.move.relocation is not None:
        # The targets of the earlier move may already have copies.
        current_nodes = {node for part in deployment.durability.replicas for node in part}
        deployment.move.keep(
            holders.nodes_with(deployment), but={*deployment.nodes, *current_nodes}
        )
    if assignments == deployment.wpg.assignments:
        deployment.move.end()
    else:
        deployment.move.begin(assignments)
        holders.drop_other_parts(step, deployment)
        for node in deployment.nodes:
            if all(assigned.node != node for assigned in assignments):
                groups.hold(step.state.cluster, node, name)
        step.state.add_move(name)
        devices.unclaim(step, deployment)
        step.job_changed(deployment.job_name)
    step.touch(deployment)


def _ordered_by_rank(
    deployment: Deployment, assignments: list[RankAssignment]
) -> list[RankAssignment]:
    """Order the assignments of a move by rank.

    A node that stays keeps its ranks. A node that has a copy of a part gets the ranks of that part.
    """
    if len(assignments) != len(deployment.wpg.assignments):
        return assignments
    new = {assigned.node: assigned for assigned in assignments}
    by_rank = [new.pop(node, None) for node in deployment.nodes]
    for index, assigned in enumerate(by_rank):
        if assigned is None:
            holders_of_part = holders.nodes_with_part(deployment, index)
            holder = next((node for node in holders_of_part if node in new), None)
            by_rank[index] = None if holder is None else new.pop(holder)
    remaining = iter(new.values())
    return [next(remaining) if assigned is None else assigned for assigned in by_rank]


def release_nodes(step: Step, deployment: Deployment) -> None:
    """Record that a deployment's nodes no longer wait for it to leave: it has left, or it stays."""
    for node in deployment.nodes:
        groups.end_hold(step.state.cluster, node, deployment.name)
    step.follow_up(FollowUp.PLACE)


def is_possible(step: Step, deployment: Deployment, move: Relocation) -> bool:
    """Whether the new nodes of a move are up, and none of them still has to forget the
    deployment."""
    return all(
        step.node(assigned.node).is_up
        and deployment.name not in step.state.stopping.get(assigned.node, {})
        for assigned in move.assignments
    )


def is_paused(deployment: Deployment) -> bool:
    """Whether a deployment gets no new operations because it will soon be sealed or leave."""
    move = deployment.move.relocation
    if move is None or deployment.queue.snapshots:
        return False
    match move.stage:
        case MoveStage.PREPARING:
            return _needs_seal(deployment) and not _has_gradients_to_use(deployment)
        case MoveStage.LEAVING | MoveStage.STOPPING:
            return not _has_gradients_to_use(deployment)
        case MoveStage.LAST_SEALING | MoveStage.LAST_COPYING:
            return True
        case MoveStage.WAITING | MoveStage.SEALING | MoveStage.COPYING:
            return False


def must_wait(deployment: Deployment, op: Op) -> bool:
    """Whether an operation is a `save_state` that must wait because the move waits for an earlier
    one."""
    return op.kind == "save_state" and _waits_for_snapshot(deployment)


def _waits_for_snapshot(deployment: Deployment) -> bool:
    move = deployment.move.relocation
    if move is None or not deployment.queue.snapshots:
        return False
    if move.stage is MoveStage.PREPARING:
        return _needs_seal(deployment)
    return move.stage in (MoveStage.LEAVING, MoveStage.STOPPING)


def describe(deployment: Deployment) -> str:
    """The destination of a move and the reason for waiting; empty: the deployment stays."""
    move = deployment.move.relocation
    if move is None:
        return ""
    if _waits_for_snapshot(deployment):
        seqs = ", ".join(str(seq) for seq in deployment.queue.snapshots)
        reason = f"waiting for save_state {seqs} to become durable"
    else:
        reason = _REASONS[move.stage].format(nodes=", ".join(move.fetching))
    nodes = ", ".join(assigned.node for assigned in move.assignments)
    return f"to {nodes}: {reason}"


_REASONS = {
    MoveStage.WAITING: "waiting for the new nodes",
    MoveStage.PREPARING: "waiting for running operations to end, then sealing",
    MoveStage.SEALING: "sealing",
    MoveStage.COPYING: "copying the state to {nodes}",
    MoveStage.LEAVING: "waiting for running operations to end",
    MoveStage.LAST_SEALING: "sealing",
    MoveStage.LAST_COPYING: "copying the state to {nodes}",
    MoveStage.STOPPING: "waiting for running operations to end",
}


def advance(step: Step, deployment: Deployment, move: Relocation) -> bool:
    """Advance the move of a running deployment as far as possible.

    Returns: whether to stop the deployment now, so that it starts on its new nodes.
    """
    if not is_possible(step, deployment, move):
        _put_off(step, deployment, move)
        return False
    while (event := _NEXT_EVENT[move.stage](step, deployment, move)) is not None:
        step.advance_move(deployment, event)
        if event is MoveEvent.LAST_SEAL_REQUESTED:
            return False  # even if the seal was skipped, the move continues with the next event
    return move.stage in (MoveStage.LEAVING, MoveStage.STOPPING) and _can_stop(deployment)


def _retry(step: Step, deployment: Deployment, move: Relocation) -> MoveEvent | None:
    return MoveEvent.RETRIED if step.now_s >= move.retry_at_s else None


def _request_seal(step: Step, deployment: Deployment, move: Relocation) -> MoveEvent | None:
    """Request the move's seal as soon as it can be made, if it needs one."""
    if deployment.durability.sealing or _has_gradients_to_use(deployment):
        return None
    move.requested_seal = 0
    if _needs_seal(deployment):
        if _is_busy(deployment):
            return None
        move.requested_seal = deployment.durability.applied
        seals.seal(step, deployment)
    move.began_s = step.now_s
    return MoveEvent.SEAL_REQUESTED


def _request_copies(step: Step, deployment: Deployment, move: Relocation) -> MoveEvent | None:
    """Have the new nodes fetch their copies once the seal has been committed or has failed."""
    if deployment.durability.sealing:
        return None
    _send_mirror_commands(step, deployment, move)
    return MoveEvent.SEAL_ENDED


def _measure_copies(step: Step, deployment: Deployment, move: Relocation) -> MoveEvent | None:
    if move.fetching:
        return None
    move.copy_s = step.now_s - move.began_s
    return MoveEvent.COPIED


def _request_last_seal(step: Step, deployment: Deployment, move: Relocation) -> MoveEvent | None:
    """Seal again if a replay of the operations since the seal would take longer than that."""
    # After a failed seal another try is unlikely to succeed: leave with the seal before it.
    has_failed = move.requested_seal and not deployment.durability.requested_seal
    if not _can_stop(deployment) or has_failed or _replay_s(deployment) <= move.copy_s:
        return None
    seals.seal(step, deployment)
    return MoveEvent.LAST_SEAL_REQUESTED


def _stop(step: Step, deployment: Deployment, move: Relocation) -> MoveEvent | None:
    """Nothing more happens before the deployment is stopped."""
    return None


_NEXT_EVENT: dict[MoveStage, Callable[[Step, Deployment, Relocation], MoveEvent | None]] = {
    MoveStage.WAITING: _retry,
    MoveStage.PREPARING: _request_seal,
    MoveStage.SEALING: _request_copies,
    MoveStage.COPYING: _measure_copies,
    MoveStage.LEAVING: _request_last_seal,
    MoveStage.LAST_SEALING: _request_copies,
    MoveStage.LAST_COPYING: _measure_copies,
    MoveStage.STOPPING: _stop,
}
"""Stage → the function that takes the next action, if it is possible now, and returns its event."""


def _is_busy(deployment: Deployment) -> bool:
    activation = deployment.activation
    return bool(activation.running or activation.opening_on or deployment.queue.snapshots)


def _can_stop(deployment: Deployment) -> bool:
    is_busy = _is_busy(deployment) or deployment.durability.sealing
    return not is_busy and not _has_gradients_to_use(deployment)


def _replay_s(deployment: Deployment) -> float:
    """Seconds that a replay of the operations after a deployment's seal would take.

    Returns: 0 if the deployment does not train, or has gradients and cannot be sealed now.
    """
    if not deployment.spec.trainable or gradients.pending(deployment):
        return 0.0
    return sum(
        m.duration_s
        for m in deployment.durability.history
        if m.seq > deployment.durability.seal_seq
    )


def _put_off(step: Step, deployment: Deployment, move: Relocation) -> None:
    move.fetching = []
    step.advance_move(deployment, MoveEvent.PUT_OFF)


def _needs_seal(deployment: Deployment) -> bool:
    """Whether a seal makes a deployment's move shorter, and may be made.

    A deployment that does not train needs none: its last operations rebuild it as fast. A seal with
    gradients would bring them back after a refused step has discarded them.
    """
    has_changed = deployment.durability.applied > max(
        deployment.durability.seal_seq, deployment.wpg.origin_seq
    )
    is_worth_it = deployment.spec.trainable and has_changed and not gradients.pending(deployment)
    return is_worth_it and not deployment.durability.sealing


def _has_gradients_to_use(deployment: Deployment) -> bool:
    """Whether a deployment's gradients will be used soon, because its next operation is known."""
    is_known = deployment.queue.head_seq in deployment.queue.operations
    return deployment.spec.trainable and is_known and bool(gradients.pending(deployment))


def _send_mirror_commands(step: Step, deployment: Deployment, move: Relocation) -> None:
    """Have each new node of a move fetch the part of the seal and the versions that it lacks."""
    fetching: list[NodeId] = []
    versions = retention.durable_needed_seqs(step, deployment)
    holds = deployment.durability.holds
    for index, assigned in enumerate(move.assignments):
        part_nodes = holders.nodes_with_part(deployment, index)
        seal_seq = 0 if assigned.node in part_nodes else deployment.durability.seal_seq
        if seal_seq or versions or holds is not None:
            fetching.append(assigned.node)
            step.send(
                MirrorState,
                step.node(assigned.node),
                deployment=deployment.key,
                seal_seq=seal_seq,
                versions=versions,
                sources=seals.sources(step, deployment, index, but=assigned.node),
                ticket=holders.files_ticket(deployment, [assigned.node]),
                holds=None
                if holds is None
                else Ticket(
                    holds, deployment.key, deployment.wpg.incarnation, [str(assigned.node)]
                ),
                rank_offset=sum(len(before.devices) for before in move.assignments[:index]),
                num_ranks=deployment.spec.layout.num_ranks,
            )
    move.fetch_sequence = step.sequence
    move.fetching = fetching


def mirrored(step: Step, event: StateMirrored) -> None:
    """Record that a new node of a move has its copy or could not get it.

    If it could not, the move is put off and retried after a pause.
    """
    deployment = step.deployment(event.deployment)
    if deployment is None or deployment.move.relocation is None:
        return
    move = deployment.move.relocation
    if event.command.sequence != move.fetch_sequence or event.node not in move.fetching:
        return
    move.fetching.remove(event.node)
    if event.error is not None:
        move.failures += 1
        move.retry_at_s = step.now_s + holders.retry_pause_s(move.failures)
        step.set_timer(f"retry/{deployment.name}/{step.sequence}", move.retry_at_s)
        step.notify("move put off", f"{event.node}: {event.error.message}", deployment.name)
        _put_off(step, deployment, move)
    elif event.seq and event.seq == deployment.durability.seal_seq:
        index = next(
            i for i, assigned in enumerate(move.assignments) if assigned.node == event.node
        )
        holders.add_replica(deployment, index, event.node)


def node_restarted(step: Step, deployment: Deployment, node: NodeId) -> None:
    """Record that a new node of a move has a new lease, under which it does not fetch its copy."""
    move = deployment.move.relocation
    if move is None or node not in move.fetching:
        return
    if move.stage in (MoveStage.COPYING, MoveStage.LAST_COPYING):
        step.advance_move(deployment, MoveEvent.NODE_RESTARTED)


def relocate(step: Step, deployment: Deployment, assignments: list[RankAssignment]) -> None:
    """Place a deployment, whose ranks on the old nodes are dead, on the new nodes of its move."""
    name, old = deployment.name, deployment.nodes
    devices.leave(step, deployment)
    devices.forget(step, deployment)
    step.dirty.update(deployment.places)
    release_nodes(step, deployment)
    deployment.move.end()
    deployment.wpg.put_on(assignments)
    devices.place(step, deployment)
    for node in deployment.nodes:
        # The node may still confirm that it has forgotten an earlier incarnation. The next one
        # needs a higher number, so that the confirmation is not taken for its death.
        stop_incarnation = step.state.withdraw_forget(node, name)
        deployment.wpg.raise_incarnation(stop_incarnation)
    deployment.move.keep([*deployment.move.stale_holders, *old], but=deployment.nodes)
    deployment.durability.clear_seal_request()
    step.notify("deployment moved", f"{', '.join(old)} -> {', '.join(deployment.nodes)}", name)
