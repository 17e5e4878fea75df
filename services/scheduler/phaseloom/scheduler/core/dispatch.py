"""Which operations run next: hold, choose, switch, permit.

A device runs the operations of one deployment at a time (one claim on all of its compute): one
mutating operation alone, or reading ones together, up to `max_reading`. While reading ones run,
more of their deployment join them, until a mutating one is at its head (which then goes before all
that came after it), another deployment has claimed one of its devices, or its quantum has ended
while another waits: then what runs drains and the others go first. Whose turn it is on a free
device is decided in `choice`, how long it is kept for its holder in `holding`, and what is switched
in before it is asked for in `early`.

A deployment with several ranks takes one device of one node each, all at once: chosen on one of
them, it claims them all, and nothing else begins on the free ones until the last is free. Claims
are taken in one order on every device, so that no two wait for each other.
Cost of a step: linear in the deployments that have something ready on the touched devices.
"""

from __future__ import annotations

from phaseloom.common.ids import DeploymentKey
from phaseloom.common.messages import OpenActivation, Permit
from phaseloom.scheduler.core import choice, devices, early, gradients, holding, ready, seals
from phaseloom.scheduler.core.state import Deployment, Device, Node, Op, OpState, WpgState
from phaseloom.scheduler.core.step import Step

BUSY = 4
"""Times the usual number of mutations, after which a state is sealed between two operations."""


def dispatch(step: Step) -> None:
    """Give every device that the step has touched its next operations, if any may begin."""
    ready.note(step)
    while step.dirty:
        name, index = min(step.dirty)
        step.dirty.remove((name, index))
        node = step.state.nodes[name]
        # A node may have come back with fewer devices.
        if node.is_up and index < len(node.devices):
            _dispatch(step, node, index)


def _dispatch(step: Step, node: Node, index: int) -> None:
    device = node.devices[index]
    if device.running:
        _join(step, node, step.state.deployments[device.running])
        return
    deployment = _claimant(step, node, index)
    if deployment is not None:
        _begin(step, node, deployment)
        return
    deployment, again_s = choice.choose(step, node, index)
    if deployment is not None:
        _begin(step, node, deployment)
    elif again_s < choice.NEVER_S:
        _wake_at(step, node, index, again_s)
    elif not ready.is_any_on(step, device):
        _seal_idle(step, device)
        _open_early(step, node, index)


def _claimant(step: Step, node: Node, index: int) -> Deployment | None:
    """Who has claimed the device; a claim of what cannot run any more is dropped."""
    while (deployment := devices.claimant(step, node, index)) is not None:
        if ready.first(step, deployment) is not None:
            return deployment
        node.claims.remove(deployment.name)
        step.dirty.update((node.node, other) for other in deployment.devices if other != index)
    return None


def _begin(step: Step, node: Node, deployment: Deployment) -> None:
    """Run what it has, or claim its devices where not all of them are free."""
    for index in deployment.devices:
        claimant = devices.claimant(step, node, index)
        if node.devices[index].running or claimant not in (None, deployment):
            if deployment.name not in node.claims:
                node.claims.append(deployment.name)
            return
    if deployment.name in node.claims:
        node.claims.remove(deployment.name)
    ops = ready.batch(step, deployment, max(1, step.config.max_reading))
    if not deployment.epoch:
        _open(step, node, deployment)
    elif seals.is_due(step, deployment, times=BUSY):
        # It is never displaced and never idle: its log must not grow for ever.
        seals.seal(step, deployment)
    for op in ops:
        _permit(step, node, deployment, op)


def _join(step: Step, node: Node, deployment: Deployment) -> None:
    """Reading operations may begin beside those of their deployment that run."""
    room = step.config.max_reading - len(deployment.running)
    if room <= 0 or deployment.name not in node.devices[deployment.devices[0]].ready:
        return
    if any(_is_closed(step, node, index, deployment) for index in deployment.devices):
        return
    for op in ready.joiners(step, deployment, room):
        _permit(step, node, deployment, op)


def _is_closed(step: Step, node: Node, index: int, deployment: Deployment) -> bool:
    """Whether what runs there must drain, because it is others' turn."""
    device = node.devices[index]
    if devices.claimant(step, node, index) is not None:
        return True
    if not holding.is_quantum_over(step, device.used_since_s):
        return False
    job = device.holder
    is_over = holding.is_quantum_over(step, device.held_since_s)
    if is_over and ready.is_any_on(step, device, but_job=job):
        return True
    return any(d is not deployment for d, _ in ready.on(step, device, of_job=job))


def _wake_at(step: Step, node: Node, index: int, due_s: float) -> None:
    device = node.devices[index]
    timer = f"grace/{node.node}/{index}/{step.sequence}"
    if step.state.timers.get(device.timer, -1.0) == due_s:
        return
    device.timer = timer
    step.set_timer(timer, due_s)


def _open_early(step: Step, node: Node, index: int) -> None:
    target, open_s = early.plan(step, node, index)
    if target is None:
        return
    if open_s > step.now_s:
        _wake_at(step, node, index, open_s)
    elif not early.try_skip(step, target):
        _open(step, node, target, is_early=True)
        early.opened(step, target)


def _open(step: Step, node: Node, deployment: Deployment, *, is_early: bool = False) -> None:
    """Open an activation: its epoch is this event's place in the log."""
    leaving: list[Deployment] = []
    for index in deployment.devices:
        found = devices.victims(step, node, index, deployment)
        leaving += [victim for victim in found if victim not in leaving]
    for victim in leaving:
        victim.epoch = 0
        early.displaced(step, victim)
        for device in step.devices_of(victim):
            if victim.name in device.resident:
                device.resident.remove(victim.name)
    deployment.epoch = step.sequence
    for device in step.devices_of(deployment):
        if deployment.name not in device.resident:
            device.resident.append(deployment.name)
    step.send(
        OpenActivation,
        node,
        deployment=deployment.key,
        incarnation=deployment.incarnation,
        epoch=deployment.epoch,
        displaces=[victim.key for victim in leaving],
        early=is_early,
    )
    for victim in leaving:
        if seals.is_due(step, victim):
            seals.seal(step, victim)


def _permit(step: Step, node: Node, deployment: Deployment, op: Op) -> None:
    replay = deployment.state is WpgState.RECOVERING
    if not replay:
        step.move_op(op, OpState.PERMITTED)
    op.permitted_s = step.now_s
    early.came(step, deployment, op)
    deployment.running.append(op.key)
    devices.use(step, deployment)
    step.send(
        Permit,
        node,
        operation=op.key,
        operation_id=op.id,
        kind=op.kind,
        incarnation=deployment.incarnation,
        epoch=deployment.epoch,
        prev=deployment.applied,
        replay=replay or (op.uncertain and op.is_mutating),
        sources=_sources(step, op),
        partial=gradients.is_partial(deployment, op),
    )


def _sources(step: Step, op: Op) -> list[str]:
    """Where the weights version of a `sync_weights` is: at the node of its policy."""
    if op.version is None:
        return []
    node = seals.node_of(step, op.version)
    return [] if node is None else [step.node(node).state_endpoint]


def _seal_idle(step: Step, device: Device) -> None:
    """A deployment that nobody displaces is sealed when it has nothing to do."""
    for name in device.resident:
        deployment = step.state.deployments[name]
        if deployment.state is WpgState.READY and seals.is_due(step, deployment, times=2):
            seals.seal(step, deployment)


def refused(step: Step, key: DeploymentKey, epoch: int) -> list[Op]:
    """An activation did not open; returns the operations that it was opened for.

    What it should have displaced may be on the devices still: it stays booked there, without an
    activation, so that the next one displaces it again (harmless where it is gone).
    """
    deployment = step.deployment(key)
    if deployment is None or deployment.epoch != epoch:
        return []
    ops = [op for name in deployment.running if (op := deployment.open_operation(name)) is not None]
    step.vacate(deployment)
    for device in step.devices_of(deployment):
        for name in device.placed:
            other = step.state.deployments[name]
            if other.incarnation and other is not deployment:
                _rebook(step, other)
    return ops


def _rebook(step: Step, deployment: Deployment) -> None:
    for device in step.devices_of(deployment):
        if deployment.name not in device.resident:
            device.resident.insert(0, deployment.name)
