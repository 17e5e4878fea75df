"""The node-local protocol between a node's agent and its state manager, over a Unix socket.

The agent presents the node's secret. `phaseloom.common.transport.framing` carries the messages;
memory travels as a file descriptor (memfd) by SCM_RIGHTS beside the frame that names it.

What a killed state manager held is not lost while its agent lives: the agent keeps a duplicate of
every extent's descriptor and of the index, which tells what is in them (`KeepHandles`). It hands
them to the next daemon (`HandOver`, `FinishHandover`), and the ranks come back (`RankResume`).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from phaseloom.common.contract.base import Message
from phaseloom.common.contract.commands import FilesTicket, Ticket
from phaseloom.common.contract.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.common.contract.specs import Durability


class AgentHello(Message, frozen=True):
    """First frame of an agent. Answer: Welcome."""

    secret: str
    index: str = ""
    """The index whose handles it keeps; empty: it keeps none."""


class Welcome(Message, frozen=True):
    needs_handles: bool
    """The daemon has nothing yet and knows nothing of that index: hand the handles over."""


class HandOver(Message, frozen=True):
    """Some of the handles that the agent keeps, a descriptor beside each. Answer: Done."""

    handles: list[int]


class FinishHandover(Message, frozen=True):
    """All handles are there. Answer: HandoverFinished, once every rank came back or is given up."""


class HandoverFinished(Message, frozen=True):
    lost: list[DeploymentKey]
    """Their state could not be verified, or their ranks did not come back: they are cut off."""


class RegisterWpg(Message, frozen=True):
    """Ranks with these tokens will come. Older incarnations are fenced from now on.

    Answer: Done.
    """

    tokens: list[str]
    """Of this node's ranks, in order."""
    deployment: DeploymentKey
    incarnation: int
    devices: list[int]
    """Likewise."""
    seal_seq: int
    """Restore this seal into the extents when the ranks register their heaps; 0: none."""
    rank_offset: int = 0
    """Of this node's first rank."""
    num_ranks: int = 0
    """On all nodes; 0: as many as here."""


class SwitchIn(Message, frozen=True):
    """Offload what is resident of `displaces`, then load every rank. Answer: Switched."""

    deployment: DeploymentKey
    incarnation: int
    epoch: int
    displaces: list[DeploymentKey]
    traceparent: str = ""
    """W3C context that the offload and load spans belong to; empty: none."""


class SwitchOut(Message, frozen=True):
    """Offload every rank. Answer: Switched."""

    deployment: DeploymentKey
    incarnation: int
    epoch: int


class Switched(Message, frozen=True):
    """Devices are switched at the same time: seconds are of the longest, bytes of all."""

    offload_s: float
    load_s: float
    bytes_out: int
    bytes_in: int
    displaced: list[DeploymentKey]
    copy_s: float = 0.0
    """Of both times, what ranks spent copying."""


class PrepareSeal(Message, frozen=True):
    """Make the host copies whole as of now and keep them from being overwritten.

    Between operations. Answer: Done; then the deployment may run on.
    """

    deployment: DeploymentKey
    incarnation: int
    seq: int


class WriteSeal(Message, frozen=True):
    """Write the prepared copies, and these versions, to disk; fsync. Answer: Sealed."""

    deployment: DeploymentKey
    incarnation: int
    seq: int
    versions: list[int]
    committed: int = 0
    """seq of the newest committed seal, whose file is kept whatever is written; 0: none is."""
    durability: Durability = Durability.NODE
    """`host`: it stays in host memory; `remote`: the replicas have it before it is answered."""
    replicas: dict[NodeId, str] = msgspec.field(default_factory=dict)
    """Nodes, and the endpoints of their state managers."""
    ticket: FilesTicket | None = None
    """Of the replicas."""


class Sealed(Message, frozen=True):
    file: str
    digest: str
    num_bytes: int
    written_bytes: int = 0
    """Of these, what was not on this disk already, in a seal before."""


class FetchState(Message, frozen=True):
    """Have this seal and these versions on this node: on its disk, or in host memory where they are
    there already. Answer: Done.

    What is here and whole stays; the rest is fetched from the sources.

    A version that no source has any more is left out: it was released meanwhile.

    Raises: DATA_LOSS: every source answers, and none has the seal whole. UNAVAILABLE: one does not
    answer. RESOURCE_EXHAUSTED: the disk, or host memory, is full. NOT_FOUND: nobody has the version
    that is to be kept.
    """

    deployment: DeploymentKey
    seal_seq: int
    """0: no seal."""
    versions: list[int]
    sources: list[str]
    ticket: FilesTicket | None = None
    holds: Ticket | None = None
    """For a version, maybe of another deployment, to be brought into host memory, if it can be."""
    keeps: Ticket | None = None
    """For a version that is to be in host memory and on the disk."""
    rank_offset: int = 0
    """The seal is to be of the ranks from this one on,"""
    num_ranks: int = 0
    """of so many on all nodes; 0: of whichever there is."""


class DropWpg(Message, frozen=True):
    """The ranks are dead. Answer: Done.

    With `forget` its job has ended: its seals and versions go too, also those of a deployment that
    this life of the daemon has never heard of. Checkpoints stay.
    """

    deployment: DeploymentKey
    incarnation: int
    forget: bool


class Prefetch(Message, frozen=True):
    """A hint: it will be used; bring its host copies up from NVMe. Answer: Done, at once.

    The copies come up where there is room, or where what is used later can go down for them. A
    hint that is sent again replaces the one before.
    """

    deployment: DeploymentKey
    incarnation: int
    in_s: float | None
    """Seconds from now to the predicted use; None: the hint is withdrawn, a move up is cancelled
    unless something waits for it."""


class DropVersions(Message, frozen=True):
    """Answer: Done."""

    versions: list[VersionKey]


class StatusRequest(Message, frozen=True):
    """Answer: StatusReport."""


class DeploymentState(msgspec.Struct, frozen=True):
    deployment: DeploymentKey
    incarnation: int
    devices: list[int]
    """Of each rank."""
    heap_bytes: int
    """Of all ranks."""
    resident: bool
    """Some rank's heap is in device memory."""
    applied: int
    """Of the newest host copy of the first rank here."""
    device_bytes: int = 0
    """Heaps that are, or are being moved, in device memory."""
    host_bytes: int = 0
    """Host memory taken for its copies, also while the heap is in device memory."""
    nvme_bytes: int = 0
    """Copies that are on NVMe instead of in host memory."""
    host_only_bytes: int = 0
    """State that is never on a device, wherever its host copy is."""
    shared_bytes: int = 0
    """Of both, what others hold too: it is there once, and counted at each of them."""
    dirty_bytes: int = 0
    """Of `host_bytes`, copies that are offloaded and whose digest is still being taken."""


class ContentState(msgspec.Struct, frozen=True):
    """Bytes that are held once, for all who refer to them."""

    num_bytes: int
    hash: str
    """BLAKE3, in hex; empty: not taken yet, or not needed."""
    base: str
    """Name of the frozen base that the operator registered it as; empty: it is none."""
    users: list[str]
    """Deployments, one entry a rank."""
    version: VersionKey | None
    """The weights version whose bytes they are, and that lies here too."""
    in_host: bool
    on_nvme: bool
    model: str = ""
    """What the first user's model is; see `RegisterHeap.model`."""


class VersionState(msgspec.Struct, frozen=True):
    version: VersionKey
    num_bytes: int
    in_host: bool
    on_nvme: bool
    num_users: int
    """Reads and writes under way; ranks that have it mapped are not counted."""


class DiskMethod(StrEnum):
    """How bytes go between host memory and a disk."""

    KVIKIO = "kvikio"
    """Through NVIDIA's library."""
    DIRECT = "direct"
    """Past the page cache."""
    BUFFERED = "buffered"


class DiskPath(msgspec.Struct, frozen=True):
    """What a round trip in one directory has shown to work."""

    method: DiskMethod
    alignment_bytes: int
    """That the disk asks of offsets and lengths."""
    why: str
    """What was found of the better ways that are not taken."""


class StatusReport(Message, frozen=True):
    device_budget_bytes: list[int]
    device_used_bytes: list[int]
    host_budget_bytes: int
    host_used_bytes: int
    deployments: list[DeploymentState]
    versions: list[VersionKey]
    endpoint: str
    """host:port where this daemon serves weights versions to other nodes' daemons."""
    disk: DiskPath = DiskPath(DiskMethod.BUFFERED, 1, "not told")
    """How seals, versions and spilled copies are written and read."""
    nvme_budget_bytes: int = 0
    """For spilled host copies; seals and versions are not counted."""
    nvme_used_bytes: int = 0
    version_states: list[VersionState] = msgspec.field(default_factory=list)
    """Of the committed ones, in the order of `versions`."""
    contents: list[ContentState] = msgspec.field(default_factory=list)
    owned_bytes: int = 0
    """Host copies and weights versions in host memory and on NVMe, counted at each owner."""
    held_bytes: int = 0
    """What lies there for them."""


class KeepHandles(Message, frozen=True):
    """Keep these descriptors, which lie beside, and close those. Answer: Done."""

    index: str
    """Another one than before: whatever is kept of that may be closed."""
    keep: list[int]
    drop: list[int]
