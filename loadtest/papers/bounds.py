"""A lower bound of the makespan of given jobs, which no schedule can beat.

Durations are drawn from a job's own seed whatever the schedule, so they are known beforehand. A job
takes at least as long as alone on nodes of its own. From any arrival on, the jobs that come then or
later need the time of a pool's nodes: operations do not overlap on a node, and where the number of
jobs on a node is bounded, each keeps its place until it ends. Loads, switches, failures are free.

The bound holds for jobs whose deployments run one operation at a time.
Cost: O(iterations + jobs · pools).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phaseloom.simulator.draws import Draws
from phaseloom.simulator.jobs import SimJob


class _ShortestRun:
    """The shortest run of one job."""

    def __init__(self, job: SimJob, seed: int) -> None:
        self.job = job
        draws = Draws(job, seed)
        drawn_s = [draws.of(iteration) for iteration in range(job.iterations)]
        self.work_s = dict.fromkeys(job.pools, 0.0)
        """The seconds that the job's operations run on each pool."""
        for phase, seconds in zip(job.phases, zip(*drawn_s, strict=True), strict=True):
            self.work_s[phase.pool] += sum(seconds)
        self.least_s = job.start_s + self._from_first_to_last_s(drawn_s[0], drawn_s[-1])

    def _from_first_to_last_s(self, first_s: list[float], last_s: list[float]) -> float:
        job = self.job
        waits_before = job.submission.waits_before
        thinks_s = [
            phase.think_s if waits_before(following) else 0.0
            for following, phase in enumerate(job.phases[:-1], 1)
        ]
        if not job.steps_ahead:
            between_s = job.phases[-1].think_s + job.sync_s
            own_s = sum(self.work_s.values()) + job.iterations * sum(thinks_s)
            return own_s + (job.iterations - 1) * between_s
        return max(self._on_pool_s(pool, first_s, last_s, thinks_s) for pool in job.pools)

    def _on_pool_s(
        self, pool: str, first_s: list[float], last_s: list[float], thinks_s: list[float]
    ) -> float:
        """The time of the job's operations on a pool, and before the first and after the last."""
        on_it = [index for index, phase in enumerate(self.job.phases) if phase.pool == pool]
        first, last = on_it[0], on_it[-1]
        before_s = sum(first_s[:first]) + sum(thinks_s[:first])
        after_s = sum(last_s[last + 1 :]) + sum(thinks_s[last:])
        return before_s + self.work_s[pool] + after_s

    def taken_s(self, pool: str, seconds: float) -> float:
        """The node-seconds that the job takes of a pool in so many seconds; 0: it is not there."""
        return seconds * self.job.demand(pool).num_nodes if pool in self.work_s else 0.0


def makespan_bound_s(
    jobs: Sequence[SimJob],
    seed: int,
    num_nodes: Mapping[str, int],
    *,
    jobs_a_node: int = 0,
) -> float:
    """The least time from the first arrival to the last end.

    Args: jobs: at least one job.
          num_nodes: the number of nodes of each pool.
          jobs_a_node: the most jobs that share a node; 0: any number.
    """
    shortest = sorted((_ShortestRun(job, seed) for job in jobs), key=lambda run: run.job.arrival_s)
    ends_s = [run.job.arrival_s + run.least_s for run in shortest]
    for pool, count in num_nodes.items():
        work_s = kept_s = 0.0
        for run in reversed(shortest):
            work_s += run.taken_s(pool, run.work_s.get(pool, 0.0))
            kept_s += run.taken_s(pool, run.least_s)
            ends_s.append(run.job.arrival_s + work_s / count)
            if jobs_a_node:
                ends_s.append(run.job.arrival_s + kept_s / (count * jobs_a_node))
    return max(ends_s) - shortest[0].job.arrival_s
