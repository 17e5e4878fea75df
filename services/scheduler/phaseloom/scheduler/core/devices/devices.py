"""Devices and their slots: what is in one, what must leave it for a newcomer, who has claimed it.

A device has one slot today. Others get slots from here (`slot`, `slots_of`), may read them, and
have them changed by the functions below: nothing else writes a slot's fields.
"""

from __future__ import annotations

from collections.abc import Iterable

from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.specs import Residency
from phaseloom.scheduler.core.state.activation import NOT_TOLD_S
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Expected, Node, Phase, Slot
from phaseloom.scheduler.core.state.step import Step


def slot(node: Node, index: int) -> Slot:
    return node.devices[index].slots[0]


def slots_of(step: Step, deployment: Deployment) -> list[Slot]:
    """The slot of each rank."""
    nodes = step.state.nodes
    return [slot(nodes[span.node], i) for span in deployment.wpg.spans for i in span.devices]


def placed_on(node: Node) -> list[str]:
    """Deployments that are placed on a node, once for each of their devices there."""
    return [name for device in node.devices for slot in device.slots for name in slot.placed]


def load(node: Node, index: int) -> int:
    """How many deployments are placed on a device."""
    return len(slot(node, index).placed)


def victims(step: Step, node: Node, index: int, newcomer: Deployment) -> list[Deployment]:
    """What must leave the device: other jobs' state where residency is per job, then the least
    recently used until the newcomer fits."""
    resident = slot(node, index).resident
    residents = [step.state.deployments[name] for name in resident if name != newcomer.name]
    leaving = []
    if node.residency is Residency.JOB:
        leaving = [d for d in residents if d.key.job_key != newcomer.key.job_key]
    staying = [d for d in residents if d not in leaving]
    used = newcomer.wpg.state_bytes + sum(d.wpg.state_bytes for d in staying)
    for other in staying:
        if used <= node.devices[index].memory_bytes:
            break
        leaving.append(other)
        used -= other.wpg.state_bytes
    return leaving


def claimant(step: Step, node: Node, index: int) -> Deployment | None:
    """The deployment that was chosen first among those that wait for this device."""
    for name in node.claims:
        deployment = step.state.deployments[name]
        if any(span.node == node.node and index in span.devices for span in deployment.wpg.spans):
            return deployment
    return None


def claim(step: Step, deployment: Deployment) -> None:
    """It was chosen, and waits until all of its devices are free.

    The claim is noted on all of its nodes at once, so that claims are in the same order wherever
    they meet: the oldest is the first on each of its devices, and nothing deadlocks.
    """
    for node in step.nodes_of(deployment):
        if deployment.name not in node.claims:
            node.claims.append(deployment.name)


def unclaim(step: Step, deployment: Deployment) -> None:
    for node in step.nodes_of(deployment):
        if deployment.name in node.claims:
            node.claims.remove(deployment.name)


def use(step: Step, deployment: Deployment) -> None:
    """Its turn has come: its slots are its job's, and its state is the newest there."""
    name, job = deployment.name, deployment.job_name
    for slot in slots_of(step, deployment):
        slot.running = name
        slot.is_released = False
        if slot.used_by != name:
            slot.used_by = name
            slot.used_since_s = step.now_s
        if slot.holder != job:
            slot.holder = job
            slot.held_since_s = step.now_s
        if name in slot.resident:
            slot.resident.remove(name)
        slot.resident.append(name)


def left(step: Step, slot: Slot, deployment: Deployment) -> None:
    """Forget a job in a slot that its last deployment has left."""
    key = deployment.key.job_key
    if not any(step.state.deployments[name].key.job_key == key for name in slot.placed):
        slot.served.pop(deployment.job_name, None)
        slot.rounds.pop(deployment.job_name, None)
    step.job_of(deployment).progress.enter_round(0)


# --- where deployments are -----------------------------------------------------------------------


def place(node: Node, indices: Iterable[int], deployment: Deployment) -> None:
    """Note on devices of a node that a deployment runs there."""
    for index in indices:
        slot(node, index).placed.append(deployment.name)


def leave(step: Step, deployment: Deployment) -> None:
    """A deployment does not run on its devices any more."""
    for slot in slots_of(step, deployment):
        slot.placed.remove(deployment.name)
        left(step, slot, deployment)


def forget(step: Step, deployment: Deployment) -> None:
    """Nothing that a deployment has left on its devices counts any more."""
    name = deployment.name
    for slot in slots_of(step, deployment):
        slot.ready.pop(name, None)
        if name in slot.resident:
            slot.resident.remove(name)  # where a switch-in was refused, it may have been booked
        if slot.used_by == name:
            slot.used_by = ""
        if slot.holder == deployment.job_name:
            slot.holder = ""


def switch_in(node: Node, indices: Iterable[int], deployment: Deployment) -> None:
    """The state of a deployment is on these devices of a node from now on."""
    for index in indices:
        resident = slot(node, index).resident
        if deployment.name not in resident:
            resident.append(deployment.name)


def switch_out(node: Node, indices: Iterable[int], deployment: Deployment) -> None:
    """The state of a deployment is not on these devices of a node any more."""
    for index in indices:
        resident = slot(node, index).resident
        if deployment.name in resident:
            resident.remove(deployment.name)


def book_again(step: Step, deployment: Deployment) -> None:
    """The state of a deployment may be on its devices still, and is the first to leave them."""
    for slot in slots_of(step, deployment):
        if deployment.name not in slot.resident:
            slot.resident.insert(0, deployment.name)


def vacate(step: Step, deployment: Deployment) -> None:
    """The processes of a deployment are gone: nothing of it is on a device, nothing of it runs."""
    name = deployment.name
    deployment.activation.close()
    for key in list(deployment.activation.running):
        free(step, deployment, key, "")
    for slot in slots_of(step, deployment):
        if name in slot.resident:
            slot.resident.remove(name)
        if slot.running == name:
            slot.running = ""
        if slot.early == name:
            slot.early = ""
        slot.expected.pop(deployment.job_name, None)
    unclaim(step, deployment)
    deployment.activation.hint(NOT_TOLD_S)
    step.touch(deployment)


# --- what runs -----------------------------------------------------------------------------------


def free(step: Step, deployment: Deployment, key: OperationKey, kind: str) -> None:
    """A running operation has ended; with the last one its devices are idle."""
    deployment.activation.ended(key, step.now_s)
    for slot in slots_of(step, deployment):
        if not deployment.activation.running:
            slot.running = ""
        slot.last = f"{key.deployment}.{kind}"
        slot.idle_since_s = step.now_s


def release(step: Step, deployment: Deployment) -> None:
    """Nothing runs on the devices of a deployment whose turn had come."""
    for slot in slots_of(step, deployment):
        slot.running = ""


def note_ready(step: Step, deployment: Deployment, *, is_ready: bool) -> None:
    """Whether a deployment has an operation that could run."""
    for slot in slots_of(step, deployment):
        if is_ready:
            slot.ready[deployment.name] = deployment.job_name
        else:
            slot.ready.pop(deployment.name, None)


def note_phase(slot: Slot, phase: Phase) -> None:
    """A slot is in another phase from now on."""
    slot.phase = phase


def note_kind(slot: Slot, kind: str) -> None:
    """An operation of this kind goes on with the slot's phase."""
    if kind not in slot.phase.kinds:
        slot.phase.kinds.append(kind)


def note_served(slot: Slot, job: str, sequence: int) -> None:
    """An operation of a job begins at this place in the log."""
    slot.served[job] = sequence


def set_released(slot: Slot, is_released: bool) -> None:
    """Note that the holder of a slot has ended its phase there, or has begun one."""
    slot.is_released = is_released
    if is_released:
        slot.phase = Phase()


def note_timer(slot: Slot, timer: str) -> None:
    """A slot is looked at again when this timer fires."""
    slot.timer = timer


# --- who is expected -----------------------------------------------------------------------------


def expect(slot: Slot, job: str, expected: Expected | None) -> None:
    """When a job needs the slot next, as far as that is predicted."""
    if expected is None:
        slot.expected.pop(job, None)
    else:
        slot.expected[job] = expected


def came(slot: Slot, job: str) -> Expected | None:
    """An operation of a job begins; returns what was predicted of it."""
    slot.early = ""
    return slot.expected.pop(job, None)


def note_early(slot: Slot, name: str) -> None:
    """An activation was opened speculatively for this deployment; empty: none is any more."""
    slot.early = name
