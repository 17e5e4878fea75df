"""Moves: a deployment goes to other nodes, and its state with it.

A deployment that trains and has changed since its last seal is sealed first. It runs on while its
new nodes fetch a copy of the seal and of the weights versions that it needs. Then it finishes the
operations that run, is given no new ones, is stopped, and begins its next incarnation on the new
nodes as after any loss: from the seal, with the operations after the seal run again. Where running
those again would take longer than the copy did, the deployment is sealed and copied once more
before it is stopped. Operations that come meanwhile wait.

While a `save_state` is written, its deployment is neither sealed nor stopped: the state that is
saved would have to be made again, from the seal before it. The deployment runs on until the saved
state is durable. A further `save_state` waits until the move is over; otherwise there might never
be a moment for the move.

Where a new node is down, or cannot take the copy, the deployment stays where it is until the node
can. Where the deployment dies on the way, its next incarnation begins wherever its state is and the
nodes are up. The old nodes keep the seal that it was rebuilt from until it has made a new seal.
"""

from __future__ import annotations

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
    """Begin to move a deployment to these nodes and devices.

    A move to where the deployment is already just ends any move that is under way.
    """
    name = deployment.name
    assignments = _arranged(deployment, assignments)
    release_nodes(step, deployment)
    holders.stop_copying(step, deployment)
    if deployment.move.relocation is not None:
        # There may be a copy on the nodes that the earlier move was to go to.
        having = {node for part in deployment.durability.replicas for node in part}
        deployment.move.keep(holders.nodes_with(deployment), but={*deployment.nodes, *having})
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


def _arranged(deployment: Deployment, assignments: list[RankAssignment]) -> list[RankAssignment]:
    """Order the assignments of a move by rank.

    A node that stays keeps its ranks, and one that has a copy of a part gets the ranks of that.
    """
    if len(assignments) != len(deployment.wpg.assignments):
        return assignments
    new = {assigned.node: assigned for assigned in assignments}
    kept = [new.pop(node, None) for node in deployment.nodes]
    for index, assigned in enumerate(kept):
        if assigned is None:
            have_it = holders.nodes_with_part(deployment, index)
            having = next((node for node in have_it if node in new), None)
            kept[index] = None if having is None else new.pop(having)
    rest = iter(new.values())
    return [next(rest) if assigned is None else assigned for assigned in kept]


def release_nodes(step: Step, deployment: Deployment) -> None:
    """Note that a deployment's nodes no longer wait for it to leave.

    It has left them, or stays after all.
    """
    for node in deployment.nodes:
        groups.end_hold(step.state.cluster, node, deployment.name)
    step.follow_up(FollowUp.PLACE)


def is_possible(step: Step, deployment: Deployment, move: Relocation) -> bool:
    """Whether the new nodes of a move are up, and none still has to forget the deployment."""
    return all(
        step.node(assigned.node).is_up
        and deployment.name not in step.state.stopping.get(assigned.node, {})
        for assigned in move.assignments
    )


def is_paused(deployment: Deployment) -> bool:
    """Whether a deployment is given no new operations: it is about to be sealed, or to leave."""
    move = deployment.move.relocation
    if move is None or deployment.queue.snapshots:
        return False
    if move.stage is MoveStage.BEGUN:
        return _is_to_be_sealed(deployment, move) and not _has_gradients_to_use(deployment)
    if move.stage is MoveStage.LEAVING:
        return not _has_gradients_to_use(deployment)
    return move.is_last and move.stage is not MoveStage.WAITING


def must_wait(deployment: Deployment, op: Op) -> bool:
    """Whether an operation is a `save_state` that must wait: the move waits for an earlier one."""
    return op.kind == "save_state" and _waits_for_snapshot(deployment)


def _waits_for_snapshot(deployment: Deployment) -> bool:
    move = deployment.move.relocation
    if move is None or not deployment.queue.snapshots:
        return False
    is_to_be_sealed = move.stage is MoveStage.BEGUN and _is_to_be_sealed(deployment, move)
    return is_to_be_sealed or move.stage is MoveStage.LEAVING


def describe(deployment: Deployment) -> str:
    """The destination of a move, and what it waits for; empty: the deployment stays."""
    move = deployment.move.relocation
    if move is None:
        return ""
    nodes = ", ".join(assigned.node for assigned in move.assignments)
    return f"to {nodes}: {_waits_for(deployment, move)}"


def _waits_for(deployment: Deployment, move: Relocation) -> str:
    if _waits_for_snapshot(deployment):
        seqs = ", ".join(str(seq) for seq in deployment.queue.snapshots)
        return f"once save_state {seqs} is durable"
    match move.stage:
        case MoveStage.WAITING:
            return "once that can take it"
        case MoveStage.BEGUN:
            return "once what runs has ended, and it is sealed"
        case MoveStage.SEALING:
            return "it is being sealed"
        case MoveStage.MIRRORING:
            return f"{', '.join(move.fetching)} is fetching its state"
        case MoveStage.LEAVING:
            return "once what runs has ended"


def advance(step: Step, deployment: Deployment, move: Relocation) -> bool:
    """Take the move of a running deployment as far as it can go now.

    Returns: whether the deployment is to be stopped now, to start on its new nodes.
    """
    if not is_possible(step, deployment, move):
        _wait(step, deployment, move)
        return False
    if move.stage is MoveStage.WAITING and step.now_s >= move.retry_at_s:
        move.is_sealed = False
        step.advance_move(deployment, MoveEvent.TRIED_AGAIN)
    if move.stage is MoveStage.BEGUN and _has_sealed(step, deployment, move):
        move.began_s = step.now_s
        step.advance_move(deployment, MoveEvent.SEAL_ASKED)
    if move.stage is MoveStage.SEALING and not deployment.durability.sealing:
        _mirror(step, deployment, move)
        step.advance_move(deployment, MoveEvent.SEAL_ENDED)
    if move.stage is MoveStage.MIRRORING and not move.fetching:
        move.copy_s = step.now_s - move.began_s
        step.advance_move(deployment, MoveEvent.FETCHED)
    is_busy = (
        deployment.activation.running
        or deployment.activation.opening_on
        or deployment.durability.sealing
        or deployment.queue.snapshots
    )
    if move.stage is not MoveStage.LEAVING or is_busy or _has_gradients_to_use(deployment):
        return False
    has_failed = move.is_sealed and not deployment.durability.seal_asked
    if move.is_last or has_failed or _replay_s(deployment) <= move.copy_s:
        return True
    move.is_last = True
    seals.seal(step, deployment)
    step.advance_move(deployment, MoveEvent.LAST_SEAL_ASKED)
    return False


def _replay_s(deployment: Deployment) -> float:
    """Seconds that it would take to run again the operations after a deployment's seal.

    It is 0 where the deployment does not train, or has gradients and so cannot be sealed now.
    """
    if not deployment.spec.trainable or gradients.pending(deployment):
        return 0.0
    return sum(
        m.duration_s
        for m in deployment.durability.history
        if m.seq > deployment.durability.seal_seq
    )


def _wait(step: Step, deployment: Deployment, move: Relocation) -> None:
    move.fetching = []
    move.is_last = False
    step.advance_move(deployment, MoveEvent.PUT_OFF)


def _has_sealed(step: Step, deployment: Deployment, move: Relocation) -> bool:
    """Ask for the seal of a move, as soon as the seal can be made.

    Returns: whether the seal was asked for, or none is wanted.
    """
    if deployment.durability.sealing or _has_gradients_to_use(deployment):
        return False
    if not _is_to_be_sealed(deployment, move):
        return True
    if (
        deployment.activation.running
        or deployment.activation.opening_on
        or deployment.queue.snapshots
    ):
        return False
    move.is_sealed = True
    seals.seal(step, deployment)
    return True


def _is_to_be_sealed(deployment: Deployment, move: Relocation) -> bool:
    """Whether a seal makes a deployment's move shorter, and may be made.

    A deployment that does not train needs none: its last operations rebuild it as fast. A seal with
    gradients in it would bring them back after a refused step has thrown them away.
    """
    has_changed = deployment.durability.applied > max(
        deployment.durability.seal_seq, deployment.wpg.origin_seq
    )
    is_worth_it = deployment.spec.trainable and has_changed and not gradients.pending(deployment)
    return is_worth_it and not move.is_sealed and not deployment.durability.sealing


def _has_gradients_to_use(deployment: Deployment) -> bool:
    """Whether a deployment's gradients will be used up soon: its next operation is known."""
    is_known = deployment.queue.head_seq in deployment.queue.operations
    return deployment.spec.trainable and is_known and bool(gradients.pending(deployment))


def _mirror(step: Step, deployment: Deployment, move: Relocation) -> None:
    """Have each new node of a move fetch the part of the seal and the versions that it lacks."""
    fetching: list[NodeId] = []
    versions = retention.durable_needed_seqs(step, deployment)
    for index, assigned in enumerate(move.assignments):
        having = holders.nodes_with_part(deployment, index)
        seal_seq = 0 if assigned.node in having else deployment.durability.seal_seq
        if seal_seq or versions or deployment.durability.holds is not None:
            fetching.append(assigned.node)
            step.send(
                MirrorState,
                step.node(assigned.node),
                deployment=deployment.key,
                seal_seq=seal_seq,
                versions=versions,
                sources=seals.sources(step, deployment, index, but=assigned.node),
                ticket=holders.files_ticket(deployment, [assigned.node]),
                holds=_ticket_of_held(deployment, assigned.node),
                rank_offset=sum(len(before.devices) for before in move.assignments[:index]),
                num_ranks=deployment.spec.layout.num_ranks,
            )
    move.asked = step.sequence
    move.fetching = fetching


def _ticket_of_held(deployment: Deployment, node: NodeId) -> Ticket | None:
    if deployment.durability.holds is None:
        return None
    return Ticket(
        deployment.durability.holds, deployment.key, deployment.wpg.incarnation, [str(node)]
    )


def mirrored(step: Step, event: StateMirrored) -> None:
    """Note that a new node of a move has its copy, or could not get it.

    Where it could not, the move is put off and tried again after a pause.
    """
    deployment = step.deployment(event.deployment)
    if deployment is None or deployment.move.relocation is None:
        return
    move = deployment.move.relocation
    if event.command.sequence != move.asked or event.node not in move.fetching:
        return
    move.fetching.remove(event.node)
    if event.error is not None:
        move.failures += 1
        move.retry_at_s = step.now_s + holders.retry_pause_s(move.failures)
        step.set_timer(f"retry/{deployment.name}/{step.sequence}", move.retry_at_s)
        step.notify("move put off", f"{event.node}: {event.error.message}", deployment.name)
        _wait(step, deployment, move)
    elif event.seq and event.seq == deployment.durability.seal_seq:
        index = next(
            i for i, assigned in enumerate(move.assignments) if assigned.node == event.node
        )
        holders.add_replica(deployment, index, event.node)


def node_restarted(step: Step, deployment: Deployment, node: NodeId) -> None:
    """Note that a new node of a move has a new lease.

    The copy that the node was told to fetch under its last lease never comes.
    """
    move = deployment.move.relocation
    if move is not None and move.stage is MoveStage.MIRRORING and node in move.fetching:
        step.advance_move(deployment, MoveEvent.NODE_RESTARTED)


def relocate(step: Step, deployment: Deployment, assignments: list[RankAssignment]) -> None:
    """Place a deployment, whose ranks on its old nodes are dead, on the new nodes of its move."""
    name, old = deployment.name, deployment.nodes
    devices.leave(step, deployment)
    devices.forget(step, deployment)
    step.dirty.update(deployment.places)
    release_nodes(step, deployment)
    deployment.move.end()
    deployment.wpg.put_on(assignments)
    devices.place(step, deployment)
    for node in deployment.nodes:
        # A node may confirm late that it has forgotten the deployment: the next incarnation must
        # not be taken for the one that is confirmed dead.
        told = step.state.withdraw_forget(node, name)
        deployment.wpg.raise_incarnation(told)
    deployment.move.keep([*deployment.move.stale_holders, *old], but=deployment.nodes)
    deployment.durability.no_seal_asked()
    step.notify("deployment moved", f"{', '.join(old)} -> {', '.join(deployment.nodes)}", name)
