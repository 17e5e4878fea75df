"""The node-local protocol between a rank and its node's state manager, over a Unix socket.

Each rank presents the token that the agent registered for its deployment and incarnation.
Calls go both ways on a rank's connection: a rank asks for memory, the state manager tells it to
copy its device heap out or in. `phaseloom.common.transport.framing` carries the messages.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract import checkpoints, state_agent
from phaseloom.common.contract.codec import Message
from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.specs import CommandId, ModelDirectory
from phaseloom.common.contract.state_layout import PartSources, Slice, VersionParts


class RankHello(Message, frozen=True):
    """A rank's first frame on a connection. Answer: Done, or PERMISSION_DENIED."""

    token: str


class RankResume(Message, frozen=True):
    """First frame of a rank whose daemon was killed. Answer: Done, or PERMISSION_DENIED.

    Raises: DATA_LOSS: the host copy that the rank needs cannot be verified.
    """

    token: str
    heap_bytes: int
    tensors: bytes
    """The tensor table that the rank registered, as in `RegisterHeap.tensors`."""
    filled: bool
    """Whether the rank has a state: its own initial one is committed, or a seal's restored."""
    resident: bool
    """Whether the heap holds the state, and not only the host copy."""
    applied: int
    """The seq of the state."""
    digest: str
    """The host copy's digest where the heap is not resident; empty: the rank has not seen it."""
    host_bytes: int = 0


class RegisterHeap(Message, frozen=True):
    """A rank's heap and what lies in it; the heap starts out released.

    Answer: HeapRegistered, with the memfd of the rank's extent beside.

    Raises: RESOURCE_EXHAUSTED, with the numbers: the extent does not fit in host memory, or the
            heap not on its device, even alone.
    """

    heap_bytes: int
    tensors: bytes
    """`TensorTable.packed`; one value, so that a known table need not be decoded again."""
    frozen: bool = False
    """Whether only `load_state` and `sync_weights` write the heap.

    The host copy is then up to date whenever it has the heap's `applied`. A frozen rank keeps no
    extent mapped: each order to copy brings the one to use.
    """
    model: str = ""
    """BLAKE3, in hex, of the model's spec; name, slice, dtype and seq with it identify a tensor."""
    host_bytes: int = 0
    """State that the rank works on in the extent itself (`host_start`), never on its device."""
    scratch_bytes: int = 0
    """Device memory beside the heap for what nobody moves, such as a KV cache. It counts on the
    device, comes and goes with the heap, and is never copied."""
    pins: bool = False
    """Whether the device pins the extent's pages, so that `Unpin` must precede their release."""


class HeapRegistered(Message, frozen=True):
    """The extent's memfd comes beside, except where a frozen heap is restored."""

    applied: int
    """The seq of the state in the extent; 0: none, the rank fills its heap and `CommitInitial`s."""


class CommitInitial(Message, frozen=True):
    """The rank has copied its initial state into the extent itself. Answer: Done."""

    digest: str
    applied: int = 0
    """The seq of the state: that of the checkpoint that the extent was filled from, or 0."""


class CreateVersion(Message, frozen=True):
    """Take host memory for a weights version.

    A node's first rank sends it for a whole version, any rank for its part (`VersionKey.part`).
    Answer: VersionExtent, without its tensors, and a writable memfd; or `exists` and no memfd.
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
    """All parts of a version are committed on their nodes; from now on this node lets them be read.

    Any rank of the policy sends it, and may repeat it. Answer: VersionExtent of the manifest,
    without its tensors.

    Raises: FAILED_PRECONDITION: a part on this node is not what the manifest says.
    """

    version: VersionKey
    manifest: VersionParts


class OpenVersion(Message, frozen=True):
    """Open a weights version to read; it is fetched from `sources` where the node lacks it.

    The state manager verifies the bytes before it answers. Where they are bad, it drops them and
    gets the version again, from its disk or from `sources`.

    Answer: VersionExtent with a read-only memfd. For a version in parts that is its manifest; each
    part is then opened by its own key.
    """

    version: VersionKey
    sources: list[str]
    ticket: Ticket | None = None
    """The permit's ticket, which the sources ask for."""
    digest: str = ""
    """The digest that a fetched version must have; empty: the one that its source states."""
    permit: CommandId | None = None
    """The permit of the operation that reads. Ranks that open the version for one permit share one
    verification; without a permit the rank has one of its own."""
    is_unverified: bool = False
    """Whether the state manager leaves the verification out, because the rank looks for the bytes
    on its device first (`OpenOnDevice`)."""
    is_ahead: bool = False
    """Whether no operation waits for the version yet. It then displaces nothing in host memory, and
    is dropped again where that is short, until an operation opens it, which has it verified."""


class OpenSlices(Message, frozen=True):
    """Open tensor slices of a version, verified; ranks that ask for the same ones share one fetch.

    Answer: VersionExtent with a read-only memfd, one tensor a slice, in the order of `slices`.
    """

    version: VersionKey
    num_bytes: int
    """The size of the memory that the slices' offsets refer to."""
    slices: list[Slice]
    sources: list[PartSources]
    """The sources of all parts; a part on this node has some too, in case its memory is bad."""
    ticket: Ticket | None = None
    permit: CommandId | None = None
    """As in `OpenVersion`."""
    is_ahead: bool = False
    """As in `OpenVersion`."""


class HoldVersion(Message, frozen=True):
    """A frozen heap has exactly this version's bytes, so the version's memory may be its host copy.

    Answer: Done, also where the state manager makes no use of that.
    """

    version: VersionKey
    applied: int
    """The seq of the `sync_weights`."""


class BorrowMemory(Message, frozen=True):
    """Take host memory of the node's budget for as long as an operation needs it.

    It stays the rank's until `ReturnMemory`, or the rank's end; the next state manager knows of it,
    too. Answer: MemoryLent with a memfd; the same one where the loan is there already.

    Raises: RESOURCE_EXHAUSTED, with the numbers.
    """

    loan: int
    """The rank's own number of the loan, which no other loan of this rank has or had."""
    num_bytes: int
    what: str
    """A few words that name the purpose of the memory where the loan is refused."""
    copy_at: int = -1
    """Where the memory is for the first bytes of the rank's own heap: the heap's seq. A frozen rank
    is then lent its host copy, if that is the heap's at this seq. -1: it is for something else."""


class MemoryLent(Message, frozen=True):
    """The memory's content is undefined and the memfd writable, unless it is the host copy."""

    is_host_copy: bool = False


class ReturnMemory(Message, frozen=True):
    """The rank has unmapped borrowed memory. Answer: Done, also where there is no such loan."""

    loan: int


class TakeSnapshot(Message, frozen=True):
    """Copy the present state of every rank on this node for an operation's checkpoint.

    A node's first rank sends it between two operations. Answer: SnapshotTaken; then the ranks may
    go on.

    Raises: ALREADY_EXISTS: the checkpoint is another operation's. RESOURCE_EXHAUSTED, with the
            numbers.
    """

    operation: str
    """The operation's id; a repeated request with the same id gets the same answer."""
    name: str
    """The checkpoint's name."""
    seq: int
    """The seq of the last mutating operation in the state."""
    overwrite: bool = False
    """The `overwrite` of the `save_state`."""


class SnapshotTaken(Message, frozen=True):
    """The snapshot is in host memory, and stays until `WriteCheckpoint`."""


class WriteCheckpoint(Message, frozen=True):
    """Write a node's snapshot to disk.

    A node's first rank sends it; the daemon goes on writing where nobody waits any more. On rank
    0's node the result is the checkpoint; other nodes write their ranks' part, which must be there
    before. Answer: CheckpointWritten, once the file has its name and is fsynced.
    """

    operation: str
    name: str
    config: str
    """The model's config as JSON."""
    keep: int = 0
    """The `keep` of the `save_state`."""
    companions: ModelDirectory | None = None
    """Files to copy beside the tensors, such as a tokenizer, as they were registered."""
    ttl_s: float = 0.0
    """The `ttl_s` of the `save_state`."""
    overwrite: bool = False
    """The `overwrite` of the `save_state`."""


class CheckpointWritten(Message, frozen=True):
    weights_sha256: str
    """The digest of the checkpoint's weights; empty for one node's part."""


class ReadCheckpoint(Message, frozen=True):
    """Replace state by that of a checkpoint of any layout. Answer: CheckpointRead.

    A node's first rank sends it to replace the state of every rank on the node. A rank that has
    registered its heap and has no state yet sends it to fill its own extent, for `CommitInitial`.

    Raises: NOT_FOUND. FAILED_PRECONDITION: the checkpoint is another model's. DATA_LOSS, naming
            file and tensor. RESOURCE_EXHAUSTED. Whatever is raised, no state was changed.
    """

    name: str
    source: str = ""
    """As in `LoadState`."""
    optimizer: bool = True
    """As in `LoadState`."""
    load: str = ""
    """The name of the load. The same load again, as in a rebuild, reads the same bytes, whatever
    has become of the checkpoint; the bytes are kept for the two newest loads of a deployment.
    Empty: they are not kept."""


class CheckpointRead(Message, frozen=True):
    weights_sha256: str
    """The weights' digest when they were saved; empty: another program wrote the files."""
    digest: str = ""
    """The digest of the extent, where one was filled."""


class OpenSaved(Message, frozen=True):
    """Describe the weights of a checkpoint. Answer: SavedOpened. Raises: NOT_FOUND. DATA_LOSS."""

    name: str
    source: str
    """As in `LoadState`."""


class SavedOpened(Message, frozen=True):
    identity: str
    """Names these files and no others, on every node that has the same checkpoints."""
    operation: str
    """The operation that saved the checkpoint; empty: another program wrote the files."""
    tensors: bytes
    """The packed `TensorTable` of the whole tensors, one behind the other."""
    adapter_config: str = ""
    """The content of `adapter_config.json`; empty: the checkpoint has all weights of its model."""


class ReadSaved(Message, frozen=True):
    """Read some of the weights of a checkpoint, verified. Answer: SavedRead.

    Raises: as `OpenSaved`. FAILED_PRECONDITION: the checkpoint is another model's.
    """

    name: str
    source: str
    """As of `LoadState`."""
    start: int
    """Where they begin in the layout."""
    num_bytes: int
    """At most MAX_READ_BYTES."""
    as_held: bool = False
    """Whether the layout is that of the rank's own weights in its heap, whose gaps are zeroes then;
    else it is that of the table in `SavedOpened`."""


MAX_READ_BYTES = 8 * 1024 * 1024


class SavedRead(Message, frozen=True):
    content: bytes


class PruneCheckpoints(Message, frozen=True):
    """Remove old checkpoints of the deployment that were saved with a `keep`. Answer: Done.

    Rank 0 sends it.
    """

    keep: int
    """The number of newest checkpoints that stay."""
    needed: list[str]
    """The names of checkpoints that stay in any case."""


class RemoveCheckpoint(Message, frozen=True):
    """Remove a checkpoint of the deployment, if there is one. Answer: CheckpointRemoved.

    Rank 0 sends it, once nothing needs it.
    """

    name: str


class CheckpointRemoved(Message, frozen=True):
    num_bytes: int
    """The bytes of its files; 0: there was no such checkpoint."""


class VersionExtent(Message, frozen=True):
    version: VersionKey
    num_bytes: int
    tensors: bytes
    """`TensorTable.packed`."""
    digest: str
    """The digest of the memory."""
    exists: bool
    sources: list[PartSources] = msgspec.field(default_factory=list)
    """For a manifest that was opened: the holders of each part that is not on this node."""


class ShareOnDevice(Message, frozen=True):
    """Device memory that holds a version's bytes in the version's layout; its descriptor is beside.

    The rank that committed the version sends it, for ranks on the same device (`OpenOnDevice`). The
    memory is kept while the version exists and the device's budget allows. Answer: Done, also where
    it is not kept.
    """

    version: VersionKey


class OpenOnDevice(Message, frozen=True):
    """Open a version's copy in the memory of the rank's own device.

    Answer: OnDevice, with the memory's descriptor where there is such a copy.
    """

    version: VersionKey


class OnDevice(Message, frozen=True):
    exists: bool


class CopyOut(Message, frozen=True):
    """Copy the whole heap to the extent; with `release`, give its memory back. Answer: Copied.

    A frozen heap is first asked without an extent, to learn whether anything must be copied.
    """

    release: bool
    whole_at: int = -1
    """The seq of the state in the host copy; −1: there is none, or the heap is not frozen."""
    digest: str = ""
    """The digest of the host copy of `whole_at`."""


class Unpin(Message, frozen=True):
    """Unpin the extent's pages, which are about to be given back. Answer: Done.

    The mapping stays, and the next copy may pin its pages again.
    """


class Unmap(Message, frozen=True):
    """Unmap versions that are not in use, and the memory that a frozen heap was loaded from.

    The state manager sends it when host memory is short. Answer: StillMapped.
    """


class StillMapped(Message, frozen=True):
    versions: list[VersionKey]
    """The versions that the rank uses."""


class CopyIn(Message, frozen=True):
    """Copy the extent to the heap and verify its digest. Answer: Copied, or DATA_LOSS."""

    digest: str


class StageState(Message, frozen=True):
    """Copy the whole state to the staging buffer whose memfd is beside, laid out as the extent is.

    The host copy stays as it is. Answer: Copied, with an empty digest.
    """


class LoadStaged(Message, frozen=True):
    """Replace the whole state by the staging buffer whose memfd is beside, and verify its digest.

    The buffer is laid out as the extent is; the host copy stays as it is. Answer: Copied, or
    DATA_LOSS.
    """

    digest: str


class Copied(Message, frozen=True):
    digest: str
    applied: int
    """The seq of the last mutating operation in the heap."""
    resident_bytes: int
    """The heap's memory that is resident afterwards."""
    duration_s: float
    changed: bool = False
    """Whether the heap is past `CopyOut.whole_at`, so that nothing was copied or released."""


class Done(Message, frozen=True):
    """The request took effect."""


class Failed(Message, frozen=True):
    """The request failed, and what it had begun is rolled back."""

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
