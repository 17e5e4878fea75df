"""Devices: what is on one, what must leave it for a newcomer, who has claimed it."""

from __future__ import annotations

from phaseloom.common.contract.specs import Residency
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Device, Node
from phaseloom.scheduler.core.state.step import Step


def victims(step: Step, node: Node, index: int, newcomer: Deployment) -> list[Deployment]:
    """What must leave the device: other jobs' state where residency is per job, then the least
    recently used until the newcomer fits."""
    device = node.devices[index]
    residents = [step.state.deployments[name] for name in device.resident if name != newcomer.name]
    leaving = []
    if node.residency is Residency.JOB:
        leaving = [d for d in residents if d.key.job_key != newcomer.key.job_key]
    staying = [d for d in residents if d not in leaving]
    used = newcomer.wpg.state_bytes + sum(d.wpg.state_bytes for d in staying)
    for resident in staying:
        if used <= device.memory_bytes:
            break
        leaving.append(resident)
        used -= resident.wpg.state_bytes
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
    """Its turn has come: its devices are its job's, and its state is the newest there."""
    name, job = deployment.name, deployment.job_name
    for device in step.devices_of(deployment):
        device.running = name
        device.is_let_go = False
        if device.used_by != name:
            device.used_by = name
            device.used_since_s = step.now_s
        if device.holder != job:
            device.holder = job
            device.held_since_s = step.now_s
        if name in device.resident:
            device.resident.remove(name)
        device.resident.append(name)


def left(step: Step, device: Device, deployment: Deployment) -> None:
    """Forget a job on a device that its last deployment has left."""
    key = deployment.key.job_key
    if not any(step.state.deployments[name].key.job_key == key for name in device.placed):
        device.served.pop(deployment.job_name, None)
        device.rounds.pop(deployment.job_name, None)
    step.job_of(deployment).progress.enter_round(0)
