"""Speculative switch-in: an idle device is switched before the predicted operation comes.

After each operation the profiler's estimates tell when its job needs the device again, and what ran
next after such a gap last time tells which deployment will. Where that one is not resident and the
device has nothing to do, the switch happens in the gap instead of after it. It is begun only where
what it displaces is not expected sooner: at once where that is not expected before the newcomer at
all, else so that it ends at the earliest usual time, reckoned with as long as activations took to
open of late. Of a resident job of which nothing is known, everything is expected.

A wrong guess costs at most a switch: one guess a gap, and each one in a row that was displaced
before its operation came doubles the gaps that pass without. Times change, results do not.

Hints to nodes: what they will need soon that is not on their devices, or not on the node.

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
from phaseloom.scheduler.core.devices import devices, estimates
from phaseloom.scheduler.core.dispatch import choice, ready
from phaseloom.scheduler.core.durability import retention
from phaseloom.scheduler.core.state.activation import NOT_TOLD_S
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Expected, Slot
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import OpState, WpgState

MAX_MISSES = 6
"""Beyond so many in a row the pause does not grow: 2^6 gaps."""
MEMORY = 0.9
"""Share of the longest time to open an activation that is kept at each that takes less."""
NEVER_S = float("inf")


def expect(step: Step, deployment: Deployment, kind: str) -> None:
    """Predict, when an operation has ended, when its job needs these devices again."""
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
    """Learn from an operation that begins what follows what, and whether a guess was right.

    Args: slots: those of its deployment.
    """
    name = deployment.name
    job = step.job_of(deployment)
    step.request_hints(deployment)
    for slot in slots:
        if slot.speculative == name:
            job.speculation.misses = 0
        expected = devices.came(slot, deployment.job_name)
        if expected is not None and op.ready_s > expected.ended_s:
            job.speculation.follows[expected.after] = deployment.key.deployment


def record_displaced(step: Step, victim: Deployment) -> None:
    """Count a miss where an activation that leaves its device was opened for nothing."""
    step.request_hints(victim)
    guessed = [slot for slot in devices.slots_of(step, victim) if slot.speculative == victim.name]
    for slot in guessed:
        devices.note_speculative(slot, "")
    if guessed:
        speculation = step.job_of(victim).speculation
        speculation.misses = min(speculation.misses + 1, MAX_MISSES)
        speculation.skips = 2**speculation.misses


def plan(step: Step, slot: Slot) -> tuple[Deployment | None, float]:
    """The activation to open in a slot with nothing ready, and when; `NEVER_S`: none."""
    if not step.config.speculative_switch_in or slot.speculative:
        return None, NEVER_S
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
    """The deployment of `next_of`, if it is not active and could be switched in."""
    deployment = predicted_deployment(step, slot, name, expected)
    if deployment is None:
        return None
    is_up = (
        deployment.wpg.state is WpgState.READY and deployment.activation.retry_at_s <= step.now_s
    )
    is_here = deployment.move.relocation is None and not deployment.activation.epoch
    return deployment if is_up and is_here else None


def _free_s(step: Step, slot: Slot, target: Deployment, expected: Expected) -> float:
    """The time from which nothing that is likely sooner would be displaced in this slot."""
    if slot.running or slot.ready or devices.claimant(step, slot):
        return NEVER_S
    job_name = target.job_name
    free_s = 0.0
    if slot.holder != job_name:
        free_s = choice.held_until_s(step, slot)
    for victim in devices.victims(step, slot, target):
        if victim.job_name != job_name:
            free_s = max(free_s, _unlikely_from_s(slot, victim.job_name, expected))
    return free_s


def _unlikely_from_s(slot: Slot, resident: str, expected: Expected) -> float:
    """The time from which a resident job is not likely to come before the expected one."""
    resident_expected = slot.expected.get(resident)
    if resident_expected is None:
        return NEVER_S
    return resident_expected.late_s if resident_expected.at_s <= expected.at_s else 0.0


def _is_first(step: Step, slot: Slot, target: Deployment, expected: Expected) -> bool:
    """Whether nothing that it would displace is likely to come before the job that is expected."""
    expected_by_job = slot.expected
    victims = {victim.job_name for victim in devices.victims(step, slot, target)}
    return all(
        name in expected_by_job and expected_by_job[name].soonest_s > expected.at_s
        for name in victims - {target.job_name}
    )


def record_lead(step: Step, deployment: Deployment) -> None:
    """Note how long an activation took to open.

    The longest recent time counts, because an activation that is begun too late is in vain.
    """
    taken_s = step.now_s - deployment.activation.opening_s
    deployment.activation.lead_s = max(taken_s, MEMORY * deployment.activation.lead_s)


def record_guess(step: Step, deployment: Deployment) -> None:
    """Note that an activation was opened for an operation that is only predicted."""
    for slot in devices.slots_of(step, deployment):
        devices.note_speculative(slot, deployment.name)
        expected = slot.expected.get(deployment.job_name)
        if expected is not None:
            expected.is_tried = True


def skip_guess(step: Step, deployment: Deployment) -> bool:
    """Whether this gap passes without a guess, after ones that were wrong."""
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
    """Send and withdraw the hints of one job that this step has changed."""
    job = step.state.jobs.get(name)
    for deployment in step.deployments_of(job) if job is not None else []:
        _update_hint(step, deployment)


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


def _update_hint(step: Step, deployment: Deployment) -> None:
    slots = devices.slots_of(step, deployment)
    if not slots or all(deployment.name in slot.resident for slot in slots):
        return
    is_told = deployment.activation.hinted_s != NOT_TOLD_S
    if any(deployment.name in slot.ready for slot in slots):
        if not is_told:
            _send_hint(step, deployment, step.now_s)
        return
    predictions = _predictions(step, deployment)
    if is_told and not predictions:
        deployment.activation.hint(NOT_TOLD_S)
        _send_prefetch(step, deployment, None)
    elif not is_told and predictions and not any(p.is_told for p in predictions):
        _send_hint(step, deployment, min(prediction.at_s for prediction in predictions))
        late_s = max(prediction.late_s for prediction in predictions)
        step.set_timer(f"hint/{deployment.name}/{step.sequence}", late_s)
        for prediction in predictions:
            prediction.is_told = True


def _predictions(step: Step, deployment: Deployment) -> list[Expected]:
    """The predictions by which the deployment runs next of its job on a device."""
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
    if not any(devices.is_crowded(step, node) for node in crowded):
        for node in crowded:
            step.state.unmark_crowded(node.node)
        return
    deployment.activation.hint(use_s)
    _send_prefetch(step, deployment, max(0.0, use_s - step.now_s))


def _send_prefetch(step: Step, deployment: Deployment, in_s: float | None) -> None:
    for node in step.nodes_of(deployment):
        step.send_for(PrefetchState, node, deployment, in_s=in_s)
