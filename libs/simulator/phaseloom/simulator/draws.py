"""The duration of each phase of a job in each iteration.

Durations are drawn from a seed of the job, in the order of its iterations, independently of the
schedule. So an iteration takes the same time under every policy and when it is repeated after a
crash.
"""

from __future__ import annotations

import math
import random

from phaseloom.simulator.jobs import Phase, SimJob


class Draws:
    def __init__(self, job: SimJob, seed: int) -> None:
        self._job = job
        self._random = random.Random(f"{seed}/{job.tenant}/{job.name}")
        self._durations_s: dict[int, list[float]] = {}
        """Iteration → its durations, since the last checkpoint."""
        self._next = 0
        self._oldest = 0
        """The first iteration that may be requested again."""
        self._fixed = None if _varies(job) else [phase.mean_s for phase in job.phases]

    def of(self, iteration: int) -> list[float]:
        """Seconds of each phase. Callers request iterations in order, and may repeat some."""
        if self._fixed is not None:
            return self._fixed
        while self._next <= iteration:
            self._durations_s[self._next] = [self._draw(phase) for phase in self._job.phases]
            self._next += 1
        return self._durations_s[iteration]

    def forget_before(self, iteration: int) -> None:
        for old_iteration in range(self._oldest, iteration):
            self._durations_s.pop(old_iteration, None)
        self._oldest = max(self._oldest, iteration)

    def _draw(self, phase: Phase) -> float:
        job = self._job
        factor = 1.0
        for drift in job.drift:
            if drift.pool == phase.pool:
                factor *= drift.factor(self._next / job.iterations)
        duration_s = phase.mean_s * factor
        if phase.sigma:
            duration_s *= math.exp(self._random.gauss(0.0, phase.sigma) - phase.sigma**2 / 2)
        # The token limit does not drift.
        return min(duration_s, phase.worst_s) if phase.worst_s else duration_s


def _varies(job: SimJob) -> bool:
    return bool(job.drift) or any(phase.sigma for phase in job.phases)
