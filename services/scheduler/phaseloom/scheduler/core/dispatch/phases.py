"""Phases as a device sees them, and how much its jobs have been kept waiting.

A phase is a run of the operations of one job on one device in which no kind comes twice; where the
controller declared it, it lasts until that ends it, at most a cycle. It may go on while more kinds
are to come and the next is predicted soon.
Ordering policies that serve phases go by it. Nothing is decided here.
"""

from __future__ import annotations

from phaseloom.scheduler.core.devices import devices, estimates, round_robin
from phaseloom.scheduler.core.dispatch import idle_hold
from phaseloom.scheduler.core.policies.registry import ORDERING
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step

SOON = 0.05
"""Share of a job's period: a longer gap is not within a phase. As the profiler splits segments."""


def began(step: Step, deployment: Deployment, op: Op, slots: list[Slot]) -> None:
    """Note an operation that is about to be permitted: it continues a phase, or begins one.

    Args: slots: those of its deployment.
    """
    _note_lag(step, deployment, op)
    if deployment.activation.running:
        return  # It joins others.
    name, kind = deployment.job_name, kind_of(deployment, op)
    # What begins beside others leaves the phase of the device to those.
    here = [
        s for s in slots if s.running in ("", deployment.name) or not s.share_of(deployment.name)
    ]
    is_new = False
    for slot in here:
        continues = is_continued(step, slot, deployment, kind)
        devices.serve(step, slot, name, kind, continues=continues)
        is_new = is_new or not continues
    if is_new and ORDERING[step.config.ordering].is_strict:
        round_robin.began(step, deployment, here)


def _note_lag(step: Step, deployment: Deployment, op: Op) -> None:
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
    payer.progress.lag_s += waited_s(step, deployment, op)
    if deployment.activation.epoch == step.sequence:
        payer.progress.lag_s += estimates.switch_s(step.state, deployment)


def is_continued(step: Step, slot: Slot, deployment: Deployment, kind: str) -> bool:
    """Whether an operation of this kind belongs to the phase that the device is in."""
    if slot.phase.job != deployment.job_name:
        return False
    if kind not in slot.phase.kinds:
        return True
    job = step.job_of(deployment)
    if not idle_hold.has_phase(step, job, slot):
        return False
    config = step.config
    longest_s = estimates.worst_period_s(step.state, deployment.job_name)
    longest_s = longest_s or max(config.quantum_s, config.phase_hold_s)
    return step.now_s < slot.phase.began_s + longest_s


def kind_of(deployment: Deployment, op: Op) -> str:
    return f"{deployment.key.deployment}.{op.kind}"


def goes_on_until_s(step: Step, slot: Slot) -> float:
    """The time until which a phase with nothing ready may go on; 0: it is over."""
    job = step.state.jobs.get(slot.phase.job)
    if job is None or slot.is_released:
        return 0.0
    if idle_hold.has_phase(step, job, slot):
        return slot.idle_since_s + step.config.phase_hold_s
    expected = slot.expected.get(slot.phase.job)
    if expected is None:
        return 0.0
    soon_s = SOON * estimates.period_s(step.state, slot.phase.job)
    if expected.at_s - expected.ended_s > soon_s or _is_complete(step, slot):
        return 0.0
    return max(expected.late_s, expected.ended_s + soon_s)


def _is_complete(step: Step, slot: Slot) -> bool:
    """Whether every kind of operation that the job is known to run here has come."""
    trace = step.state.traces.get(slot.phase.job)
    if trace is None:
        return True
    here = {step.state.deployments[name].key for name in slot.placed}
    names = {key.deployment for key in here if str(key.job_key) == slot.phase.job}
    usual = {f"{e.deployment}.{e.kind}" for e in trace.estimates if e.deployment in names}
    return usual <= set(slot.phase.kinds)


def waited_s(step: Step, deployment: Deployment, op: Op) -> float:
    """Seconds for which other operations kept this one from running."""
    return max(0.0, step.now_s - max(op.ready_s, deployment.activation.idle_since_s))


def slack_s(step: Step, deployment: Deployment, op: Op) -> float:
    """How much longer the operation may wait before the job that it is run for misses its SLO.

    It counts from the job's first operation: the time that was neither waiting nor switching would
    have passed alone as well.
    Returns: inf where it has none.
    """
    job = step.payer_of(deployment, op)
    if job.spec.slo <= 0:
        return float("inf")
    age_s = step.now_s - (job.progress.began_s if job.progress.began_s >= 0 else op.ready_s)
    alone_s = age_s - job.progress.lag_s - waited_s(step, deployment, op)
    return job.spec.slo * alone_s - age_s
