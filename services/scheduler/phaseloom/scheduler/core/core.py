"""The scheduler's decisions, as a fold over the decision log.

    core = Core()
    for entry in log:
        outputs = core.step(entry.sequence, entry.time_s, entry.event)

The same log always gives the same outputs: live, after a restart, and in the simulator. Nothing
here reads a clock, a random number, the environment or a file. Time is the log's timestamps. Order,
epochs and command ids are its sequence numbers.

Cost of a step: linear in the ready operations on the devices that the event touches.
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
    """Run the action once for each subject, in alphabetical order."""

    def run_for_all(step: Step, subjects: Subjects) -> None:
        for name in sorted(subjects):
            action(step, name)

    return run_for_all


def _per_failed_subject(action: Callable[[Step, str, ErrorInfo], None]) -> Action:
    """Run the action once for each subject, in alphabetical order, with the subject's error."""

    def run_for_all(step: Step, subjects: Subjects) -> None:
        for name, error in sorted(subjects.items()):
            assert error is not None, name
            action(step, name, error)

    return run_for_all


# The order matters. For example, jobs fail before waiting jobs are placed, so that these get the
# room; and moves come last, because a placement may start one.
AFTER_EACH_EVENT: tuple[tuple[FollowUp, Action], ...] = (
    (FollowUp.WAKE, _without_subject(operations.wake)),
    (FollowUp.WRITE_ENDINGS, _without_subject(operations.write_endings)),
    (FollowUp.FALL_BACK, _per_failed_subject(jobs.fall_back)),
    (FollowUp.FAIL_JOB, _per_failed_subject(jobs.fail)),
    (FollowUp.END_DEPLOYMENT, _per_failed_subject(deployments.end_alone)),
    (FollowUp.RELEASE, _per_subject(retention.release_unnamed)),
    (FollowUp.REVIEW_JOB, _per_subject(jobs.review)),
    (FollowUp.PLACE, _without_subject(jobs.place_waiting)),
    (FollowUp.REPLAN, _without_subject(repack.ask)),
    (FollowUp.MOVE, _without_subject(wpgs.advance_moves)),
)
"""The follow-ups that run after each event, in this order, each with its function."""
MAX_PASSES = 2
"""Maximum number of times that `AFTER_EACH_EVENT` runs after one event.

The second pass runs the follow-ups that a later one in the first pass requested. Requests made in
the second pass wait for the next event. So an event costs at most two looks at the waiting jobs.
"""
AFTER_EACH_STEP: tuple[tuple[FollowUp, Action], ...] = (
    (FollowUp.PREFETCH, _per_subject(speculative.prefetch_version)),
    (FollowUp.HINT, _per_subject(speculative.send_hints)),
    (FollowUp.SHOW_JOB, _per_subject(jobs.publish_status)),
)
"""The follow-ups that run once at the end of a step, after dispatch, each with its function."""


class Core:
    """The scheduler's state. Only `step` changes it."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State()

    def step(self, sequence: int, time_s: float, event: events.Event) -> list[Output]:
        """Fold one log entry into the state and return what the shell must do.

        Args:   sequence: number of the entry in the log; must be higher than any before.
                time_s: when the log stored the entry. If the log's clock steps back, the state's
                    time stands still.
        Raises: InvalidTransition: a bug of ours. The state must not be used any further.
        """
        assert sequence > self.state.sequence, "entries are folded once, in order"
        self.state.advance(sequence, time_s)
        step = Step(self.state, sequence, self.state.now_s)
        for part in events.parts(event):
            HANDLERS[type(part)](step, part)
            _follow_up(step)
        operations.continue_later(step)
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
        """Continue from a snapshot.

        Args:   led_since: the core version that has decided anything since the snapshot; 0 if none
                    has. None stands for the version that wrote the snapshot.
                upgrades: core version → the upgrade of its tree to the next version.
        Raises: ResourceError: another core version has decided something since the snapshot, no
                    upgrade leads from the snapshot's version to this one, or the snapshot is
                    damaged.
        """
        # Decode the head first: the state of another version may have another shape.
        core_version = _decode(payload, SnapshotHead).core_version
        last = core_version if led_since is None else led_since
        # Folding the rest of the log here could decide otherwise than the last leader did.
        if last not in (0, CORE_VERSION):
            raise ResourceError(
                f"a scheduler of core version {last} has not stopped cleanly, and this one has "
                f"core version {CORE_VERSION}: decisions since the last snapshot are unknown",
                code=Code.FAILED_PRECONDITION,
                remedy=f"start a scheduler of core version {last} again, then stop it with SIGTERM",
            )
        if core_version == CORE_VERSION:
            return cls(_decode(payload, Snapshot).state)
        tree = _decode(payload, _AnySnapshot).state
        if not upgrade(tree, core_version, CORE_VERSION, upgrades):
            raise ResourceError(
                f"cannot read a snapshot of core version {core_version}; this scheduler has core "
                f"version {CORE_VERSION}",
                code=Code.FAILED_PRECONDITION,
                remedy=f"let the scheduler of core version {core_version} finish its jobs, stop "
                "the mesh, and start this one on a bus without the old streams and buckets",
            )
        try:
            return cls(msgspec.convert(tree, State))
        except msgspec.ValidationError as error:
            raise InternalError(
                f"the upgrade from core version {core_version} to {CORE_VERSION} gives an invalid "
                f"state: {error}"
            ) from None


class _AnySnapshot(SnapshotHead, frozen=True):
    state: dict[str, Any]


def _decode(payload: bytes, kind: type[S]) -> S:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise ResourceError(f"cannot read the snapshot: {error}", code=Code.DATA_LOSS) from None


def _follow_up(step: Step) -> None:
    follow_ups = step.follow_ups
    # Any event may let a move continue, so moves advance after every event.
    if step.state.moving or follow_ups:
        step.follow_up(FollowUp.MOVE)
    for _ in range(MAX_PASSES):
        if not follow_ups:
            return
        for kind, action in AFTER_EACH_EVENT:
            if kind in follow_ups:
                # Popped before it runs: an action may request its own kind again.
                action(step, follow_ups.pop(kind))


def _timer(step: Step, event: events.TimerFired) -> None:  # noqa: PLR0912 - one arm a timer
    set_for_s = step.state.pop_timer(event.timer)
    if set_for_s is None:
        return
    if set_for_s > step.now_s:
        # The shell's clock is ahead of the log's.
        step.set_timer(event.timer, set_for_s)
        return
    match event.timer.split("/"):
        case ["expire", key]:
            operations.expire(step, key)
        case ["continue", _]:
            operations.go_on(step)
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
        # All other timers are a device's, for example the end of an idle grace.
        case [_, node, device, *_]:
            step.dirty.add((node, int(device)))


def _configured(step: Step, event: events.SchedulerConfigured) -> None:
    before = step.state.config
    step.configure(event.config)
    assignment.configured(step, event.config)
    # Observed slowdowns are relative to the table, so they are worthless under another one.
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
    # Both a replica and a move send MirrorState; the command's id tells whose answer this is.
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
    events.OutcomesDropped: outcomes.dropped,
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
"""Type of event → the function that handles it."""
