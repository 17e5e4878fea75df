"""The protocol between a rank and its node's state manager, over a Unix socket of the node.

Each rank authenticates with the token that the agent registered for its deployment and incarnation.
Both sides make calls on a rank's connection: a rank requests memory, and the state manager orders
it to copy its device heap out or in. `phaseloom.common.transport.framing` carries the messages.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract import checkpoints, state_agent
from phaseloom.common.contract.codec import Message
from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.specs import Adapter, CommandId, ModelDirectory
from phaseloom.common.contract.state_layout import PartSources, Places, Slice, VersionParts


class RankHello(Message, frozen=True):
    """A rank's first frame on a connection. Answer: Done, or PERMISSION_DENIED."""

    token: str


class RankResume(Message, frozen=True):
    """First frame of a rank after its state manager was killed. Answer: Done, or PERMISSION_DENIED.

    Raises: DATA_LOSS: the host copy that the rank needs cannot be verified.
    """

    token: str
    heap_bytes: int
    tensors: bytes
    """The tensor table that the rank registered, see `RegisterHeap.tensors`."""
    filled: bool
    """Whether the rank has state: its initial state is committed, or a seal was restored."""
    resident: bool
    """Whether the state is in the heap, and not only in the host copy."""
    applied: int
    """The seq of the state."""
    digest: str
    """Digest of the host copy if the heap is not resident; empty: the rank does not know it."""
    host_bytes: int = 0
    in_extent: bool = False
    """Whether the extent is the memory of the heap now (`RegisterHeap.emulated`)."""


class RegisterHeap(Message, frozen=True):
    """Register a rank's heap and its tensors. The heap starts without device memory.

    Answer: HeapRegistered, with the memfd of the rank's extent attached.

    Raises: RESOURCE_EXHAUSTED, with the numbers: the extent does not fit in host memory, or the
            heap does not fit on its device even alone.
    """

    heap_bytes: int
    tensors: bytes
    """`TensorTable.packed`, sent as one value so that a known table need not be decoded again."""
    frozen: bool = False
    """Whether only `load_state` and `sync_weights` write the heap.

    If so, the host copy is up to date whenever it has the heap's `applied`. A frozen rank does not
    keep its extent mapped: each copy order brings the extent to use.
    """
    model: str = ""
    """BLAKE3, in hex, of the model's spec. Together with name, slice, dtype and seq it identifies a
    tensor."""
    host_bytes: int = 0
    """Size of the state that the rank uses in the extent itself (`host_start`), never on its
    device."""
    scratch_bytes: int = 0
    """Device memory, in addition to the heap, for data that is never moved, such as a KV cache. It
    counts against the device's budget, is allocated and released with the heap, and is never
    copied."""
    pins: bool = False
    """Whether the device pins the extent's pages, which must then be unpinned (`Unpin`) before they
    are released."""
    emulated: bool = False
    """Whether the device is emulated, so that host memory serves as device memory. If the rank is
    not frozen and has no `host_bytes`, its extent is then the memory of its heap while it is
    resident: an offload and a load copy nothing. If it is frozen, each order to copy in brings the
    memory of its heap, after the extent to copy from."""


class HeapRegistered(Message, frozen=True):
    """The extent's memfd is attached, except when a frozen heap is restored."""

    applied: int
    """The seq of the state in the extent. 0: it has none, so the rank fills its heap and sends
    `CommitInitial`."""
    has_memory: bool = True
    """Whether host memory has room for the extent. If not, the rank keeps its initial state in the
    heap, and a frozen rank gets no extent. Upon `CommitInitial` the state manager orders the rank
    to write the heap to a file (`CopyOut.file`)."""


class CommitInitial(Message, frozen=True):
    """The rank has copied its initial state to the extent, or has it in its heap. Answer: Done."""

    digest: str
    """Of the extent; empty: the extent has no memory (`HeapRegistered.has_memory`)."""
    applied: int = 0
    """The seq of the state: that of the checkpoint that filled the extent, or 0."""


class CreateVersion(Message, frozen=True):
    """Allocate host memory for a weights version.

    A node's first rank sends it for a whole version, any rank for its own part (`VersionKey.part`).
    Answer: VersionExtent without its tensors, with a writable memfd; or, if the version exists
    already, `exists` without a memfd.
    """

    version: VersionKey
    num_bytes: int
    tensors: bytes
    """`TensorTable.packed`."""


class CommitVersion(Message, frozen=True):
    """The rank has written the version, which is immutable from now on. Answer: Done."""

    version: VersionKey
    digest: str


class CommitParts(Message, frozen=True):
    """All parts of a version are committed on their nodes. From now on they can be read on this
    node.

    Any rank of the policy sends it, and may repeat it. Answer: VersionExtent of the manifest,
    without its tensors.

    Raises: FAILED_PRECONDITION: a part on this node differs from the manifest.
    """

    version: VersionKey
    manifest: VersionParts


class OpenVersion(Message, frozen=True):
    """Open a weights version for reading. If the node does not have it, it is fetched from
    `sources`.

    The state manager verifies the bytes before it answers. If they are corrupt, it drops them and
    reads the version again, from its disk or from `sources`.

    Answer: VersionExtent with a read-only memfd. For a version in parts this is its manifest; each
    part is then opened by its own key.
    """

    version: VersionKey
    sources: list[str]
    ticket: Ticket | None = None
    """The permit's ticket, which the sources require."""
    digest: str = ""
    """The digest that a fetched version must have; empty: the one that its source reports."""
    permit: CommandId | None = None
    """The permit of the reading operation. Ranks that open the version under the same permit share
    one verification. Without a permit the version is verified only for this rank."""
    is_unverified: bool = False
    """Whether to skip the verification, because the rank first tries to get the bytes on its device
    (`OpenOnDevice`)."""
    is_ahead: bool = False
    """Whether this is a prefetch that no operation waits for yet. A prefetched version never evicts
    anything from host memory, and is evicted first if memory runs short. When an operation opens
    it, it is verified and loses this status."""


class OpenSlices(Message, frozen=True):
    """Open and verify tensor slices of a version. Ranks that request the same slices share one
    fetch.

    Answer: VersionExtent with a read-only memfd, with one tensor per slice, in the order of
    `slices`.
    """

    version: VersionKey
    num_bytes: int
    """Size of the memory that the offsets of the slices refer to."""
    slices: list[Slice]
    sources: list[PartSources]
    """The sources of all parts, including parts on this node, in case the local memory is
    corrupt."""
    ticket: Ticket | None = None
    permit: CommandId | None = None
    """See `OpenVersion`."""
    is_ahead: bool = False
    """See `OpenVersion`."""


class HoldVersion(Message, frozen=True):
    """The tensors of a frozen heap are those of this version, or slices of them. So the version's
    memory can serve as its host copy, whatever the layouts.

    Answer: Done, even if the state manager does not use this.
    """

    version: VersionKey
    applied: int
    """The seq of the `sync_weights`."""


class BorrowMemory(Message, frozen=True):
    """Borrow host memory from the node's budget for the duration of an operation.

    The rank keeps it until `ReturnMemory` or until the rank ends; it survives a restart of the
    state manager. Answer: MemoryLent with a memfd. Repeating the request returns the same memory.

    Raises: RESOURCE_EXHAUSTED, with the numbers.
    """

    loan: int
    """Number of this loan, chosen by the rank and never reused."""
    num_bytes: int
    what: str
    """Short description of the purpose, for the error message if the request is refused."""
    copy_at: int = -1
    """If the memory is for the start of the rank's own heap: the heap's seq. A frozen rank then
    gets its host copy, if that has the heap's state at this seq. -1: the memory has another
    purpose."""


class MemoryLent(Message, frozen=True):
    """The memfd is writable and its content undefined, unless it is the host copy."""

    is_host_copy: bool = False


class ReturnMemory(Message, frozen=True):
    """The rank has unmapped borrowed memory. Answer: Done, even if there is no such loan."""

    loan: int


class TakeSnapshot(Message, frozen=True):
    """Copy the current state of every rank on this node for an operation's checkpoint.

    A node's first rank sends it between two operations. Answer: SnapshotTaken; the ranks may then
    continue.

    Raises: ALREADY_EXISTS: another operation saved the checkpoint. RESOURCE_EXHAUSTED, with the
            numbers.
    """

    operation: str
    """The operation's id. A repeated request with the same id gets the same answer."""
    name: str
    """The checkpoint's name."""
    seq: int
    """The seq of the last mutating operation in the state."""
    overwrite: bool = False
    """The `overwrite` of the `save_state`."""


class SnapshotTaken(Message, frozen=True):
    """The snapshot is in host memory and stays there until `WriteCheckpoint`."""


class WriteCheckpoint(Message, frozen=True):
    """Write a node's snapshot to disk.

    A node's first rank sends it. The daemon keeps writing even if the rank stops waiting. On rank
    0's node the result is the checkpoint; other nodes write the part with their ranks, which must
    be complete before. Answer: CheckpointWritten, once the file has its final name and is fsynced.
    """

    operation: str
    name: str
    config: str
    """The model's config as JSON."""
    keep: int = 0
    """The `keep` of the `save_state`."""
    companions: ModelDirectory | None = None
    """Files to copy next to the tensors, such as a tokenizer, as they were registered."""
    ttl_s: float = 0.0
    """The `ttl_s` of the `save_state`."""
    overwrite: bool = False
    """The `overwrite` of the `save_state`."""
    model: str = ""
    """Name of the registered model that the weights are of, or that the adapter is on; empty: the
    deployment started from drawn weights."""
    adapter: Adapter | None = None
    """The adapter that the checkpoint has instead of all weights."""


class CheckpointWritten(Message, frozen=True):
    weights_sha256: str
    """Digest of the checkpoint's weights; empty for one node's part."""


class ReadCheckpoint(Message, frozen=True):
    """Replace state with that of a checkpoint of any layout. Answer: CheckpointRead.

    A node's first rank sends it to replace the state of every rank on the node. A rank that has
    registered its heap but has no state yet sends it to fill its own extent before `CommitInitial`.

    Raises: NOT_FOUND. FAILED_PRECONDITION: the checkpoint is of another model. DATA_LOSS, naming
            file and tensor. RESOURCE_EXHAUSTED. After any of these errors the state is unchanged.
    """

    name: str
    source: str = ""
    """See `LoadState`."""
    optimizer: bool = True
    """See `LoadState`."""
    load: str = ""
    """Name of the load. Repeating the same load, for example in a rebuild, reads the same bytes
    even if the checkpoint has changed or is gone. The bytes are kept for the two newest loads of a
    deployment. Empty: they are not kept."""
    adapter_config: str = ""
    """The `adapter_config.json` of the ranks' own adapter. The state manager refuses an adapter
    with another rank or scale. Empty: the ranks have no adapter."""
    places: Places | None = {}
    """Where the files have each tensor of the ranks; empty: under the ranks' own names. None: the
    sender can find out if the answer lists the names in the files."""


class CheckpointRead(Message, frozen=True):
    weights_sha256: str
    """Digest of the weights when they were saved; empty: another program wrote the files."""
    digest: str = ""
    """Digest of the extent, if one was filled."""
    names: list[str] = []
    """The tensors in the files, if their names are not those of the ranks. Nothing was read: the
    sender repeats its message with `places`."""


class OpenSaved(Message, frozen=True):
    """Describe the weights of a checkpoint. Answer: SavedOpened.

    Raises: NOT_FOUND. DATA_LOSS.
    """

    name: str
    source: str
    """See `LoadState`."""


class SavedOpened(Message, frozen=True):
    identity: str
    """Identifies exactly these files, on every node that has the same checkpoints."""
    operation: str
    """The operation that saved the checkpoint; empty: another program wrote the files."""
    tensors: bytes
    """The packed `TensorTable` of the whole tensors, one after the other."""
    adapter_config: str = ""
    """Content of `adapter_config.json`; empty: the checkpoint has all weights of its model."""


class ReadSaved(Message, frozen=True):
    """Read and verify some of the weights of a checkpoint. Answer: SavedRead.

    Raises: the errors of `OpenSaved`. FAILED_PRECONDITION: the checkpoint is of another model.
    """

    name: str
    source: str
    """See `LoadState`."""
    start: int
    """Start offset in the layout."""
    num_bytes: int
    """At most MAX_READ_BYTES."""
    as_held: bool = False
    """Whether to return the bytes in the layout of the rank's own weights in its heap, with zeroes
    in the gaps. Otherwise they have the layout of the table in `SavedOpened`."""
    places: Places = {}
    """See `ReadCheckpoint`."""


MAX_READ_BYTES = 8 * 1024 * 1024


class SavedRead(Message, frozen=True):
    content: bytes


class PruneCheckpoints(Message, frozen=True):
    """Remove old checkpoints of the deployment that were saved with a `keep`. Answer: Done.

    Rank 0 sends it.
    """

    keep: int
    """Number of newest checkpoints to retain."""
    needed: list[str]
    """Names of checkpoints that must not be removed."""


class RemoveCheckpoint(Message, frozen=True):
    """Remove a checkpoint of the deployment, if it exists. Answer: CheckpointRemoved.

    Rank 0 sends it once nothing needs the checkpoint.
    """

    name: str


class CheckpointRemoved(Message, frozen=True):
    num_bytes: int
    """Total size of its files; 0: there was no such checkpoint."""


class VersionExtent(Message, frozen=True):
    version: VersionKey
    num_bytes: int
    tensors: bytes
    """`TensorTable.packed`."""
    digest: str
    """Digest of the memory."""
    exists: bool
    sources: list[PartSources] = msgspec.field(default_factory=list)
    """For an opened manifest: the holders of each part that is not on this node."""


class ShareOnDevice(Message, frozen=True):
    """Share device memory with a version's bytes in the version's layout. Its descriptor is
    attached.

    The rank that committed the version sends it, for ranks on the same device (`OpenOnDevice`). The
    memory is kept while the version exists and the device's budget allows. Answer: Done, even if
    the memory is not kept.
    """

    version: VersionKey


class OpenOnDevice(Message, frozen=True):
    """Open a version's copy in the memory of the rank's own device.

    Answer: OnDevice, with the memory's descriptor if there is such a copy.
    """

    version: VersionKey


class OnDevice(Message, frozen=True):
    exists: bool


class VersionLayout(Message, frozen=True):
    """Where the tensors of a weights version lie in its memory."""

    num_bytes: int
    tensors: bytes
    """`TensorTable.packed`."""


class FileSection(Message, frozen=True):
    """Where the bytes of a heap are in a state file, whose descriptor is attached to the order."""

    offset: int
    method: state_agent.DiskMethod
    """How the rank moves the bytes. If this does not work there, it uses a simpler method."""
    checksums: bytes = b""
    """The xxh3-64 of each block of 8 MiB, 8 bytes each. Empty if the rank writes the section: it
    returns them."""


class CopyOut(Message, frozen=True):
    """Copy the whole heap to the extent and, with `release`, release its device memory. Answer:
    Copied.

    With `whole_at` nothing is copied. The rank only says whether its heap has changed since then,
    and releases its memory if it has not and `release` is set.
    """

    release: bool
    whole_at: int = -1
    """The seq of the state in the host copy; −1: copy the heap."""
    digest: str = ""
    """Digest of the host copy of `whole_at`."""
    file: FileSection | None = None
    """Copy the heap to this file instead, because host memory has no room."""


class Unpin(Message, frozen=True):
    """Unpin the extent's pages, which are about to be released. Answer: Done.

    The mapping stays, and the next copy may pin its pages again.
    """


class Unmap(Message, frozen=True):
    """Unmap versions that are not in use, and the memory that a frozen heap was loaded from.

    The state manager sends it when host memory is short. Answer: StillMapped.
    """


class StillMapped(Message, frozen=True):
    versions: list[VersionKey]
    """The versions that the rank still uses."""


class CopyIn(Message, frozen=True):
    """Copy the extent to the heap and verify its digest. Answer: Copied, or DATA_LOSS."""

    digest: str
    version: VersionLayout | None = None
    """The layout of the extent, if that is the memory of a weights version in another layout than
    the heap. The rank places the tensors as its `sync_weights` did."""
    file: FileSection | None = None
    """Copy from this file instead, because host memory has no room."""


class StageState(Message, frozen=True):
    """Copy the whole state to the staging buffer whose memfd is attached, in the layout of the
    extent.

    The host copy does not change. Answer: Copied, with an empty digest.
    """

    digest: str = ""
    version: VersionLayout | None = None
    """Copy from the host copy instead, whose memfd is attached first, with this digest, and which
    has this layout. Answer: Copied with the buffer's digest, or DATA_LOSS."""
    becomes_copy: bool = False
    """Whether the buffer becomes the host copy."""


class LoadStaged(Message, frozen=True):
    """Replace the whole state with the staging buffer whose memfd is attached, and verify its
    digest.

    The buffer has the layout of the extent. The host copy does not change. Answer: Copied, or
    DATA_LOSS.
    """

    digest: str


class Copied(Message, frozen=True):
    digest: str
    applied: int
    """The seq of the last mutating operation in the heap."""
    resident_bytes: int
    """Device memory of the heap after the copy."""
    duration_s: float
    changed: bool = False
    """Whether the heap is newer than `CopyOut.whole_at`, so that nothing was copied or released."""
    checksums: bytes = b""
    """The checksums of the blocks that were written to `CopyOut.file`."""


class Done(Message, frozen=True):
    """The request took effect."""


class Failed(Message, frozen=True):
    """The request failed, and its effects were rolled back."""

    error: ErrorInfo


StateMessage = (
    state_agent.AgentHello
    | state_agent.Welcome
    | state_agent.HandOver
    | state_agent.FinishHandover
    | state_agent.HandoverFinished
    | state_agent.KeepHandles
    | state_agent.RegisterWpg
    | state_agent.SwitchIn
    | state_agent.SwitchOut
    | state_agent.Switched
    | state_agent.PrepareSeal
    | state_agent.WriteSeal
    | state_agent.Sealed
    | state_agent.FetchState
    | state_agent.DropWpg
    | state_agent.Prefetch
    | state_agent.DropVersions
    | state_agent.StatusRequest
    | state_agent.StatusReport
    | checkpoints.FindCheckpoints
    | checkpoints.CheckpointsFound
    | checkpoints.DescribeCheckpoint
    | checkpoints.SetExpiry
    | checkpoints.EraseCheckpoint
    | checkpoints.CheckpointErased
    | checkpoints.OpenArchive
    | checkpoints.ArchiveOpened
    | checkpoints.ReadArchivePart
    | checkpoints.ArchiveRead
    | checkpoints.FindExpired
    | checkpoints.ExpiredFound
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
    | BorrowMemory
    | MemoryLent
    | ReturnMemory
    | TakeSnapshot
    | SnapshotTaken
    | WriteCheckpoint
    | CheckpointWritten
    | ReadCheckpoint
    | CheckpointRead
    | OpenSaved
    | SavedOpened
    | ReadSaved
    | SavedRead
    | PruneCheckpoints
    | RemoveCheckpoint
    | CheckpointRemoved
    | StageState
    | LoadStaged
    | VersionExtent
    | Unmap
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
