"""Speculative switch-in and hints: prepare nodes for operations that are only predicted.

**Speculative switch-in.** After each operation the profiler's estimates say when its job will need
the device again. The deployment that ran after such a gap last time is likely to run again. If it
is not resident and the device is idle, it is switched in during the gap instead of after it, unless
a job that it displaces is expected sooner. If even the earliest usual return of those jobs is later
than the newcomer's expected return, the switch happens at once. Otherwise it is timed to finish at
the newcomer's earliest usual return, based on how long activations have recently taken to open. A
resident job about which nothing is known may return at any time, so it is not displaced.

A wrong guess costs at most one switch. There is one guess per gap. Each wrong guess in a row
doubles the number of gaps without a guess. Guesses change times, never results.

**Hints.** If host memory may not hold all states of a node (the node is *crowded*), some of them
are stored on its NVMe. A state manager that knows which state is needed next can load it into host
memory while the device is busy, and move the state that is needed last to disk. It gets a hint
about a deployment whose operation waits for the device, and about the predicted next one: once per
prediction, and again when the prediction turns out wrong or is overdue, or when the waiting
operation is cancelled. A deployment that is switched in needs no hint.

A `sync_weights` often waits although its version is already published: for a device that other jobs
use, or for a rollout of its own deployment. Its nodes fetch the version in the meantime, so that
the device does not wait for the network. Crowded nodes do not, because the version would displace
states that are needed sooner.

Neither results nor other commands depend on hints.

Cost: linear in the deployments of the touched jobs.
"""

from __future__ import annotations

from phaseloom.common.contract.commands import PrefetchState, PrefetchVersion
from phaseloom.common.contract.ids import parse_operation_key
from phaseloom.scheduler.core.devices import devices, estimates
from phaseloom.scheduler.core.dispatch import choice, ready
from phaseloom.scheduler.core.durability import retention
from phaseloom.scheduler.core.state.activation import NOT_HINTED_S
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Expected, Slot
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import OpState, WpgState

MAX_MISSES = 6
"""After this many wrong guesses in a row the pause no longer grows: 2^6 gaps."""
MEMORY = 0.9
"""The longest time to open an activation decays by this factor with each one that opens faster."""
NEVER_S = float("inf")


def expect(step: Step, deployment: Deployment, kind: str) -> None:
    """Predict when a job will need these devices again, after one of its operations has ended."""
    last = f"{deployment.key.deployment}.{kind}"
    estimate = estimates.after(step.state, deployment.job_name, last)
    for slot in devices.slots_of(step, deployment):
        if estimate is None or estimate.next_gap_s < 0:
            devices.expect(slot, deployment.job_name, None)
            continue
        gap_s = estimate.next_gap_s
        early_s = gap_s if estimate.gap_p10_s < 0 else min(estimate.gap_p10_s, gap_s)
        late_s = max(choice.OVERDUE * gap_s, estimate.gap_p90_s, step.config.idle_grace_s)
        expected = Expected(
            after=last,
            ended_s=step.now_s,
            soonest_s=step.now_s + early_s,
            at_s=step.now_s + gap_s,
            late_s=step.now_s + late_s,
        )
        devices.expect(slot, deployment.job_name, expected)


def record_start(step: Step, deployment: Deployment, op: Op, slots: list[Slot]) -> None:
    """Learn from an operation that starts: what follows what, and whether a guess was right.

    Args: slots: the slots of the operation's deployment.
    """
    name = deployment.name
    job = step.job_of(deployment)
    step.request_hints(deployment)
    for slot in slots:
        if slot.speculative == name:
            job.speculation.misses = 0
        expected = devices.came(slot, deployment.job_name)
        # An operation that was queued before the last one ended says nothing about gaps.
        if expected is not None and op.ready_s > expected.ended_s:
            job.speculation.follows[expected.after] = deployment.key.deployment


def record_displaced(step: Step, victim: Deployment) -> None:
    """Count a wrong guess if an activation that was opened speculatively leaves its device
    unused."""
    step.request_hints(victim)
    guessed = [slot for slot in devices.slots_of(step, victim) if slot.speculative == victim.name]
    for slot in guessed:
        devices.note_speculative(slot, "")
    if guessed:
        speculation = step.job_of(victim).speculation
        speculation.misses = min(speculation.misses + 1, MAX_MISSES)
        speculation.skips = 2**speculation.misses


def plan(step: Step, slot: Slot) -> tuple[Deployment | None, float]:
    """Return the activation to open in an idle slot, and when to open it; `NEVER_S`: none."""
    if not step.config.speculative_switch_in or slot.speculative:
        return None, NEVER_S
    # The job that is expected first gets the first chance; `is_tried` allows one guess per gap.
    for name, expected in sorted(slot.expected.items(), key=lambda item: item[1].at_s):
        target = None if expected.is_tried else _switchable(step, slot, name, expected)
        if target is None:
            continue
        slots = devices.slots_of(step, target)
        open_s = max(_free_s(step, s, target, expected) for s in slots)
        if not all(_is_first(step, s, target, expected) for s in slots):
            lead_s = max(target.activation.lead_s, estimates.switch_s(step.state, target))
            open_s = max(open_s, expected.soonest_s - lead_s)
        if open_s < expected.late_s:
            return target, open_s
    return None, NEVER_S


def predicted_deployment(
    step: Step, slot: Slot, name: str, expected: Expected
) -> Deployment | None:
    """The deployment that a job is predicted to need next on a device."""
    if expected.late_s <= step.now_s:
        return None
    job = step.state.jobs[name]
    placed = [d for d in step.deployments_of(job) if d.name in slot.placed]
    queued = [d for d in placed if ready.waits_elsewhere(d)]
    usual = [d for d in placed if d.key.deployment == job.speculation.follows.get(expected.after)]
    return next(iter([*queued, *usual]), None)


def _switchable(step: Step, slot: Slot, name: str, expected: Expected) -> Deployment | None:
    """The predicted deployment, if it is not active and could be switched in."""
    deployment = predicted_deployment(step, slot, name, expected)
    if deployment is None:
        return None
    is_up = (
        deployment.wpg.state is WpgState.READY and deployment.activation.retry_at_s <= step.now_s
    )
    is_here = deployment.move.relocation is None and not deployment.activation.epoch
    return deployment if is_up and is_here else None


def _free_s(step: Step, slot: Slot, target: Deployment, expected: Expected) -> float:
    """The time from which the switch displaces nothing that is likely to be needed sooner."""
    if slot.running or slot.ready or devices.claimant(step, slot):
        return NEVER_S
    job_name = target.job_name
    free_s = 0.0
    if slot.holder != job_name:
        free_s = choice.held_until_s(step, slot)
    for victim in devices.victims(step, slot, target):
        if victim.job_name == job_name:
            continue
        victim_expected = slot.expected.get(victim.job_name)
        if victim_expected is None:
            return NEVER_S  # it may return at any time
        if victim_expected.at_s <= expected.at_s:
            free_s = max(free_s, victim_expected.late_s)
    return free_s


def _is_first(step: Step, slot: Slot, target: Deployment, expected: Expected) -> bool:
    """Whether the expected job is likely to return before every job that it would displace."""
    expected_by_job = slot.expected
    victims = {victim.job_name for victim in devices.victims(step, slot, target)}
    return all(
        name in expected_by_job and expected_by_job[name].soonest_s > expected.at_s
        for name in victims - {target.job_name}
    )


def record_lead(step: Step, deployment: Deployment) -> None:
    """Record how long an activation took to open.

    The longest recent time counts, because a speculative switch-in that starts too late is useless.
    """
    taken_s = step.now_s - deployment.activation.opening_s
    deployment.activation.lead_s = max(taken_s, MEMORY * deployment.activation.lead_s)


def record_guess(step: Step, deployment: Deployment) -> None:
    """Record that an activation was opened for an operation that is only predicted."""
    for slot in devices.slots_of(step, deployment):
        devices.note_speculative(slot, deployment.name)
        expected = slot.expected.get(deployment.job_name)
        if expected is not None:
            expected.is_tried = True


def skip_guess(step: Step, deployment: Deployment) -> bool:
    """Whether to let this gap pass without a guess, because earlier guesses were wrong."""
    job = step.job_of(deployment)
    if job.speculation.skips == 0:
        return False
    job.speculation.skips -= 1
    for slot in devices.slots_of(step, deployment):
        expected = slot.expected.get(str(job.key))
        if expected is not None:
            expected.is_tried = True
    return True


def send_hints(step: Step, name: str) -> None:
    """Send the hints of one job that are new in this step, and withdraw those that ended."""
    job = step.state.jobs.get(name)
    for deployment in step.deployments_of(job) if job is not None else []:
        _update_hint(step, deployment)


def prefetch_version(step: Step, name: str) -> None:
    """Have the nodes of a waiting `sync_weights` fetch its version in advance."""
    key = parse_operation_key(name)
    deployment = step.deployment_of(key)
    op = deployment.queue.find(key) if deployment is not None else None
    if deployment is None or op is None or op.version is None or op.state is not OpState.QUEUED:
        return
    if deployment.wpg.state is not WpgState.READY:
        return
    holders = retention.nodes_of(step, op.version)
    for node in step.nodes_of(deployment):
        # If the version is only on this node, there is nothing to fetch.
        if node.node not in step.state.crowded and holders != [node.node]:
            step.send_for(
                PrefetchVersion,
                node,
                deployment,
                sources=retention.sources_of(step, op.version),
                ticket=retention.ticket(step, deployment, op.version),
            )


def _update_hint(step: Step, deployment: Deployment) -> None:
    slots = devices.slots_of(step, deployment)
    if not slots or all(deployment.name in slot.resident for slot in slots):
        return
    was_hinted = deployment.activation.hinted_s != NOT_HINTED_S
    if any(deployment.name in slot.ready for slot in slots):
        if not was_hinted:
            _send_hint(step, deployment, step.now_s)
        return
    predictions = _predictions(step, deployment)
    if was_hinted and not predictions:
        deployment.activation.hint(NOT_HINTED_S)
        _send_prefetch(step, deployment, None)
    elif not was_hinted and predictions and not any(p.is_hinted for p in predictions):
        _send_hint(step, deployment, min(prediction.at_s for prediction in predictions))
        late_s = max(prediction.late_s for prediction in predictions)
        step.set_timer(f"hint/{deployment.name}/{step.sequence}", late_s)
        for prediction in predictions:
            prediction.is_hinted = True


def _predictions(step: Step, deployment: Deployment) -> list[Expected]:
    """Predictions according to which the deployment is the next one of its job on a device."""
    job = deployment.job_name
    predictions = []
    if deployment.wpg.state is not WpgState.READY or deployment.move.relocation is not None:
        return []
    for slot in devices.slots_of(step, deployment):
        running = step.state.deployments.get(slot.running)
        expected = slot.expected.get(job)
        if expected is None or (running is not None and running.job_name == job):
            continue
        if predicted_deployment(step, slot, job, expected) is deployment:
            predictions.append(expected)
    return predictions


def _send_hint(step: Step, deployment: Deployment, use_s: float) -> None:
    crowded = [node for node in step.nodes_of(deployment) if node.node in step.state.crowded]
    # Deployments may have left since a node was marked as crowded.
    if not any(devices.is_crowded(step, node) for node in crowded):
        for node in crowded:
            step.state.unmark_crowded(node.node)
        return
    deployment.activation.hint(use_s)
    _send_prefetch(step, deployment, max(0.0, use_s - step.now_s))


def _send_prefetch(step: Step, deployment: Deployment, in_s: float | None) -> None:
    for node in step.nodes_of(deployment):
        step.send_for(PrefetchState, node, deployment, in_s=in_s)
