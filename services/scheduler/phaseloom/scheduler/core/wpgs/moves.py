"""Moves: a deployment goes to other nodes, and its state with it.

It is sealed where it trains and has changed since its seal, and runs on while its new nodes fetch a
copy of that seal and of the weights versions that it needs. Then it finishes what runs, is given
nothing new, is stopped, and begins its next life on the new nodes as after any loss: from the seal,
with what came after that run again. Where that would take longer than the copy did, it is sealed
and copied once more before it is stopped. Operations that come meanwhile wait.

While a `save_state` of it is written it is neither sealed nor stopped: what is saved would have to
be made again, from the seal before it. It runs on until that is durable; a further `save_state`
waits for the move, or there might never be a moment for it.

If one of its new nodes is down, or cannot take the copy, it goes on where it is until that is
otherwise. If it dies on the way, its next life begins wherever the state is and the nodes are up.
Its old nodes keep the seal that it was rebuilt from until it has made one where it is now.
"""

from __future__ import annotations

from phaseloom.common.contract.commands import MirrorState, Ticket
from phaseloom.common.contract.events import StateMirrored
from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.devices import devices
from phaseloom.scheduler.core.durability import seals
from phaseloom.scheduler.core.operations import gradients
from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.move import Relocation
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import MoveEvent, MoveStage
from phaseloom.scheduler.core.state.wpg import Span

RETRY_PAUSE_S = 5.0
"""Before a node that could not take a copy is asked again; twice as long each time."""
MAX_RETRY_PAUSE_S = 80.0


def begin(step: Step, deployment: Deployment, spans: list[Span]) -> None:
    """From now on it is on its way; to where it is, it stays."""
    name = deployment.name
    spans = _arranged(deployment, spans)
    let_go(step, deployment)
    seals.stop_copying(step, deployment)
    if deployment.move.relocation is not None:
        # Where it does not go after all there may be a copy.
        holders = {node for part in deployment.durability.replicas for node in part}
        deployment.move.keep(seals.nodes_with(deployment), but={*deployment.nodes, *holders})
    if spans == deployment.wpg.spans:
        deployment.move.end()
    else:
        deployment.move.begin(spans)
        seals.drop_other_parts(step, deployment)
        for node in deployment.nodes:
            if all(span.node != node for span in spans):
                groups.hold(step.state.cluster, node, name)
        if name not in step.state.moving:
            step.state.moving.append(name)
        devices.unclaim(step, deployment)
        step.job_changed(deployment.job_name)
    step.touch(deployment)


def _arranged(deployment: Deployment, spans: list[Span]) -> list[Span]:
    """Who stays keeps its ranks, and who has a copy of a part gets the ranks of that."""
    if len(spans) != len(deployment.wpg.spans):
        return spans
    new = {span.node: span for span in spans}
    kept = [new.pop(node, None) for node in deployment.nodes]
    for index, span in enumerate(kept):
        if span is None:
            having = next((node for node in seals.holders(deployment, index) if node in new), None)
            kept[index] = None if having is None else new.pop(having)
    rest = iter(new.values())
    return [next(rest) if span is None else span for span in kept]


def let_go(step: Step, deployment: Deployment) -> None:
    """It leaves its nodes, or stays after all: they wait for it no longer."""
    for node in deployment.nodes:
        groups.end_hold(step.state.cluster, node, deployment.name)
    step.follow(FollowUp.PLACE)


def is_possible(step: Step, deployment: Deployment, move: Relocation) -> bool:
    """Whether the nodes that it is to go to are there, and have forgotten it if it was there."""
    return all(
        step.node(span.node).is_up and deployment.name not in step.state.stopping.get(span.node, {})
        for span in move.spans
    )


def is_held(deployment: Deployment) -> bool:
    """Whether nothing new begins on it: it is about to be sealed, or to leave."""
    move = deployment.move.relocation
    if move is None or deployment.queue.cuts:
        return False
    if move.stage is MoveStage.BEGUN:
        return _is_to_be_sealed(deployment, move) and not _has_gradients_to_use(deployment)
    if move.stage is MoveStage.LEAVING:
        return not _has_gradients_to_use(deployment)
    return move.is_last and move.stage is not MoveStage.WAITING


def holds_back(deployment: Deployment, op: Op) -> bool:
    """Whether it is one `save_state` too many: the move waits for another one."""
    return op.kind == "save_state" and _waits_for_cut(deployment)


def _waits_for_cut(deployment: Deployment) -> bool:
    move = deployment.move.relocation
    if move is None or not deployment.queue.cuts:
        return False
    is_to_be_sealed = move.stage is MoveStage.BEGUN and _is_to_be_sealed(deployment, move)
    return is_to_be_sealed or move.stage is MoveStage.LEAVING


def describe(deployment: Deployment) -> str:
    """Where it is on its way to, and what it waits for; empty: it stays."""
    move = deployment.move.relocation
    if move is None:
        return ""
    return f"to {', '.join(span.node for span in move.spans)}: {_waits_for(deployment, move)}"


def _waits_for(deployment: Deployment, move: Relocation) -> str:
    if _waits_for_cut(deployment):
        seqs = ", ".join(str(seq) for seq in deployment.queue.cuts)
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
    """Take the move of a living deployment on; whether it is to be stopped now."""
    if not is_possible(step, deployment, move):
        _wait(step, deployment, move)
        return False
    if move.stage is MoveStage.WAITING and step.now_s >= move.retry_at_s:
        move.begin_again()
        step.advance_move(deployment, MoveEvent.TRIED_AGAIN)
    if move.stage is MoveStage.BEGUN and _has_sealed(step, deployment, move):
        move.note_began(step.now_s)
        step.advance_move(deployment, MoveEvent.SEAL_ASKED)
    if move.stage is MoveStage.SEALING and not deployment.durability.sealing:
        _mirror(step, deployment, move)
        step.advance_move(deployment, MoveEvent.SEAL_ENDED)
    if move.stage is MoveStage.MIRRORING and not move.fetching:
        move.note_copied(step.now_s)
        step.advance_move(deployment, MoveEvent.FETCHED)
    is_busy = (
        deployment.activation.running
        or deployment.activation.opening_on
        or deployment.durability.sealing
        or deployment.queue.cuts
    )
    if move.stage is not MoveStage.LEAVING or is_busy or _has_gradients_to_use(deployment):
        return False
    has_failed = move.is_sealed and not deployment.durability.seal_asked
    if move.is_last or has_failed or _replay_s(deployment) <= move.copy_s:
        return True
    move.seal_last()
    seals.seal(step, deployment)
    step.advance_move(deployment, MoveEvent.LAST_SEAL_ASKED)
    return False


def _replay_s(deployment: Deployment) -> float:
    """How long it would take to run again what its seal has not; 0: that, or it cannot be sealed as
    it is."""
    if not deployment.spec.trainable or gradients.pending(deployment):
        return 0.0
    return sum(
        m.duration_s
        for m in deployment.durability.history
        if m.seq > deployment.durability.seal_seq
    )


def _wait(step: Step, deployment: Deployment, move: Relocation) -> None:
    move.wait()
    step.advance_move(deployment, MoveEvent.PUT_OFF)


def _has_sealed(step: Step, deployment: Deployment, move: Relocation) -> bool:
    """Whether its seal was asked for, or none is wanted."""
    if deployment.durability.sealing or _has_gradients_to_use(deployment):
        return False
    if not _is_to_be_sealed(deployment, move):
        return True
    if deployment.activation.running or deployment.activation.opening_on or deployment.queue.cuts:
        return False
    move.note_sealed()
    seals.seal(step, deployment)
    return True


def _is_to_be_sealed(deployment: Deployment, move: Relocation) -> bool:
    """What does not train is rebuilt as fast by what it did last. A seal with gradients would bring
    them back after a refused step has thrown them away."""
    has_changed = deployment.durability.applied > max(
        deployment.durability.seal_seq, deployment.wpg.origin_seq
    )
    is_worth_it = deployment.spec.trainable and has_changed and not gradients.pending(deployment)
    return is_worth_it and not move.is_sealed and not deployment.durability.sealing


def _has_gradients_to_use(deployment: Deployment) -> bool:
    """Whether they will be gone soon: what comes next is known."""
    is_known = deployment.queue.head_seq in deployment.queue.operations
    return deployment.spec.trainable and is_known and bool(gradients.pending(deployment))


def _mirror(step: Step, deployment: Deployment, move: Relocation) -> None:
    """Have each new node fetch what it will begin with, as far as it has not got that."""
    fetching: list[NodeId] = []
    versions = seals.durable_needed(step, deployment)
    for index, span in enumerate(move.spans):
        holders = seals.holders(deployment, index)
        seal_seq = 0 if span.node in holders else deployment.durability.seal_seq
        if seal_seq or versions or deployment.durability.holds is not None:
            fetching.append(span.node)
            step.send(
                MirrorState,
                step.node(span.node),
                deployment=deployment.key,
                seal_seq=seal_seq,
                versions=versions,
                sources=seals.sources(step, deployment, index, but=span.node),
                ticket=seals.ticket(deployment, [span.node]),
                holds=_ticket_of_held(deployment, span.node),
                rank_offset=sum(len(before.devices) for before in move.spans[:index]),
                num_ranks=deployment.spec.layout.num_ranks,
            )
    move.ask(step.sequence, fetching)


def _ticket_of_held(deployment: Deployment, node: NodeId) -> Ticket | None:
    if deployment.durability.holds is None:
        return None
    return Ticket(
        deployment.durability.holds, deployment.key, deployment.wpg.incarnation, [str(node)]
    )


def mirrored(step: Step, event: StateMirrored) -> None:
    """A new node has its copy, or could not get it."""
    deployment = step.deployment(event.deployment)
    if deployment is None or deployment.move.relocation is None:
        return
    move = deployment.move.relocation
    if event.command.sequence != move.asked or event.node not in move.fetching:
        return
    move.note_fetched(event.node)
    if event.error is not None:
        move.failed(step.now_s, RETRY_PAUSE_S, MAX_RETRY_PAUSE_S)
        step.set_timer(f"retry/{deployment.name}/{step.sequence}", move.retry_at_s)
        step.tell("move put off", f"{event.node}: {event.error.message}", deployment.name)
        _wait(step, deployment, move)
    elif event.seq and event.seq == deployment.durability.seal_seq:
        index = next(i for i, span in enumerate(move.spans) if span.node == event.node)
        seals.note_replica(deployment, index, event.node)


def came_back(step: Step, deployment: Deployment, node: NodeId) -> None:
    """A new node has begun a new life: what it was told to fetch in the last one it never will."""
    move = deployment.move.relocation
    if move is not None and move.stage is MoveStage.MIRRORING and node in move.fetching:
        step.advance_move(deployment, MoveEvent.NODE_RESTARTED)


def relocate(step: Step, deployment: Deployment, spans: list[Span]) -> None:
    """It is dead on its old nodes, and booked on the new ones from now on."""
    name, old = deployment.name, deployment.nodes
    devices.leave(step, deployment)
    devices.forget(step, deployment)
    step.dirty.update(deployment.places)
    let_go(step, deployment)
    deployment.move.end()
    deployment.wpg.put_on(spans)
    for span in spans:
        devices.place(step.node(span.node), span.devices, deployment)
    for node in deployment.nodes:
        # What it was told to forget there may be confirmed late, and an incarnation dies once.
        told = step.state.stopping.get(node, {}).pop(name, 0)
        deployment.wpg.raise_incarnation(told)
    deployment.move.keep([*deployment.move.stale_holders, *old], but=deployment.nodes)
    deployment.durability.no_seal_asked()
    step.tell("deployment moved", f"{', '.join(old)} -> {', '.join(deployment.nodes)}", name)
