"""The sessions of controllers: opened, lost, and the phases that they declare."""

from __future__ import annotations

from phaseloom.common.contract.events import PhaseDeclared, SessionLost, SessionOpened
from phaseloom.common.contract.ids import JobKey
from phaseloom.scheduler.core.dispatch import choice
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JOB_ENDED


def opened(step: Step, event: SessionOpened) -> None:
    """Record that a controller has attached.

    Two attaches may be in the log in another order than they were made. A session that was reported
    lost is attached again when its heartbeat returns.
    """
    job = _live(step, event.job)
    if job is None or event.session < job.controller.session:
        return
    if event.session == job.controller.session and job.controller.is_attached:
        return
    _end_phases(step, job)  # those of the previous controller
    job.controller.attach(event.session)
    step.job_changed(str(job.key))


def lost(step: Step, event: SessionLost) -> None:
    """Record that a controller was lost. Its queued operations still run; no device is kept for
    it."""
    job = _live(step, event.job)
    if job is None or event.session != job.controller.session or not job.controller.is_attached:
        return
    _end_phases(step, job)
    job.controller.detach()
    step.notify(
        "controller lost",
        f"session {event.session} has no heartbeat; devices are no longer kept for it",
        str(job.key),
    )
    for deployment in step.deployments_of(job):
        step.touch(deployment)


def declared(step: Step, event: PhaseDeclared) -> None:
    job = _live(step, event.job)
    if job is not None:
        choice.declare_phase(step, event)


def _live(step: Step, key: JobKey) -> Job | None:
    job = step.state.jobs.get(str(key))
    return None if job is None or job.state in JOB_ENDED else job


def _end_phases(step: Step, job: Job) -> None:
    for pool in sorted({spec.pool for spec in job.spec.deployments}):
        choice.declare_phase(
            step, PhaseDeclared(job.key, job.controller.session, pool, is_open=False)
        )
