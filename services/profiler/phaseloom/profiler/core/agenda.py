"""Rate limiter for profiling jobs: limits the total rate of reviews and serves every waiting job.

A review computes a job's trace. The job that has waited longest comes first. Short bursts are
allowed, so a few jobs never delay one another. The caller passes the time. Cost: O(log jobs) per
review, O(1) if no job needs one.
"""

from __future__ import annotations

from heapq import heappop, heappush

from phaseloom.common.contract.ids import JobKey

SPACING_S = 0.1
"""Average time between two reviews, over all jobs."""
BURST = 20
"""Number of reviews allowed at once after a pause of `BURST * SPACING_S`."""


class Agenda:
    def __init__(self) -> None:
        self._queue: list[tuple[float, int, JobKey]] = []
        """Heap of (due time, sequence of the entry, job). An entry not in `_waiting` is stale."""
        self._waiting: dict[JobKey, int] = {}
        self._charged_until_s = float("-inf")
        """Time up to which reviews have been charged: each review adds `SPACING_S`. It may be up to
        one
        burst ahead of the clock."""

    def __contains__(self, job: JobKey) -> bool:
        return job in self._waiting

    def add(self, job: JobKey, due_s: float, sequence: int) -> None:
        """Schedule a review of a job, not before `due_s`.

        Args: sequence: log sequence of the entry that makes the job due. It must be unique; it
                  orders jobs that are due at the same time.
        """
        self._waiting[job] = sequence
        heappush(self._queue, (due_s, sequence, job))

    def discard(self, job: JobKey) -> None:
        self._waiting.pop(job, None)

    def next(self, time_s: float) -> JobKey | None:
        """Remove and return the job to review now, or None if no job is due."""
        if time_s < self._charged_until_s - (BURST - 1) * SPACING_S:
            return None
        while self._queue and self._queue[0][0] <= time_s:
            _, sequence, job = heappop(self._queue)
            if self._waiting.get(job) == sequence:
                del self._waiting[job]
                self._charged_until_s = max(self._charged_until_s, time_s) + SPACING_S
                return job
        return None
