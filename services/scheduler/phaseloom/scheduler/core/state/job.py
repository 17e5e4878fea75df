"""A job as the scheduler knows it: its key and spec, and a record for each subject."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import JobKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.specs import DeploymentSpec, JobSpec
from phaseloom.scheduler.core.state.durability import Copying
from phaseloom.scheduler.core.state.transitions import JobState


def run_name(submitted_s: float, previous: str = "") -> str:
    """Return the name of a run: its start in UTC, so that names sort by age.

    Args: previous: the job's run before it, which may have started in the same second.
    """
    name = f"{datetime.fromtimestamp(submitted_s, UTC):%Y%m%d-%H%M%S}"
    if not previous.startswith(name):
        return name
    return f"{name}-{int(previous.removeprefix(name).removeprefix('-') or 1) + 1}"


class Controller(msgspec.Struct):
    """The sessions of the job's controllers."""

    session: int = 0
    """Newest session. Operations of older sessions are refused."""
    is_attached: bool = True
    """Whether the newest session still sends heartbeats."""
    ended_session: int = -1
    """Newest session that a rollback has ended. Operations of this and older sessions are
    refused."""
    phases: dict[str, int] = {}
    """Pool → session that declared the phase that is open there."""

    def attach(self, session: int) -> None:
        self.session = session
        self.is_attached = True

    def detach(self) -> None:
        self.is_attached = False

    def end_sessions(self) -> None:
        """Record that all sessions opened so far have ended."""
        self.ended_session = self.session

    def succeed(self, session: int) -> None:
        """Record that sessions up to this one belong to an earlier job of the same name."""
        self.session = self.ended_session = session


class NamedVersion(msgspec.Struct):
    """A weights version that operations may read by name, with its readers."""

    ttl_s: float = 0.0
    """Seconds for which the version may be named after its publish and after each operation that
    named it."""
    until_s: float = 0.0
    """Time until which the version may be named, even if newer ones are published."""
    readers: dict[str, str] = {}
    """Open operation that names the version → its deployment."""
    nodes: list[NodeId] = []
    """Nodes that may have a copy because a deployment there has read the version."""

    @property
    def is_read(self) -> bool:
        return bool(self.readers)


class JobVersions(msgspec.Struct):
    """Existing weights versions of a job."""

    published: list[VersionKey] = []
    named: dict[str, NamedVersion] = {}
    """Weights version → its readers by name."""
    retained: dict[str, list[NodeId]] = {}
    """Weights version of a deleted policy that others still need → the nodes that have it."""
    copying: dict[str, Copying] = {}
    """Retained versions that another node is fetching."""

    def retain(self, version: str, nodes: list[NodeId]) -> None:
        self.retained.setdefault(version, nodes)

    def drop_retained(self, version: str) -> list[NodeId]:
        """Drop a retained version. Returns the nodes that had it."""
        return self.retained.pop(version, [])

    def name(self, version: str, ttl_s: float, now_s: float) -> None:
        """Record that a version was published and may be named for `ttl_s` seconds from now."""
        named = self.named.setdefault(version, NamedVersion())
        named.ttl_s, named.until_s = ttl_s, now_s + ttl_s

    def begin_reading(self, version: str, operation: OperationKey) -> None:
        self.named.setdefault(version, NamedVersion()).readers[str(operation)] = (
            operation.deployment_name
        )

    def note_copies(self, version: str, nodes: list[NodeId]) -> None:
        named = self.named[version]
        named.nodes += [node for node in nodes if node not in named.nodes]

    def end_reading(self, version: str, operation: OperationKey, now_s: float) -> None:
        named = self.named[version]
        del named.readers[str(operation)]
        named.until_s = max(named.until_s, now_s + named.ttl_s)

    def drop_name(self, version: str) -> NamedVersion:
        """Record that a version may no longer be named. Returns its readers."""
        return self.named.pop(version, NamedVersion())

    def begin_copying(self, version: str, copying: Copying) -> None:
        self.copying[version] = copying

    def end_copying(self, version: str, *, on: NodeId | None = None) -> None:
        """Record that copying a retained version to a node has ended.

        Args: on: the node, if it now has the version.
        """
        del self.copying[version]
        if on is not None:
            self.retained[version] = [*self.retained[version], on]


class EarlierDeployments(msgspec.Struct):
    """Highest numbers used by deployments of earlier jobs of this name, and by deleted
    deployments."""

    last_seqs: dict[str, int] = {}
    """Deployment → its last used seq."""
    incarnations: dict[str, int] = {}
    """Deployment → its last incarnation."""

    def succeed(self, older: EarlierDeployments) -> None:
        """Adopt the numbers of the preceding job of this name."""
        self.last_seqs = dict(older.last_seqs)
        self.incarnations = dict(older.incarnations)

    def record_seq(self, deployment: str, last_seq: int) -> None:
        self.last_seqs[deployment] = last_seq

    def raise_seq(self, deployment: str, minimum: int) -> None:
        self.last_seqs[deployment] = max(minimum, self.last_seqs.get(deployment, 0))

    def record_incarnation(self, deployment: str, incarnation: int) -> None:
        self.incarnations[deployment] = incarnation


class Speculation(msgspec.Struct):
    """Record of how well the job's next operations are predicted."""

    follows: dict[str, str] = {}
    """`<deployment>.<kind>` → deployment that ran next on its pool, the last time there was a
    gap."""
    misses: int = 0
    """Number of consecutive speculative activations that were displaced before their operation
    came."""
    skips: int = 0
    """Number of gaps to skip before the next speculative activation."""


class Progress(msgspec.Struct):
    """How far a job has come relative to the other jobs of its group."""

    began_s: float = -1.0
    """When the job's first operation was ready. -1: none was yet."""
    lag_s: float = 0.0
    """Seconds since `began_s` for which other jobs or switches delayed its operations."""
    round: int = -1
    """Last meta-iteration of its group that the job has started, under a policy with
    meta-iterations. -1: none."""

    def enter_round(self, number: int) -> None:
        self.round = number

    def leave_rounds(self) -> None:
        """Record that the job moves to other jobs and will join their rounds."""
        self.round = -1


class Job(msgspec.Struct):
    key: JobKey
    spec: JobSpec
    state: JobState = JobState.SUBMITTED
    submitted_s: float = 0.0
    submitted_sequence: int = 0
    run: str = ""
    """Name of this run among those of the job's name: its start in UTC."""
    ended_s: float = 0.0
    """When the job ended. 0: it has not ended."""
    controller: Controller = msgspec.field(default_factory=Controller)
    versions: JobVersions = msgspec.field(default_factory=JobVersions)
    earlier: EarlierDeployments = msgspec.field(default_factory=EarlierDeployments)
    speculation: Speculation = msgspec.field(default_factory=Speculation)
    progress: Progress = msgspec.field(default_factory=Progress)
    checkpoint: str = ""
    """Name of the newest checkpoint that includes a controller's blob."""
    checkpoints: dict[str, str] = {}
    """Deployment → its checkpoint that belongs to `checkpoint`."""
    device_s: dict[str, float] = {}
    """Pool → device time charged to the job, in device-seconds."""
    placement_reason: str = ""
    """Reason for the job's placement."""
    error: ErrorInfo | None = None

    def have(self, deployments: list[DeploymentSpec]) -> None:
        self.spec = msgspec.structs.replace(self.spec, deployments=deployments)

    def charge(self, pool: str, device_s: float) -> None:
        self.device_s[pool] = self.device_s.get(pool, 0.0) + device_s

    def ended(self, now_s: float) -> None:
        self.ended_s = now_s

    def failed(self, error: ErrorInfo | None) -> None:
        """Record the job's error. None: the error no longer applies."""
        self.error = error
