"""Which operations run next: hold, choose, switch, permit.

A device runs the operations of one deployment at a time, or of several that each have a share of
it (`shares`). Of a deployment run one mutating operation alone, or reading ones together, up to
`max_reading`. While reading ones run,
more of their deployment join them, until a mutating one is at its head (which then goes before all
that came after it), another deployment has claimed one of its devices, or its quantum has ended
while another waits: then what runs drains and the others go first. What runs next on a free
device is decided in `choice`, how long it is kept for its holder in `idle_hold`, and what is
switched in before it is asked for in `speculative`.

A deployment with several ranks takes a device for each, of one node or of several, all at once:
chosen on one of them, it claims them all, and nothing else begins on the free ones until the last
is free. Claims are taken in one order on every device, so that no two wait for each other.

On one node an activation and its permits are ordered by the node itself. Over several, it opens on
each by itself: its devices are reserved, and its permits follow once the last has said that it is
open. If one refuses, the others close theirs.
Cost of a step: linear in the deployments that have something ready on the touched devices.
"""

from __future__ import annotations

from msgspec.structs import replace

from phaseloom.common.contract.commands import CloseActivation, OpenActivation, Permit
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import ActivationOpened, ActivationRefused, PermitReturned
from phaseloom.scheduler.core.devices import devices, estimates, round_robin
from phaseloom.scheduler.core.dispatch import choice, ready, shares, speculative, tails
from phaseloom.scheduler.core.durability import retention, seals
from phaseloom.scheduler.core.operations import gradients, operations, reads
from phaseloom.scheduler.core.policies.registry import ORDERING
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import OpEvent, OpState, WpgState

REFUSAL_PAUSE_S = 0.5
"""Pause before an activation that was refused is tried again."""
MAX_REFUSALS = 3
_PERMANENT = frozenset({Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT})
"""Codes of refused switch-ins that will be refused again."""
RETRY_PAUSE_S = 0.5
"""Pause before an operation whose permit came back unused is permitted again."""
BUSY_FACTOR = 4
"""Times the usual number of mutations, after which a state is sealed between two operations."""


def dispatch(step: Step) -> None:
    """Give every device that the step has touched its next operations, if any may begin."""
    _record_ready(step)
    while step.dirty:
        device_ref = min(step.dirty)
        step.dirty.remove(device_ref)
        name, index = device_ref
        node = step.state.nodes[name]
        # A node may have come back with fewer devices.
        if node.is_up and index < len(node.devices):
            slot = devices.slot(step.state, name, index)
            _dispatch(step, slot)
            if slot.shares:
                while (neighbour := shares.next_neighbour(step, slot)) is not None:
                    _start_neighbour(step, neighbour)
                shares.record_paces(step, slot)


def _record_ready(step: Step) -> None:
    """Note on their devices which of the touched deployments have a ready operation."""
    for name in sorted(step.touched):
        deployment = step.state.deployments.get(name)
        if deployment is None:
            continue
        step.request_hints(deployment)
        is_ready = next(iter(ready.operations(step, deployment)), None) is not None
        devices.note_ready(step, deployment, is_ready=is_ready)


def _dispatch(step: Step, slot: Slot) -> None:
    if slot.running:
        for name in slot.runs:
            _continue(step, step.state.deployments[name])
        return
    deployment = _next_claimant(step, slot)
    if deployment is not None:
        _start(step, deployment)
        return
    deployment, retry_s = choice.choose(step, slot)
    if deployment is not None:
        _start(step, deployment)
    elif retry_s < choice.NEVER_S:
        _look_again_at(step, slot, retry_s)
    elif not ready.is_any_on(step, slot):
        _seal_idle(step, slot)
        _open_speculatively(step, slot)


def _next_claimant(step: Step, slot: Slot) -> Deployment | None:
    """The deployment that has claimed the device. A claim of one that cannot run is dropped."""
    while (deployment := devices.claimant(step, slot)) is not None:
        if ready.first(step, deployment) is not None:
            return deployment
        devices.unclaim(step, deployment)
        step.dirty.update(set(deployment.places) - {(slot.node, slot.device)})
    return None


def _start(step: Step, deployment: Deployment) -> None:
    """Run what a deployment has, or claim its devices where not all that it needs are free."""
    slots = devices.slots_of(step, deployment)
    # A lone rank's device is the one on which the deployment was chosen: it is free.
    taken_ranks = _taken_ranks(step, deployment, slots) if len(slots) > 1 else []
    ops = _batch(step, deployment)
    if taken_ranks:
        ops = tails.startable_without(step, deployment, ops, taken_ranks)
        if not ops:
            devices.claim(step, deployment)
            return
    devices.unclaim(step, deployment)
    deployment.activation.leave_out(taken_ranks)
    shares.give_share(step, deployment)
    if not deployment.activation.epoch:
        _open(step, deployment)
    elif seals.is_due(step, deployment, times=BUSY_FACTOR) and not taken_ranks:
        # It is never displaced and never idle: its log must not grow for ever.
        seals.seal(step, deployment)
    if deployment.activation.opening_on:
        devices.use(step, deployment, slots)
        return
    _permit(step, deployment, ops, slots)


def _taken_ranks(step: Step, deployment: Deployment, slots: list[Slot]) -> list[int]:
    """The ranks whose devices run something, or are claimed by others."""
    return [
        rank
        for rank, slot in enumerate(slots)
        if slot.running or devices.claimant(step, slot) not in (None, deployment)
    ]


def _start_neighbour(step: Step, deployment: Deployment) -> None:
    """Run what a deployment has, beside others on its device: it has its share already."""
    if not deployment.activation.epoch:
        _open(step, deployment)
    elif seals.is_due(step, deployment, times=BUSY_FACTOR):
        seals.seal(step, deployment)
    _permit(step, deployment, _batch(step, deployment), devices.slots_of(step, deployment))


def _batch(step: Step, deployment: Deployment) -> list[Op]:
    return ready.batch(step, deployment, max(1, step.config.max_reading))


def _continue(step: Step, deployment: Deployment) -> None:
    """Run more of the deployment that holds a device, or what its activation was opened for."""
    if deployment.activation.running:
        _join(step, deployment)
    elif not deployment.activation.opening_on:
        # The activation is open on all nodes now: run what it was opened for.
        ops = _batch(step, deployment)
        _permit(step, deployment, ops, devices.slots_of(step, deployment))
        if not ops:
            devices.release(step, deployment)
            step.dirty.update(deployment.places)


def _join(step: Step, deployment: Deployment) -> None:
    """Reading operations may begin beside those of their deployment that run."""
    room = step.config.max_reading - len(deployment.activation.running)
    slots = devices.slots_of(step, deployment)
    if room <= 0 or deployment.name not in slots[0].ready:
        return
    running = deployment.queue.find(deployment.activation.running[0])
    if running is None or running.is_mutating or running.uncertain:
        return
    ops = [op for op in ready.batch(step, deployment, room) if not (op.is_mutating or op.uncertain)]
    if not ops or any(_must_drain(step, slot, deployment) for slot in slots):
        return
    _permit(step, deployment, ops, slots)


def _must_drain(step: Step, slot: Slot, deployment: Deployment) -> bool:
    """Whether what runs in a slot must drain, because others go next."""
    if devices.claimant(step, slot) is not None:
        return True
    if not choice.is_quantum_over(step, slot.used_since_s):
        return False
    job = slot.holder
    is_over = choice.is_quantum_over(step, slot.held_since_s)
    if is_over and ready.is_any_on(step, slot, but_job=job):
        return True
    return any(d is not deployment for d, _ in ready.options_on(step, slot, of_job=job))


def _look_again_at(step: Step, slot: Slot, due_s: float) -> None:
    if step.state.timers.get(slot.timer, -1.0) != due_s:
        devices.note_timer(slot, f"grace/{slot.node}/{slot.device}/{step.sequence}")
        step.set_timer(slot.timer, due_s)


def _open_speculatively(step: Step, slot: Slot) -> None:
    target, open_s = speculative.plan(step, slot)
    if target is None:
        return
    if open_s > step.now_s:
        _look_again_at(step, slot, open_s)
    elif not speculative.skip_guess(step, target):
        _open(step, target, is_speculative=True)
        speculative.record_guess(step, target)


def _open(step: Step, deployment: Deployment, *, is_speculative: bool = False) -> None:
    """Open an activation on all of its nodes: its epoch is this event's place in the log."""
    opening_on = deployment.nodes if len(deployment.wpg.assignments) > 1 else []
    deployment.activation.open(step.sequence, step.now_s, opening_on)
    displaced: list[Deployment] = []
    ranks = tails.ranks_of(deployment)
    for node in step.nodes_of(deployment):
        held_slots = devices.held_slots(step.state, deployment)
        slots = [slot for slot in held_slots if slot.node == node.node]
        leaving: list[Deployment] = []
        for slot in slots:
            victims = devices.victims(step, slot, deployment)
            leaving += [victim for victim in victims if victim not in leaving]
        for victim in leaving:
            _displace(step, victim, slots)
        devices.switch_in(slots, deployment)
        step.send_for(
            OpenActivation,
            node,
            deployment,
            epoch=deployment.activation.epoch,
            displaces=[victim.key for victim in leaving],
            is_speculative=is_speculative,
            ranks=ranks,
        )
        displaced += [victim for victim in leaving if victim not in displaced]
    for victim in displaced:
        if not victim.activation.running and seals.is_due(step, victim):
            seals.seal(step, victim)


def _displace(step: Step, victim: Deployment, slots: list[Slot]) -> None:
    """End an activation, unless its tail goes on elsewhere. The state leaves these slots, and stays
    in others until it must go."""
    if not victim.activation.idle_ranks:
        victim.activation.close()
        speculative.record_displaced(step, victim)
    devices.switch_out(slots, victim)


def _permit(step: Step, deployment: Deployment, ops: list[Op], slots: list[Slot]) -> None:
    for op in ops:
        _permit_one(step, deployment, op, slots)


def _permit_one(step: Step, deployment: Deployment, op: Op, slots: list[Slot]) -> None:
    replay = deployment.wpg.state is WpgState.RECOVERING
    if not replay:
        step.advance_op(op, OpEvent.PERMITTED)
    op.permitted_s = step.now_s
    speculative.record_start(step, deployment, op, slots)
    _record_phase(step, deployment, op, slots)
    reads.record_copies(step, deployment, op)
    deployment.activation.began(op.key)
    devices.use(step, deployment, slots)
    node = step.node_of(deployment)
    # A lone rank runs everything itself: there is no other to gather its tail on.
    is_lone = len(slots) == 1
    # Built here, since one by the names in a dict, as `send` does it, takes twice as long.
    permit = Permit(
        id=step.command_id,
        node=node.node,
        revision=node.revision,
        operation=op.key,
        operation_id=op.id,
        kind=op.kind,
        incarnation=deployment.wpg.incarnation,
        epoch=deployment.activation.epoch,
        prev=deployment.durability.applied,
        replay=replay or (op.uncertain and op.is_mutating),
        sources=[] if op.version is None else retention.sources_of(step, op.version),
        partial=gradients.is_partial(deployment, op),
        ticket=None if op.version is None else retention.ticket(step, deployment, op.version),
        sealing=deployment.durability.sealing if len(deployment.wpg.assignments) > 1 else 0,
        ranks=[] if is_lone else tails.ranks_of(deployment),
        tail_on=[] if is_lone else tails.tail_ranks(step, deployment, op),
        adapter=op.adapter,
        units=shares.units_for(step, deployment, slots),
    )
    step.send_built(node, permit)


def _record_phase(step: Step, deployment: Deployment, op: Op, slots: list[Slot]) -> None:
    """Note an operation that is about to be permitted: it continues a phase, or begins one.

    Args: slots: those of its deployment.
    """
    _record_lag(step, deployment, op)
    if deployment.activation.running:
        return  # It joins others.
    name, kind = deployment.job_name, ready.kind_of(deployment, op)
    # What begins beside others leaves the phase of the device to those.
    phase_slots = [
        s for s in slots if s.running in ("", deployment.name) or not s.share_of(deployment.name)
    ]
    is_new = False
    for slot in phase_slots:
        continues = ready.is_continued(step, slot, deployment, kind)
        devices.serve(step, slot, name, kind, continues=continues)
        is_new = is_new or not continues
    if is_new and ORDERING[step.config.ordering].is_strict:
        round_robin.began(step, deployment, phase_slots)


def _record_lag(step: Step, deployment: Deployment, op: Op) -> None:
    """Note for the job that an operation is run for how long it was kept waiting.

    What several operations of a job wait for at once counts as the wait of the first.
    """
    running = deployment.activation.running
    if running and not op.payer:
        return
    payer = step.payer_of(deployment, op)
    for key in running:
        if step.payer_of(deployment, deployment.queue.find(key)) is payer:
            return
    if payer.progress.began_s < 0:
        payer.progress.began_s = op.ready_s
    payer.progress.lag_s += ready.waited_s(step, deployment, op)
    if deployment.activation.epoch == step.sequence:
        payer.progress.lag_s += estimates.switch_s(step.state, deployment)


def _seal_idle(step: Step, slot: Slot) -> None:
    """A deployment that nobody displaces is sealed when it has nothing to do."""
    for name in slot.resident:
        deployment = step.state.deployments[name]
        is_idle = deployment.wpg.state is WpgState.READY and not deployment.activation.running
        if is_idle and seals.is_due(step, deployment, times=2):
            seals.seal(step, deployment)


def opened(step: Step, event: ActivationOpened) -> None:
    """A node has switched its part in; after the last one of several the permits follow."""
    deployment = step.deployment(event.deployment)
    if deployment is None:
        return
    if deployment.activation.epoch and deployment.activation.epoch == event.epoch:
        if deployment.activation.opened_on(event.node):
            step.touch(deployment)
        if not deployment.activation.opening_on:
            speculative.record_lead(step, deployment)
    if deployment.wpg.state is not WpgState.STOPPED:
        step.state.record_switch(deployment.name, event.offload_s, event.load_s)


def refused(step: Step, event: ActivationRefused) -> None:
    """Try again, after a pause, what a refused activation was opened for.

    An operation whose activation was refused too often is given up.
    """
    ops = _close_refused(step, event)
    deployment = step.deployment(event.deployment)
    if deployment is None:
        return
    step.notify("activation refused", event.error.message, deployment.name)
    for op in ops:
        if op.state is OpState.PERMITTED:
            step.advance_op(op, OpEvent.TAKEN_BACK)
        op.refusals += 1
        if op.refusals >= MAX_REFUSALS:
            operations.end_or_settle(
                step, deployment, op, _switch_in_error(event.error, op.refusals)
            )
        else:
            operations.end_if_unwanted(step, deployment, op)
    if deployment.wpg.state is WpgState.RECOVERING and event.error.code in _PERMANENT:
        deployment.wpg.count_refusal()
        if deployment.wpg.refusals >= MAX_REFUSALS:
            error = _switch_in_error(event.error, deployment.wpg.refusals)
            step.follow_up(FollowUp.FAIL_JOB, deployment.job_name, error)
    _retry_at(step, deployment, step.now_s + REFUSAL_PAUSE_S)


def _switch_in_error(error: ErrorInfo, refusals: int) -> ErrorInfo:
    return replace(
        error, message=f"its state could not be switched in ({refusals} times): {error.message}"
    )


def returned(step: Step, event: PermitReturned) -> None:
    """Give a permit that came back unused again, after a pause.

    It is given as often as it takes, since a node that is away may come back.
    """
    deployment = step.deployment_of(event.key)
    if deployment is None or event.incarnation != deployment.wpg.incarnation:
        return
    if event.key not in deployment.activation.running:
        return
    step.notify("permit returned", event.error.message, str(event.key))
    devices.free(step, deployment, event.key, "")
    op = deployment.queue.find(event.key)
    if op is not None and op.state is OpState.PERMITTED:
        step.advance_op(op, OpEvent.TAKEN_BACK)
        operations.end_if_unwanted(step, deployment, op)
    _retry_at(step, deployment, step.now_s + RETRY_PAUSE_S)
    step.touch(deployment)


def _retry_at(step: Step, deployment: Deployment, retry_at_s: float) -> None:
    deployment.activation.retry_at_s = retry_at_s
    step.set_timer(f"retry/{deployment.name}/{step.sequence}", retry_at_s)


def _close_refused(step: Step, event: ActivationRefused) -> list[Op]:
    """Close an activation that one of its nodes has refused; returns what it was opened for.

    What it should have displaced may be on the devices still: it stays noted there, without an
    activation, so that the next one displaces it again (harmless where it is gone).
    """
    deployment = step.deployment(event.deployment)
    if deployment is None or deployment.activation.epoch != event.epoch:
        return []
    ops = _intended_ops(step, deployment)
    for node in step.nodes_of(deployment):
        if node.node != event.node:
            step.send_for(CloseActivation, node, deployment, epoch=deployment.activation.epoch)
    devices.vacate(step, deployment)
    for slot in devices.slots_of(step, deployment):
        for name in slot.placed:
            displaced = step.state.deployments[name]
            if displaced.wpg.incarnation and displaced is not deployment:
                devices.book_again(step, displaced)
    return ops


def _intended_ops(step: Step, deployment: Deployment) -> list[Op]:
    """Operations that have a permit, or would get one once all of their nodes were ready."""
    if deployment.activation.running:
        ops = [deployment.queue.find(key) for key in deployment.activation.running]
        return [op for op in ops if op is not None and op.state is OpState.PERMITTED]
    is_reserved = devices.slots_of(step, deployment)[0].running == deployment.name
    if not is_reserved or deployment.wpg.state is WpgState.RECOVERING:
        return []
    return _batch(step, deployment)
