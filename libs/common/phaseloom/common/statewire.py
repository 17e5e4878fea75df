"""The node-local protocol with the state manager, over its Unix socket.

Two kinds of peers: the node's agent (it presents the node's secret) and ranks (each presents the
token that the agent got registered for one deployment and incarnation). `phaseloom.common.framing`
carries the messages; memory travels as a file descriptor (memfd) by SCM_RIGHTS beside the frame
that names it. Calls go both ways on a rank's connection: a rank asks for memory,
the state manager tells it to copy its device heap out or in.

The state manager keeps a deployment's state as one host extent that mirrors the rank's device heap
byte for byte; the `TensorSlot`s say what lies where. Digests are xxh3-128 in hex.

What a killed state manager held is not lost while its agent lives: the agent keeps a duplicate of
every extent's descriptor and of the index, which tells what is in them (`KeepHandles`). It hands
them to the next daemon (`HandOver`, `Adopt`), and the ranks come back (`RankResume`).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from phaseloom.common.errors import ErrorInfo
from phaseloom.common.ids import DeploymentKey, VersionKey
from phaseloom.common.messages import Message


class Role(StrEnum):
    WEIGHT = "weight"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"


class TensorSlot(msgspec.Struct, frozen=True):
    """A tensor's place in a heap or in a weights version."""

    name: str
    """The parameter's fully qualified name; optimizer state: `<parameter>.<key>`."""
    role: Role
    dtype: str
    """As numpy spells it: `float32`."""
    shape: list[int]
    offset: int
    """Bytes, a multiple of 64."""
    num_bytes: int


# --- agent → state manager -----------------------------------------------------------------------


class AgentHello(Message, frozen=True):
    """First frame of an agent. Answer: Welcome."""

    secret: str
    index: str = ""
    """The index whose handles it keeps; empty: it keeps none."""


class Welcome(Message, frozen=True):
    adopts: bool
    """The daemon has nothing yet and knows nothing of that index: hand the handles over."""


class HandOver(Message, frozen=True):
    """Some of the handles that the agent keeps, a descriptor beside each. Answer: Done."""

    handles: list[int]


class Adopt(Message, frozen=True):
    """All handles are there. Answer: Adopted, once every rank came back or is given up."""


class Adopted(Message, frozen=True):
    lost: list[DeploymentKey]
    """Their state could not be verified, or their ranks did not come back: they are cut off."""


class RegisterWpg(Message, frozen=True):
    """Ranks with these tokens will come. Older incarnations are fenced from now on.

    Answer: Done.
    """

    tokens: list[str]
    """Of rank 0, 1, …"""
    deployment: DeploymentKey
    incarnation: int
    devices: list[int]
    """Of rank 0, 1, …"""
    seal_seq: int
    """Restore this seal into the extents when the ranks register their heaps; 0: none."""


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


class Sealed(Message, frozen=True):
    file: str
    digest: str
    num_bytes: int


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
    """Of rank 0's newest host copy."""
    device_bytes: int = 0
    """Heaps that are, or are being moved, in device memory."""
    host_bytes: int = 0
    """Host memory taken for its copies, also while the heap is in device memory."""
    nvme_bytes: int = 0
    """Copies that are on NVMe instead of in host memory."""


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


# --- state manager → agent -----------------------------------------------------------------------


class KeepHandles(Message, frozen=True):
    """Keep these descriptors, which lie beside, and close those. Answer: Done."""

    index: str
    """Another one than before: whatever is kept of that may be closed."""
    keep: list[int]
    drop: list[int]


# --- rank → state manager ------------------------------------------------------------------------


class RankHello(Message, frozen=True):
    """First frame of a rank. Answer: Done, or PERMISSION_DENIED."""

    token: str


class RankResume(Message, frozen=True):
    """First frame of a rank that a killed daemon knew. Answer: Done, or PERMISSION_DENIED.

    Raises: DATA_LOSS: the host copy that it needs cannot be verified.
    """

    token: str
    heap_bytes: int
    tensors: list[TensorSlot]
    filled: bool
    """It has a state: its own initial one is committed, or a seal's restored."""
    resident: bool
    """The heap holds the state, and not only the host copy."""
    applied: int
    """Of the state."""
    digest: str
    """Of the host copy where the heap is not resident; empty: the rank has not seen it."""


class RegisterHeap(Message, frozen=True):
    """Answer: HeapRegistered with the extent's memfd. The heap starts out released.

    Raises: RESOURCE_EXHAUSTED with the numbers where the host extent, or the heap on its device
    alone, cannot fit.
    """

    heap_bytes: int
    tensors: list[TensorSlot]


class HeapRegistered(Message, frozen=True):
    applied: int
    """seq that the extent holds; 0: nothing, the rank must fill its heap and `CommitInitial`."""


class CommitInitial(Message, frozen=True):
    """The rank has copied its initial state into the extent itself. Answer: Done."""

    digest: str
    applied: int = 0
    """seq that this state stands for: that of a checkpoint it was filled from."""


class CreateVersion(Message, frozen=True):
    """From rank 0. Answer: VersionExtent with a writable memfd, or `exists` and no memfd."""

    version: VersionKey
    num_bytes: int
    tensors: list[TensorSlot]


class CommitVersion(Message, frozen=True):
    """The rank has written the extent: it is immutable from now on. Answer: Done."""

    version: VersionKey
    digest: str


class OpenVersion(Message, frozen=True):
    """Answer: VersionExtent with a read-only memfd; fetched from `sources` where absent here."""

    version: VersionKey
    sources: list[str]


class VersionExtent(Message, frozen=True):
    version: VersionKey
    num_bytes: int
    tensors: list[TensorSlot]
    digest: str
    exists: bool


# --- state manager → rank ------------------------------------------------------------------------


class CopyOut(Message, frozen=True):
    """Copy the whole heap to the extent; with `release`, give its memory back. Answer: Copied."""

    release: bool


class CopyIn(Message, frozen=True):
    """Copy the extent to the heap and verify. Answer: Copied, or DATA_LOSS."""

    digest: str


class Copied(Message, frozen=True):
    digest: str
    applied: int
    """seq of the last mutating operation in the heap."""
    resident_bytes: int
    """Heap memory resident afterwards."""
    duration_s: float


# --- both ----------------------------------------------------------------------------------------


class Done(Message, frozen=True):
    """It took effect."""


class Failed(Message, frozen=True):
    """It did not, and what it had begun is rolled back."""

    error: ErrorInfo


StateMessage = (
    AgentHello
    | Welcome
    | HandOver
    | Adopt
    | Adopted
    | KeepHandles
    | RegisterWpg
    | SwitchIn
    | SwitchOut
    | Switched
    | PrepareSeal
    | WriteSeal
    | Sealed
    | DropWpg
    | Prefetch
    | DropVersions
    | StatusRequest
    | StatusReport
    | RankHello
    | RankResume
    | RegisterHeap
    | HeapRegistered
    | CommitInitial
    | CreateVersion
    | CommitVersion
    | OpenVersion
    | VersionExtent
    | CopyOut
    | CopyIn
    | Copied
    | Done
    | Failed
)
