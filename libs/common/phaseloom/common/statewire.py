"""The node-local protocol with the state manager, over its Unix socket.

Two kinds of peers: the node's agent (it presents the node's secret) and ranks (each presents the
token that the agent got registered for one deployment and incarnation). `phaseloom.common.framing`
carries the messages; memory travels as a file descriptor (memfd) by SCM_RIGHTS beside the frame
that names it. Calls go both ways on a rank's connection: a rank asks for memory,
the state manager tells it to copy its device heap out or in.

The state manager keeps a deployment's state as one host extent that mirrors the rank's device heap
byte for byte, and behind that holds what never is on a device; the `TensorSlot`s say what lies
where. Digests are those of `phaseloom.common.blockhash`.

What a killed state manager held is not lost while its agent lives: the agent keeps a duplicate of
every extent's descriptor and of the index, which tells what is in them (`KeepHandles`). It hands
them to the next daemon (`HandOver`, `Adopt`), and the ranks come back (`RankResume`).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from phaseloom.common.errors import ErrorInfo
from phaseloom.common.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.common.messages import Durability, FilesTicket, Layout, Message, Ticket

EXTENT_ALIGNMENT_BYTES = 4096


def host_start(heap_bytes: int) -> int:
    """Where, in a rank's extent, the state begins that lives in host memory alone."""
    return -(-heap_bytes // EXTENT_ALIGNMENT_BYTES) * EXTENT_ALIGNMENT_BYTES


def extent_bytes(heap_bytes: int, host_bytes: int) -> int:
    """How much of a rank's extent is its state: the heap's copy, and what lives there alone."""
    return host_start(heap_bytes) + host_bytes if host_bytes else heap_bytes


class Role(StrEnum):
    WEIGHT = "weight"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    MANIFEST = "manifest"
    """No tensor: of a weights version that is written in parts, what these are (`VersionParts`)."""


class TensorSlot(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor's place in a heap or in a weights version, and what of the whole tensor it is."""

    name: str
    """The parameter's fully qualified name; optimizer state: `<parameter>.<key>`."""
    role: Role
    dtype: str
    """As numpy spells it: `float32`."""
    shape: list[int]
    offset: int
    """Bytes, a multiple of 64."""
    num_bytes: int
    global_shape: list[int] = []
    """Of the whole tensor; empty: it is here whole."""
    start: list[int] = []
    """Where in the whole tensor this slice begins, one index a dim; empty: it is here whole."""


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


class BringState(Message, frozen=True):
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
    shared_bytes: int = 0
    """Of these, what other contents hold too: it is there once, and counted at each of them."""
    shared_with: list[str] = []
    """Deployments that refer to those, each once."""


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
    can_move: bool = False
    """Whether it hands over what it has to other nodes' daemons, and takes what they have."""


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
    tensors: bytes
    """As it registered them."""
    filled: bool
    """It has a state: its own initial one is committed, or a seal's restored."""
    resident: bool
    """The heap holds the state, and not only the host copy."""
    applied: int
    """Of the state."""
    digest: str
    """Of the host copy where the heap is not resident; empty: the rank has not seen it."""
    host_bytes: int = 0


class RegisterHeap(Message, frozen=True):
    """Answer: HeapRegistered with the extent's memfd. The heap starts out released.

    Raises: RESOURCE_EXHAUSTED with the numbers where the host extent, or the heap on its device
    alone, cannot fit.
    """

    heap_bytes: int
    tensors: bytes
    """`TensorTable.packed`: as one value, whoever knows it need not decode it again."""
    frozen: bool = False
    """Nothing but `load_state` and `sync_weights` writes the heap: whenever `applied` is what the
    host copy holds, so are the bytes. The rank keeps no extent mapped: each order to copy brings
    the one to use."""
    model: str = ""
    """BLAKE3 of the model's spec, in hex: with name, slice, dtype and seq what a tensor is."""
    host_bytes: int = 0
    """State that the rank works on in the extent itself (`host_start`), never on its device."""
    pins: bool = False
    """It keeps the extent's pages in the device's hands: before they are given back, `Unpin`."""


class HeapRegistered(Message, frozen=True):
    """No memfd comes where a frozen heap is restored."""

    applied: int
    """seq that the extent holds; 0: nothing, the rank must fill its heap and `CommitInitial`."""


class CommitInitial(Message, frozen=True):
    """The rank has copied its initial state into the extent itself. Answer: Done."""

    digest: str
    applied: int = 0
    """seq that this state stands for: that of a checkpoint it was filled from."""


class CreateVersion(Message, frozen=True):
    """From the first rank here, or a part (`VersionKey.part`) from any rank.

    Answer: VersionExtent, without its tensors, and a writable memfd; or `exists` and no memfd.
    """

    version: VersionKey
    num_bytes: int
    tensors: bytes
    """`TensorTable.packed`."""


class CommitVersion(Message, frozen=True):
    """The rank has written the extent: it is immutable from now on. Answer: Done."""

    version: VersionKey
    digest: str


class VersionPart(msgspec.Struct, frozen=True, array_like=True):
    """What one source rank holds of a weights version."""

    part: str
    """As in VersionKey: `2of4`."""
    num_bytes: int
    digest: str
    """Of its memory."""
    layout: str
    """BLAKE3 of what lies where in it, in hex."""


class VersionParts(msgspec.Struct, frozen=True, array_like=True):
    """The manifest of a version that is written in parts: its bytes, as MessagePack, are what the
    version's own key names. So equal parts of equal layout are equal versions."""

    layout: Layout
    """Of the ranks that wrote it."""
    fsdp: int
    """Over how many of the replicas rows are sharded."""
    tensors: str
    """BLAKE3, in hex, of what lies where in such a version that is written whole: what model it
    is of."""
    parts: list[VersionPart]


class CommitParts(Message, frozen=True):
    """All parts of a version are committed, wherever they are: from now on they can be read here.

    From any rank of the policy; the same again is harmless. Answer: VersionExtent, of the manifest,
    without its tensors.

    Raises: FAILED_PRECONDITION: a part that is here is not what the manifest says.
    """

    version: VersionKey
    manifest: VersionParts


class OpenVersion(Message, frozen=True):
    """Answer: VersionExtent with a read-only memfd; fetched from `sources` where absent here.

    Of a version in parts it is the manifest's; each part is opened by its own key then.
    """

    version: VersionKey
    sources: list[str]
    ticket: Ticket | None = None
    """Of the permit; the sources ask for it."""
    digest: str = ""
    """What it must have to be fetched; empty: whatever it has there."""
    doubted: bool = False
    """What came before does not match its digest: the state manager verifies its own memory first,
    and where that is bad it brings the version anew, from its disk or from `sources`."""


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor in some part of a version, and where the reader wants it."""

    part: str
    """As in VersionKey; empty: of a version that was written whole."""
    name: str
    dtype: str
    start: list[int]
    """In the tensor as that part has it, one index a dim."""
    size: list[int]
    offset: int
    """In the reader's memory: bytes, a multiple of 64. The box lies there without gaps."""
    num_bytes: int


class PartSources(msgspec.Struct, frozen=True):
    part: str
    endpoints: list[str]
    """Of the state managers that hold it; all of them are asked, each for something else."""


class OpenSlices(Message, frozen=True):
    """Exactly these bytes of a version, each fetched once, whoever asks for the same on this node.

    Answer: VersionExtent with a read-only memfd, one tensor a slice, in their order.
    """

    version: VersionKey
    num_bytes: int
    """Of the memory that the offsets are in."""
    slices: list[Slice]
    sources: list[PartSources]
    """Of parts that are on the node, too: should they prove bad there."""
    ticket: Ticket | None = None
    doubted: bool = False
    """As in OpenVersion."""


class HoldVersion(Message, frozen=True):
    """The frozen heap has exactly this version's bytes: its memory may be the host copy.

    Answer: Done, also where it is not taken as one.
    """

    version: VersionKey
    applied: int
    """seq of the sync."""


class CutState(Message, frozen=True):
    """From a node's first rank, between two operations. Copy the state of every rank here, as it is
    now, aside for the checkpoint that this operation writes; then they may go on. Answer: CutTaken.

    Raises: ALREADY_EXISTS: another operation's. RESOURCE_EXHAUSTED, with the numbers.
    """

    operation: str
    """Its id: whatever is asked again for it is answered the same."""
    name: str
    """Of the checkpoint."""
    seq: int
    """The last mutating operation in the state."""


class CutTaken(Message, frozen=True):
    """It is there until `WriteCheckpoint`."""


class WriteCheckpoint(Message, frozen=True):
    """From a node's first rank. Put what was cut on disk; the daemon goes on with it where nobody
    waits any more. Answer: CheckpointWritten, once it has its name and is fsynced. On rank 0's node
    that is the checkpoint; on others their ranks' part, which must be there before."""

    operation: str
    name: str
    config: str
    """The model's, as JSON."""
    keep: int = 0
    """Of the `save_state`."""


class CheckpointWritten(Message, frozen=True):
    weights_sha256: str
    """Empty: it is a part."""


class ReadCheckpoint(Message, frozen=True):
    """Replace the state by a checkpoint's, whatever layout wrote it. Answer: CheckpointRead, which
    says from which whole copy of it.

    From a node's first rank: that of every rank here. From one that has registered its heap and has
    no state yet: its extent's content alone, for `CommitInitial`.

    Raises: NOT_FOUND. FAILED_PRECONDITION: it is of another model. DATA_LOSS, naming file and
            tensor. RESOURCE_EXHAUSTED. Whatever is raised, no state was changed.
    """

    name: str


class LoadedFrom(StrEnum):
    """Whole copies of a checkpoint's state, the nearest first."""

    CUT = "cut"
    """The host memory that it was written from."""
    HOST_SEAL = "host_seal"
    """A seal of the same bytes in host memory."""
    NVME_SEAL = "nvme_seal"
    """A seal of the same bytes on this node's disk."""
    FILES = "files"
    """The checkpoint's own."""


class CheckpointRead(Message, frozen=True):
    weights_sha256: str
    """Of the weights when they were saved; empty: an older release did not say."""
    digest: str = ""
    """Of an extent that was filled."""
    source: LoadedFrom = LoadedFrom.FILES


class PruneCheckpoints(Message, frozen=True):
    """From rank 0. Remove the deployment's checkpoints that were saved with a `keep`, but for the
    newest so many. Answer: Done."""

    keep: int
    needed: list[str]
    """Names that stay in any case."""


class VersionExtent(Message, frozen=True):
    version: VersionKey
    num_bytes: int
    tensors: bytes
    """`TensorTable.packed`."""
    digest: str
    """Of the memory."""
    exists: bool
    sources: list[PartSources] = msgspec.field(default_factory=list)
    """Of a manifest that was opened: who holds each part that is not here."""


class ShareOnDevice(Message, frozen=True):
    """Device memory with a version's bytes, laid out as the version is, a descriptor beside.

    From the rank that committed it. It is kept while the version and the device's budget allow, for
    ranks on the same device that open it. Answer: Done, also where it is not kept.
    """

    version: VersionKey


class OpenOnDevice(Message, frozen=True):
    """Answer: OnDevice, with the descriptor where there is such memory on the rank's device."""

    version: VersionKey


class OnDevice(Message, frozen=True):
    exists: bool


# --- state manager → rank ------------------------------------------------------------------------


class CopyOut(Message, frozen=True):
    """Copy the whole heap to the extent; with `release`, give its memory back. Answer: Copied.

    For a frozen heap first without an extent: whether anything must be copied.
    """

    release: bool
    whole_at: int = -1
    """seq that the host copy holds whole; −1: none, or the heap is not frozen."""
    digest: str = ""
    """Of that copy."""


class Unpin(Message, frozen=True):
    """The extent's pages are about to be given back: let go of them. Answer: Done.

    The mapping stays; whoever copies next may pin what it then holds.
    """


class LetGo(Message, frozen=True):
    """Host memory is short: unmap the weights versions that are not in use, and what a frozen heap
    was loaded from. Answer: StillMapped."""


class StillMapped(Message, frozen=True):
    versions: list[VersionKey]
    """Those that the rank uses."""


MAX_PIECE_SOURCES = 8
"""Descriptors that come with one message."""


class HeapPiece(msgspec.Struct, frozen=True, array_like=True):
    source: int
    """Which of the memfds beside, from 0."""
    start: int
    """Where in that."""
    num_bytes: int


class CopyIn(Message, frozen=True):
    """Copy the extent to the heap and verify. Answer: Copied, or DATA_LOSS."""

    digest: str
    pieces: list[HeapPiece] = msgspec.field(default_factory=list)
    """Of a frozen heap, one after another, where it lies in several places of up to
    `MAX_PIECE_SOURCES` memfds; empty: it is the beginning of the one that comes."""


class CopyAside(Message, frozen=True):
    """Copy the whole state to the memfd beside, laid out as the extent is. Answer: Copied, whose
    digest is empty. The host copy stays as it is."""


class CopyFrom(Message, frozen=True):
    """Replace the whole state by the memfd beside, laid out as the extent is, and verify. Answer:
    Copied, or DATA_LOSS. The host copy stays as it is."""

    digest: str


class Copied(Message, frozen=True):
    digest: str
    applied: int
    """seq of the last mutating operation in the heap."""
    resident_bytes: int
    """Heap memory resident afterwards."""
    duration_s: float
    changed: bool = False
    """Nothing was copied or released, for the heap is not at `CopyOut.whole_at` any more."""


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
    | BringState
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
    | CommitParts
    | OpenVersion
    | OpenSlices
    | HoldVersion
    | CutState
    | CutTaken
    | WriteCheckpoint
    | CheckpointWritten
    | ReadCheckpoint
    | CheckpointRead
    | PruneCheckpoints
    | CopyAside
    | CopyFrom
    | VersionExtent
    | LetGo
    | StillMapped
    | CopyOut
    | CopyIn
    | Unpin
    | ShareOnDevice
    | OpenOnDevice
    | OnDevice
    | Copied
    | Done
    | Failed
)
