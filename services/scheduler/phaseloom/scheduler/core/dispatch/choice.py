"""The choice of the next deployment on a free device.

**Idle hold.** The job that used a device last is its *holder*. The operations of one phase should
not pay for switches in between, so the holder goes first for a quantum. Without this rule the next
operation of a job that submits serially would lose to every operation that has waited longer, a
weakness of PlexRL's HRRS. If the holder has nothing ready, other jobs wait for the idle grace, in
which its controller can answer and continue. The grace ends early if the holder has said that its
next operation here comes after work elsewhere. If the profiler knows the usual gap before the next
operation, the wait lasts until that operation is overdue, or is skipped because the gap is too
long.

A declared phase keeps the device beyond the grace, for up to `phase_hold_s` but within the quantum.
It ends when the controller ends it (then there is no grace either), is lost, or is succeeded by
another. It is only a hint: a dead or waiting controller blocks nobody. Nothing starves, because
other jobs go first after a quantum. A quantum of 0 leaves the order to the policy.

**Choice.** Among the admitted operations the ordering policy decides. It sees a view of the device:
the candidates, the holder's expected return, and for round robin the order of the jobs.

**Several devices.** A deployment over several devices is chosen only if every one of them would
choose it (gang scheduling), so that its neighbours are served as fairly as on a device of their
own. Choices on several devices can stay out of phase indefinitely. So after `GANG_TIMEOUT` quanta
it is enough to be chosen on one. The chosen deployment claims all of its devices at once, and every
device queues claims in the same order, so there is no deadlock. Deployments that have waited longer
than it go first on each of these devices (`dispatch`).

Cost: linear in the candidates, and for round robin in the jobs of the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from phaseloom.common.contract.events import PhaseDeclared
from phaseloom.scheduler.core.devices import devices, estimates, round_robin
from phaseloom.scheduler.core.dispatch import ready, tails
from phaseloom.scheduler.core.policies.device_view import (
    Candidate,
    DeviceView,
    Ordering,
    Resident,
    TurnMember,
    Wait,
)
from phaseloom.scheduler.core.policies.registry import ORDERING
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.node import Expected, Slot
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JOB_ENDED, JobState, WpgState

GANG_TIMEOUT = 2.0
"""Quanta for which a deployment over several devices waits to be chosen on all of them."""
LEAST_GANG_TIMEOUT_S = 1.0
NEVER_S = float("inf")
ABSENCE_TIMEOUT = 2.0
"""For a job without a known period: how many quanta after its last operation others wait for it."""
Option = tuple[Deployment, Op]
_AT_WORK = frozenset({JobState.PLACED, JobState.PROFILING, JobState.ACTIVE})
MAX_GRACES = 2.0
"""If the holder's usual gap between operations is longer than this many idle graces, the device is
not kept for it."""
OVERDUE = 1.5
"""A device is kept for at most this many times the holder's usual gap between operations."""


class Contenders(NamedTuple):
    """The operations of a device among which the policy chooses."""

    options: list[Option]
    """Admitted operations: the policy chooses among these."""
    held_back: list[Option]
    """The holder's operations after its quantum. They run if none of `options` can start."""
    lets_in_s: float
    """When the operations of other jobs are admitted."""
    may_wait: bool = True
    """Whether the policy may leave the device idle."""


NO_CONTENDERS = Contenders([], [], NEVER_S)


def policy_of(step: Step) -> Ordering:
    return ORDERING[step.config.ordering]


def choose(step: Step, slot: Slot) -> tuple[Deployment | None, float]:
    """Choose the deployment whose operation starts next in a free slot.

    Returns: the deployment, with 0 if all of its devices choose it, or with the past time since
             which it need not wait for that. Or None, with the time at which to look again
             (`NEVER_S`: at the next event).
    """
    among = contenders_on(step, slot)
    again_s, may_wait = among.lets_in_s, among.may_wait
    for group in (among.options, among.held_back):
        options = group
        while options:
            preferred = prefer(step, slot, options, may_wait=may_wait)
            if isinstance(preferred, Wait):
                return None, min(again_s, preferred.until_s)
            deployment, op = preferred
            until_s = _elsewhere_s(step, slot, deployment, op)
            if until_s <= step.now_s:
                return deployment, until_s
            again_s = min(again_s, until_s)
            if policy_of(step).is_strict:
                return None, again_s
            # This deployment is ready but cannot start elsewhere yet. The policy must not leave the
            # device idle for another reason meanwhile.
            may_wait = False
            options = [option for option in options if option[0] is not deployment]
    return None, again_s


def contenders_on(step: Step, slot: Slot) -> Contenders:
    """Return the operations among which the policy chooses.

    During the quantum of the job that holds the device, these are its own; afterwards, those of
    other jobs too. A policy that may wait chooses when the holder gives up the device: then the
    quantum is only a minimum.
    """
    if not slot.ready:
        return NO_CONTENDERS
    quantum_s = step.config.quantum_s
    of_holder = list(ready.options_on(step, slot, of_job=slot.holder))
    is_alone = len(of_holder) == len(slot.ready)
    if of_holder and not slot.speculative and not is_quantum_over(step, slot.held_since_s):
        lets_in_s = NEVER_S if is_alone else slot.held_since_s + quantum_s
        return Contenders(_after_quantum(step, slot, of_holder), [], lets_in_s, may_wait=False)
    outsiders = [] if is_alone else list(ready.options_on(step, slot, but_job=slot.holder))
    if not outsiders:
        return Contenders(_after_quantum(step, slot, of_holder), [], NEVER_S)
    # While the device is open for a guess, its holder has no privilege.
    if slot.speculative or (of_holder and (quantum_s == 0 or policy_of(step).may_wait)):
        return Contenders([*of_holder, *outsiders], [], NEVER_S)
    lets_in_s = 0.0 if of_holder else held_until_s(step, slot)
    if lets_in_s > step.now_s:
        return Contenders([], [], lets_in_s)
    return Contenders(outsiders, of_holder, NEVER_S)


def _after_quantum(step: Step, slot: Slot, options: list[Option]) -> list[Option]:
    """The options without the deployment whose quantum is over, if its job has other options."""
    if len(options) > 1 and step.config.quantum_s and is_quantum_over(step, slot.used_since_s):
        return [o for o in options if o[0].name != slot.used_by] or options
    return options


def _elsewhere_s(step: Step, slot: Slot, deployment: Deployment, op: Op) -> float:
    """When a deployment may claim its other devices. A time in the past means now, and 0 that they
    choose it too."""
    slots = devices.slots_of(step, deployment)
    if len(slots) == 1:
        return 0.0
    timeout_s = _gang_timeout_s(step, deployment)
    until_s = max(op.ready_s, deployment.activation.idle_since_s) + timeout_s
    # Gang scheduling: each other device must be ready to choose this deployment too.
    if until_s <= step.now_s:
        return until_s
    for peer in slots:
        if peer is slot or tails.can_start_without(step, deployment, peer):
            continue
        among = contenders_on(step, peer)
        if not among.options:
            return min(until_s, among.lets_in_s)
        preferred = prefer(step, peer, among.options, may_wait=among.may_wait)
        if isinstance(preferred, Wait):
            return min(until_s, among.lets_in_s, preferred.until_s)
        if preferred[0] is not deployment:
            return min(until_s, among.lets_in_s)
    return 0.0


def _gang_timeout_s(step: Step, deployment: Deployment) -> float:
    """How long a deployment waits to be chosen on all of its devices."""
    least_s = max(GANG_TIMEOUT * step.config.quantum_s, LEAST_GANG_TIMEOUT_S)
    if not policy_of(step).is_strict:
        return least_s
    # Under a strict order it waits for one round of every job that it shares a device or group
    # with; starting sooner would break the order.
    neighbours = {name for slot in devices.slots_of(step, deployment) for name in slot.placed}
    jobs = {step.state.deployments[name].job_name for name in neighbours}
    group = step.state.cluster.groups.get(step.state.cluster.placed.get(deployment.job_name, ""))
    jobs.update(group.members if group is not None else ())
    periods_s = [estimates.worst_period_s(step.state, job) for job in jobs]
    return max(least_s, math.fsum(periods_s))


def prefer(step: Step, slot: Slot, options: list[Option], *, may_wait: bool) -> Option | Wait:
    """Ask the ordering policy for the next option on a free slot."""
    policy = policy_of(step)
    if len(options) == 1 and not (may_wait and _has_alternative(step, slot, options[0], policy)):
        return options[0]
    view = view_of(step, slot, options, policy, may_wait=may_wait)
    chosen = policy.choose(view)
    return chosen if isinstance(chosen, Wait) else options[view.candidates.index(chosen)]


def view_of(
    step: Step,
    slot: Slot,
    options: Sequence[Option],
    policy: Ordering,
    *,
    may_wait: bool,
    is_plan: bool = False,
) -> DeviceView:
    """Make the view of a device that an ordering policy gets.

    Args: options: at least one.
          may_wait: whether waiting is allowed here, for a policy that can wait.
          is_plan: whether to estimate durations even if the policy does not use them.
    """
    present = candidate_of if policy.weighs or is_plan else _unweighed
    return DeviceView(
        now_s=step.now_s,
        candidates=[present(step, slot, d, op) for d, op in options],
        resident=_resident(step, slot) if policy.may_wait else None,
        members=_members(step, slot, options, may_wait) if policy.is_strict else (),
        may_wait=may_wait and policy.may_wait,
    )


def candidate_of(step: Step, slot: Slot, deployment: Deployment, op: Op) -> Candidate:
    setup_s = estimates.switch_s(step.state, deployment)
    return Candidate(
        operation=str(op.key),
        deployment=deployment.name,
        job=deployment.job_name,
        arrival_s=op.ready_s,
        arrival=op.arrival,
        duration_s=estimates.duration_s(step.state, deployment, op.kind),
        switch_s=0.0 if deployment.activation.epoch else setup_s,
        setup_s=setup_s,
        phase_s=estimates.phase_s(step.state, deployment),
        back_s=_back_s(step, slot, deployment),
        slack_s=ready.slack_s(step, deployment, op),
        period_s=estimates.period_s(step.state, deployment.job_name),
        served=slot.served.get(deployment.job_name, 0),
        continues=ready.is_continued(step, slot, deployment, ready.kind_of(deployment, op)),
    )


def _unweighed(step: Step, slot: Slot, deployment: Deployment, op: Op) -> Candidate:
    """A candidate without durations and slack, for policies that ignore them."""
    return Candidate(
        operation=str(op.key),
        deployment=deployment.name,
        job=deployment.job_name,
        arrival_s=op.ready_s,
        arrival=op.arrival,
        duration_s=0.0,
        switch_s=0.0,
        served=slot.served.get(deployment.job_name, 0),
        continues=ready.is_continued(step, slot, deployment, ready.kind_of(deployment, op)),
    )


def _back_s(step: Step, slot: Slot, newcomer: Deployment) -> float:
    """Time of the longest switch back, if the newcomer displaces deployments of the holder."""
    if newcomer.activation.epoch or newcomer.job_name == slot.holder:
        return 0.0
    leaving = [d for d in devices.victims(step, slot, newcomer) if d.job_name == slot.holder]
    return max((estimates.switch_s(step.state, d) for d in leaving), default=0.0)


def _resident(step: Step, slot: Slot) -> Resident | None:
    job = step.state.jobs.get(slot.holder)
    if job is None or not _is_alive(job):
        return None
    expected = None if slot.is_released else slot.expected.get(slot.holder)
    deployments = step.deployments_of(job)
    return Resident(
        job=slot.holder,
        since_s=slot.held_since_s,
        idle_since_s=slot.idle_since_s,
        phase_until_s=ready.phase_until_s(step, slot),
        net_gap_s=_net_gap_s(step, slot, expected),
        period_s=estimates.period_s(step.state, slot.holder),
        away_switch_s=math.fsum(_remaining_switch_s(step, d) for d in deployments),
        is_busy=any(d.activation.running or d.activation.is_opening for d in deployments),
        is_blocked=any(_is_blocked(step, d) for d in deployments),
    )


def _remaining_switch_s(step: Step, deployment: Deployment) -> float:
    """Time until a deployment is on its devices, if its switch-in has started or starts now."""
    if not deployment.activation.epoch:
        return estimates.switch_s(step.state, deployment)
    return max(0.0, estimates.open_s(step.state, deployment) - step.now_s)


def _net_gap_s(step: Step, slot: Slot, expected: Expected | None) -> float:
    """The usual gap before the holder's next operation, at most its longest gap when alone."""
    if expected is None:
        return NEVER_S
    alone_s = estimates.longest_gap_s(step.state, slot.holder, ready.pool_of(step, slot))
    return min(expected.at_s - expected.ended_s, alone_s)


def _is_blocked(step: Step, deployment: Deployment) -> bool:
    """Whether a ready operation waits for a device that runs or is kept for something else.

    A device that is still to be decided in this step may yet start the operation.
    """
    activation = deployment.activation
    if activation.running or activation.is_opening or ready.first(step, deployment) is None:
        return False
    return any(
        slot.running or (slot.node, slot.device) not in step.dirty
        for slot in devices.slots_of(step, deployment)
    )


def _is_alive(job: Job) -> bool:
    return job.controller.is_attached and job.state in _AT_WORK


def _has_alternative(step: Step, slot: Slot, option: Option, policy: Ordering) -> bool:
    """Whether a policy could leave the device idle although there is one option."""
    if not policy.may_wait:
        return False
    if policy.is_strict:
        deployments, job_name = step.state.deployments, option[0].job_name
        # A list is faster than a generator here: a device has few deployments.
        return any([deployments[name].job_name != job_name for name in slot.placed])
    holder = slot.holder
    if holder in ("", option[0].job_name):
        return False
    job = step.state.jobs.get(holder)
    return holder in slot.expected or (job is not None and bool(job.controller.phases))


def _members(step: Step, slot: Slot, options: Sequence[Option], may_wait: bool) -> list[TurnMember]:
    """The jobs of the device in round-robin order.

    If the policy may wait, the list ends with the first job that has an option: the policy looks no
    further.
    """
    by_job: dict[str, list[Deployment]] = {}
    for name in slot.placed:
        deployment = step.state.deployments[name]
        by_job.setdefault(deployment.job_name, []).append(deployment)
    by_position = round_robin.in_order(step.state, slot, by_job)
    if not may_wait:
        return [TurnMember(job, 0.0) for job in by_position]
    ready_jobs = {deployment.job_name for deployment, _ in options}
    since_s = max(slot.idle_since_s, min(op.ready_s for _, op in options))
    members = []
    for job in by_position:
        if job in ready_jobs:
            members.append(TurnMember(job, 0.0))
            break
        members.append(TurnMember(job, _awaited_until_s(step, job, by_job, since_s)))
    return members


def _awaited_until_s(
    step: Step, name: str, by_job: dict[str, list[Deployment]], since_s: float
) -> float:
    """Until when a device waits for a job that has nothing ready there; a past time means not at
    all.

    For a job that is busy on other devices it waits one round at most. Otherwise two devices with
    different orders could wait for each other.

    Args: by_job: the deployments of each job of the device. since_s: when the wait began.
    """
    job = step.state.jobs[name]
    if not _is_alive(job) or all(d.wpg.state is not WpgState.READY for d in by_job[name]):
        return 0.0
    unknown_s = ABSENCE_TIMEOUT * step.config.quantum_s
    deployments = step.deployments_of(job)
    if any(d.activation.running or ready.first(step, d) is not None for d in deployments):
        round_s = sum(estimates.worst_period_s(step.state, member) for member in by_job)
        return since_s + (round_s or unknown_s)
    last_s = max(d.activation.idle_since_s for d in deployments)
    return last_s + (estimates.worst_period_s(step.state, name) or unknown_s) if last_s else 0.0


def is_quantum_over(step: Step, since_s: float) -> bool:
    """Whether a quantum has passed since a time."""
    # Computed like the time of its timer. The difference now_s - since_s may round to less.
    return step.now_s >= since_s + step.config.quantum_s


def held_until_s(step: Step, slot: Slot) -> float:
    """Until when a device is kept for a holder with nothing ready; 0: it is not kept."""
    job = step.state.jobs.get(slot.holder)
    if job is None or job.state in JOB_ENDED or not job.controller.is_attached or slot.is_released:
        return 0.0
    phase_until_s = 0.0
    if ready.has_phase(step, job, slot):
        phase_until_s = slot.idle_since_s + step.config.phase_hold_s
        if step.config.quantum_s:
            phase_until_s = min(phase_until_s, slot.held_since_s + step.config.quantum_s)
    return max(phase_until_s, _grace_until_s(step, slot, job))


def _grace_until_s(step: Step, slot: Slot, job: Job) -> float:
    grace_s = step.config.idle_grace_s
    gap_s = estimates.next_gap_s(step.state, slot.holder, slot.last)
    until_s = slot.idle_since_s + max(grace_s, OVERDUE * gap_s)
    # Waiting through a long gap would cost more than a switch.
    if gap_s > MAX_GRACES * grace_s or until_s <= step.now_s:
        return 0.0
    pool = ready.pool_of(step, slot)
    if any(ready.waits_elsewhere(d) for d in step.deployments_of(job) if d.spec.pool == pool):
        return 0.0
    return until_s


def declare_phase(step: Step, event: PhaseDeclared) -> None:
    """Open or close the phase that a controller declared on a pool. Older sessions are ignored."""
    job = step.state.jobs.get(str(event.job))
    if job is None or job.state in JOB_ENDED or event.session != job.controller.session:
        return
    if event.is_open:
        job.controller.phases[event.pool] = event.session
        _set_released(step, job, event.pool, is_released=False)
    else:
        job.controller.phases.pop(event.pool, None)
        _set_released(step, job, event.pool, is_released=True)


def _set_released(step: Step, job: Job, pool: str, *, is_released: bool) -> None:
    for deployment in step.deployments_of(job):
        if deployment.spec.pool != pool:
            continue
        for slot in devices.slots_of(step, deployment):
            if slot.holder == deployment.job_name:
                devices.set_released(slot, is_released)
                step.dirty.add((slot.node, slot.device))
