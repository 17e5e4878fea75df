"""The operations of a deployment that are open, in their order.

One record a deployment. Each of its fields is written by one module: here, or by its owner.
"""

from __future__ import annotations

import bisect

import msgspec

from phaseloom.common.contract.ids import OperationKey, VersionKey
from phaseloom.scheduler.core.state.operation import Op


class OperationQueue(msgspec.Struct):
    operations: dict[int, Op] = {}
    """Ordered operations without an outcome, by seq. Above `next_seq` also some that have ended:
    each stays until all below it have."""
    unordered: dict[str, Op] = {}
    """Reading operations without a place in the order, by slot."""
    first_seq: int = 1
    """Lower seqs were used by an earlier deployment of this name."""
    next_seq: int = 1
    """The lowest seq without an outcome: it may run, and so may the reading ones that follow it if
    it only reads too."""
    head_seq: int = 1
    """The lowest seq that those behind it have to wait for: an operation that has ended, or a
    `save_state` whose snapshot is taken, lets them go on."""
    not_completed: list[int] = []
    """Seqs whose outcome was not COMPLETED, sorted."""
    awaited_seq: int = 0
    """The highest seq of this deployment that an operation ever named in `after`."""
    queued_syncs: dict[int, VersionKey] = {}
    """Weights version that each open `sync_weights` brings, by seq."""
    missing_gradients: list[int] = []
    """Seqs of the `forward_backward`s since the last step that were not completed."""
    snapshots: list[int] = []
    """Seqs of ordered `save_state`s with a snapshot and without an outcome, sorted."""

    def is_done(self, seq: int) -> bool:
        """Whether this ordered operation has an outcome."""
        op = self.operations.get(seq)
        return seq < self.next_seq or (op is not None and op.has_ended)

    def was_not_completed(self, seq: int) -> bool:
        index = bisect.bisect_left(self.not_completed, seq)
        return index < len(self.not_completed) and self.not_completed[index] == seq

    def find(self, key: OperationKey) -> Op | None:
        """The operation of this key, if it is in the queue."""
        seq = key.seq
        return self.unordered.get(key.slot) if seq is None else self.operations.get(seq)

    @property
    def every(self) -> list[Op]:
        """The ordered operations, then the unordered ones."""
        return [*self.operations.values(), *self.unordered.values()]

    # --- changed by operations, outcomes and gradients -------------------------------------------

    def add(self, op: Op, seq: int | None) -> None:
        """Put an operation into the queue. Args: seq: its own; None: it has no place in the
        order."""
        if seq is None:
            self.unordered[op.key.slot] = op
        else:
            self.operations[seq] = op

    def note_sync(self, seq: int, version: VersionKey) -> None:
        self.queued_syncs[seq] = version

    def note_snapshot(self, op: Op) -> None:
        """Note that the snapshot of a `save_state` is taken: the operations behind it may go on."""
        assert not op.has_snapshot, f"{op.key}: a second snapshot"
        op.has_snapshot = True
        if op.key.seq is not None:
            bisect.insort(self.snapshots, op.key.seq)
            self._pass()

    def forget_snapshot(self, op: Op) -> None:
        """Note that the snapshot of an unordered `save_state` is gone with its WPG: it is run anew
        as any other operation."""
        op.has_snapshot = False

    def remove(self, op: Op, *, completed: bool) -> bool:
        """Take an operation that has ended off the queue.

        Above `next_seq` an ordered one stays until its turn comes.

        Returns: whether `next_seq` moved on.
        """
        seq = op.key.seq
        if seq is None:
            self.unordered.pop(op.key.slot, None)
            return False
        self.queued_syncs.pop(seq, None)
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

    def _pass(self) -> None:
        """Move `head_seq` past the operations that have ended or have their snapshot."""
        seq = max(self.next_seq, self.head_seq)
        while (op := self.operations.get(seq)) is not None and (op.has_ended or op.has_snapshot):
            seq += 1
        self.head_seq = seq

    def note_missing_gradients(self, seq: int) -> None:
        self.missing_gradients.append(seq)

    def forget_missing_gradients(self, seq: int | None = None) -> None:
        """Forget which gradients are missing below this seq, since a step used or dropped them;
        None: all."""
        later = [] if seq is None else [m for m in self.missing_gradients if m > seq]
        self.missing_gradients = later

    def end(self) -> None:
        """Note that the deployment has ended: the lists, which may be long, are emptied, and the
        numbers stay."""
        self.operations = {}
        self.not_completed = []
        self.missing_gradients = []
        self.queued_syncs = {}

    def validate(self, name: str) -> None:
        """Raises: AssertionError: names the invariant and the deployment."""
        assert all(seq >= self.next_seq for seq in self.operations), f"{name}: stale op"
        for seq in range(self.next_seq, self.head_seq):
            passed = self.operations[seq]
            assert passed.has_ended or passed.has_snapshot, f"I1 {name}: {seq} is not behind it yet"
        head = self.operations.get(self.head_seq)
        is_head = head is None or not (head.has_ended or head.has_snapshot)
        assert is_head, f"{name}: {self.head_seq} is passed, and still the head"
        assert set(self.queued_syncs) <= set(self.operations), f"{name}: a sync that ended"
        taken = [op.key.seq for op in self.every if op.has_snapshot and op.key.seq is not None]
        assert sorted(taken) == self.snapshots, f"{name}: saves {taken}, known as {self.snapshots}"
