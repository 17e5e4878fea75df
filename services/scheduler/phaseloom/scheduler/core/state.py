"""What the scheduler knows, as one serialisable tree, and the state machines of its entities.

The tree is the fold of the decision log: nothing in it comes from anywhere else. Mappings are keyed
by the text form of a key (`str(DeploymentKey)`), so that a snapshot is plain MessagePack.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from phaseloom.common.errors import ErrorInfo, InternalError
from phaseloom.common.ids import DeploymentKey, JobKey, NodeId, OperationKey, VersionKey
from phaseloom.common.messages import (
    MUTATING_KINDS,
    After,
    DeploymentSpec,
    DeviceSpec,
    JobSpec,
    PhaseTrace,
    Residency,
    SchedulerConfig,
)

CORE_VERSION = 2
"""Raised whenever the same log would give other commands: a snapshot of another one is refused."""


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
    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"
    REJECTED = "rejected"


OP_TRANSITIONS: dict[OpState, frozenset[OpState]] = {
    OpState.QUEUED: frozenset(
        {OpState.PERMITTED, OpState.FAILED, OpState.CANCELLED, OpState.EXPIRED}
    ),
    OpState.PERMITTED: frozenset({OpState.QUEUED, OpState.COMPLETED, OpState.FAILED}),
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
        {JobState.PLACED, JobState.REJECTED, JobState.DONE, JobState.FAILED}
    ),
    JobState.PLACED: frozenset(
        {JobState.ACTIVE, JobState.REJECTED, JobState.DONE, JobState.FAILED}
    ),
    JobState.ACTIVE: frozenset({JobState.DONE, JobState.FAILED}),
    JobState.DONE: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.REJECTED: frozenset(),
}

JOB_ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.REJECTED})


class InvalidTransition(InternalError):
    """An entity was asked to go where its table has no arrow."""

    def __init__(self, entity: str, before: StrEnum, after: StrEnum, sequence: int) -> None:
        super().__init__(f"{entity}: {before} -> {after} at log sequence {sequence}")


class Op(msgspec.Struct):
    """An operation that has no outcome yet."""

    key: OperationKey
    id: str
    kind: str
    after: list[After]
    version: VersionKey | None
    content_type: str
    arrival: int
    """Log sequence of its QueuedOperation: breaks ties."""
    queued_s: float
    state: OpState = OpState.QUEUED
    eligible_s: float = -1.0
    """When the last thing it waits for on other deployments was done; -1: not yet."""
    uncertain: bool = False
    """Its WPG died while it was permitted: it may have taken effect in the dead incarnation."""
    refusals: int = 0

    @property
    def is_mutating(self) -> bool:
        return self.kind in MUTATING_KINDS


class Mutation(msgspec.Struct, frozen=True):
    """A mutating operation that took effect, above the purge floor."""

    seq: int
    kind: str


class Deployment(msgspec.Struct):
    key: DeploymentKey
    spec: DeploymentSpec
    node: NodeId | None = None
    device: int = 0
    state: WpgState = WpgState.UNPLACED
    incarnation: int = 0
    state_bytes: int = 0
    epoch: int = 0
    """Of its open activation; 0: none."""
    operations: dict[int, Op] = {}
    """Ordered ones without an outcome, by seq."""
    unordered: dict[str, Op] = {}
    next_seq: int = 1
    """The lowest seq without an outcome: the only ordered one that may run."""
    not_completed: list[int] = []
    """Seqs below `next_seq` whose outcome was not COMPLETED."""
    applied: int = 0
    """seq of the last mutating operation in the state of this incarnation."""
    history: list[Mutation] = []
    replay: list[int] = []
    """Mutating operations still to be run again in this incarnation."""
    holds: VersionKey | None = None
    base: int = 0
    """The seal that this incarnation was started from."""
    seal_seq: int = 0
    sealing: int = 0
    """seq of the seal under way; 0: none."""
    since_seal: int = 0
    durable_versions: list[int] = []
    retry_at_s: float = 0.0
    """Until then nothing of it runs: its activation was refused, or the weights version that its
    next operation brings was out of reach."""
    losses: int = 0
    """Deaths of the WPG at the current `next_seq` (or in its start)."""
    error: ErrorInfo | None = None

    @property
    def name(self) -> str:
        return str(self.key)

    def open_operation(self, key: OperationKey) -> Op | None:
        seq = key.seq
        return self.unordered.get(key.slot) if seq is None else self.operations.get(seq)

    @property
    def last_kind(self) -> str:
        return self.history[-1].kind if self.history else ""


class Job(msgspec.Struct):
    key: JobKey
    spec: JobSpec
    state: JobState = JobState.SUBMITTED
    submitted_s: float = 0.0
    submitted_sequence: int = 0
    session: int = 0
    """The newest: operations of older ones are refused."""
    published: list[VersionKey] = []
    """Weights versions that exist."""
    error: ErrorInfo | None = None


class Device(msgspec.Struct):
    memory_bytes: int
    resident: list[str] = []
    """Deployments whose state is on it, least recently used first."""
    placed: list[str] = []
    holder: str = ""
    """Job that used it last."""
    held_since_s: float = 0.0
    """When the holder took it."""
    running: OperationKey | None = None
    last: str = ""
    """`<deployment>.<kind>` of what ended last: what the profiler's gap is looked up by."""
    idle_since_s: float = 0.0
    timer: str = ""


class Node(msgspec.Struct):
    node: NodeId
    pool: str
    devices: list[Device]
    host_memory_bytes: int
    revision: int
    state_endpoint: str
    residency: Residency
    is_up: bool = True


class State(msgspec.Struct):
    sequence: int = 0
    now_s: float = 0.0
    config: SchedulerConfig | None = None
    nodes: dict[str, Node] = {}
    jobs: dict[str, Job] = {}
    deployments: dict[str, Deployment] = {}
    traces: dict[str, PhaseTrace] = {}
    switch_s: dict[str, tuple[float, float]] = {}
    """Newest (offload, load) seconds by deployment."""
    timers: dict[str, float] = {}
    """When each is due."""
    waiters: dict[str, list[str]] = {}
    """Operation key -> deployments that have an operation waiting for it."""


class Snapshot(msgspec.Struct, frozen=True):
    core_version: int
    state: State


def new_devices(specs: list[DeviceSpec]) -> list[Device]:
    return [Device(memory_bytes=spec.memory_bytes) for spec in specs]
