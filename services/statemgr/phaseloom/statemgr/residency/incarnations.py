"""A life of a deployment on this node: its ranks, where the state of each is, and what may follow.

Records, and `TRANSITIONS`, the table of steps; `residency` has the books of all lives.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from weakref import WeakSet

from phaseloom.common.contract.errors import InternalError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_layout import TensorSlot, extent_bytes
from phaseloom.common.tensors.tensortable import EMPTY, TensorTable


class State(StrEnum):
    AWAITING = "awaiting"
    """The agent announced it; no rank has registered its heap."""
    FILLING = "filling"
    """The rank has its extent, which holds no state yet."""
    HOST = "host"
    """Offloaded: the host copy is whole and verified."""
    LOADING = "loading"
    RESIDENT = "resident"
    """In device memory: the host copy, if any, is older."""
    OFFLOADING = "offloading"
    DEMOTING = "demoting"
    """In host memory, on its way to NVMe."""
    DEMOTED = "demoted"
    """On NVMe only."""
    PROMOTING = "promoting"
    """On NVMe, on its way to host memory."""
    LOST = "lost"
    """A rank of its life is gone, or it was fenced."""


class Step(StrEnum):
    HEAP_REGISTERED = "heap registered"
    FILLED = "filled"
    LOAD_BEGUN = "load begun"
    LOAD_VERIFIED = "load verified"
    LOAD_FAILED = "load failed"
    OFFLOAD_BEGUN = "offload begun"
    OFFLOAD_VERIFIED = "offload verified"
    OFFLOAD_FAILED = "offload failed"
    RELEASE_UNVERIFIED = "release unverified"
    """Copied out, but the device memory was not given back: it is loaded again."""
    DEMOTE_BEGUN = "demote begun"
    DEMOTE_VERIFIED = "demote verified"
    DEMOTE_FAILED = "demote failed"
    WRITTEN_BACK = "written back"
    """It is on NVMe now, and stays in host memory while nothing needs the room."""
    PROMOTE_BEGUN = "promote begun"
    PROMOTE_VERIFIED = "promote verified"
    PROMOTE_FAILED = "promote failed"


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.AWAITING, Step.HEAP_REGISTERED): State.FILLING,
    (State.FILLING, Step.FILLED): State.HOST,
    (State.HOST, Step.LOAD_BEGUN): State.LOADING,
    (State.LOADING, Step.LOAD_VERIFIED): State.RESIDENT,
    (State.LOADING, Step.LOAD_FAILED): State.HOST,
    (State.RESIDENT, Step.OFFLOAD_BEGUN): State.OFFLOADING,
    (State.OFFLOADING, Step.OFFLOAD_VERIFIED): State.HOST,
    (State.OFFLOADING, Step.OFFLOAD_FAILED): State.RESIDENT,
    (State.OFFLOADING, Step.RELEASE_UNVERIFIED): State.LOADING,
    (State.HOST, Step.DEMOTE_BEGUN): State.DEMOTING,
    (State.DEMOTING, Step.DEMOTE_VERIFIED): State.DEMOTED,
    (State.DEMOTING, Step.DEMOTE_FAILED): State.HOST,
    (State.DEMOTING, Step.WRITTEN_BACK): State.HOST,
    (State.DEMOTED, Step.PROMOTE_BEGUN): State.PROMOTING,
    (State.PROMOTING, Step.PROMOTE_VERIFIED): State.HOST,
    (State.PROMOTING, Step.PROMOTE_FAILED): State.DEMOTED,
}
ON_DEVICE = frozenset({State.LOADING, State.RESIDENT, State.OFFLOADING})
ON_NVME = frozenset({State.DEMOTED, State.PROMOTING})
"""What the host copy is whole in."""
OFFLOADED = frozenset({State.HOST, State.DEMOTING, *ON_NVME})
"""It is on no device; its host copy is whole, in whatever tier."""


class InvalidTransition(InternalError):
    """The shell reported a step that the table does not have; carries the deployment's history."""


@dataclass(slots=True)
class PreparedSeal:
    """Host copies kept whole until they are on disk."""

    seq: int
    is_writing: bool = False


@dataclass(slots=True, eq=False)
class Rank:
    """One process of a life: its heap on one device, and the host copy of it."""

    wpg: Wpg
    index: int
    device: int
    token: str
    state: State = State.AWAITING
    heap_bytes: int = 0
    host_bytes: int = 0
    """Of state that lives in host memory alone, behind the copy of the heap."""
    table: TensorTable = field(default=EMPTY, repr=False)
    extent: int | None = None
    snapshot: int | None = None
    """While a seal is prepared: an extent with what lives in host memory alone, as it was then."""
    pins: bool = False
    """It must be told before the extent's pages are given back."""
    applied: int = 0
    """Of the newest host copy."""
    digest: str = ""
    """Of the newest host copy; empty: it is dirty, or there is none that is whole."""
    is_dirty: bool = False
    """The newest host copy is whole, and its digest not taken yet."""
    is_written_back: bool = False
    """The newest host copy is in host memory, and on NVMe too."""
    num_copies: int = 0
    """Of the heap that were begun: tells the newest host copy from those before."""
    frozen: bool = False
    """Its host copy is a content once it is whole; `extent` is only one that it is filling."""
    model: str = ""
    """See `RegisterHeap.model`."""
    content: SharedCopy | None = None
    held_version: tuple[VersionKey, int] | None = None
    """What its heap is, and since which seq; to become its content once a seal is written."""
    is_copying: bool = False
    """A frozen one is asked for a new host copy: its `extent` is where that goes."""
    history: deque[str] = field(default_factory=lambda: deque(maxlen=32))

    @property
    def tensors(self) -> list[TensorSlot]:
        return self.table.tensors

    @property
    def copy_state(self) -> State:
        """Where its host copy is, whoever else it belongs to."""
        return self.state if self.content is None else self.content.state

    @property
    def shares(self) -> bool:
        """Others hold the same bytes."""
        content = self.content
        return content is not None and (len(content.users) > 1 or content.version is not None)

    @property
    def bytes_above(self) -> int:
        """Host memory taken for it: of a frozen rank that writes, that of two copies."""
        own = self.extent is not None and self.state not in ON_NVME
        shared = self.content is not None and self.content.state not in ON_NVME
        return self.extent_bytes * (own + shared)

    @property
    def has_memory(self) -> bool:
        return bool(self.extents) or self.content is not None

    @property
    def extent_bytes(self) -> int:
        """Of its host copy: what seals, files and digests of it are of."""
        return extent_bytes(self.heap_bytes, self.host_bytes)

    @property
    def extents(self) -> list[int]:
        return [extent for extent in (self.extent, self.snapshot) if extent is not None]

    @property
    def is_whole(self) -> bool:
        """There is a host copy, whole as of `applied`."""
        return self.is_dirty or self.digest != ""

    def copied(self, applied: int, digest: str) -> None:
        """There is a new host copy. Args: digest: empty: it is yet to be taken."""
        self.applied, self.digest, self.is_dirty = applied, digest, not digest

    def overwritten(self) -> None:
        """What there was of a host copy is so no more."""
        self.digest, self.is_dirty, self.is_written_back = "", False, False
        self.num_copies += 1

    @property
    def owner(self) -> str:
        """As the name of its memory: without the incarnation, which is of no use to people."""
        key = self.wpg.key
        return str(key) if len(self.wpg.ranks) == 1 else f"{key} rank {self.index}"

    def __str__(self) -> str:
        if len(self.wpg.ranks) == 1:
            return str(self.wpg)
        return f"rank {self.index} of {self.wpg}"


@dataclass(slots=True, eq=False)
class Wpg:
    """One life of a deployment on this node: it lives and dies whole."""

    key: DeploymentKey
    incarnation: int
    seal_seq: int
    ranks: list[Rank] = field(default_factory=list)
    epoch: int = 0
    prepared: PreparedSeal | None = None
    sealed: set[int] = field(default_factory=set)
    """Seals that this life has written."""
    layouts: WeakSet[TensorTable] = field(default_factory=WeakSet, repr=False)
    """That its ranks have sent, and somebody uses or keeps."""
    rank_offset: int = 0
    """Of its first rank here; `Rank.index` counts from it."""
    num_ranks: int = 0
    """On all nodes."""
    num_users: int = 0
    """Switches, seals and moves upward that need its host copies to stay where they are."""
    last_used: int = 0
    """Count of the uses of this node's deployments at its last one."""
    next_use_s: float | None = None
    """When it is predicted to be used next, on the shell's clock; None: nobody said."""

    @property
    def is_lost(self) -> bool:
        return self.ranks[0].state is State.LOST

    @property
    def devices(self) -> list[int]:
        return [rank.device for rank in self.ranks]

    @property
    def heap_bytes(self) -> int:
        return sum(rank.heap_bytes for rank in self.ranks)

    @property
    def on_device(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.state in ON_DEVICE]

    def __str__(self) -> str:
        return f"{self.key} (incarnation {self.incarnation})"


def is_demotable(wpg: Wpg) -> bool:
    """Nothing needs its host copies to be in host memory."""
    return not wpg.num_users and not wpg.on_device and wpg.prepared is None


@dataclass(slots=True, eq=False)
class SharedCopy:
    number: int
    owner: DeploymentKey
    """Who made it; it may have left since."""
    applied: int
    """seq of the maker's state that these bytes are."""
    num_bytes: int
    table: TensorTable = field(repr=False)
    """The maker's layout."""
    digest: str
    """xxh3-128 in hex: what every load is verified by."""
    extent: int | None
    """Where it lies in host memory; None: it is on NVMe."""
    is_immutable: bool = False
    """No process has it mapped writable, or can."""
    version: VersionKey | None = None
    """The weights version whose memory it is, or was."""
    hash: str = ""
    """BLAKE3 in hex; empty: not known."""
    is_base: bool = False
    """Tenants share it: it was a registered base when they came to."""
    state: State = State.HOST
    users: list[Rank] = field(default_factory=list)

    @property
    def extent_bytes(self) -> int:
        return self.num_bytes

    @property
    def tensors(self) -> list[TensorSlot]:
        return self.table.tensors

    @property
    def tenants(self) -> set[str]:
        return {rank.wpg.key.tenant for rank in self.users}

    @property
    def wpgs(self) -> list[Wpg]:
        return list(dict.fromkeys(rank.wpg for rank in self.users))

    @property
    def last_used(self) -> int:
        return max(wpg.last_used for wpg in self.wpgs)

    @property
    def next_use_s(self) -> float | None:
        """The earliest that is predicted of a user."""
        known = [wpg.next_use_s for wpg in self.wpgs if wpg.next_use_s is not None]
        return min(known, default=None)

    def __str__(self) -> str:
        return f"content {self.number} of {self.owner} at {self.applied}"
