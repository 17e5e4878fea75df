"""Devices: what is on one, what must leave it for a newcomer, who has claimed it."""

from __future__ import annotations

from phaseloom.common.messages import Residency
from phaseloom.scheduler.core.state import Deployment, Node
from phaseloom.scheduler.core.step import Step


def victims(step: Step, node: Node, index: int, newcomer: Deployment) -> list[Deployment]:
    """What must leave the device: other jobs' state where residency is per job, then the least
    recently used until the newcomer fits."""
    device = node.devices[index]
    residents = [step.state.deployments[name] for name in device.resident if name != newcomer.name]
    leaving = []
    if node.residency is Residency.JOB:
        leaving = [d for d in residents if d.key.job_key != newcomer.key.job_key]
    staying = [d for d in residents if d not in leaving]
    used = newcomer.state_bytes + sum(d.state_bytes for d in staying)
    for resident in staying:
        if used <= device.memory_bytes:
            break
        leaving.append(resident)
        used -= resident.state_bytes
    return leaving


def claimant(step: Step, node: Node, index: int) -> Deployment | None:
    """The deployment that was chosen first among those that wait for this device."""
    for name in node.claims:
        deployment = step.state.deployments[name]
        if index in deployment.devices:
            return deployment
    return None


def use(step: Step, deployment: Deployment) -> None:
    """Operations of it run now: its devices are its job's, and its state is the newest there."""
    name, job = deployment.name, str(deployment.key.job_key)
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
