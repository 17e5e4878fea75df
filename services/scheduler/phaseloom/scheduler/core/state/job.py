"""A job as the scheduler knows it: its key and spec, and a record for each subject.

Each field of a record is written by one module: here, or by its owner. Others read it.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import JobKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.specs import DeploymentSpec, JobSpec
from phaseloom.scheduler.core.state.durability import Copying
from phaseloom.scheduler.core.state.transitions import JobState


class Controller(msgspec.Struct):
    """The controllers that drive a job, by their sessions."""

    session: int = 0
    """The newest session: operations of older ones are refused."""
    is_attached: bool = True
    """Whether the newest session's heartbeat goes on."""
    ended_session: int = -1
    """Sessions up to this one ended with a roll-back: what they send is refused."""
    phases: dict[str, int] = {}
    """Pool → session whose controller declared a phase there that is open."""

    def attach(self, session: int) -> None:
        self.session = session
        self.is_attached = True

    def detach(self) -> None:
        self.is_attached = False

    def end_sessions(self) -> None:
        """Note that all sessions opened until now are over."""
        self.ended_session = self.session

    def succeed(self, session: int) -> None:
        """Note that sessions up to this one belong to an earlier job of the same name."""
        self.session = self.ended_session = session


class NamedVersion(msgspec.Struct):
    """A weights version that operations may read by its name, and who does."""

    ttl_s: float = 0.0
    """Seconds for which the version may be named after its publish, and after each operation that
    named it."""
    until_s: float = 0.0
    """The time until which the version may be named, whatever is published after it."""
    readers: list[OperationKey] = []
    """The open operations that name the version."""
    nodes: list[NodeId] = []
    """Nodes that may have a copy, because a deployment there has read it."""

    @property
    def is_read(self) -> bool:
        return bool(self.readers)


class JobVersions(msgspec.Struct):
    """The weights versions of a job that exist."""

    published: list[VersionKey] = []
    named: dict[str, NamedVersion] = {}
    """Weights version → who reads it by its name."""
    retained: dict[str, list[NodeId]] = {}
    """Weights version of a deleted policy that others need → the nodes that have it."""
    copying: dict[str, Copying] = {}
    """The retained versions that another node fetches."""

    def retain(self, version: str, nodes: list[NodeId]) -> None:
        self.retained.setdefault(version, nodes)

    def drop_retained(self, version: str) -> list[NodeId]:
        """Drop a version that was retained; returns the nodes that had it."""
        return self.retained.pop(version, [])

    def name(self, version: str, ttl_s: float, now_s: float) -> None:
        """Note that a version was published, and may be named for `ttl_s` seconds from now."""
        named = self.named.setdefault(version, NamedVersion())
        named.ttl_s, named.until_s = ttl_s, now_s + ttl_s

    def begin_reading(self, version: str, operation: OperationKey) -> None:
        self.named.setdefault(version, NamedVersion()).readers.append(operation)

    def note_copies(self, version: str, nodes: list[NodeId]) -> None:
        named = self.named[version]
        named.nodes += [node for node in nodes if node not in named.nodes]

    def end_reading(self, version: str, operation: OperationKey, now_s: float) -> None:
        named = self.named[version]
        named.readers.remove(operation)
        named.until_s = max(named.until_s, now_s + named.ttl_s)

    def drop_name(self, version: str) -> NamedVersion:
        """Note that a version may be named no longer; returns who read it by its name."""
        return self.named.pop(version, NamedVersion())

    def begin_copying(self, version: str, copying: Copying) -> None:
        self.copying[version] = copying

    def end_copying(self, version: str, *, on: NodeId | None = None) -> None:
        """Note that the copying of a retained version to a node has ended.

        Args: on: the node, where it has the version now.
        """
        del self.copying[version]
        if on is not None:
            self.retained[version] = [*self.retained[version], on]


class EarlierDeployments(msgspec.Struct):
    """The last numbers of the deployments of this name's earlier jobs, and of deleted
    deployments."""

    last_seqs: dict[str, int] = {}
    """Deployment → the last seq that it used."""
    incarnations: dict[str, int] = {}
    """Deployment → its last incarnation."""

    def succeed(self, older: EarlierDeployments) -> None:
        """Take over the numbers that the last job of this name knew."""
        self.last_seqs = dict(older.last_seqs)
        self.incarnations = dict(older.incarnations)

    def note_seq(self, deployment: str, last_seq: int) -> None:
        self.last_seqs[deployment] = last_seq

    def raise_seq(self, deployment: str, least: int) -> None:
        self.last_seqs[deployment] = max(least, self.last_seqs.get(deployment, 0))

    def note_incarnation(self, deployment: str, incarnation: int) -> None:
        self.incarnations[deployment] = incarnation


class Speculation(msgspec.Struct):
    """How well the next operations of a job are predicted."""

    follows: dict[str, str] = {}
    """`<deployment>.<kind>` → deployment that ran next on its pool, last time after a gap."""
    misses: int = 0
    """Speculative activations of the job, in a row, that were displaced before their operation."""
    skips: int = 0
    """Gaps still to pass before an activation is opened speculatively for the job again."""


class Progress(msgspec.Struct):
    """How far a job has come, beside the others of its group."""

    began_s: float = -1.0
    """When the job's first operation was ready; -1: none has begun."""
    lag_s: float = 0.0
    """Seconds since `began_s` for which other jobs or a switch kept its operations from running."""
    round: int = -1
    """The last meta-iteration of its group that it began, under a policy that serves them; -1: it
    has begun none."""

    def enter_round(self, number: int) -> None:
        self.round = number

    def leave_rounds(self) -> None:
        """Note that the job goes elsewhere: it joins the rounds of those that it meets there."""
        self.round = -1


class Job(msgspec.Struct):
    key: JobKey
    spec: JobSpec
    state: JobState = JobState.SUBMITTED
    submitted_s: float = 0.0
    submitted_sequence: int = 0
    controller: Controller = msgspec.field(default_factory=Controller)
    versions: JobVersions = msgspec.field(default_factory=JobVersions)
    earlier: EarlierDeployments = msgspec.field(default_factory=EarlierDeployments)
    speculation: Speculation = msgspec.field(default_factory=Speculation)
    progress: Progress = msgspec.field(default_factory=Progress)
    checkpoint: str = ""
    """Name of the newest checkpoint with a controller's blob."""
    checkpoints: dict[str, str] = {}
    """Deployment → the checkpoint of it that belongs to `checkpoint`."""
    device_s: dict[str, float] = {}
    """Pool → the devices' time that counts as the job's, in seconds times devices."""
    why_here: str = ""
    """Why placement chose its place."""
    error: ErrorInfo | None = None

    def have(self, deployments: list[DeploymentSpec]) -> None:
        """Replace the list of deployments."""
        self.spec = msgspec.structs.replace(self.spec, deployments=deployments)

    def charge(self, pool: str, device_s: float) -> None:
        self.device_s[pool] = self.device_s.get(pool, 0.0) + device_s

    def failed(self, error: ErrorInfo | None) -> None:
        """Note the error of the job; None: the error is over."""
        self.error = error
