"""The protocol between a node's agent and its state manager, over a Unix socket of the node.

The agent authenticates with the node's secret. `phaseloom.common.transport.framing` carries the
messages. Memory is passed as a file descriptor (memfd) by SCM_RIGHTS, attached to the frame that
names it.

Host memory survives a killed state manager as long as the node's agent lives. The agent keeps a
duplicate of every extent's descriptor, and of the manifest that lists what each extent holds
(`KeepHandles`). It passes them to the next daemon (`HandOver`, `FinishHandover`), and the ranks
reconnect (`RankResume`).
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
    """The manifest whose handles the agent keeps; empty: it keeps none."""


class Welcome(Message, frozen=True):
    needs_handles: bool
    """Whether the daemon has just started and needs the agent's handles."""


class HandOver(Message, frozen=True):
    """Some of the agent's handles; their descriptors are attached to the frame. Answer: Done."""

    handles: list[int]


class FinishHandover(Message, frozen=True):
    """The agent has handed over all its handles.

    Answer: HandoverFinished, once every rank has either reconnected or been given up.
    """


class HandoverFinished(Message, frozen=True):
    lost: list[DeploymentKey]
    """Deployments whose state could not be verified, or whose ranks did not reconnect."""


class RegisterWpg(Message, frozen=True):
    """Ranks with these tokens will connect. Older incarnations are refused from now on.

    Answer: Done.
    """

    tokens: list[str]
    """One token per rank on this node, in rank order."""
    deployment: DeploymentKey
    incarnation: int
    devices: list[int]
    """The device of each rank, in the order of `tokens`."""
    seal_seq: int
    """The seal to restore into the extents once the ranks have registered their heaps; 0: none."""
    rank_offset: int = 0
    """The number of this node's first rank within the deployment."""
    num_ranks: int = 0
    """Number of the deployment's ranks on all nodes; 0: all of them are on this node."""


class SwitchIn(Message, frozen=True):
    """Offload the deployments in `displaces` from this deployment's devices, then load its ranks.
    Answer: Switched."""

    deployment: DeploymentKey
    incarnation: int
    epoch: int
    displaces: list[DeploymentKey]
    ranks: list[int] = []
    """The ranks to load; empty: all ranks on this node."""
    traceparent: str = ""
    """The W3C trace context of the offload and load spans; empty: none."""


class SwitchOut(Message, frozen=True):
    """Offload every rank of the deployment on this node. Answer: Switched."""

    deployment: DeploymentKey
    incarnation: int
    epoch: int


class Switched(Message, frozen=True):
    """Devices switch in parallel: times are those of the slowest device, bytes are totals."""

    offload_s: float
    load_s: float
    bytes_out: int
    bytes_in: int
    displaced: list[DeploymentKey]
    copy_s: float = 0.0
    """The part of `offload_s` and `load_s` that ranks spent copying."""


class PrepareSeal(Message, frozen=True):
    """Bring the host copies up to date, and protect them from being overwritten until `WriteSeal`.

    The agent sends it between two operations. Answer: Done; the deployment may then run on.
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
    """The seq of the newest committed seal, whose file must be kept; 0: none."""
    durability: Durability = Durability.NODE
    """A `host` seal stays in host memory. A `remote` one is on the replicas before the answer is
    sent."""
    replicas: dict[NodeId, str] = msgspec.field(default_factory=dict)
    """The nodes that get a copy → the endpoints of their state managers."""
    ticket: FilesTicket | None = None
    """The permission that the replicas use to fetch the files."""


class Sealed(Message, frozen=True):
    file: str
    digest: str
    num_bytes: int


class FetchState(Message, frozen=True):
    """Fetch this seal and these versions to this node's disk. Answer: Done.

    Files that the node already has complete, on disk or in host memory, are not fetched again. A
    version that no source has is skipped, because it has been released in the meantime.

    Raises: DATA_LOSS: every source answered and none has the complete seal.
            UNAVAILABLE: a source did not answer.
            RESOURCE_EXHAUSTED: the disk or host memory is full.
            NOT_FOUND: no source has the version of `keeps`.
    """

    deployment: DeploymentKey
    seal_seq: int
    """The seal to fetch; 0: none."""
    versions: list[int]
    sources: list[str]
    ticket: FilesTicket | None = None
    holds: Ticket | None = None
    """Ticket of a version, possibly of another deployment, to fetch to host memory if possible."""
    keeps: Ticket | None = None
    """Ticket of a version that must end up in host memory and on disk."""
    rank_offset: int = 0
    """The first rank that the seal on this node must cover."""
    num_ranks: int = 0
    """Number of the deployment's ranks on all nodes; 0: accept a seal of any ranks."""


class DropWpg(Message, frozen=True):
    """The deployment's ranks on this node have ended. Answer: Done.

    With `forget` the job has ended too, and its seals and versions are removed, even if the daemon
    has not seen the deployment since it started. Checkpoints stay.
    """

    deployment: DeploymentKey
    incarnation: int
    forget: bool


class Prefetch(Message, frozen=True):
    """A hint that a deployment will soon be used. Answer: Done, at once.

    Its host copies are promoted from NVMe if there is room, or if copies that are used later can be
    demoted for them. A new hint for a deployment replaces the previous one.
    """

    deployment: DeploymentKey
    incarnation: int
    in_s: float | None
    """Seconds until the predicted use; None: withdraw the hint."""


class DropVersions(Message, frozen=True):
    """Remove weights versions from memory and disk. Answer: Done."""

    versions: list[VersionKey]


class StatusRequest(Message, frozen=True):
    """Request the location of all state on the node. Answer: StatusReport."""


class DeploymentState(msgspec.Struct, frozen=True):
    deployment: DeploymentKey
    incarnation: int
    devices: list[int]
    """The device of each rank."""
    heap_bytes: int
    """Total size of the ranks' heaps."""
    resident: bool
    """Whether any rank's heap is in device memory."""
    applied: int
    """The seq of the newest host copy of the node's first rank."""
    device_bytes: int = 0
    """Device memory of the heaps that are on their device or moving in or out, including scratch
    memory."""
    scratch_bytes: int = 0
    """Device memory for data that is never moved, which the ranks need in addition to their
    heaps."""
    host_bytes: int = 0
    """Host memory of the deployment's copies, even while its heaps are in device memory."""
    nvme_bytes: int = 0
    """Size of the host copies that are on NVMe instead of in host memory."""
    host_only_bytes: int = 0
    """Size of the state that is never on a device, whether it is in host memory or on NVMe."""
    shared_bytes: int = 0
    """The part of `host_bytes` and `nvme_bytes` shared with other deployments, each of which counts
    it too."""
    dirty_bytes: int = 0
    """The part of `host_bytes` that has been offloaded but whose digest is not computed yet."""
    way: str = ""
    """For people: the way between the devices and NVMe, and the sizes and room that decide it."""


class SharedCopyState(msgspec.Struct, frozen=True):
    """A host copy stored once for all deployments that share it."""

    num_bytes: int
    hash: str
    """BLAKE3 in hex; empty: not computed yet, or not needed."""
    base: str
    """The name under which the operator registered the copy as a frozen base; empty: it is not a
    base."""
    users: list[str]
    """The deployments that share the copy, one entry per rank."""
    version: VersionKey | None
    """The weights version on this node that has the same memory; None: no version does."""
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
    """Number of reads and writes in progress, not counting ranks that have the version mapped."""


class DiskMethod(StrEnum):
    """How bytes move between memory and a disk."""

    KVIKIO = "kvikio"
    """NVIDIA's library, which also moves device memory (GPUDirect Storage)."""
    DIRECT = "direct"
    """Direct I/O, which bypasses the page cache."""
    BUFFERED = "buffered"


class DiskPath(msgspec.Struct, frozen=True):
    """The method for a directory's disk, chosen by a successful round trip."""

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
    """host:port at which this daemon serves the daemons of other nodes."""
    disk: DiskPath = DiskPath(DiskMethod.BUFFERED, 1, "not told")
    """How seals, versions and demoted copies are written and read."""
    nvme_budget_bytes: int = 0
    """Budget of demoted host copies. Seals and versions do not count against it."""
    nvme_used_bytes: int = 0
    version_states: list[VersionState] = msgspec.field(default_factory=list)
    """The state of each committed version, in the order of `versions`."""
    shared_copies: list[SharedCopyState] = msgspec.field(default_factory=list)
    owned_bytes: int = 0
    """Bytes of host copies and versions in host memory and on NVMe, counting shared bytes once per
    owner."""
    held_bytes: int = 0
    """The same as `owned_bytes`, but counting shared bytes only once."""


class KeepHandles(Message, frozen=True):
    """Handles for the agent to keep, with their descriptors attached, and handles to close. Answer:
    Done."""

    index: str
    """The manifest that the handles belong to. The agent closes the handles of any other
    manifest."""
    keep: list[int]
    drop: list[int]
