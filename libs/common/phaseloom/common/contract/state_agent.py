"""The node-local protocol between a node's agent and its state manager, over a Unix socket.

The agent presents the node's secret. `phaseloom.common.transport.framing` carries the messages;
memory travels as a file descriptor (memfd) by SCM_RIGHTS beside the frame that names it.

Host memory survives a killed state manager while the node's agent lives: the agent keeps a
duplicate of every extent's descriptor, and of the manifest that says what each extent holds
(`KeepHandles`). The agent hands them to the next daemon (`HandOver`, `FinishHandover`), and the
ranks connect again (`RankResume`).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from phaseloom.common.contract.codec import Message
from phaseloom.common.contract.commands import FilesTicket, Ticket
from phaseloom.common.contract.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.common.contract.specs import Durability


class AgentHello(Message, frozen=True):
    """An agent's first frame on a connection. Answer: Welcome."""

    secret: str
    index: str = ""
    """The manifest whose handles the agent keeps; empty where it keeps none."""


class Welcome(Message, frozen=True):
    needs_handles: bool
    """Whether the daemon has just started, so that the agent is to hand over its handles."""


class HandOver(Message, frozen=True):
    """Some of the agent's handles, each with its descriptor beside the frame. Answer: Done."""

    handles: list[int]


class FinishHandover(Message, frozen=True):
    """The agent has handed over all its handles.

    Answer: HandoverFinished, once every rank has connected again or is given up.
    """


class HandoverFinished(Message, frozen=True):
    lost: list[DeploymentKey]
    """Deployments whose state could not be verified, or whose ranks did not connect again."""


class RegisterWpg(Message, frozen=True):
    """Ranks with these tokens will connect; older incarnations are refused from now on.

    Answer: Done.
    """

    tokens: list[str]
    """One token for each rank on this node, in the order of the ranks."""
    deployment: DeploymentKey
    incarnation: int
    devices: list[int]
    """The device of each rank, in the order of `tokens`."""
    seal_seq: int
    """The seal to restore into the extents when the ranks register their heaps; 0: none."""
    rank_offset: int = 0
    """The number of this node's first rank within the deployment."""
    num_ranks: int = 0
    """The deployment's ranks on all nodes; 0: all of them are on this node."""


class SwitchIn(Message, frozen=True):
    """Offload the deployments in `displaces` from this one's devices, then load its ranks. Answer:
    Switched."""

    deployment: DeploymentKey
    incarnation: int
    epoch: int
    displaces: list[DeploymentKey]
    ranks: list[int] = []
    """The ranks to load; empty: all of this node's."""
    traceparent: str = ""
    """The W3C trace context of the offload and load spans; empty: none."""


class SwitchOut(Message, frozen=True):
    """Offload every rank of the deployment on this node. Answer: Switched."""

    deployment: DeploymentKey
    incarnation: int
    epoch: int


class Switched(Message, frozen=True):
    """Devices are switched side by side: seconds are the slowest device's, bytes the sum of all."""

    offload_s: float
    load_s: float
    bytes_out: int
    bytes_in: int
    displaced: list[DeploymentKey]
    copy_s: float = 0.0
    """The share of `offload_s` and `load_s` that ranks spent copying."""


class PrepareSeal(Message, frozen=True):
    """Bring the host copies up to date and keep them from being overwritten until `WriteSeal`.

    The agent sends it between two operations. Answer: Done; then the deployment may run on.
    """

    deployment: DeploymentKey
    incarnation: int
    seq: int


class WriteSeal(Message, frozen=True):
    """Write the prepared host copies and these versions to disk and fsync them. Answer: Sealed."""

    deployment: DeploymentKey
    incarnation: int
    seq: int
    versions: list[int]
    committed: int = 0
    """The seq of the newest committed seal, whose file stays in any case; 0: there is none."""
    durability: Durability = Durability.NODE
    """A `host` seal stays in host memory; a `remote` one is on the replicas before the answer."""
    replicas: dict[NodeId, str] = msgspec.field(default_factory=dict)
    """The nodes that get a copy, with the endpoints of their state managers."""
    ticket: FilesTicket | None = None
    """The permission by which the replicas fetch the files."""


class Sealed(Message, frozen=True):
    file: str
    digest: str
    num_bytes: int


class FetchState(Message, frozen=True):
    """Fetch this seal and these versions to this node's disk. Answer: Done.

    Whatever the node has whole, on its disk or in host memory, is not fetched again. A version that
    no source has any more is left out: it was released meanwhile.

    Raises: DATA_LOSS: every source answers, and none has the seal whole.
            UNAVAILABLE: a source does not answer.
            RESOURCE_EXHAUSTED: the disk, or host memory, is full.
            NOT_FOUND: no source has the version of `keeps`.
    """

    deployment: DeploymentKey
    seal_seq: int
    """The seal to fetch; 0: none."""
    versions: list[int]
    sources: list[str]
    ticket: FilesTicket | None = None
    holds: Ticket | None = None
    """The ticket of a version, maybe another deployment's, to fetch to host memory if possible."""
    keeps: Ticket | None = None
    """The ticket of a version that must end up in host memory and on the disk."""
    rank_offset: int = 0
    """The first rank that the seal on this node must cover."""
    num_ranks: int = 0
    """The deployment's ranks on all nodes; 0: a seal of any ranks will do."""


class DropWpg(Message, frozen=True):
    """The deployment's ranks on this node have ended. Answer: Done.

    With `forget` the job has ended, too: its seals and versions are removed, also where the daemon
    has not seen the deployment since it started. Checkpoints stay.
    """

    deployment: DeploymentKey
    incarnation: int
    forget: bool


class Prefetch(Message, frozen=True):
    """A hint that a deployment will soon be used. Answer: Done, at once.

    Its host copies are promoted from NVMe where there is room, or where copies that are used later
    can be demoted for them. A deployment's next hint replaces its last one.
    """

    deployment: DeploymentKey
    incarnation: int
    in_s: float | None
    """Seconds until the predicted use; None withdraws the hint."""


class DropVersions(Message, frozen=True):
    """Remove weights versions from memory and disk. Answer: Done."""

    versions: list[VersionKey]


class StatusRequest(Message, frozen=True):
    """Ask what lies where on the node. Answer: StatusReport."""


class DeploymentState(msgspec.Struct, frozen=True):
    deployment: DeploymentKey
    incarnation: int
    devices: list[int]
    """The device of each rank."""
    heap_bytes: int
    """The sum of the ranks' heaps."""
    resident: bool
    """Whether any rank's heap is in device memory."""
    applied: int
    """The seq of the newest host copy of the node's first rank."""
    device_bytes: int = 0
    """The device memory of heaps that are there, or on their way in or out, scratch included."""
    scratch_bytes: int = 0
    """The device memory that the ranks take beside their heaps while they are there, for what
    nobody moves."""
    host_bytes: int = 0
    """The host memory of the deployment's copies, also while its heaps are in device memory."""
    nvme_bytes: int = 0
    """Host copies that are on NVMe instead of in host memory."""
    host_only_bytes: int = 0
    """State that is never on a device, whether it is in host memory or on NVMe."""
    shared_bytes: int = 0
    """The part of `host_bytes` and `nvme_bytes` that others share; each of them counts it."""
    dirty_bytes: int = 0
    """The part of `host_bytes` that is offloaded and whose digest is still being taken."""


class SharedCopyState(msgspec.Struct, frozen=True):
    """A host copy that is held once for all deployments that share it."""

    num_bytes: int
    hash: str
    """BLAKE3 in hex; empty while it is not taken, or not needed."""
    base: str
    """The name that the operator registered the copy under as a frozen base; empty: none."""
    users: list[str]
    """The deployments that share the copy, one entry for each of their ranks."""
    version: VersionKey | None
    """The weights version on this node whose memory the copy is; None: the copy is no version's."""
    in_host: bool
    on_nvme: bool
    model: str = ""
    """The first user's model, as in `RegisterHeap.model`."""


class VersionState(msgspec.Struct, frozen=True):
    version: VersionKey
    num_bytes: int
    in_host: bool
    on_nvme: bool
    num_users: int
    """The number of reads and writes under way; ranks that have the version mapped are not
    counted."""


class DiskMethod(StrEnum):
    """The way of bytes between host memory and a disk."""

    DIRECT = "direct"
    """Direct I/O, past the page cache."""
    BUFFERED = "buffered"


class DiskPath(msgspec.Struct, frozen=True):
    """The way to a directory's disk that a round trip has shown to work."""

    method: DiskMethod
    alignment_bytes: int
    """Offsets and lengths must be multiples of this."""
    why: str
    """Why each better method is not used."""


class StatusReport(Message, frozen=True):
    device_budget_bytes: list[int]
    device_used_bytes: list[int]
    host_budget_bytes: int
    host_used_bytes: int
    deployments: list[DeploymentState]
    versions: list[VersionKey]
    endpoint: str
    """The host:port where this daemon serves other nodes' daemons."""
    disk: DiskPath = DiskPath(DiskMethod.BUFFERED, 1, "not told")
    """The way by which seals, versions and demoted copies are written and read."""
    nvme_budget_bytes: int = 0
    """The budget of demoted host copies; seals and versions do not count."""
    nvme_used_bytes: int = 0
    version_states: list[VersionState] = msgspec.field(default_factory=list)
    """The state of each committed version, in the order of `versions`."""
    shared_copies: list[SharedCopyState] = msgspec.field(default_factory=list)
    owned_bytes: int = 0
    """The bytes of host copies and versions in host memory and on NVMe, with shared bytes counted
    once for each owner."""
    held_bytes: int = 0
    """The same bytes as `owned_bytes`, with shared bytes counted once."""


class KeepHandles(Message, frozen=True):
    """Handles that the agent is to keep, their descriptors beside, and to close. Answer: Done."""

    index: str
    """The manifest that the handles belong to; the agent closes those of any other manifest."""
    keep: list[int]
    drop: list[int]
