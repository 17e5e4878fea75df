"""The node-local protocol between a rank and its node's state manager, over a Unix socket.

Each rank presents the token that the agent got registered for one deployment and incarnation.
Calls go both ways on a rank's connection: a rank asks for memory, the state manager tells it to
copy its device heap out or in. `phaseloom.common.transport.framing` carries the messages.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.base import Message
from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_agent import (
    AgentHello,
    DropVersions,
    DropWpg,
    FetchState,
    FinishHandover,
    HandOver,
    HandoverFinished,
    KeepHandles,
    Prefetch,
    PrepareSeal,
    RegisterWpg,
    Sealed,
    StatusReport,
    StatusRequest,
    Switched,
    SwitchIn,
    SwitchOut,
    Welcome,
    WriteSeal,
)
from phaseloom.common.contract.state_layout import PartSources, Slice, VersionParts


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
    is_suspect: bool = False
    """Whether what came before did not match its digest: the state manager verifies its memory
    first, drops it where it is bad, and gets the version again, from its disk or from `sources`."""


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
    is_suspect: bool = False
    """As in OpenVersion."""


class HoldVersion(Message, frozen=True):
    """The frozen heap has exactly this version's bytes: its memory may be the host copy.

    Answer: Done, also where it is not taken as one.
    """

    version: VersionKey
    applied: int
    """seq of the sync."""


class TakeSnapshot(Message, frozen=True):
    """Copy the present state of every rank on this node for an operation's checkpoint.

    A node's first rank sends it between two operations. Answer: SnapshotTaken; then the ranks may
    go on.

    Raises: ALREADY_EXISTS: another operation's. RESOURCE_EXHAUSTED, with the numbers.
    """

    operation: str
    """Its id: whatever is asked again for it is answered the same."""
    name: str
    """Of the checkpoint."""
    seq: int
    """The last mutating operation in the state."""


class SnapshotTaken(Message, frozen=True):
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


class CheckpointRead(Message, frozen=True):
    weights_sha256: str
    """Of the weights when they were saved; empty: another program wrote them."""
    digest: str = ""
    """Of an extent that was filled."""


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
    """The extent's pages are about to be given back: unpin them. Answer: Done.

    The mapping stays; whoever copies next may pin what it then holds.
    """


class Unmap(Message, frozen=True):
    """Host memory is short: unmap the weights versions that are not in use, and what a frozen heap
    was loaded from. Answer: StillMapped."""


class StillMapped(Message, frozen=True):
    versions: list[VersionKey]
    """Those that the rank uses."""


class CopyIn(Message, frozen=True):
    """Copy the extent to the heap and verify. Answer: Copied, or DATA_LOSS."""

    digest: str


class StageState(Message, frozen=True):
    """Copy the whole state to the memfd beside, laid out as the extent is. Answer: Copied, whose
    digest is empty. The host copy stays as it is."""


class LoadStaged(Message, frozen=True):
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


class Done(Message, frozen=True):
    """It took effect."""


class Failed(Message, frozen=True):
    """It did not, and what it had begun is rolled back."""

    error: ErrorInfo


StateMessage = (
    AgentHello
    | Welcome
    | HandOver
    | FinishHandover
    | HandoverFinished
    | KeepHandles
    | RegisterWpg
    | SwitchIn
    | SwitchOut
    | Switched
    | PrepareSeal
    | WriteSeal
    | Sealed
    | FetchState
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
    | TakeSnapshot
    | SnapshotTaken
    | WriteCheckpoint
    | CheckpointWritten
    | ReadCheckpoint
    | CheckpointRead
    | PruneCheckpoints
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
