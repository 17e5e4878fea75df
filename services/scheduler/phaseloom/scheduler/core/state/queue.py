"""The open operations of a deployment, in order."""

from __future__ import annotations

import bisect
import itertools

import msgspec

from phaseloom.common.contract.ids import OperationKey, VersionKey
from phaseloom.scheduler.core.state.operation import Op


class OperationQueue(msgspec.Struct):
    operations: dict[int, Op] = {}
    """Ordered operations without an outcome, by seq. Above `next_seq` there are also operations
    that have ended; each stays until all lower seqs have ended."""
    unordered: dict[str, Op] = {}
    """Unordered reading operations, by slot."""
    first_seq: int = 1
    """Lower seqs were used by an earlier deployment of this name."""
    next_seq: int = 1
    """Lowest seq without an outcome. It may run. If it only reads, the reading operations that
    directly follow it may run too."""
    head_seq: int = 1
    """Lowest seq that later operations must wait for. Operations that have ended are passed, and so
    is a `save_state` whose snapshot was taken."""
    not_completed: list[int] = []
    """Seqs with an outcome other than COMPLETED, sorted."""
    awaited_seq: int = 0
    """Highest seq of this deployment that any operation has named in `after`."""
    queued_syncs: dict[int, VersionKey] = {}
    """seq of each open `sync_weights` → the weights version that it loads."""
    naming: list[int] = []
    """Seqs of the open `publish_weights` whose version may be named for a while."""
    missing_gradients: list[int] = []
    """Seqs of the `forward_backward`s since the last optimiser step that did not complete."""
    snapshots: list[int] = []
    """Seqs of ordered `save_state`s with a snapshot but no outcome, sorted."""

    def is_done(self, seq: int) -> bool:
        op = self.operations.get(seq)
        return seq < self.next_seq or (op is not None and op.has_ended)

    def was_not_completed(self, seq: int) -> bool:
        index = bisect.bisect_left(self.not_completed, seq)
        return index < len(self.not_completed) and self.not_completed[index] == seq

    def find(self, key: OperationKey) -> Op | None:
        """Return the operation if it is in the queue."""
        seq = key.seq
        return self.unordered.get(key.slot) if seq is None else self.operations.get(seq)

    @property
    def every(self) -> list[Op]:
        """All operations: the ordered ones, then the unordered ones."""
        return [*self.operations.values(), *self.unordered.values()]

    @property
    def has_open(self) -> bool:
        """Whether any operation has no outcome."""
        ops = itertools.chain(self.operations.values(), self.unordered.values())
        return any(not op.has_ended for op in ops)

    @property
    def open_slots(self) -> list[str]:
        """Slots of the operations without an outcome: the ordered ones, then the unordered ones."""
        ordered = [str(seq) for seq in sorted(self.operations) if not self.is_done(seq)]
        return ordered + sorted(self.unordered)

    # --- changed by operations, outcomes and gradients -------------------------------------------

    def add(self, op: Op, seq: int | None) -> None:
        """Add an operation. Args: seq: None if it is unordered."""
        if seq is None:
            self.unordered[op.key.slot] = op
        else:
            self.operations[seq] = op

    def note_sync(self, seq: int, version: VersionKey) -> None:
        self.queued_syncs[seq] = version

    def note_naming(self, seq: int) -> None:
        self.naming.append(seq)

    def note_snapshot(self, op: Op) -> None:
        """Record that the snapshot of a `save_state` was taken. The operations behind it may now
        run."""
        assert not op.has_snapshot, f"{op.key}: a second snapshot"
        op.has_snapshot = True
        if op.key.seq is not None:
            bisect.insort(self.snapshots, op.key.seq)
            self._pass()

    def forget_snapshot(self, op: Op) -> None:
        """Record that the snapshot of an unordered `save_state` was lost with its WPG. The
        operation runs again like any other."""
        op.has_snapshot = False

    def remove(self, op: Op, *, completed: bool) -> bool:
        """Remove an operation that has ended. Above `next_seq`, an ordered one stays until its
        turn.

        Returns: whether `next_seq` advanced.
        """
        seq = op.key.seq
        if seq is None:
            self.unordered.pop(op.key.slot, None)
            return False
        self.queued_syncs.pop(seq, None)
        if seq in self.naming:
            self.naming.remove(seq)
        if op.has_snapshot:
            self.snapshots.remove(seq)
            op.has_snapshot = False
        if not completed:
            bisect.insort(self.not_completed, seq)
        before = self.next_seq
        if seq == before:
            while (head := self.operations.get(self.next_seq)) is not None and head.has_ended:
                del self.operations[self.next_seq]
                self.next_seq += 1
        self._pass()
        return self.next_seq > before

    def take_open(self) -> list[Op]:
        """Record that no open operation will be completed, and return them in order.

        Those above a gap also stay until it is filled. The caller records them as ended.
        """
        open_seqs = sorted(seq for seq, op in self.operations.items() if not op.has_ended)
        ops = [*(self.operations[seq] for seq in open_seqs), *self.unordered.values()]
        self.unordered = {}
        self.queued_syncs = {}
        self.naming = []
        self.snapshots = []
        self.not_completed = sorted([*self.not_completed, *open_seqs])
        while self.operations.pop(self.next_seq, None) is not None:
            self.next_seq += 1
        self.head_seq = self.next_seq
        return ops

    def first_gap(self) -> int:
        """Return the lowest seq that was not queued yet."""
        gap = self.next_seq
        while gap in self.operations:
            gap += 1
        return gap

    def _pass(self) -> None:
        """Advance `head_seq` past operations that have ended or have a snapshot."""
        seq = max(self.next_seq, self.head_seq)
        while (op := self.operations.get(seq)) is not None and (op.has_ended or op.has_snapshot):
            seq += 1
        self.head_seq = seq

    def note_missing_gradients(self, seq: int) -> None:
        self.missing_gradients.append(seq)

    def forget_missing_gradients(self, seq: int | None = None) -> None:
        """Forget missing gradients up to this seq, because a step used or dropped them. None:
        all."""
        later = [] if seq is None else [m for m in self.missing_gradients if m > seq]
        self.missing_gradients = later

    def end(self) -> None:
        """Record that the deployment has ended: empties the possibly long lists and keeps the
        numbers."""
        self.operations = {}
        self.not_completed = []
        self.missing_gradients = []
        self.queued_syncs = {}

    def validate(self, name: str) -> None:
        """Check the invariants. Raises: AssertionError: names the invariant and the deployment."""
        assert all(seq >= self.next_seq for seq in self.operations), (
            f"{name}: an operation below next_seq"
        )
        for seq in range(self.next_seq, self.head_seq):
            passed = self.operations[seq]
            assert passed.has_ended or passed.has_snapshot, (
                f"I1 {name}: head_seq has passed the open operation {seq}"
            )
        head = self.operations.get(self.head_seq)
        is_head = head is None or not (head.has_ended or head.has_snapshot)
        assert is_head, f"{name}: head_seq {self.head_seq} should have advanced"
        assert set(self.naming) <= set(self.operations), f"{name}: a publish that has ended"
        assert set(self.queued_syncs) <= set(self.operations), (
            f"{name}: queued_syncs has a sync that has ended"
        )
        snapshot_seqs = [
            op.key.seq for op in self.every if op.has_snapshot and op.key.seq is not None
        ]
        assert sorted(snapshot_seqs) == self.snapshots, (
            f"{name}: snapshots are {snapshot_seqs}, not {self.snapshots}"
        )
