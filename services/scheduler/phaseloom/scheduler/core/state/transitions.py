"""Transition tables of operations, WPGs, jobs and moves.

A table maps (state, event) to the next state. A missing entry raises `InvalidTransition`. The
scheduler's README shows the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

from phaseloom.common.contract.errors import InternalError


class OpState(StrEnum):
    QUEUED = "queued"
    PERMITTED = "permitted"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class WpgState(StrEnum):
    UNPLACED = "unplaced"
    STARTING = "starting"
    RECOVERING = "recovering"
    """The ranks are up and are replaying operations after the seal."""
    READY = "ready"
    LOST = "lost"
    """One of its nodes is gone, or its ranks are being killed."""
    STOPPED = "stopped"


class JobState(StrEnum):
    SUBMITTED = "submitted"
    PLACED = "placed"
    PROFILING = "profiling"
    """Placed alone on its own nodes, because its cycle is unknown and must be measured."""
    ACTIVE = "active"
    DRAINING = "draining"
    """The job accepts no new operations and becomes DONE once none is open."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """A person ended the job."""
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    """The state fell back to the last checkpoint. The job becomes ACTIVE once a controller
    attaches."""


class MoveStage(StrEnum):
    WAITING = "waiting"
    """A new node is down or could not take its copy; the deployment runs where it is."""
    PREPARING = "preparing"
    """The deployment is sealed as soon as nothing runs on it, if a seal is needed."""
    SEALING = "sealing"
    COPYING = "copying"
    """The deployment runs while its new nodes fetch the state that it will start from there."""
    LEAVING = "leaving"
    """As soon as nothing runs on it, the deployment is sealed again or stopped."""
    LAST_SEALING = "last sealing"
    """The deployment gets no operations while it is sealed for the last time before it leaves."""
    LAST_COPYING = "last copying"
    """The deployment gets no operations while its new nodes fetch the last seal."""
    STOPPING = "stopping"
    """The deployment is stopped as soon as nothing runs on it."""


class OpEvent(StrEnum):
    """Events of an operation. The final events have the values of `Outcome`."""

    PERMITTED = "permitted"
    TAKEN_BACK = "taken back"
    """The permit was not used, or the WPG died."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class WpgEvent(StrEnum):
    STARTED = "started"
    """The nodes were requested to start the ranks."""
    UP_TO_REPLAY = "up to replay"
    """The ranks are up and have operations to replay."""
    UP = "up"
    REPLAYED = "replayed"
    DIED = "died"
    STOPPED = "stopped"


class JobEvent(StrEnum):
    PLACED = "placed"
    PLACED_ALONE = "placed alone"
    """Placed on its own nodes, to be measured."""
    UP = "up"
    """All of its WPGs are up."""
    ATTACHED = "attached"
    """All of its WPGs are up, and a controller has attached since it fell back."""
    DRAIN = "drain"
    FELL_BACK = "fell back"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class MoveEvent(StrEnum):
    PUT_OFF = "put off"
    """A new node is down or could not take its copy."""
    RETRIED = "retried"
    SEAL_REQUESTED = "seal requested"
    """The seal was requested, or none is needed."""
    SEAL_ENDED = "seal ended"
    """The seal was committed or failed, and the new nodes were told to fetch their copies."""
    COPIED = "copied"
    """All new nodes have their copies."""
    NODE_RESTARTED = "node restarted"
    """A new node has a new lease, so it does not fetch the copy requested under the last one."""
    LAST_SEAL_REQUESTED = "last seal requested"
    """Replaying the operations after the seal would take longer than another copy."""


S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


def _table(*rows: tuple[Iterable[S], E, S]) -> dict[tuple[S, E], S]:
    """Build a table from rows of (states, event, next state)."""
    return {(before, event): after for states, event, after in rows for before in states}


_UNENDED = (OpState.QUEUED, OpState.PERMITTED)
OPERATIONS = _table(
    ([OpState.QUEUED], OpEvent.PERMITTED, OpState.PERMITTED),
    ([OpState.PERMITTED], OpEvent.TAKEN_BACK, OpState.QUEUED),
    ([OpState.PERMITTED], OpEvent.COMPLETED, OpState.COMPLETED),
    (_UNENDED, OpEvent.FAILED, OpState.FAILED),
    (_UNENDED, OpEvent.CANCELLED, OpState.CANCELLED),
    (_UNENDED, OpEvent.EXPIRED, OpState.EXPIRED),
)


_UP = (WpgState.STARTING, WpgState.RECOVERING, WpgState.READY)
WPGS = _table(
    ([WpgState.UNPLACED, WpgState.LOST], WpgEvent.STARTED, WpgState.STARTING),
    ([WpgState.STARTING], WpgEvent.UP_TO_REPLAY, WpgState.RECOVERING),
    ([WpgState.STARTING], WpgEvent.UP, WpgState.READY),
    ([WpgState.RECOVERING], WpgEvent.REPLAYED, WpgState.READY),
    (_UP, WpgEvent.DIED, WpgState.LOST),
    ((WpgState.UNPLACED, *_UP, WpgState.LOST), WpgEvent.STOPPED, WpgState.STOPPED),
)


_NOT_UP_YET = (JobState.PROFILING, JobState.PLACED)
_RUNNING = (JobState.ACTIVE, JobState.ROLLED_BACK)
_LIVING = (JobState.SUBMITTED, *_NOT_UP_YET, *_RUNNING, JobState.DRAINING)
JOBS = _table(
    ([JobState.SUBMITTED], JobEvent.PLACED, JobState.PLACED),
    ([JobState.SUBMITTED], JobEvent.PLACED_ALONE, JobState.PROFILING),
    (_NOT_UP_YET, JobEvent.UP, JobState.ACTIVE),
    ([JobState.ROLLED_BACK], JobEvent.ATTACHED, JobState.ACTIVE),
    (_RUNNING, JobEvent.FELL_BACK, JobState.ROLLED_BACK),
    ((*_NOT_UP_YET, *_RUNNING), JobEvent.DRAIN, JobState.DRAINING),
    (_LIVING, JobEvent.FINISHED, JobState.DONE),
    (_LIVING, JobEvent.FAILED, JobState.FAILED),
    (_LIVING, JobEvent.CANCELLED, JobState.CANCELLED),
    ((JobState.SUBMITTED, *_NOT_UP_YET), JobEvent.REJECTED, JobState.REJECTED),
)


MOVES = _table(
    ([MoveStage.WAITING], MoveEvent.RETRIED, MoveStage.PREPARING),
    ([MoveStage.PREPARING], MoveEvent.SEAL_REQUESTED, MoveStage.SEALING),
    ([MoveStage.SEALING], MoveEvent.SEAL_ENDED, MoveStage.COPYING),
    ([MoveStage.COPYING], MoveEvent.COPIED, MoveStage.LEAVING),
    ([MoveStage.COPYING], MoveEvent.NODE_RESTARTED, MoveStage.SEALING),
    ([MoveStage.LEAVING], MoveEvent.LAST_SEAL_REQUESTED, MoveStage.LAST_SEALING),
    ([MoveStage.LAST_SEALING], MoveEvent.SEAL_ENDED, MoveStage.LAST_COPYING),
    ([MoveStage.LAST_COPYING], MoveEvent.COPIED, MoveStage.STOPPING),
    ([MoveStage.LAST_COPYING], MoveEvent.NODE_RESTARTED, MoveStage.LAST_SEALING),
    (MoveStage, MoveEvent.PUT_OFF, MoveStage.WAITING),
)
"""A move ends when the deployment is up on its new nodes, stays after all, or has ended."""


JOB_ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.REJECTED})


def next_state(  # noqa: PLR0917 - one line of a table, its name and its place
    table: Mapping[tuple[S, E], S], kind: str, name: object, state: S, event: E, sequence: int
) -> S:
    """Return the next state according to the table.

    Raises: InvalidTransition: the table has no entry for this event in this state.
    """
    after = table.get((state, event))
    if after is None:
        raise InvalidTransition(f"{kind} {name}", state, event, sequence)
    return after


class InvalidTransition(InternalError):
    """An event that is illegal in the entity's state: a bug of Phaseloom."""

    def __init__(self, entity: str, state: StrEnum, event: StrEnum, sequence: int) -> None:
        super().__init__(f"{entity}: {event!r} in state {state!r} at log sequence {sequence}")
