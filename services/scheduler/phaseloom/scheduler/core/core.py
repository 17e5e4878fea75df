"""The scheduler's decisions: a fold over the decision log, without I/O.

    core = Core()
    for entry in log:
        outputs = core.step(entry.sequence, entry.time_s, entry.event)

Same log, same outputs: live, after a restart, in a simulation. Nothing in here reads a clock, a
random number, the environment or a file; the log's timestamps are the time and its sequence numbers
the order, the epochs and the command ids. Cost of a step: linear in the operations that are ready
on the devices that the event touches.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from phaseloom.common.contract.errors import Code, ErrorInfo, ResourceError
from phaseloom.common.contract.events import (
    ActivationOpened,
    ActivationRefused,
    CancelRequested,
    DeploymentCreated,
    DeploymentDeleted,
    DrainRequested,
    Event,
    JobFinished,
    JobSubmitted,
    NodeDrainRequested,
    NodeLost,
    NodeUp,
    OperationFinished,
    PermitReturned,
    PhaseDeclared,
    PhaseTrace,
    QueuedOperation,
    ReplanComputed,
    SchedulerConfigured,
    SealCommitted,
    SealFailed,
    SessionLost,
    SessionOpened,
    StateCut,
    StateMirrored,
    TimerFired,
    WpgLost,
    WpgStarted,
    parts,
)
from phaseloom.scheduler.core.dispatch import dispatch, hints
from phaseloom.scheduler.core.durability import replicas, seals
from phaseloom.scheduler.core.jobs import cancel, jobs, outcomes, sessions
from phaseloom.scheduler.core.operations import operations
from phaseloom.scheduler.core.placement import assignment, evacuation, repack
from phaseloom.scheduler.core.state.outputs import Output, PutView
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import OpState, WpgState
from phaseloom.scheduler.core.state.tree import (
    CORE_VERSION,
    Snapshot,
    SnapshotHead,
    State,
)
from phaseloom.scheduler.core.wpgs import moves, wpgs

S = TypeVar("S", bound=msgspec.Struct)

REFUSAL_PAUSE_S = 0.5
"""Before an activation that was refused is tried again."""
MAX_REFUSALS = 3
_FOR_GOOD = frozenset({Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT})
"""Codes of refused switch-ins that will be refused again."""
RETRY_PAUSE_S = 0.5
"""Before an operation whose permit came back unused is permitted again."""


class Core:
    """Holds the state; `step` is its only door."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State()

    def step(self, sequence: int, time_s: float, event: Event) -> list[Output]:
        """Take one entry of the log.

        Args:   sequence: of the log, greater than any before.
                time_s: when the log took it; a clock that steps back is held.
        Raises: InvalidTransition: our own bug; the state is then not to be used.
        """
        assert sequence > self.state.sequence, "entries are folded once, in order"
        self.state.sequence = sequence
        self.state.now_s = max(self.state.now_s, time_s)
        self.state.cluster.now_s = self.state.now_s
        step = Step(self.state, sequence, self.state.now_s)
        for part in parts(event):
            _take(step, part)
            operations.wake_all(step)
            jobs.settle(step)
            repack.ask(step)
            wpgs.move_on(step)
            jobs.place_waiting(step)
            operations.wake_all(step)
        dispatch.dispatch(step)
        hints.tell(step)
        for name in sorted(step.changed_jobs):
            job = self.state.jobs[name]
            step.emit(PutView(job.key, jobs.status(step, job)))
        return step.outputs

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(Snapshot(CORE_VERSION, self.state))

    @classmethod
    def restore(cls, payload: bytes) -> Core:
        """Go on from a snapshot.

        Raises: ResourceError: a snapshot of another core version, or damaged.
        """
        # Alone first: the rest of another version's may be of another shape.
        core_version = _decode(payload, SnapshotHead).core_version
        if core_version != CORE_VERSION:
            raise ResourceError(
                f"snapshot of core version {core_version}, this is {CORE_VERSION}",
                code=Code.FAILED_PRECONDITION,
                remedy=f"let the scheduler of core version {core_version} end its jobs, stop the "
                "mesh, and start this one on a bus without its streams and buckets",
            )
        return cls(_decode(payload, Snapshot).state)


def _decode(payload: bytes, kind: type[S]) -> S:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise ResourceError(f"snapshot unreadable: {error}", code=Code.DATA_LOSS) from None


def _take(step: Step, event: Event) -> None:  # noqa: PLR0912, PLR0915 - one arm an event
    match event:
        case SchedulerConfigured():
            step.state.config = event.config
            assignment.configured(step, event.config)
        case QueuedOperation():
            operations.file(step, event)
        case SessionOpened():
            sessions.opened(step, event)
        case SessionLost():
            sessions.lost(step, event)
        case PhaseDeclared():
            sessions.declared(step, event)
        case CancelRequested():
            cancel.request(step, event)
        case OperationFinished():
            outcomes.finish(step, event)
        case ActivationOpened():
            _opened(step, event)
        case ActivationRefused():
            _refused(step, event)
        case PermitReturned():
            _returned(step, event)
        case StateCut():
            outcomes.cut(step, event)
        case TimerFired():
            _timer(step, event)
        case PhaseTrace():
            repack.traced(step, event)
        case ReplanComputed():
            repack.answered(step, event)
        case JobSubmitted():
            jobs.submit(step, event)
        case JobFinished():
            jobs.finish(step, event)
        case DrainRequested():
            jobs.drain(step, event)
        case DeploymentCreated():
            jobs.create_deployment(step, event)
        case DeploymentDeleted():
            jobs.delete_deployment(step, event)
        case NodeUp():
            wpgs.node_up(step, event)
            assignment.node_up(step, event)
        case NodeLost():
            wpgs.node_lost(step, event)
            assignment.node_lost(step, event)
        case WpgStarted():
            wpgs.started(step, event)
        case WpgLost():
            wpgs.lost(step, event)
        case SealCommitted():
            seals.committed(step, event)
        case SealFailed():
            seals.failed(step, event)
        case StateMirrored():
            if not replicas.mirrored(step, event):
                moves.mirrored(step, event)
        case NodeDrainRequested():
            evacuation.requested(step, event)


def _timer(step: Step, event: TimerFired) -> None:
    due_s = step.state.timers.pop(event.timer, None)
    if due_s is None:
        return
    if due_s > step.now_s:
        # The shell's clock runs ahead of the log's.
        step.set_timer(event.timer, due_s)
        return
    match event.timer.split("/"):
        case ["expire", key]:
            operations.expire(step, key)
        case ["hint", name, _]:
            deployment = step.state.deployments.get(name)
            if deployment is not None:
                step.foresee(deployment)
        case ["forget", job_name, sequence]:
            jobs.forget(step, job_name, int(sequence))
        case ["away" | "gone" as what, node, revision]:
            evacuation.missed(step, what, node, int(revision))
        case ["copies", _]:
            step.has_new_room = True
        case ["retry", name, _]:
            deployment = step.state.deployments.get(name)
            if deployment is not None:
                step.touch(deployment)
        case [_, node, device, *_]:
            step.dirty.add((node, int(device)))


def _opened(step: Step, event: ActivationOpened) -> None:
    dispatch.opened(step, event)
    deployment = step.deployment(event.deployment)
    if deployment is not None and deployment.wpg.state is not WpgState.STOPPED:
        step.state.switch_s[deployment.name] = (event.offload_s, event.load_s)


def _refused(step: Step, event: ActivationRefused) -> None:
    ops = dispatch.refused(step, event)
    deployment = step.deployment(event.deployment)
    if deployment is None:
        return
    step.tell("activation refused", event.error.message, deployment.name)
    for op in ops:
        if op.state is OpState.PERMITTED:
            step.move_op(op, OpState.QUEUED)
        op.count_refusal()
        if op.refusals >= MAX_REFUSALS:
            operations.give_up(step, deployment, op, _given_up(event.error, op.refusals))
        else:
            operations.end_unwanted(step, deployment, op)
    if deployment.wpg.state is WpgState.RECOVERING and event.error.code in _FOR_GOOD:
        deployment.wpg.count_refusal()
        if deployment.wpg.refusals >= MAX_REFUSALS:
            job = deployment.job_name
            step.doomed[job] = _given_up(event.error, deployment.wpg.refusals)
    deployment.activation.retry_at(step.now_s + REFUSAL_PAUSE_S)
    step.set_timer(f"retry/{deployment.name}/{step.sequence}", deployment.activation.retry_at_s)


def _returned(step: Step, event: PermitReturned) -> None:
    """As often as it takes: a node that is away may come back, and others use the device."""
    deployment = step.deployment(event.key.deployment_key)
    if deployment is None or event.incarnation != deployment.wpg.incarnation:
        return
    if event.key not in deployment.activation.running:
        return
    step.tell("permit returned", event.error.message, str(event.key))
    step.free(deployment, event.key, "")
    op = deployment.queue.find(event.key)
    if op is not None and op.state is OpState.PERMITTED:
        step.move_op(op, OpState.QUEUED)
        operations.end_unwanted(step, deployment, op)
    deployment.activation.retry_at(step.now_s + RETRY_PAUSE_S)
    step.set_timer(f"retry/{deployment.name}/{step.sequence}", deployment.activation.retry_at_s)
    step.touch(deployment)


def _given_up(error: ErrorInfo, refusals: int) -> ErrorInfo:
    return msgspec.structs.replace(
        error, message=f"its state could not be switched in ({refusals} times): {error.message}"
    )
