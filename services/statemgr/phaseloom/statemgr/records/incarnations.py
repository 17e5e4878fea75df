"""Incarnations of deployments on this node: their ranks, and the location of each rank's state.

`TRANSITIONS` is the table of steps from state to state. `Residency` has the incarnations of all
deployments.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from phaseloom.common.contract.errors import Code, InternalError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_layout import TensorSlot, extent_bytes
from phaseloom.common.tensors.tensortable import EMPTY, TensorTable


class State(StrEnum):
    """The location of a rank's state or of a host copy. Host copies use HOST and the NVMe states
    only."""

    AWAITING = "awaiting"
    """The agent has announced the rank, which has not registered its heap yet."""
    FILLING = "filling"
    """The rank has an extent, which holds no state yet."""
    HOST = "host"
    """Rank: it is offloaded, and its host copy is complete. Host copy: it is in host memory."""
    LOADING = "loading"
    """The host copy is being copied into device memory."""
    RESIDENT = "resident"
    """The state is in device memory; the host copy, if any, may be older."""
    OFFLOADING = "offloading"
    """The heap is being copied out of device memory."""
    DEMOTING = "demoting"
    """The host copy is in host memory, on its way to NVMe."""
    DEMOTED = "demoted"
    """The host copy is on NVMe only, and older than the heap while its rank is resident. Or the
    rank has no whole copy yet, and no host memory for one."""
    PROMOTING = "promoting"
    """The host copy is on NVMe, on its way to host memory."""
    LOST = "lost"
    """A rank of the incarnation has left, or the incarnation was fenced or dropped."""


class Step(StrEnum):
    """A step of a rank or host copy that the shell reports; see `TRANSITIONS`."""

    HEAP_REGISTERED = "heap registered"
    FILLED = "filled"
    LOAD_BEGUN = "load begun"
    LOAD_VERIFIED = "load verified"
    LOAD_FAILED = "load failed"
    OFFLOAD_BEGUN = "offload begun"
    OFFLOAD_VERIFIED = "offload verified"
    OFFLOAD_FAILED = "offload failed"
    RELEASE_UNVERIFIED = "release unverified"
    """The heap was copied out, but its device memory was not released, so it is loaded again."""
    OCCUPIED = "occupied"
    """A copy on NVMe has host memory again, for the heap that will be copied out."""
    DEMOTE_BEGUN = "demote begun"
    DEMOTE_VERIFIED = "demote verified"
    DEMOTE_FAILED = "demote failed"
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
    (State.DEMOTED, Step.OCCUPIED): State.HOST,
    (State.HOST, Step.DEMOTE_BEGUN): State.DEMOTING,
    (State.DEMOTING, Step.DEMOTE_VERIFIED): State.DEMOTED,
    (State.DEMOTING, Step.DEMOTE_FAILED): State.HOST,
    (State.DEMOTED, Step.PROMOTE_BEGUN): State.PROMOTING,
    (State.PROMOTING, Step.PROMOTE_VERIFIED): State.HOST,
    (State.PROMOTING, Step.PROMOTE_FAILED): State.DEMOTED,
}
ON_DEVICE = frozenset({State.LOADING, State.RESIDENT, State.OFFLOADING})
ON_NVME = frozenset({State.DEMOTED, State.PROMOTING})
"""States in which the only complete copy is the one on NVMe."""


class InvalidTransition(InternalError):
    """The shell reported a step that the table does not have. The message has the rank's
    history."""


def following(item: Rank | HostCopy, step: Step) -> State:
    """The state after a step. Raises: InvalidTransition: the table does not have the step."""
    state = TRANSITIONS.get((item.state, step))
    if state is None:
        before = f"; before: {'; '.join(item.history)}" if isinstance(item, Rank) else ""
        raise InvalidTransition(f"{item} is {item.state}: no {step!r} from there{before}")
    return state


@dataclass(slots=True)
class PreparedSeal:
    """A seal whose host copies must not be overwritten until they are on disk."""

    seq: int
    is_writing: bool = False


class Loan(NamedTuple):
    """Host memory that a rank borrows while an operation needs it."""

    extent: int
    num_bytes: int
    is_host_copy: bool
    """Whether the memory is the host copy that a frozen rank had when it borrowed. The loan is one
    more holder of it."""


@dataclass(slots=True, eq=False)
class Rank:
    """One process of an incarnation: its heap on one device, and the host copy of that heap."""

    wpg: Wpg
    index: int
    device: int
    token: str
    state: State = State.AWAITING
    heap_bytes: int = 0
    scratch_bytes: int = 0
    """Device memory next to the heap. It comes and goes with the heap and is never copied."""
    host_bytes: int = 0
    """Bytes of state that exist in host memory only, after the copy of the heap."""
    table: TensorTable = field(default=EMPTY, repr=False)
    copy: HostCopy | None = None
    """The host copy. None: the rank has no heap yet, or is frozen and has no complete copy yet."""
    new_extent: int | None = None
    """The extent of a frozen rank's next host copy, until that copy is complete."""
    snapshot: int | None = None
    """The extent with the host-only state as it was when a seal was prepared, if any; with all
    state if the rank's extent is device memory meanwhile (`is_in_extent`)."""
    loans: dict[int, Loan] = field(default_factory=dict)
    """Borrowed memory, by the rank's own numbers."""
    pins: bool = False
    """Whether the rank's device pins the extent's pages, so that the rank must unpin them before
    they are given back."""
    emulated: bool = False
    """See `RegisterHeap.emulated`."""
    applied: int = 0
    """The seq of the newest host copy."""
    frozen: bool = False
    """Whether the rank does not train, so that it may share its host copy."""
    model: str = ""
    """See `RegisterHeap.model`."""
    held_version: tuple[VersionKey, int] | None = None
    """The version that a frozen rank's heap equals, and the seq since when. Its memory becomes the
    host copy at once, or at the next copy-out if a seal or a copy is under way."""
    is_copying: bool = False
    """Whether a copy-out of a frozen rank to its `new_extent` is under way."""
    history: deque[str] = field(default_factory=lambda: deque(maxlen=32))
    """The last transitions, for the message of an invalid one."""

    @property
    def tensors(self) -> list[TensorSlot]:
        return self.table.tensors

    @property
    def extent(self) -> int | None:
        """The extent that the rank writes: that of its own host copy or, if it is frozen, that of
        its next one."""
        return self.new_extent if self.copy is None or self.frozen else self.copy.extent

    @property
    def digest(self) -> str:
        """The digest of the host copy; empty: the copy is dirty, or no copy is complete."""
        return "" if self.copy is None else self.copy.digest

    @property
    def is_dirty(self) -> bool:
        return self.copy is not None and self.copy.is_dirty

    @property
    def is_whole(self) -> bool:
        """Whether there is a whole host copy, at `applied`."""
        return self.copy is not None and self.copy.is_whole

    @property
    def has_other_layout(self) -> bool:
        """Whether the host copy is a version in another layout than the heap."""
        return self.copy is not None and not self.copy.is_laid_out_as(self)

    @property
    def copy_bytes(self) -> int:
        """Size of the host copy."""
        return 0 if self.copy is None else self.copy.num_bytes

    @property
    def is_below(self) -> bool:
        """Whether the host copy is on NVMe."""
        return self.copy is not None and self.copy.state in ON_NVME

    @property
    def has_memory(self) -> bool:
        """Whether the rank has a host copy or an extent."""
        return self.copy is not None or bool(self.extents)

    @property
    def device_bytes(self) -> int:
        """Device memory of the rank while it is resident."""
        return self.heap_bytes + self.scratch_bytes

    @property
    def extent_bytes(self) -> int:
        """Size of the whole host copy, which seals, files and digests cover."""
        return extent_bytes(self.heap_bytes, self.host_bytes)

    @property
    def extents(self) -> list[int]:
        """Extents other than the host copy's: the next copy's, and the snapshot for a seal."""
        return [extent for extent in (self.new_extent, self.snapshot) if extent is not None]

    @property
    def is_in_extent(self) -> bool:
        """Whether the rank's extent is also the memory of its heap while it is resident, so that a
        switch copies nothing, but changes what a seal would read."""
        return self.emulated and not self.frozen and not self.host_bytes

    @property
    def borrowed(self) -> list[int]:
        """The extents of all loans. That of a host copy may occur more than once."""
        return [loan.extent for loan in self.loans.values()]

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of the loans that are separate memory."""
        return sum(loan.num_bytes for loan in self.loans.values() if not loan.is_host_copy)

    def copied(self, applied: int, digest: str) -> None:
        """Record a new host copy in the memory of the old one.

        Args: digest: of the new copy; empty: not computed yet.
        """
        assert self.copy is not None
        self.applied, self.copy.digest, self.copy.is_dirty = applied, digest, not digest

    @property
    def owner(self) -> str:
        """The rank's name for people, without the incarnation, which would not help them."""
        key = self.wpg.key
        return str(key) if len(self.wpg.ranks) == 1 else f"{key} rank {self.index}"

    def __str__(self) -> str:
        if len(self.wpg.ranks) == 1:
            return str(self.wpg)
        return f"rank {self.index} of {self.wpg}"


@dataclass(slots=True, eq=False)
class Wpg:
    """One incarnation of a deployment on this node. Its ranks are lost together."""

    key: DeploymentKey
    incarnation: int
    seal_seq: int
    """The seq of the seal that the incarnation starts from; 0: none."""
    ranks: list[Rank] = field(default_factory=list)
    epoch: int = 0
    prepared: PreparedSeal | None = None
    sealed: set[int] = field(default_factory=set)
    """Seqs of the seals that this incarnation has written."""
    rank_offset: int = 0
    """Number of this node's first rank, counted over all nodes. `Rank.index` counts from it."""
    num_ranks: int = 0
    """Ranks of the incarnation on all nodes."""
    num_users: int = 0
    """Switches, seals and promotions that need the host copies to stay in host memory."""
    last_used: int = 0
    """Time of the last use, as a count of the uses of this node's deployments."""
    next_use_s: float = math.inf
    """Predicted time of the next use, on the shell's clock; infinite: no prediction."""

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
        """Ranks in device memory, or on their way in or out."""
        return [rank for rank in self.ranks if rank.state in ON_DEVICE]

    def check_alive(self) -> None:
        """Raises: ResourceError: ABORTED: the incarnation is over."""
        if self.is_lost:
            raise ResourceError(f"{self} is over", code=Code.ABORTED)

    def __str__(self) -> str:
        return f"{self.key} (incarnation {self.incarnation})"


def is_demotable(wpg: Wpg) -> bool:
    """Whether nothing needs the incarnation's host copies in host memory."""
    return not wpg.num_users and not wpg.on_device and wpg.prepared is None


@dataclass(slots=True, eq=False)
class HostCopy:
    """The newest whole state of a rank that trains, or of all frozen ranks whose bytes are equal.
    These ranks are its users."""

    number: int
    owner: DeploymentKey
    """The deployment that made the copy, and may have left since."""
    num_bytes: int
    extent: int | None
    """The extent in host memory; None: a frozen copy that is on NVMe. A rank that trains has its
    extent mapped, so that extent stays even without memory."""
    is_frozen: bool = False
    """Whether the users are frozen ranks, which may share the bytes because nobody overwrites
    them."""
    digest: str = ""
    """The xxh3-128 in hex that every load is verified by; empty: the copy is dirty, or not
    whole."""
    is_dirty: bool = False
    """Whether the copy is whole but its digest has not been computed yet."""
    num_writes: int = 0
    """Number of times that the copy was overwritten; distinguishes the newest bytes from older
    ones."""
    is_immutable: bool = False
    """Whether the memory is sealed: no process has it mapped writable, or can."""
    version: VersionKey | None = None
    """The weights version whose memory the copy is, or was; None: separate memory."""
    table: TensorTable = field(default=EMPTY, repr=False)
    """The layout of a copy that is or was a version and has users with other layouts; empty: the
    layout is that of the users' heaps."""
    hash: str = ""
    """The BLAKE3 of the bytes in hex; empty: not known yet."""
    is_base: bool = False
    """Whether tenants share the copy; it was a registered frozen base when they started to."""
    state: State = State.HOST
    users: list[Rank] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.is_dirty or self.digest != ""

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
    def next_use_s(self) -> float:
        """The earliest predicted use of all users; infinite: no prediction."""
        return min(wpg.next_use_s for wpg in self.wpgs)

    @property
    def is_demotable(self) -> bool:
        """Whether the copy may be demoted now, if nothing else holds its memory."""
        return self.is_whole and self.state is State.HOST and all(map(is_demotable, self.wpgs))

    def is_laid_out_as(self, rank: Rank) -> bool:
        """Whether the bytes are the rank's heap, one for one."""
        return self.num_bytes == rank.extent_bytes and self.table in {EMPTY, rank.table}

    def overwritten(self) -> None:
        """Record that the copy is incomplete while it is overwritten, until `Rank.copied`."""
        self.digest, self.is_dirty = "", False
        self.num_writes += 1

    def __str__(self) -> str:
        return f"host copy {self.number} of {self.owner}"
