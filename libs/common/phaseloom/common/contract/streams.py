"""Subjects and streams: the storage, writers and readers of each message.

`Bus.provision` creates the streams and buckets listed here. The list also defines who may publish
what.
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
RUNS = "RUNS"
DEAD = "DEAD"


class Bucket(StrEnum):
    """KV buckets. Only its owner writes to a bucket."""

    VIEW = "view"
    """scheduler → people, router. Projections: job status by `<tenant>.<job>`."""
    LEASES = "leases"
    """agent, scheduler, gateway. The leases that show which processes are alive. The revision
    fences the holder."""
    SEALS = "seals"
    """agents. The commit record of each deployment's newest seal: a `SealRecord`."""
    SESSIONS = "sessions"
    """router. The newest session number of each job."""
    SNAPSHOTS = "snapshots"
    """scheduler. The scheduler's own state at a sequence of the decision log."""
    PROFILES = "profiles"
    """profiler → people. The newest phase trace of each job, by `<tenant>.<job>`."""
    CHECKPOINTS = "checkpoints"
    """WPG leader → router. Each job's latest checkpoint with a controller blob."""
    MODELS = "models"
    """operator → scheduler. The registered models by name: a `RegisteredModel`."""
    GATEWAY = "gateway"
    """gateway. Records that the gateway needs after a restart: models, samplers and checkpoints by
    name."""


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


def report_subject(job: JobKey | str, run: str = "") -> str:
    """The subject of the reports of a job's run. Pass `>` instead of a job for those of all
    jobs."""
    return f"{PREFIX}.report.{job}.{run}".removesuffix(".")


def run_subject(job: JobKey | str, run: str = "") -> str:
    """The subject of a run's record. Pass `>` instead of a job for the records of all jobs."""
    return f"{PREFIX}.run.{job}.{run}".removesuffix(".")


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
    events.OutcomesDropped: f"{PREFIX}.sched.timer",
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
"""Seconds within which the server drops duplicates. Longer than the redelivery (ack_wait ×
max_deliver) of any message that causes another one."""


def mesh_streams(replicas: int = 1) -> list[StreamConfig]:
    """Return the streams of a mesh.

    Args:   replicas: number of servers that store each stream. With several servers, followers may
                lag, so reads must go to the stream's leader. Direct gets, which any replica
                answers, are therefore enabled only for the decision log.
    """
    is_alone = replicas == 1
    return [
        # The decision log: the scheduler's only input, in one order.
        StreamConfig(
            name=SCHED,
            subjects=[f"{PREFIX}.sched.>"],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            duplicate_window=DEDUP_WINDOW_S,
            num_replicas=replicas,
            allow_direct=True,
        ),
        # Every command to a node, with one durable consumer per node.
        StreamConfig(
            name=PERMITS,
            subjects=[f"{PREFIX}.permit.*"],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            duplicate_window=DEDUP_WINDOW_S,
            num_replicas=replicas,
            max_consumers=1000,
        ),
        # One outcome per key, and the first writer wins. Only stored outcomes reach `out`.
        StreamConfig(
            name=DONE,
            subjects=[f"{PREFIX}.done.>"],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            max_msgs_per_subject=1,
            discard=DiscardPolicy.NEW,
            discard_new_per_subject=True,
            num_replicas=replicas,
            allow_direct=is_alone,
            republish=RePublish(src=f"{PREFIX}.done.>", dest=f"{PREFIX}.out.>"),
        ),
        StreamConfig(
            name=EVENTS,
            subjects=[f"{PREFIX}.event.>"],
            # A memory stream of several servers is lost when they are restarted in turn.
            storage=StorageType.MEMORY if is_alone else StorageType.FILE,
            max_age=600.0,
            max_bytes=16 * 1024 * 1024,
            num_replicas=replicas,
        ),
        # The newest reports of each run's controller, for people.
        StreamConfig(
            name=REPORTS,
            subjects=[f"{PREFIX}.report.>"],
            storage=StorageType.FILE,
            max_msgs_per_subject=4096,
            max_age=30 * 86400.0,
            max_bytes=64 * 1024 * 1024,
            num_replicas=replicas,
        ),
        # The newest status of each run, for people. It stays when the scheduler forgets the job.
        StreamConfig(
            name=RUNS,
            subjects=[f"{PREFIX}.run.>"],
            storage=StorageType.FILE,
            max_msgs_per_subject=1,
            max_age=30 * 86400.0,
            max_bytes=32 * 1024 * 1024,
            num_replicas=replicas,
        ),
        StreamConfig(
            name=DEAD,
            subjects=[f"{PREFIX}.dead.>"],
            storage=StorageType.FILE,
            max_age=7 * 86400.0,
            max_bytes=64 * 1024 * 1024,
            num_replicas=replicas,
        ),
    ]


def tenant_stream(tenant: str, max_bytes: int, replicas: int = 1) -> StreamConfig:
    """The stream of a tenant's operations, which is its write-ahead log. A full stream rejects
    messages and never drops any.

    Args:   replicas: see `mesh_streams`.
    """
    return StreamConfig(
        name=ops_stream(tenant),
        subjects=[f"{PREFIX}.op.{tenant}.>"],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        max_bytes=max_bytes,
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        num_replicas=replicas,
        allow_direct=replicas == 1,
        max_consumers=16,
    )


_HISTORY = {Bucket.SEALS: 2, Bucket.SNAPSHOTS: 2}
_MARKER_TTL_S = {Bucket.LEASES: 60.0}
"""How long the marker of an expired key stays. Processes that wait for a lease are notified by
it."""


def buckets(replicas: int = 1) -> list[KeyValueConfig]:
    """Return the KV buckets of a mesh.

    Args:   replicas: see `mesh_streams`.
    """
    return [
        KeyValueConfig(
            bucket=bucket,
            history=_HISTORY.get(bucket, 1),
            limit_marker_ttl=_MARKER_TTL_S.get(bucket),
            replicas=replicas,
            direct=replicas == 1,
        )
        for bucket in Bucket
    ]
