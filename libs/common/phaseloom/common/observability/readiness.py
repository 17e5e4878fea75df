"""Readiness: an operation is ready once it is queued and its predecessors and `after` are done.

This is a fold over the decision log that needs no scheduler state, for observers: the profiler (how
long until a job needs its pool again) and the run report (which operations waited for a device).
Predecessors follow from the ordering rule: a mutating operation waits for every lower `seq` of its
deployment, a reading one for every lower mutating `seq`. A `seq` that has not arrived yet blocks
the operations after it.

A log may start in the middle. A finished operation proves that everything it waited for is done, so
the fold catches up with a deployment at its first finished mutating operation. Operations that end
without running have no log entry and stay unfinished here. Cost: O(waiting operations of the job)
per event.
"""

from __future__ import annotations

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

    def is_done(self, seq: int) -> bool:
        return seq <= self.done_to or seq in self.done_above

    def queue(self, seq: int, kind: str) -> None:
        self.open_kinds[seq] = kind
        self._advance_read_to()

    def finish(self, seq: int, kind: str) -> None:
        self.open_kinds.pop(seq, None)
        if seq > self.done_to:
            self.done_above.add(seq)
        # A mutating operation runs only after all lower ones, so the log must have missed some.
        if kind in MUTATING_KINDS and seq > self.done_to + 1:
            self.done_to = seq
            self.done_above = {s for s in self.done_above if s > seq}
            self.open_kinds = {s: k for s, k in self.open_kinds.items() if s > seq}
        while self.done_to + 1 in self.done_above:
            self.done_to += 1
            self.done_above.remove(self.done_to)
        self._advance_read_to()

    def is_unblocked(self, seq: int, kind: str) -> bool:
        """Whether no earlier operation of the deployment blocks operation `seq`."""
        return seq - 1 <= (self.done_to if kind in MUTATING_KINDS else self.read_to)

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
        self._waiting: dict[JobKey, dict[OperationKey, events.QueuedOperation]] = {}

    def step(self, event: events.Event) -> list[OperationKey]:
        """Apply the next event of the log. Returns: the operations that it made ready, in order of
        arrival."""
        match event:
            case events.QueuedOperation(key=key):
                self._queue(event)
                return self._release(key.job_key)
            case events.OperationFinished(key=key):
                self._finish(key, event.kind)
                return self._release(key.job_key)
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

    def _queue(self, operation: events.QueuedOperation) -> None:
        key, seq = operation.key, operation.key.seq
        deployment = self._deployment(key.deployment_key)
        if seq is not None and (deployment.is_done(seq) or seq in deployment.open_kinds):
            return
        if operation.error is not None:
            # A refused operation counts as failed, so its number is not a gap.
            self._finish(key, "")
            return
        if seq is not None:
            deployment.queue(seq, operation.kind)
        self._waiting.setdefault(key.job_key, {})[key] = operation

    def _finish(self, key: OperationKey, kind: str) -> None:
        self._waiting.get(key.job_key, {}).pop(key, None)
        if key.seq is not None:
            self._deployment(key.deployment_key).finish(key.seq, kind)

    def _release(self, job: JobKey) -> list[OperationKey]:
        waiting = self._waiting.get(job, {})
        ready = [key for key, operation in waiting.items() if self._is_ready(operation)]
        for key in ready:
            del waiting[key]
        return ready

    def _is_ready(self, operation: events.QueuedOperation) -> bool:
        key = operation.key
        for dependency in operation.after:
            deployment = DeploymentKey(key.tenant, key.job, dependency.deployment)
            if not self._deployment(deployment).is_done(dependency.seq):
                return False
        if key.seq is None:
            return True
        return self._deployment(key.deployment_key).is_unblocked(key.seq, operation.kind)
