"""The view of a free device that ordering policies get: its candidates, and who is expected.

Cost: O(candidates), and for round robin O(jobs of the device).
"""

from __future__ import annotations

from collections.abc import Sequence

from phaseloom.scheduler.core.devices import devices, estimates, round_robin
from phaseloom.scheduler.core.dispatch import phases, ready
from phaseloom.scheduler.core.policies.device_view import (
    Candidate,
    DeviceView,
    Member,
    Ordering,
    Resident,
)
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JobState, WpgState

ABSENCE_TIMEOUT = 2.0
"""Quanta for which a job of which no period is known is waited for after its last operation."""
NEVER_S = float("inf")

Option = tuple[Deployment, Op]
_AT_WORK = frozenset({JobState.PLACED, JobState.PROFILING, JobState.ACTIVE})


def view_of(
    step: Step,
    slot: Slot,
    options: Sequence[Option],
    policy: Ordering,
    *,
    may_wait: bool,
    is_plan: bool = False,
) -> DeviceView:
    """Args: options: at least one. may_wait: whether the policy may, where it ever does.
    is_plan: whether what the options take is asked for though the policy does not weigh it."""
    present = candidate if policy.weighs or is_plan else _unweighed
    return DeviceView(
        now_s=step.now_s,
        candidates=[present(step, slot, d, op) for d, op in options],
        resident=_resident(step, slot) if policy.may_wait else None,
        members=_members(step, slot, options, may_wait) if policy.is_strict else (),
        may_wait=may_wait and policy.may_wait,
    )


def candidate(step: Step, slot: Slot, deployment: Deployment, op: Op) -> Candidate:
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
        slack_s=phases.slack_s(step, deployment, op),
        served=slot.served.get(deployment.job_name, 0),
        continues=phases.is_continued(step, slot, deployment, phases.kind_of(deployment, op)),
    )


def _unweighed(step: Step, slot: Slot, deployment: Deployment, op: Op) -> Candidate:
    """A candidate without durations and slack, for policies that do not weigh them."""
    return Candidate(
        operation=str(op.key),
        deployment=deployment.name,
        job=deployment.job_name,
        arrival_s=op.ready_s,
        arrival=op.arrival,
        duration_s=0.0,
        switch_s=0.0,
        served=slot.served.get(deployment.job_name, 0),
        continues=phases.is_continued(step, slot, deployment, phases.kind_of(deployment, op)),
    )


def _back_s(step: Step, slot: Slot, newcomer: Deployment) -> float:
    """The dearest switch back of what the newcomer displaces of the holder."""
    if newcomer.activation.epoch or newcomer.job_name == slot.holder:
        return 0.0
    leaving = [d for d in devices.victims(step, slot, newcomer) if d.job_name == slot.holder]
    return max((estimates.switch_s(step.state, d) for d in leaving), default=0.0)


def _resident(step: Step, slot: Slot) -> Resident | None:
    job = step.state.jobs.get(slot.holder)
    if job is None or not _is_alive(job):
        return None
    expected = None if slot.is_released else slot.expected.get(slot.holder)
    return Resident(
        job=slot.holder,
        since_s=slot.held_since_s,
        idle_since_s=slot.idle_since_s,
        at_s=expected.at_s if expected else NEVER_S,
        late_s=expected.late_s if expected else NEVER_S,
        phase_until_s=phases.goes_on_until_s(step, slot),
    )


def _is_alive(job: Job) -> bool:
    return job.controller.is_attached and job.state in _AT_WORK


def has_alternative(step: Step, slot: Slot, option: Option, policy: Ordering) -> bool:
    """Whether a policy could leave the device idle rather than run the only option."""
    if not policy.may_wait:
        return False
    if policy.is_strict:
        deployments, own = step.state.deployments, option[0].job_name
        return any([deployments[name].job_name != own for name in slot.placed])
    holder = slot.holder
    if holder in ("", option[0].job_name):
        return False
    job = step.state.jobs.get(holder)
    return holder in slot.expected or (job is not None and bool(job.controller.phases))


def _members(step: Step, slot: Slot, options: Sequence[Option], may_wait: bool) -> list[Member]:
    """The jobs of the device by their next round-robin positions on it.

    Where the policy may wait, up to the first that has an option: it looks at none behind it.
    """
    here: dict[str, list[Deployment]] = {}
    for name in slot.placed:
        deployment = step.state.deployments[name]
        here.setdefault(deployment.job_name, []).append(deployment)
    by_position = round_robin.in_order(step.state, slot, here)
    if not may_wait:
        return [Member(job, 0.0) for job in by_position]
    ready_jobs = {deployment.job_name for deployment, _ in options}
    since_s = max(slot.idle_since_s, min(op.ready_s for _, op in options))
    members = []
    for job in by_position:
        if job in ready_jobs:
            members.append(Member(job, 0.0))
            break
        members.append(Member(job, _awaited_until_s(step, job, here, since_s)))
    return members


def _awaited_until_s(
    step: Step, name: str, here: dict[str, list[Deployment]], since_s: float
) -> float:
    """Until when a job that has nothing ready on a device is waited for; a past time: not at all.

    A job that is busy on other devices is waited for during one round at most: two devices whose
    orders differ could wait for each other.

    Args: here: the deployments of each job of the device. since_s: when the waiting began.
    """
    job = step.state.jobs[name]
    if not _is_alive(job) or all(d.wpg.state is not WpgState.READY for d in here[name]):
        return 0.0
    unknown_s = ABSENCE_TIMEOUT * step.config.quantum_s
    every = step.deployments_of(job)
    if any(d.activation.running or ready.first(step, d) is not None for d in every):
        round_s = sum(estimates.worst_period_s(step.state, member) for member in here)
        return since_s + (round_s or unknown_s)
    last_s = max(d.activation.idle_since_s for d in every)
    return last_s + (estimates.worst_period_s(step.state, name) or unknown_s) if last_s else 0.0
