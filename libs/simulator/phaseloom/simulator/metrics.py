"""The result of a simulation for each job, each pool, and the whole cluster.

A job meets its SLO if its mean iteration, from its first placement to its end, takes at most `slo`
times as long as alone. Alone means every phase at its longest (`SimJob.solo_s`) and the state
loaded once. Waits, switches, moves and crashes all count against the job.
"""

from __future__ import annotations

from statistics import fmean

import msgspec

from phaseloom.simulator.metering import JobMeter, Meter, Span

_HOUR_S = 3600.0
_ROUNDING = 1e-9
"""Relative tolerance for sums of the same seconds in a different order."""


class JobResult(msgspec.Struct, frozen=True):
    name: str
    outcome: str
    """`done`, `rejected`, `failed`, or `open` if the simulation was stopped earlier."""
    reason: str
    slo: float
    solo_s: float
    """Time of an iteration alone with every phase at its longest."""
    first_load_s: float
    """Time to load the job's state once, which the job needs even alone."""
    submitted_s: float
    placed_s: float
    """When the job was first placed; -1: never."""
    ended_s: float
    """When the job ended; -1: not yet."""
    iterations: int
    """Completed iterations. One that is repeated after a failure counts once."""
    mean_iteration_s: float
    """Time from the first placement to the end of the last iteration, divided by the number of
    iterations; 0 if there are none."""
    slowdown: float
    """`mean_iteration_s` relative to the time of the same draws alone."""
    within_slo: float
    """Share of the job's single iterations within its SLO."""
    wait_s: float
    """Mean time of an operation from ready to started, including switches."""
    switches: int
    """Switch-ins of the job's deployments that displaced another deployment."""
    moves: int
    attempts: int
    opened: list[str]
    """Pools of which the job's first placement needed a node that no other job held."""

    @property
    def is_slo_met(self) -> bool:
        alone_s = self.iterations * self.solo_s + self.first_load_s
        life_s = self.iterations * self.mean_iteration_s
        return life_s <= self.slo * alone_s * (1 + _ROUNDING)

    @property
    def queueing_s(self) -> float:
        """Time from submission to placement; -1 if the job was never placed."""
        return self.placed_s - self.submitted_s if self.placed_s >= 0 else -1.0

    @property
    def queueing_delay(self) -> float:
        """Queueing relative to the time from placement to end; -1 if the job lacks either."""
        life_s = self.ended_s - self.placed_s
        return self.queueing_s / life_s if self.placed_s >= 0 and life_s > 0 else -1.0


class PoolResult(msgspec.Struct, frozen=True):
    """Sums over the nodes of a pool, in node-seconds."""

    held_s: float
    """Time with a job pinned to the node."""
    busy_s: float
    switch_s: float
    switches: int
    peak_nodes: int

    @property
    def utilisation(self) -> float:
        return self.busy_s / self.held_s if self.held_s else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Share of the held time in which no operation ran: idle or switching."""
        return 1.0 - self.utilisation if self.held_s else 0.0


class Result(msgspec.Struct, frozen=True):
    jobs: list[JobResult]
    pools: dict[str, PoolResult]
    start_s: float
    """Time of the first arrival."""
    makespan_s: float
    """Time from the first arrival to the last end."""
    cost: float
    """Price of the nodes, for the time that jobs were pinned to them."""
    peak_gpus: int
    switches: int
    moves: int
    operations: int
    events: int
    """Number of entries of the decision log."""
    cost_steps: list[tuple[float, float, int]]
    """(time, $/h, GPUs held) after each change."""
    decisions: list[tuple[int, float]]
    """(active jobs, CPU seconds) of each step that placed or released a job."""
    step_s: dict[str, list[float]]
    """Kind of event → CPU seconds of the timed steps of the core."""
    notices: dict[str, int]
    """Kind → number of the scheduler's notices."""
    spans: list[Span] = []
    """Intervals in which nodes ran or switched, if they were recorded."""

    @property
    def promised(self) -> list[JobResult]:
        """Jobs with an SLO that ended."""
        return [job for job in self.jobs if job.slo and job.outcome in ("done", "failed")]

    @property
    def slo_attainment(self) -> float:
        """Share of the ended jobs with an SLO that met it; 1 if there are none."""
        promised = self.promised
        return (
            fmean(job.is_slo_met and job.outcome == "done" for job in promised) if promised else 1.0
        )

    @property
    def slo_attainment_of_draws(self) -> float:
        """As `slo_attainment`, but relative to running alone with the same draws."""
        promised = self.promised
        within = [job for job in promised if job.slowdown <= job.slo * (1 + _ROUNDING)]
        return sum(job.outcome == "done" for job in within) / len(promised) if promised else 1.0

    @property
    def iterations_within_slo(self) -> float:
        """Share of single iterations within the SLO, over the ended jobs with an SLO."""
        total = sum(job.iterations for job in self.promised)
        within = sum(job.within_slo * job.iterations for job in self.promised)
        return within / total if total else 1.0

    @property
    def bubble_ratio(self) -> float:
        held_s = sum(pool.held_s for pool in self.pools.values())
        busy_s = sum(pool.busy_s for pool in self.pools.values())
        return 1.0 - busy_s / held_s if held_s else 0.0

    @property
    def mean_wait_s(self) -> float:
        """Mean over the jobs of the time that an operation waits."""
        waits = [job.wait_s for job in self.jobs if job.iterations]
        return fmean(waits) if waits else 0.0

    def decision_ms(self, share: float) -> float:
        """Return a quantile of the decision latencies; 0 if there were none."""
        ordered = sorted(seconds for _, seconds in self.decisions)
        return 1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def summarise(meter: Meter, now_s: float, num_events: int) -> Result:
    """Return the result of a simulation. Args: now_s: when the simulation was stopped."""
    for node in meter.nodes.values():
        if node.pinned:
            node.held_s += now_s - node.held_since_s
            node.held_since_s = now_s
    jobs = [_job(job) for job in meter.jobs.values()]
    start_s = min((job.submitted_s for job in jobs if job.submitted_s >= 0), default=0.0)
    end_s = max((job.ended_s for job in jobs), default=now_s)
    if any(job.ended_s < 0 for job in jobs):
        end_s = now_s
    return Result(
        jobs=jobs,
        pools={pool: _pool(meter, pool) for pool in sorted({n.pool for n in meter.nodes.values()})},
        start_s=start_s,
        makespan_s=max(0.0, end_s - start_s),
        cost=sum(n.held_s * n.price_per_hour for n in meter.nodes.values()) / _HOUR_S,
        peak_gpus=max(gpus for _, _, gpus in meter.steps),
        switches=sum(node.switches for node in meter.nodes.values()),
        moves=sum(job.moves for job in jobs),
        operations=sum(job.operations for job in meter.jobs.values()),
        events=num_events,
        cost_steps=meter.steps,
        decisions=[(d.num_jobs, d.seconds) for d in meter.decisions],
        step_s=meter.steps_s,
        notices=meter.notices,
        spans=meter.spans or [],
    )


def _pool(meter: Meter, pool: str) -> PoolResult:
    nodes = [node for node in meter.nodes.values() if node.pool == pool]
    return PoolResult(
        held_s=sum(node.held_s for node in nodes),
        busy_s=sum(node.busy_s for node in nodes),
        switch_s=sum(node.switch_s for node in nodes),
        switches=sum(node.switches for node in nodes),
        peak_nodes=meter.peaks.get(pool, 0),
    )


def _job(meter: JobMeter) -> JobResult:
    job, done = meter.job, meter.completed
    life_s = meter.last_end_s - meter.placed_s
    mean_s = life_s / done if done else 0.0
    limit_s = job.slo * job.solo_s * (1 + _ROUNDING)
    single_s = meter.iteration_s
    return JobResult(
        name=job.name,
        outcome=meter.outcome,
        reason=meter.reason,
        slo=job.slo,
        solo_s=job.solo_s,
        first_load_s=sum(job.demand(pool).load_s for pool in job.pools),
        submitted_s=meter.submitted_s,
        placed_s=meter.placed_s,
        ended_s=meter.ended_s,
        iterations=done,
        mean_iteration_s=mean_s,
        slowdown=mean_s * len(single_s) / meter.alone_s if meter.alone_s else 0.0,
        within_slo=fmean(s <= limit_s for s in single_s) if single_s else 0.0,
        wait_s=meter.wait_s / meter.operations if meter.operations else 0.0,
        switches=meter.switches,
        moves=meter.moves,
        attempts=meter.attempts,
        opened=sorted(meter.opened),
    )
