"""The state machines of operations, WPGs and jobs: each a table of the arrows that there are."""

from __future__ import annotations

from enum import StrEnum

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
    """Its ranks are up; operations after its seal are being run again."""
    READY = "ready"
    LOST = "lost"
    """Its node is gone, or it is being killed."""
    STOPPED = "stopped"


class JobState(StrEnum):
    SUBMITTED = "submitted"
    PLACED = "placed"
    PROFILING = "profiling"
    """Placed as well, alone: its cycle is not known, and is to be measured on nodes of its own."""
    ACTIVE = "active"
    DRAINING = "draining"
    """It takes no new operations; DONE once none is open."""
    DONE = "done"
    FAILED = "failed"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    """Its state fell back to its last checkpoint; ACTIVE again once a controller attaches."""


OP_TRANSITIONS: dict[OpState, frozenset[OpState]] = {
    OpState.QUEUED: frozenset(
        {OpState.PERMITTED, OpState.FAILED, OpState.CANCELLED, OpState.EXPIRED}
    ),
    OpState.PERMITTED: frozenset(
        {OpState.QUEUED, OpState.COMPLETED, OpState.FAILED, OpState.CANCELLED, OpState.EXPIRED}
    ),
    OpState.COMPLETED: frozenset(),
    OpState.FAILED: frozenset(),
    OpState.CANCELLED: frozenset(),
    OpState.EXPIRED: frozenset(),
}


WPG_TRANSITIONS: dict[WpgState, frozenset[WpgState]] = {
    WpgState.UNPLACED: frozenset({WpgState.STARTING, WpgState.STOPPED}),
    WpgState.STARTING: frozenset(
        {WpgState.RECOVERING, WpgState.READY, WpgState.LOST, WpgState.STOPPED}
    ),
    WpgState.RECOVERING: frozenset({WpgState.READY, WpgState.LOST, WpgState.STOPPED}),
    WpgState.READY: frozenset({WpgState.LOST, WpgState.STOPPED}),
    WpgState.LOST: frozenset({WpgState.STARTING, WpgState.STOPPED}),
    WpgState.STOPPED: frozenset(),
}


JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.SUBMITTED: frozenset(
        {
            JobState.PROFILING,
            JobState.PLACED,
            JobState.REJECTED,
            JobState.DONE,
            JobState.FAILED,
        }
    ),
    JobState.PROFILING: frozenset(
        {JobState.ACTIVE, JobState.DRAINING, JobState.REJECTED, JobState.DONE, JobState.FAILED}
    ),
    JobState.PLACED: frozenset(
        {JobState.ACTIVE, JobState.DRAINING, JobState.REJECTED, JobState.DONE, JobState.FAILED}
    ),
    JobState.ACTIVE: frozenset(
        {JobState.DRAINING, JobState.DONE, JobState.FAILED, JobState.ROLLED_BACK}
    ),
    JobState.ROLLED_BACK: frozenset(
        {
            JobState.ACTIVE,
            JobState.DRAINING,
            JobState.ROLLED_BACK,
            JobState.DONE,
            JobState.FAILED,
        }
    ),
    JobState.DRAINING: frozenset({JobState.DONE, JobState.FAILED}),
    JobState.DONE: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.REJECTED: frozenset(),
}


JOB_ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.REJECTED})


class InvalidTransition(InternalError):
    """An entity was asked to go where its table has no arrow."""

    def __init__(self, entity: str, before: StrEnum, after: StrEnum, sequence: int) -> None:
        super().__init__(f"{entity}: {before} -> {after} at log sequence {sequence}")
