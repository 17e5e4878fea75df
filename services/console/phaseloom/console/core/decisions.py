"""Turns events of the decision log into decisions in words, for people.

Context switches are not included: a page shows them in its timeline, with all their figures.
"""

from __future__ import annotations

from phaseloom.common.contract import events
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.console.core.wire import Decision

ROUTINE = frozenset(
    {
        "copy requested",
        "deployment deleted",
        "deployment moved",
        "job cancelled",
        "job done",
        "job draining",
        "job moved",
        "job profiled",
        "node draining",
        "node is empty",
        "node no longer draining",
        "recovered",
    }
)
"""Notices of the scheduler that do not report a problem."""


def decision_of(  # noqa: PLR0911, PLR0912 - one arm an event
    time_s: float, event: events.Event
) -> Decision | None:
    """Return the decision that an event represents, or None if it is not shown."""
    match event:
        case events.JobSubmitted(job=job):
            parts = ", ".join(f"{spec.name} on {spec.pool}" for spec in event.spec.deployments)
            return Decision(time_s, "submitted", parts, str(job))
        case events.JobFinished(job=job):
            title = "gave up" if event.failed else "finished"
            return Decision(time_s, "cancelled" if event.cancelled else title, "", str(job))
        case events.DrainRequested(job=job):
            return Decision(time_s, "drained", "it accepts no new operations", str(job))
        case events.DeploymentCreated(job=job, spec=spec):
            return Decision(time_s, f"{spec.name} added", f"on {spec.pool}", str(job))
        case events.DeploymentDeleted(deployment=key):
            return Decision(time_s, f"{key.deployment} deleted", "", str(key.job_key))
        case events.SessionOpened(job=job):
            return Decision(time_s, "controller attached", f"session {event.session}", str(job))
        case events.SessionLost(job=job):
            reason = "its heartbeats stopped; no device is held for it"
            return Decision(time_s, "controller lost", reason, str(job), is_trouble=True)
        case events.CancelRequested(key=key):
            return Decision(
                time_s, f"cancel {key.deployment}.{key.slot}", "requested", str(key.job_key)
            )
        case events.WpgStarted(deployment=key):
            reason = f"incarnation {event.incarnation}, as of operation {event.applied}"
            return _deployment_decision(time_s, key, f"started on {event.node}", reason)
        case events.WpgLost(deployment=key) if event.error.code is Code.ABORTED:
            # The scheduler ordered this stop; its reason, such as a loss, has its own decision.
            return _deployment_decision(
                time_s, key, f"stopped on {event.node}", event.error.message
            )
        case events.WpgLost(deployment=key):
            return _problem_decision(time_s, key, f"lost on {event.node}", event.error)
        case events.ActivationRefused(deployment=key):
            return _problem_decision(time_s, key, f"not switched in on {event.node}", event.error)
        case events.PermitReturned(key=operation):
            key = operation.deployment_key
            return _problem_decision(time_s, key, f"gave back {operation.slot}", event.error)
        case events.TailGathered(operations=[first, *_]):
            reason = f"{len(event.freed)} ranks have nothing left to do"
            return _deployment_decision(time_s, first.deployment_key, "long tail gathered", reason)
        case events.SealFailed(deployment=key):
            return _problem_decision(time_s, key, f"not sealed at {event.seq}", event.error)
        case events.QueuedOperation(key=operation, error=error) if error is not None:
            title = f"refused {operation.slot}"
            return _problem_decision(time_s, operation.deployment_key, title, error)
        case events.OperationFinished(key=operation) if event.outcome is not Outcome.COMPLETED:
            title = f"{event.kind} {operation.slot} {event.outcome}"
            return _problem_decision(time_s, operation.deployment_key, title, event.error)
        case events.PhaseTrace(job=job) if event.drift:
            reason = f"{event.drift:+.0%} compared with before"
            return Decision(time_s, f"cycle is {event.period_s:.2f} s", reason, str(job))
        case _:
            return _mesh_decision(time_s, event)


def moves_of(time_s: float, event: events.ReplanComputed) -> list[Decision]:
    """Return one decision for each job that a repacking moves."""
    return [
        Decision(time_s, f"moves to {move.group or 'a new group'}", move.why, str(move.job))
        for move in event.moves
    ]


def of_notice(time_s: float, notice: events.Notice) -> Decision:
    """Return the decision that a notice represents. All except routine ones count as trouble."""
    subject = f" {notice.subject}" if notice.subject else ""
    title = f"{notice.what.replace('_', ' ')}{subject}"
    reason = f"{notice.source}: {notice.reason}"
    return Decision(time_s, title, reason, is_trouble=notice.what not in ROUTINE)


def _mesh_decision(time_s: float, event: events.Event) -> Decision | None:
    match event:
        case events.SchedulerConfigured(config=config):
            reason = f"placement {config.placement}, ordering {config.ordering}"
            return Decision(time_s, "scheduler configured", reason)
        case events.NodeUp():
            plural_suffix = "" if len(event.devices) == 1 else "s"
            reason = f"{len(event.devices)} device{plural_suffix} in pool {event.pool}"
            return Decision(time_s, f"node {event.node} is up", reason)
        case events.NodeLost():
            return Decision(time_s, f"node {event.node} lost", event.reason, is_trouble=True)
        case events.NodeDrainRequested():
            title = "permanently lost" if event.gone else "draining"
            title = "may be used again" if event.undo else title
            return Decision(time_s, f"node {event.node} {title}", "requested by an operator")
        case _:
            return None


def _deployment_decision(time_s: float, key: DeploymentKey, title: str, reason: str) -> Decision:
    return Decision(time_s, f"{key.deployment} {title}", reason, str(key.job_key))


def _problem_decision(
    time_s: float, key: DeploymentKey, title: str, error: ErrorInfo | None
) -> Decision:
    reason = "" if error is None else f"{error.code}: {error.message}"
    text = f"{key.deployment} {title}"
    return Decision(time_s, text, reason, str(key.job_key), is_trouble=True)
