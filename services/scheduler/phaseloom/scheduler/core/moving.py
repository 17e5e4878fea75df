"""Moves: a deployment goes to other nodes, and its state with it.

It finishes what runs and is given nothing new, is sealed where it trains and has changed since its
seal, is stopped, and begins its next life on the new nodes as after any loss: from the seal, with
what came after that run again. Operations that come meanwhile wait. If it dies on the way, it goes
on from there; if one of its new nodes is down, it waits for that. Its old nodes keep the seal that
it was rebuilt from until it has made one where it is now. How they hand it over is theirs.
"""

from __future__ import annotations

from phaseloom.scheduler.core import devices, gradients, groups, phases, seals
from phaseloom.scheduler.core.state import Deployment, Relocation, Span
from phaseloom.scheduler.core.step import Step


def begin(step: Step, deployment: Deployment, spans: list[Span]) -> None:
    """From now on nothing new begins on it; to where it is, it stays."""
    name = deployment.name
    let_go(step, deployment)
    if spans == deployment.spans:
        deployment.moving = None
    else:
        deployment.moving = Relocation(spans)
        for node in deployment.nodes:
            if all(span.node != node for span in spans):
                groups.hold(step.state.cluster, node, name)
        if name not in step.state.moving:
            step.state.moving.append(name)
        devices.unclaim(step, deployment)
        step.changed_jobs.add(deployment.job_name)
    step.touch(deployment)


def let_go(step: Step, deployment: Deployment) -> None:
    """It leaves its nodes, or stays after all: they wait for it no longer."""
    for node in deployment.nodes:
        groups.let_go(step.state.cluster, node, deployment.name)
    step.has_new_room = True


def is_possible(step: Step, move: Relocation) -> bool:
    """Whether the nodes that it is to go to are there."""
    return all(step.node(span.node).is_up for span in move.spans)


def may_leave(step: Step, deployment: Deployment, move: Relocation) -> bool:
    """Whether all that it needs to be rebuilt elsewhere is stored; sees to it that it will be."""
    if deployment.running or deployment.awaited or deployment.sealing:
        return False
    if not is_possible(step, move):
        return False
    if move.is_sealed or not _is_worth_a_seal(deployment):
        return True
    move.is_sealed = True
    seals.seal(step, deployment)
    return False


def _is_worth_a_seal(deployment: Deployment) -> bool:
    """What does not train is rebuilt as fast by what it did last. A seal with gradients would bring
    them back after a refused step has thrown them away."""
    has_changed = deployment.applied > max(deployment.seal_seq, deployment.origin_seq)
    return deployment.spec.trainable and has_changed and not gradients.pending(deployment)


def relocate(step: Step, deployment: Deployment, spans: list[Span]) -> None:
    """It is dead on its old nodes, and booked on the new ones from now on."""
    name, old = deployment.name, deployment.nodes
    for device in step.devices_of(deployment):
        device.placed.remove(name)
        phases.left(step, device, deployment)
        device.ready.pop(name, None)
        if name in device.resident:
            device.resident.remove(name)  # where a switch-in was refused, it may have been booked
        if device.used_by == name:
            device.used_by = ""
        if device.holder == deployment.job_name:
            device.holder = ""
    step.dirty.update(deployment.places)
    let_go(step, deployment)
    deployment.moving = None
    deployment.spans = spans
    for device in step.devices_of(deployment):
        device.placed.append(name)
    for node in deployment.nodes:
        # What it was told to forget there may be confirmed late, and an incarnation dies once.
        told = step.state.stopping.get(node, {}).pop(name, 0)
        deployment.incarnation = max(deployment.incarnation, told)
    left = dict.fromkeys([*deployment.left, *old])
    deployment.left = [node for node in left if node not in deployment.nodes]
    deployment.seal_asked = 0
    step.tell("deployment moved", f"{', '.join(old)} -> {', '.join(deployment.nodes)}", name)
