"""Give devices their next operations: open activations and send permits.

A device runs the operations of one deployment at a time, or of several if each has a share of it
(`shares`). A deployment runs one mutating operation alone, or up to `max_reading` reading
operations together. Waiting reading operations may join running ones. They stop joining, so that
the running ones drain, in three cases: a mutating operation is next in order, another deployment
has claimed one of the devices, or the quantum is over and another deployment waits.

`choice` decides which deployment runs next on a free device, and how long the device is kept for
its holder. `speculative` switches deployments in before their operations arrive.

A deployment with several ranks needs one device per rank, on one node or on several, and takes all
of them at once. If it is chosen while some are busy, it claims them all: nothing else starts on the
free ones until the last is free. Every device queues claims in the same order, so two deployments
never wait for each other.

A node runs an activation and its permits in the order in which they were sent. Several nodes have
no common order, so a deployment over several nodes gets its permits only after all of them have
reported its activation open. If one node refuses, the other nodes close theirs.

Cost of a step: linear in the deployments with ready operations on the touched devices.
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
"""Pause before a refused activation is tried again."""
MAX_REFUSALS = 3
_PERMANENT = frozenset({Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT})
"""Error codes of refusals that every retry would meet again."""
RETRY_PAUSE_S = 0.5
"""Pause before an operation whose permit came back unused is permitted again."""
BUSY_FACTOR = 4
"""A deployment that never idles is sealed between two operations after this many times `seal_every`
mutations."""


def dispatch(step: Step) -> None:
    """Start the next operations on every device that the step has touched."""
    _record_ready(step)
    _dispatch_dirty(step)
    if step.touched and ORDERING[step.config.ordering].may_wait:
        # A job that has come to wait for another device may no longer hold this one, and a job that
        # no longer waits may.
        _review_holds(step)
        _dispatch_dirty(step)


def _review_holds(step: Step) -> None:
    """Look again at idle devices that were used last by the jobs that the step has touched."""
    deployments = step.state.deployments
    jobs = {deployments[name].job_name for name in step.touched if name in deployments}
    for job_name in jobs:
        for deployment in step.deployments_of(step.state.jobs[job_name]):
            for slot in devices.slots_of(step, deployment):
                if slot.holder == job_name and slot.ready and not slot.running:
                    step.dirty.add((slot.node, slot.device))


def _dispatch_dirty(step: Step) -> None:
    # Starting one deployment may dirty devices of others. The smallest goes first, so that the
    # order does not depend on the iteration order of a set.
    while step.dirty:
        device_ref = min(step.dirty)
        step.dirty.remove(device_ref)
        name, index = device_ref
        node = step.state.nodes[name]
        # A restarted node may have fewer devices than before.
        if node.is_up and index < len(node.devices):
            slot = devices.slot(step.state, name, index)
            _dispatch(step, slot)
            if slot.shares:
                while (neighbour := shares.next_neighbour(step, slot)) is not None:
                    _start_neighbour(step, neighbour)
                shares.record_paces(step, slot)


def _record_ready(step: Step) -> None:
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
    claimant = _next_claimant(step, slot)
    if claimant is not None:
        for following in [*ready.before_claim(step, slot, claimant), claimant]:
            _start(step, following, overtakes=True)
            if slot.running:
                break
        return
    deployment, retry_s = choice.choose(step, slot)
    if deployment is not None:
        _start(step, deployment, overtakes=retry_s > 0)
    elif retry_s < choice.NEVER_S:
        _look_again_at(step, slot, retry_s)
    elif not ready.is_any_on(step, slot):
        _seal_idle(step, slot)
        _open_speculatively(step, slot)


def _next_claimant(step: Step, slot: Slot) -> Deployment | None:
    """Return the deployment whose claim on the device is first, after dropping claims of
    deployments that cannot run."""
    while (deployment := devices.claimant(step, slot)) is not None:
        if ready.first(step, deployment) is not None:
            return deployment
        devices.unclaim(step, deployment)
        step.dirty.update(set(deployment.places) - {(slot.node, slot.device)})
    return None


def _start(step: Step, deployment: Deployment, *, overtakes: bool) -> None:
    """Run the ready operations of a deployment, or claim its devices if some that it needs are
    taken.

    Args: overtakes: whether some of its devices may not have chosen it. Deployments that need only
                     one of them and have waited longer then go first.
    """
    slots = devices.slots_of(step, deployment)
    # A single rank's only device is the one that the deployment was just chosen for.
    taken_ranks = []
    if len(slots) > 1:
        taken_ranks = [
            rank
            for rank, slot in enumerate(slots)
            if slot.running
            or devices.claimant(step, slot) not in (None, deployment)
            or (overtakes and _has_older(step, slot, deployment))
        ]
    ops = _batch(step, deployment)
    if taken_ranks:
        ops = tails.startable_without(step, deployment, ops, taken_ranks)
        if not ops:
            if devices.claim(step, deployment):
                step.dirty.update(deployment.places)
            return
    devices.unclaim(step, deployment)
    deployment.activation.leave_out(taken_ranks)
    shares.give_share(step, deployment)
    if not deployment.activation.epoch:
        _open(step, deployment)
    elif seals.is_due(step, deployment, times=BUSY_FACTOR) and not taken_ranks:
        # It is never displaced and never idle, so nothing else would bound its log.
        seals.seal(step, deployment)
    if deployment.activation.opening_on:
        # The devices are reserved. The permits follow when the last node has opened.
        devices.use(step, deployment, slots)
        return
    _permit(step, deployment, ops, slots)


def _has_older(step: Step, slot: Slot, deployment: Deployment) -> bool:
    """Whether one that needs only this device has waited for it longer than a deployment."""
    older = ready.before_claim(step, slot, deployment)
    return any(len(devices.slots_of(step, d)) == 1 for d in older)


def _start_neighbour(step: Step, deployment: Deployment) -> None:
    """Run a deployment next to others on its device. It has its share already."""
    if not deployment.activation.epoch:
        _open(step, deployment)
    elif seals.is_due(step, deployment, times=BUSY_FACTOR):
        seals.seal(step, deployment)
    _permit(step, deployment, _batch(step, deployment), devices.slots_of(step, deployment))


def _batch(step: Step, deployment: Deployment) -> list[Op]:
    return ready.batch(step, deployment, max(1, step.config.max_reading))


def _continue(step: Step, deployment: Deployment) -> None:
    """Run more operations of a deployment that holds its devices."""
    if deployment.activation.running:
        _join(step, deployment)
    elif not deployment.activation.opening_on:
        # The activation is now open on all nodes, so its operations can run.
        ops = _batch(step, deployment)
        _permit(step, deployment, ops, devices.slots_of(step, deployment))
        if not ops:
            devices.release(step, deployment)
            step.dirty.update(deployment.places)


def _join(step: Step, deployment: Deployment) -> None:
    """Let reading operations join those of their deployment that are running."""
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
    """Whether the running operations must drain because another deployment goes next."""
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
    """Open an activation on all nodes of a deployment. Its epoch is the event's log sequence."""
    opening_on = deployment.nodes if len(deployment.wpg.assignments) > 1 else []
    deployment.activation.open(step.sequence, step.now_s, opening_on)
    # A victim may occupy several of these nodes; it is sealed once, after the last one.
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
    """Switch a deployment out of these slots, and end its activation unless its tail runs on
    elsewhere.

    Its state stays in its other slots until it must leave them too.
    """
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
    # A single rank has no other rank to gather its tail on.
    is_lone = len(slots) == 1
    # Built here and not by `step.send`, whose keyword dict makes it take twice as long.
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
    """Record that an operation continues the phase of its devices or begins a new one.

    Args: slots: the slots of the operation's deployment.
    """
    _record_lag(step, deployment, op)
    if deployment.activation.running:
        return  # it joins operations whose phase is recorded
    name, kind = deployment.job_name, ready.kind_of(deployment, op)
    # On a shared device only the holder's operations determine the phase.
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
    """Record how long the job that an operation runs for was kept waiting.

    If several operations of a job wait at the same time, only the first one counts.
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
    """Seal idle deployments, which would otherwise keep unsealed changes until something displaces
    them."""
    for name in slot.resident:
        deployment = step.state.deployments[name]
        is_idle = deployment.wpg.state is WpgState.READY and not deployment.activation.running
        if is_idle and seals.is_due(step, deployment, times=2):
            seals.seal(step, deployment)


def opened(step: Step, event: ActivationOpened) -> None:
    """Record that a node has opened its part of an activation; the last of several parts lets
    permits follow."""
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
    """Retry a refused activation after a pause, or end its operations after `MAX_REFUSALS`
    refusals."""
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
        error, message=f"switching its state in failed {refusals} times: {error.message}"
    )


def returned(step: Step, event: PermitReturned) -> None:
    """Permit an operation again, after a pause, if its permit came back unused.

    There is no limit to the tries: the node that the operation needs may be away and come back.
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
    """Close an activation that one of its nodes has refused.

    The deployments that it should have displaced may still be on the devices. They are recorded
    there again, without an activation, so that the next activation displaces them. This is harmless
    if they are gone.

    Returns: the operations that the activation was opened for.
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
    """Operations that have a permit, or would get one as soon as the activation is open on all
    nodes."""
    if deployment.activation.running:
        ops = [deployment.queue.find(key) for key in deployment.activation.running]
        return [op for op in ops if op is not None and op.state is OpState.PERMITTED]
    is_reserved = devices.slots_of(step, deployment)[0].running == deployment.name
    if not is_reserved or deployment.wpg.state is WpgState.RECOVERING:
        return []
    return _batch(step, deployment)
