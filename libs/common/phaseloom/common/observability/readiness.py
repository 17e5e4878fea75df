"""Readiness: an operation is ready once it is queued and its predecessors and `after` are done.

This is a fold over the decision log that needs no scheduler state, for observers: the profiler (how
long until a job needs its pool again) and the run report (which operations waited for a device).
Predecessors follow from the ordering rule: a mutating operation waits for every lower `seq` of its
deployment, a reading one for every lower mutating `seq`. A `seq` that has not arrived yet blocks
the operations after it.

A log may start in the middle. A finished operation proves that everything it waited for is done, so
the fold catches up with a deployment at its first finished mutating operation. Operations that end
without running have no log entry and stay unfinished here. Cost: O(1) per event,
plus the operations that it makes ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from phaseloom.common.contract import events
from phaseloom.common.contract.ids import DeploymentKey, JobKey, OperationKey
from phaseloom.common.contract.kinds import MUTATING_KINDS, READING_KINDS


@dataclass(slots=True)
class _Deployment:
    done_to: int = 0
    """All operations up to this seq are done."""
    done_above: set[int] = field(default_factory=set)
    open_kinds: dict[int, str] = field(default_factory=dict)
    """Seq → kind of each operation that is queued and not done."""
    read_to: int = 0
    """All operations up to this seq are done or reading, so they do not block a reading
    operation."""
    blocked: dict[int, events.QueuedOperation] = field(default_factory=dict)
    """Operations that an earlier one of the deployment blocks, by seq."""
    unblocked_to: int = 0
    """No reading operation up to this seq is blocked."""
    awaited: dict[int, list[events.QueuedOperation]] = field(default_factory=dict)
    """Seq → operations of the job that name it in `after` and that nothing else blocks."""

    def is_done(self, seq: int) -> bool:
        return seq <= self.done_to or seq in self.done_above

    def queue(self, seq: int, kind: str) -> None:
        self.open_kinds[seq] = kind
        self._advance_read_to()

    def finish(self, seq: int, kind: str) -> range:
        """Returns: the seqs that are done now and may not have been before."""
        done = range(seq, seq + 1)
        self.open_kinds.pop(seq, None)
        if seq > self.done_to:
            self.done_above.add(seq)
        # A mutating operation runs only after all lower ones, so the log must have missed some.
        if kind in MUTATING_KINDS and seq > self.done_to + 1:
            done = range(self.done_to + 1, seq + 1)
            self.done_to = seq
            self.done_above = {s for s in self.done_above if s > seq}
            self.open_kinds = {s: k for s, k in self.open_kinds.items() if s > seq}
        while self.done_to + 1 in self.done_above:
            self.done_to += 1
            self.done_above.remove(self.done_to)
        self._advance_read_to()
        return done

    def unblock(self) -> list[events.QueuedOperation]:
        """Remove the operations that no earlier one of the deployment blocks any longer."""
        candidates: Sequence[int] = range(self.unblocked_to + 1, self.read_to + 2)
        if len(candidates) > len(self.blocked):  # the log started in the middle
            candidates = sorted(seq for seq in self.blocked if seq <= self.read_to + 1)
        self.unblocked_to = self.read_to
        return [
            self.blocked.pop(seq)
            for seq in candidates
            if seq in self.blocked and self._is_unblocked(seq)
        ]

    def pop_awaiting(self, done: range) -> list[events.QueuedOperation]:
        """Remove the operations that waited for these seqs."""
        seqs = done if len(done) <= len(self.awaited) else [s for s in self.awaited if s in done]
        return [operation for seq in seqs for operation in self.awaited.pop(seq, ())]

    def _is_unblocked(self, seq: int) -> bool:
        is_mutating = self.blocked[seq].kind in MUTATING_KINDS
        return seq - 1 <= (self.done_to if is_mutating else self.read_to)

    def _advance_read_to(self) -> None:
        self.read_to = max(self.read_to, self.done_to)
        while (seq := self.read_to + 1) in self.done_above or (
            self.open_kinds.get(seq) in READING_KINDS
        ):
            self.read_to = seq


class Readiness:
    """A fold over the decision log. `step` returns the operations that each event made ready."""

    def __init__(self) -> None:
        self._deployments: dict[DeploymentKey, _Deployment] = {}
        self._waiting: dict[JobKey, dict[OperationKey, int]] = {}
        """Job → its waiting operations, each with its number in the order of arrival."""
        self._num_arrived = 0

    def step(self, event: events.Event) -> list[OperationKey]:
        """Apply the next event of the log. Returns: the operations that it made ready, in order of
        arrival."""
        match event:
            case events.QueuedOperation(key=key):
                return self._queue(event)
            case events.OperationFinished(key=key):
                return self._finish(key, event.kind)
            case events.DeploymentDeleted(deployment=deployment):
                waiting = self._waiting.get(deployment.job_key, {})
                for key in [key for key in waiting if key.deployment_key == deployment]:
                    del waiting[key]
            case events.JobFinished(job=job):
                self._waiting.pop(job, None)
                for deployment in [key for key in self._deployments if key.job_key == job]:
                    del self._deployments[deployment]
        return []

    def _deployment(self, key: DeploymentKey) -> _Deployment:
        deployment = self._deployments.get(key)
        if deployment is None:
            deployment = self._deployments[key] = _Deployment()
        return deployment

    def _queue(self, operation: events.QueuedOperation) -> list[OperationKey]:
        key, seq = operation.key, operation.key.seq
        deployment = self._deployment(key.deployment_key)
        if seq is not None and (deployment.is_done(seq) or seq in deployment.open_kinds):
            return []
        if operation.error is not None:
            # A refused operation counts as failed, so its number is not a gap.
            return self._finish(key, "")
        self._num_arrived += 1
        self._waiting.setdefault(key.job_key, {}).setdefault(key, self._num_arrived)
        if seq is None:
            # Nothing but its `after` can block it.
            return self._ready([operation])
        deployment.blocked[seq] = operation
        deployment.queue(seq, operation.kind)
        return self._ready(deployment.unblock())

    def _finish(self, key: OperationKey, kind: str) -> list[OperationKey]:
        self._waiting.get(key.job_key, {}).pop(key, None)
        if key.seq is None:
            return []
        deployment = self._deployment(key.deployment_key)
        deployment.blocked.pop(key.seq, None)
        done = deployment.finish(key.seq, kind)
        return self._ready(deployment.unblock() + deployment.pop_awaiting(done))

    def _ready(self, unblocked: list[events.QueuedOperation]) -> list[OperationKey]:
        """Return the operations whose `after` is done, and let the others wait for it."""
        ready: dict[OperationKey, int] = {}
        for operation in unblocked:
            key = operation.key
            number = self._waiting.get(key.job_key, {}).get(key)
            if number is None or self._waits(operation):
                continue  # it has ended, or its deployment was deleted
            del self._waiting[key.job_key][key]
            ready[key] = number
        return sorted(ready, key=ready.__getitem__)

    def _waits(self, operation: events.QueuedOperation) -> bool:
        key = operation.key
        for dependency in operation.after:
            name = DeploymentKey(key.tenant, key.job, dependency.deployment)
            deployment = self._deployment(name)
            if not deployment.is_done(dependency.seq):
                deployment.awaited.setdefault(dependency.seq, []).append(operation)
                return True
        return False
