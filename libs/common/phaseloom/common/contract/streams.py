"""Subjects and streams: which messages are kept where, who writes them and who reads them.

The table here is the one `Bus.provision` creates, and the list of who may publish what.
"""

from __future__ import annotations

from enum import StrEnum

from nats.js.api import (
    DiscardPolicy,
    KeyValueConfig,
    RePublish,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from phaseloom.common.contract import events
from phaseloom.common.contract.ids import JobKey, NodeId, OperationKey

PREFIX = "pl.v1"
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024

SCHED = "SCHED"
PERMITS = "PERMITS"
DONE = "DONE"
EVENTS = "EVENTS"
REPORTS = "REPORTS"
DEAD = "DEAD"


class Bucket(StrEnum):
    """KV buckets, each written by its owner only."""

    VIEW = "view"
    """scheduler → people, router. Projections: job status by `<tenant>.<job>`."""
    LEASES = "leases"
    """agent, scheduler, gateway. The leases by which one sees who is alive; the revision fences the
    holder."""
    SEALS = "seals"
    """agents. The commit record of each deployment's newest seal: a `SealRecord`."""
    SESSIONS = "sessions"
    """router. The newest session number of each job."""
    SNAPSHOTS = "snapshots"
    """scheduler. The scheduler's own state at a sequence of the decision log."""
    PROFILES = "profiles"
    """profiler → people. The newest phase trace of each job, by `<tenant>.<job>`."""
    CHECKPOINTS = "checkpoints"
    """WPG leader → router. Each job's last checkpoint with a controller's blob."""
    MODELS = "models"
    """operator → scheduler. The registered models by name: a `RegisteredModel`."""
    GATEWAY = "gateway"
    """gateway. Its records for after a restart: models, samplers and checkpoints by name."""


def ops_stream(tenant: str) -> str:
    return f"OPS_{tenant}"


def op_subject(key: OperationKey) -> str:
    return f"{PREFIX}.op.{key}"


def done_subject(key: OperationKey) -> str:
    return f"{PREFIX}.done.{key}"


def out_subject(key: OperationKey) -> str:
    return f"{PREFIX}.out.{key}"


def progress_subject(key: OperationKey) -> str:
    return f"{out_subject(key)}.progress"


def permit_subject(node: NodeId) -> str:
    return f"{PREFIX}.permit.{node}"


def state_subject(node: NodeId) -> str:
    """The subject on which a node's agent answers requests for its `StatusReport`."""
    return f"{PREFIX}.state.{node}"


def checkpoint_subject(node: NodeId) -> str:
    """The subject on which a node's agent answers routers about checkpoints."""
    return f"{PREFIX}.checkpoint.{node}"


def wpg_subject(node: NodeId) -> str:
    """The subject on which a node's agent answers other nodes' agents about WPGs they share."""
    return f"{PREFIX}.wpg.{node}"


def node_subject(call: str) -> str:
    """The subject on which the scheduler answers operators' calls about nodes."""
    return f"{PREFIX}.node.{call}"


def dead_subject(source: str) -> str:
    return f"{PREFIX}.dead.{source}"


def event_subject(source: str) -> str:
    return f"{PREFIX}.event.{source}"


def report_subject(job: JobKey | str) -> str:
    """The subject of a job's reports. `>` in place of a job: of all jobs' reports."""
    return f"{PREFIX}.report.{job}"


def api_subject(tenant: str, call: str) -> str:
    return f"{PREFIX}.api.{tenant}.{call}"


LOG_SUBJECTS: dict[type, str] = {
    events.QueuedOperation: f"{PREFIX}.sched.queued",
    events.OperationsQueued: f"{PREFIX}.sched.queued",
    events.OperationFinished: f"{PREFIX}.sched.finished",
    events.OperationsFinished: f"{PREFIX}.sched.finished",
    events.PhaseTrace: f"{PREFIX}.sched.trace",
    events.ReplanComputed: f"{PREFIX}.sched.job",
    events.NodeUp: f"{PREFIX}.sched.node",
    events.NodeLost: f"{PREFIX}.sched.node",
    events.NodeDrainRequested: f"{PREFIX}.sched.node",
    events.WpgStarted: f"{PREFIX}.sched.node",
    events.WpgLost: f"{PREFIX}.sched.node",
    events.SealCommitted: f"{PREFIX}.sched.seal",
    events.SealFailed: f"{PREFIX}.sched.seal",
    events.StateMirrored: f"{PREFIX}.sched.seal",
    events.SchedulerConfigured: f"{PREFIX}.sched.job",
    events.JobSubmitted: f"{PREFIX}.sched.job",
    events.JobFinished: f"{PREFIX}.sched.job",
    events.DrainRequested: f"{PREFIX}.sched.job",
    events.DeploymentCreated: f"{PREFIX}.sched.job",
    events.DeploymentDeleted: f"{PREFIX}.sched.job",
    events.SessionOpened: f"{PREFIX}.sched.job",
    events.SessionLost: f"{PREFIX}.sched.job",
    events.PhaseDeclared: f"{PREFIX}.sched.job",
    events.CancelRequested: f"{PREFIX}.sched.job",
    events.TimerFired: f"{PREFIX}.sched.timer",
    events.ActivationOpened: f"{PREFIX}.sched.progress",
    events.ActivationRefused: f"{PREFIX}.sched.progress",
    events.PermitReturned: f"{PREFIX}.sched.progress",
    events.StateSnapshotTaken: f"{PREFIX}.sched.progress",
    events.TailGathered: f"{PREFIX}.sched.progress",
    events.ClaimsAdjusted: f"{PREFIX}.sched.progress",
}


def log_subject(event: events.Event) -> str:
    return LOG_SUBJECTS[type(event)]


DEDUP_WINDOW_S = 600.0
"""Seconds within which the server drops repeats: longer than any redelivery (ack_wait ×
max_deliver) of a message that causes another."""


def mesh_streams() -> list[StreamConfig]:
    return [
        # The decision log: the scheduler's only input, in one order.
        StreamConfig(
            name=SCHED,
            subjects=[f"{PREFIX}.sched.>"],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            duplicate_window=DEDUP_WINDOW_S,
            allow_direct=True,
        ),
        # Every command to a node; one durable consumer a node.
        StreamConfig(
            name=PERMITS,
            subjects=[f"{PREFIX}.permit.*"],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            duplicate_window=DEDUP_WINDOW_S,
            max_consumers=1000,
        ),
        # One outcome a key, first writer wins; what was stored, and only that, reaches `out`.
        StreamConfig(
            name=DONE,
            subjects=[f"{PREFIX}.done.>"],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            max_msgs_per_subject=1,
            discard=DiscardPolicy.NEW,
            discard_new_per_subject=True,
            allow_direct=True,
            republish=RePublish(src=f"{PREFIX}.done.>", dest=f"{PREFIX}.out.>"),
        ),
        StreamConfig(
            name=EVENTS,
            subjects=[f"{PREFIX}.event.>"],
            storage=StorageType.MEMORY,
            max_age=600.0,
            max_bytes=16 * 1024 * 1024,
        ),
        # What controllers report: the newest of each job, for people.
        StreamConfig(
            name=REPORTS,
            subjects=[f"{PREFIX}.report.>"],
            storage=StorageType.FILE,
            max_msgs_per_subject=4096,
            max_age=30 * 86400.0,
            max_bytes=64 * 1024 * 1024,
        ),
        StreamConfig(
            name=DEAD,
            subjects=[f"{PREFIX}.dead.>"],
            storage=StorageType.FILE,
            max_age=7 * 86400.0,
            max_bytes=64 * 1024 * 1024,
        ),
    ]


def tenant_stream(tenant: str, max_bytes: int) -> StreamConfig:
    """The stream of a tenant's operations, which is its write-ahead log: a full one refuses, and
    drops nothing."""
    return StreamConfig(
        name=ops_stream(tenant),
        subjects=[f"{PREFIX}.op.{tenant}.>"],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        max_bytes=max_bytes,
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        allow_direct=True,
        max_consumers=16,
    )


def buckets() -> list[KeyValueConfig]:
    return [
        KeyValueConfig(bucket=Bucket.VIEW, history=1, direct=True),
        # The marker of an expired lease is what tells those who wait for it.
        KeyValueConfig(bucket=Bucket.LEASES, history=1, direct=True, limit_marker_ttl=60.0),
        KeyValueConfig(bucket=Bucket.SEALS, history=2, direct=True),
        KeyValueConfig(bucket=Bucket.SESSIONS, history=1, direct=True),
        KeyValueConfig(bucket=Bucket.SNAPSHOTS, history=2, direct=True),
        KeyValueConfig(bucket=Bucket.PROFILES, history=1, direct=True),
        KeyValueConfig(bucket=Bucket.CHECKPOINTS, history=1, direct=True),
        KeyValueConfig(bucket=Bucket.MODELS, history=1, direct=True),
        KeyValueConfig(bucket=Bucket.GATEWAY, history=1, direct=True),
    ]
