"""Which job is looked at next, and when: a bounded number of looks over all jobs, none forgotten.

A look works out a job's trace. Whoever has been due longest comes first; a short burst of looks is
free, so that a few jobs never wait for one another. Time is the caller's. Cost: O(log jobs) a look,
O(1) where nobody is due.
"""

from __future__ import annotations

from heapq import heappop, heappush

from phaseloom.common.contract.ids import JobKey

SPACING_S = 0.1
"""Between two looks, over all jobs, on average."""
BURST = 20
"""Looks that may follow one another at once, after as many were left out."""


class Agenda:
    def __init__(self) -> None:
        self._due: list[tuple[float, int, JobKey]] = []
        """A heap of (due time, sequence of the entry, job); what is not in `_waiting` is stale."""
        self._waiting: dict[JobKey, int] = {}
        self._paid_to_s = float("-inf")
        """Each look pays for `SPACING_S`; it may be paid ahead for a burst."""

    def __contains__(self, job: JobKey) -> bool:
        return job in self._waiting

    def add(self, job: JobKey, due_s: float, sequence: int) -> None:
        """Have a job looked at, not before `due_s`.

        Args: sequence: of what makes it due, unlike any before; equal times are told apart by it.
        """
        self._waiting[job] = sequence
        heappush(self._due, (due_s, sequence, job))

    def discard(self, job: JobKey) -> None:
        self._waiting.pop(job, None)

    def next(self, time_s: float) -> JobKey | None:
        """The job to look at now, which is then off the agenda; None: nobody, or not yet."""
        if time_s < self._paid_to_s - (BURST - 1) * SPACING_S:
            return None
        while self._due and self._due[0][0] <= time_s:
            _, sequence, job = heappop(self._due)
            if self._waiting.get(job) == sequence:
                del self._waiting[job]
                self._paid_to_s = max(self._paid_to_s, time_s) + SPACING_S
                return job
        return None
