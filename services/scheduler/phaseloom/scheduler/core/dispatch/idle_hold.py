"""The idle hold: how long a device is kept for the job that used it last, its *holder*.

The parts of one phase should cost no switch between them. While the holder has ready operations
they go first, for a quantum: the next operation of a job that submits serially has not waited yet
and would lose against anyone who has (PlexRL's HRRS has that weakness). While it has none, another
job's operation waits for the idle grace, the time in which the holder's controller may answer and
go on. That wait ends early when the holder has said that its next work here comes after work
elsewhere; where the profiler knows when the next operation usually comes, the wait lasts until that
is overdue, or is not begun.

A phase that the controller declared keeps the device past the grace: up to the hold of the
configuration, never past the quantum, and not after the controller ended it (then there is no
grace either), was lost or was followed by another. It is a hint: a dead or waiting controller
blocks nobody.

Nothing starves: when a quantum ends, others go first. A quantum of 0 leaves the order to the policy
alone.
"""

from __future__ import annotations

from phaseloom.common.contract.events import PhaseDeclared
from phaseloom.scheduler.core.devices import devices, estimates
from phaseloom.scheduler.core.dispatch import ready
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JOB_ENDED

SOON = 2.0
"""Times the idle grace: an operation known to come later than that is not waited for at all."""
OVERDUE = 1.5
"""Times its usual gap: an operation that has not come by then is not waited for any longer."""


def is_quantum_over(step: Step, since_s: float) -> bool:
    # As its timer is set: a difference of the two may round to less.
    return step.now_s >= since_s + step.config.quantum_s


def held_until_s(step: Step, slot: Slot) -> float:
    """The time until which a device is kept for a holder with nothing ready; 0: it is not kept."""
    job = step.state.jobs.get(slot.holder)
    if job is None or job.state in JOB_ENDED or not job.controller.is_attached or slot.is_released:
        return 0.0
    phase_s = _phase_until_s(step, slot) if has_phase(step, job, slot) else 0.0
    return max(phase_s, _grace_until_s(step, slot, job))


def _grace_until_s(step: Step, slot: Slot, job: Job) -> float:
    grace_s = step.config.idle_grace_s
    gap_s = estimates.next_gap_s(step.state, slot.holder, slot.last)
    until_s = slot.idle_since_s + max(grace_s, OVERDUE * gap_s)
    if gap_s > SOON * grace_s or until_s <= step.now_s:
        return 0.0
    pool = _pool(step, slot)
    if any(ready.waits_elsewhere(d) for d in step.deployments_of(job) if d.spec.pool == pool):
        return 0.0
    return until_s


def _phase_until_s(step: Step, slot: Slot) -> float:
    until_s = slot.idle_since_s + step.config.phase_hold_s
    quantum_s = step.config.quantum_s
    return min(until_s, slot.held_since_s + quantum_s) if quantum_s else until_s


def has_phase(step: Step, job: Job, slot: Slot) -> bool:
    """Whether the job's present controller has a phase open on the device's pool."""
    phases = job.controller.phases
    return bool(phases) and phases.get(_pool(step, slot)) == job.controller.session


def _pool(step: Step, slot: Slot) -> str:
    used_by = step.state.deployments.get(slot.used_by)
    return used_by.spec.pool if used_by is not None else ""


def declare(step: Step, event: PhaseDeclared) -> None:
    """Open or close the phase that a controller declared on a pool; older sessions have no say."""
    job = step.state.jobs.get(str(event.job))
    if job is None or job.state in JOB_ENDED or event.session != job.controller.session:
        return
    if event.is_open:
        job.controller.phases[event.pool] = event.session
        _mark(step, job, event.pool, is_released=False)
    else:
        job.controller.phases.pop(event.pool, None)
        _mark(step, job, event.pool, is_released=True)


def _mark(step: Step, job: Job, pool: str, *, is_released: bool) -> None:
    for deployment in step.deployments_of(job):
        if deployment.spec.pool != pool:
            continue
        for slot in devices.slots_of(step, deployment):
            if slot.holder == deployment.job_name:
                devices.set_released(slot, is_released)
                step.dirty.add((slot.node, slot.device))
