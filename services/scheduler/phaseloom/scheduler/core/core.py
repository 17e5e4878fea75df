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

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from phaseloom.common.contract import events
from phaseloom.common.contract.errors import Code, ErrorInfo, InternalError, ResourceError
from phaseloom.scheduler.core.dispatch import dispatch, shares, speculative, tails
from phaseloom.scheduler.core.durability import replicas, retention, seals
from phaseloom.scheduler.core.jobs import cancel, deployments, jobs, outcomes, sessions
from phaseloom.scheduler.core.operations import operations
from phaseloom.scheduler.core.placement import assignment, evacuation, repack
from phaseloom.scheduler.core.state.outputs import Output
from phaseloom.scheduler.core.state.step import FollowUp, Step, Subjects
from phaseloom.scheduler.core.state.tree import (
    CORE_VERSION,
    Snapshot,
    SnapshotHead,
    State,
)
from phaseloom.scheduler.core.state.upgrades import UPGRADES, Upgrade, upgrade
from phaseloom.scheduler.core.wpgs import moves, wpgs

S = TypeVar("S", bound=msgspec.Struct)


Action = Callable[[Step, Subjects], None]


def _without_subject(action: Callable[[Step], None]) -> Action:
    return lambda step, subjects: action(step)


def _per_subject(action: Callable[[Step, str], None]) -> Action:
    """Make a follow-up that is done for each subject, in the order of their names."""

    def run_for_all(step: Step, subjects: Subjects) -> None:
        for name in sorted(subjects):
            action(step, name)

    return run_for_all


def _per_failed_subject(action: Callable[[Step, str, ErrorInfo], None]) -> Action:
    """The same as `_per_subject`, with the error that is the reason given to `do`."""

    def run_for_all(step: Step, subjects: Subjects) -> None:
        for name, error in sorted(subjects.items()):
            assert error is not None, name
            action(step, name, error)

    return run_for_all


AFTER_EACH_EVENT: tuple[tuple[FollowUp, Action], ...] = (
    (FollowUp.WAKE, operations.wake),
    (FollowUp.FALL_BACK, _per_failed_subject(jobs.fall_back)),
    (FollowUp.FAIL_JOB, _per_failed_subject(jobs.fail)),
    (FollowUp.END_DEPLOYMENT, _per_failed_subject(deployments.end_alone)),
    (FollowUp.RELEASE, _per_subject(retention.release_unnamed)),
    (FollowUp.REVIEW_JOB, _per_subject(jobs.review)),
    (FollowUp.PLACE, _without_subject(jobs.place_waiting)),
    (FollowUp.REPLAN, _without_subject(repack.ask)),
    (FollowUp.MOVE, _without_subject(wpgs.advance_moves)),
)
"""The follow-ups after an event, in the order in which they are done, each with the function that
does it."""
MAX_PASSES = 2
"""The number of times that `AFTER_EACH_EVENT` is gone through after an event.

The second time is for follow-ups that were asked for by one further down. Where they make room in
turn, a later event uses it: no event costs more than two looks at what waits.
"""
AFTER_EACH_STEP: tuple[tuple[FollowUp, Action], ...] = (
    (FollowUp.PREFETCH, _per_subject(speculative.prefetch_version)),
    (FollowUp.HINT, _per_subject(speculative.send_hints)),
    (FollowUp.SHOW_JOB, _per_subject(jobs.publish_status)),
)
"""The follow-ups that are done once a step, after all events of its entry and after devices have
been given their next operations, each with its function."""


class Core:
    """The state of the scheduler, which only `step` changes."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State()

    def step(self, sequence: int, time_s: float, event: events.Event) -> list[Output]:
        """Take one entry of the log.

        Args:   sequence: the entry's number in the log, greater than any before.
                time_s: when the log took the entry; a clock that steps back is held.
        Raises: InvalidTransition: our own bug; the state is then not to be used.
        """
        assert sequence > self.state.sequence, "entries are folded once, in order"
        self.state.advance(sequence, time_s)
        step = Step(self.state, sequence, self.state.now_s)
        for part in events.parts(event):
            HANDLERS[type(part)](step, part)
            _follow_up(step)
        dispatch.dispatch(step)
        if step.follow_ups:
            for kind, action in AFTER_EACH_STEP:
                if kind in step.follow_ups:
                    action(step, step.follow_ups.pop(kind))
        return step.outputs

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(Snapshot(CORE_VERSION, self.state))

    @classmethod
    def restore(
        cls,
        payload: bytes,
        *,
        led_since: int | None = None,
        upgrades: Mapping[int, Upgrade] = UPGRADES,
    ) -> Core:
        """Go on from a snapshot.

        Args:   led_since: the core version that has gone on from the snapshot, 0 where nobody has;
                    None: the version that wrote it.
                upgrades: how the tree of each older version becomes that of the next.
        Raises: ResourceError: a core of another version has gone on from the snapshot, or the
                    snapshot is of a version that cannot be taken over, or damaged.
        """
        # The head is read first: the state of another version may have another shape.
        core_version = _decode(payload, SnapshotHead).core_version
        last = core_version if led_since is None else led_since
        if last not in (0, CORE_VERSION):
            raise ResourceError(
                f"a scheduler of core version {last} has not stopped in order, and this one is of "
                f"{CORE_VERSION}: what the other has decided since its last snapshot is not known",
                code=Code.FAILED_PRECONDITION,
                remedy=f"start a scheduler of core version {last} again, and stop it by SIGTERM",
            )
        if core_version == CORE_VERSION:
            return cls(_decode(payload, Snapshot).state)
        tree = _decode(payload, _AnySnapshot).state
        if not upgrade(tree, core_version, CORE_VERSION, upgrades):
            raise ResourceError(
                f"snapshot of core version {core_version}, this is {CORE_VERSION}",
                code=Code.FAILED_PRECONDITION,
                remedy=f"let the scheduler of core version {core_version} end its jobs, stop the "
                "mesh, and start this one on a bus without its streams and buckets",
            )
        try:
            return cls(msgspec.convert(tree, State))
        except msgspec.ValidationError as error:
            raise InternalError(
                f"the tree of core version {core_version} does not become one of {CORE_VERSION}: "
                f"{error}"
            ) from None


class _AnySnapshot(SnapshotHead, frozen=True):
    state: dict[str, Any]


def _decode(payload: bytes, kind: type[S]) -> S:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise ResourceError(f"snapshot unreadable: {error}", code=Code.DATA_LOSS) from None


def _follow_up(step: Step) -> None:
    """Do the follow-ups that an event has asked for. Moves are looked at after every event."""
    follow_ups = step.follow_ups
    if step.state.moving or follow_ups:
        step.follow_up(FollowUp.MOVE)
    for _ in range(MAX_PASSES):
        if not follow_ups:
            return
        for kind, action in AFTER_EACH_EVENT:
            if kind in follow_ups:
                action(step, follow_ups.pop(kind))


def _timer(step: Step, event: events.TimerFired) -> None:  # noqa: PLR0912 - one arm a timer
    set_for_s = step.state.pop_timer(event.timer)
    if set_for_s is None:
        return
    if set_for_s > step.now_s:
        # The shell's clock runs ahead of the log's.
        step.set_timer(event.timer, set_for_s)
        return
    match event.timer.split("/"):
        case ["expire", key]:
            operations.expire(step, key)
        case ["hint", name, _]:
            deployment = step.state.deployments.get(name)
            if deployment is not None:
                step.request_hints(deployment)
        case ["forget", job_name, sequence]:
            jobs.forget(step, job_name, int(sequence))
        case ["away" | "gone" as absence, node, revision]:
            evacuation.missed(step, absence, node, int(revision))
        case ["version", job_name, _]:
            step.follow_up(FollowUp.RELEASE, job_name)
        case ["copies", _]:
            step.follow_up(FollowUp.PLACE)
        case ["rebuild", name]:
            wpgs.pause_ended(step, name)
        case ["retry", name, _]:
            deployment = step.state.deployments.get(name)
            if deployment is not None:
                step.touch(deployment)
        case [_, node, device, *_]:
            step.dirty.add((node, int(device)))


def _configured(step: Step, event: events.SchedulerConfigured) -> None:
    before = step.state.config
    step.configure(event.config)
    assignment.configured(step, event.config)
    is_other_table = before is not None and before.slowdowns != event.config.slowdowns
    if is_other_table or not shares.corrects_table(step):
        step.state.forget_all_observed()


def _node_up(step: Step, event: events.NodeUp) -> None:
    wpgs.node_up(step, event)
    assignment.node_up(step, event)


def _node_lost(step: Step, event: events.NodeLost) -> None:
    wpgs.node_lost(step, event)
    assignment.node_lost(step, event)


def _mirrored(step: Step, event: events.StateMirrored) -> None:
    if not replicas.mirrored(step, event):
        moves.mirrored(step, event)


HANDLERS: dict[type[Any], Callable[[Step, Any], None]] = {
    events.SchedulerConfigured: _configured,
    events.QueuedOperation: operations.enqueue,
    events.SessionOpened: sessions.opened,
    events.SessionLost: sessions.lost,
    events.PhaseDeclared: sessions.declared,
    events.CancelRequested: cancel.request,
    events.OperationFinished: outcomes.finish,
    events.ActivationOpened: dispatch.opened,
    events.ActivationRefused: dispatch.refused,
    events.PermitReturned: dispatch.returned,
    events.StateSnapshotTaken: outcomes.snapshot_taken,
    events.TailGathered: tails.gathered,
    events.ClaimsAdjusted: shares.adjusted,
    events.TimerFired: _timer,
    events.PhaseTrace: repack.traced,
    events.ReplanComputed: repack.answered,
    events.JobSubmitted: jobs.submit,
    events.JobFinished: jobs.finish,
    events.DrainRequested: jobs.drain,
    events.DeploymentCreated: jobs.create_deployment,
    events.DeploymentDeleted: jobs.delete_deployment,
    events.NodeUp: _node_up,
    events.NodeLost: _node_lost,
    events.WpgStarted: wpgs.started,
    events.WpgLost: wpgs.lost,
    events.SealCommitted: seals.committed,
    events.SealFailed: seals.failed,
    events.StateMirrored: _mirrored,
    events.NodeDrainRequested: evacuation.requested,
}
"""Type of event → the function that takes it."""
