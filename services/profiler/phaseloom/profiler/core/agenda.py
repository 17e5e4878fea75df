"""The agenda of looks at jobs: their rate is bounded over all jobs, and no job is forgotten.

A look works out a job's trace. The job that has been due longest comes first. A short burst of
looks is free, so that a few jobs never wait for one another. The caller tells the time. Cost:
O(log jobs) for a look, O(1) where no job is due.
"""

from __future__ import annotations

from heapq import heappop, heappush

from phaseloom.common.contract.ids import JobKey

SPACING_S = 0.1
"""The average time between two looks, over all jobs."""
BURST = 20
"""The number of looks that may follow one another at once, after a pause of as many."""


class Agenda:
    def __init__(self) -> None:
        self._due: list[tuple[float, int, JobKey]] = []
        """A heap of (due time, sequence of the entry, job). An entry not in `_waiting` is stale."""
        self._waiting: dict[JobKey, int] = {}
        self._paid_to_s = float("-inf")
        """The time up to which looks are paid for: each look moves it on by `SPACING_S`. It may be
        ahead of the clock by a burst."""

    def __contains__(self, job: JobKey) -> bool:
        return job in self._waiting

    def add(self, job: JobKey, due_s: float, sequence: int) -> None:
        """Have a job looked at, not before `due_s`.

        Args: sequence: the sequence of the entry that makes the job due, unlike any before; it
                  orders jobs that are due at one time.
        """
        self._waiting[job] = sequence
        heappush(self._due, (due_s, sequence, job))

    def discard(self, job: JobKey) -> None:
        self._waiting.pop(job, None)

    def next(self, time_s: float) -> JobKey | None:
        """The job to look at now, taken off the agenda; None: no job is due yet."""
        if time_s < self._paid_to_s - (BURST - 1) * SPACING_S:
            return None
        while self._due and self._due[0][0] <= time_s:
            _, sequence, job = heappop(self._due)
            if self._waiting.get(job) == sequence:
                del self._waiting[job]
                self._paid_to_s = max(self._paid_to_s, time_s) + SPACING_S
                return job
        return None
