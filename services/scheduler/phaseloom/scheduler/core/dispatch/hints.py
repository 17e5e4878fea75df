"""Hints to nodes: what they will need soon that is not on their devices, or not on the node.

Where host memory may not hold all states of a node, some of them lie on its NVMe. A state manager
that knows what is needed next promotes that while the device is busy with others, and demotes what
is needed last. It is told of a deployment whose operation waits for the device, and of the one that
a prediction says runs next (see `speculative`): once a prediction, and that it was wrong when
another operation came, when it is overdue, or when what waited is cancelled. A deployment that is
switched in needs no hint any more. On nodes that hold everything, and of jobs of which nothing is
known and nothing waits, nobody is told anything.

A `sync_weights` often waits while its version is there already: for a device that other jobs use,
or for a rollout of its own deployment. Its nodes are told to fetch the version meanwhile, so that
the device does not wait for the network. On crowded nodes a version comes with its operation only:
it would displace what is used sooner.

Results do not depend on hints, and neither does any other command.
Cost: O(deployments of the touched jobs), where a node is crowded; else nothing.
"""

from __future__ import annotations

from phaseloom.common.contract.commands import PrefetchState, PrefetchVersion
from phaseloom.common.contract.ids import parse_operation_key
from phaseloom.scheduler.core.devices import devices
from phaseloom.scheduler.core.dispatch import speculative
from phaseloom.scheduler.core.durability import retention
from phaseloom.scheduler.core.state.activation import NOT_TOLD_S
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Expected
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import OpState, WpgState


def tell(step: Step, name: str) -> None:
    """Send and withdraw the hints of one job that this step has changed."""
    job = step.state.jobs.get(name)
    for deployment in step.deployments_of(job) if job is not None else []:
        _tell(step, deployment)


def prefetch_version(step: Step, name: str) -> None:
    """Have the version of a `sync_weights` fetched that did not run at once when it could."""
    key = parse_operation_key(name)
    deployment = step.deployment_of(key)
    op = deployment.queue.find(key) if deployment is not None else None
    if deployment is None or op is None or op.version is None or op.state is not OpState.QUEUED:
        return
    if deployment.wpg.state is not WpgState.READY:
        return
    holders = retention.nodes_of(step, op.version)
    for node in step.nodes_of(deployment):
        if node.node not in step.state.crowded and holders != [node.node]:
            step.send_for(
                PrefetchVersion,
                node,
                deployment,
                sources=retention.sources_of(step, op.version),
                ticket=retention.ticket(step, deployment, op.version),
            )


def _tell(step: Step, deployment: Deployment) -> None:
    if not deployment.wpg.assignments or _is_resident(step, deployment):
        return
    is_told = deployment.activation.hinted_s != NOT_TOLD_S
    if _is_waiting(step, deployment):
        if not is_told:
            _send(step, deployment, step.now_s)
        return
    predictions = _predictions(step, deployment)
    if is_told and not predictions:
        _withdraw(step, deployment)
    elif not is_told and predictions and not any(p.is_told for p in predictions):
        _send(step, deployment, min(prediction.at_s for prediction in predictions))
        late_s = max(prediction.late_s for prediction in predictions)
        step.set_timer(f"hint/{deployment.name}/{step.sequence}", late_s)
        for prediction in predictions:
            prediction.is_told = True


def _is_resident(step: Step, deployment: Deployment) -> bool:
    return all(deployment.name in slot.resident for slot in devices.slots_of(step, deployment))


def _is_waiting(step: Step, deployment: Deployment) -> bool:
    return any(deployment.name in slot.ready for slot in devices.slots_of(step, deployment))


def _predictions(step: Step, deployment: Deployment) -> list[Expected]:
    """The predictions by which the deployment runs next of its job on a device."""
    job = deployment.job_name
    found = []
    if deployment.wpg.state is not WpgState.READY or deployment.move.relocation is not None:
        return []
    for slot in devices.slots_of(step, deployment):
        running = step.state.deployments.get(slot.running)
        expected = slot.expected.get(job)
        if expected is None or (running is not None and running.job_name == job):
            continue
        if speculative.next_of(step, slot, job, expected) is deployment:
            found.append(expected)
    return found


def _send(step: Step, deployment: Deployment, use_s: float) -> None:
    crowded = [node for node in step.nodes_of(deployment) if node.node in step.state.crowded]
    if not any(devices.is_crowded(step, node) for node in crowded):
        for node in crowded:
            step.state.unmark_crowded(node.node)
        return
    deployment.activation.hint(use_s)
    _command(step, deployment, max(0.0, use_s - step.now_s))


def _withdraw(step: Step, deployment: Deployment) -> None:
    deployment.activation.hint(NOT_TOLD_S)
    _command(step, deployment, None)


def _command(step: Step, deployment: Deployment, in_s: float | None) -> None:
    for node in step.nodes_of(deployment):
        step.send_for(PrefetchState, node, deployment, in_s=in_s)
