"""Random mixes of jobs on few nodes, and a lower bound of their makespan.

A mix has two to eight jobs on one to four nodes of each pool. Each job is pinned to random nodes, a
fifth of the demands to two. Cycles take 3 to 16 s, switches nothing up to the mean phase, and
durations vary by a factor that differs between mixes. Controllers submit in three ways.
"""

from __future__ import annotations

import itertools
import math
import random
from statistics import mean
from typing import NamedTuple

from phaseloom.scheduler.core.state.cluster import Cluster, Member, Placed, Placement
from phaseloom.simulator.comparison.clusters import pools
from phaseloom.simulator.draws import Draws
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob, Submission
from phaseloom.simulator.nodes import PoolSpec

RATIOS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Mean switch relative to the mean phase."""
_VARIATIONS = (0.0, 0.3, 0.3, 0.6)
_SUBMISSIONS = (
    Submission.BURST,
    Submission.BURST,
    Submission.SERIAL,
    Submission.SERIAL,
    Submission.CYCLE,
)
_SHORTEST_CYCLE_S, _LONGEST_CYCLE_S = 3.0, 16.0
_ITERATIONS = 14
"""Iterations of the job with the longest cycle. The others run for about as long."""
_ON_TWO_NODES = 0.2
_POOLS = (ROLLOUT, TRAIN)
Nodes = dict[str, dict[str, list[int]]]
"""Job → pool → indices of the nodes that the job is pinned to."""


class Mix(NamedTuple):
    seed: int
    num_nodes: int
    """Nodes of each pool."""
    ratio: float
    """Mean switch relative to the mean phase."""
    jobs: list[SimJob]
    nodes: Nodes

    @property
    def cycles_s(self) -> float:
        """Sum of all jobs' iterations when alone."""
        return sum(job.mean_s for job in self.jobs)

    @property
    def switch_s(self) -> float:
        """Mean time of a switch: offload plus load."""
        demands = [demand for job in self.jobs for demand in job.demands.values()]
        return mean(demand.load_s + demand.offload_s for demand in demands)

    @property
    def pools(self) -> list[PoolSpec]:
        return pools(self.num_nodes, self.num_nodes)


def mix_of(seed: int) -> Mix:
    draws = random.Random(seed)
    num_nodes = draws.choice([1, 1, 2, 3, 4])
    num_jobs = draws.randint(max(2, num_nodes), 8)
    ratio = draws.choice(RATIOS)
    variation = draws.choice(_VARIATIONS)
    shapes_s = []
    for _ in range(num_jobs):
        cycle_s = math.exp(draws.uniform(math.log(_SHORTEST_CYCLE_S), math.log(_LONGEST_CYCLE_S)))
        share = draws.uniform(0.2, 0.8)
        shapes_s.append((cycle_s * share, cycle_s * (1 - share)))
    switch_s = ratio * mean(seconds for shape in shapes_s for seconds in shape)
    longest_s = max(map(sum, shapes_s))
    jobs: list[SimJob] = []
    nodes: Nodes = {}
    for index, (rollout_s, train_s) in enumerate(shapes_s):
        name = f"j{index}"
        cycle_s = rollout_s + train_s
        submission = draws.choice(_SUBMISSIONS)
        think_s = draws.uniform(0, 0.05) * cycle_s if submission is Submission.SERIAL else 0.0
        phases = _phases(rollout_s, train_s, think_s, draws.choice([1, 1, 2, 4]), variation)
        nodes[name] = {pool: _some_nodes(draws, num_nodes) for pool in _POOLS}
        half_s = switch_s * draws.uniform(0.6, 1.4) / 2
        demands = {
            pool: Demand(num_nodes=len(nodes[name][pool]), load_s=half_s, offload_s=half_s)
            for pool in _POOLS
        }
        job = SimJob(
            name=name,
            arrival_s=draws.uniform(0, 5),
            iterations=max(4, round(_ITERATIONS * longest_s / cycle_s)),
            phases=phases,
            demands=demands,
            submission=submission,
        )
        jobs.append(job)
    return Mix(seed, num_nodes, ratio, jobs, nodes)


def _phases(
    rollout_s: float, train_s: float, think_s: float, num_batches: int, variation: float
) -> tuple[Phase, ...]:
    sigma = math.sqrt(math.log(1 + variation**2))
    rows = [(ROLLOUT, 0.85 * rollout_s, "generate", think_s)]
    rows += [(TRAIN, 0.8 * train_s / num_batches, "forward_backward", think_s / 4)] * num_batches
    rows += [
        (TRAIN, 0.15 * train_s, "optim_step", think_s / 8),
        (TRAIN, 0.05 * train_s, "publish_weights", 0.0),
        (ROLLOUT, 0.15 * rollout_s, "sync_weights", 0.0),
    ]
    # The draws of a phase that varies have no cap.
    return tuple(
        Phase(pool, seconds, 0.0 if sigma else seconds, sigma, kind, think)
        for pool, seconds, kind, think in rows
    )


def _some_nodes(draws: random.Random, num_nodes: int) -> list[int]:
    is_gang = num_nodes > 1 and draws.random() < _ON_TWO_NODES
    return sorted(draws.sample(range(num_nodes), 2 if is_gang else 1))


def pinned(nodes: Nodes) -> Placement:
    """Return a placement policy that places every job on its nodes of the mix, all in one group."""

    def place(cluster: Cluster, member: Member) -> Placed:
        names = {
            pool: sorted(host.node for host in cluster.hosts.values() if host.pool == pool)
            for pool in _POOLS
        }
        wanted = nodes[member.job.rpartition(".")[2]]
        chosen = {pool: [names[pool][index] for index in wanted[pool]] for pool in _POOLS}
        return Placed(next(iter(cluster.groups), ""), chosen, "")

    return Placement(place)


def makespan_bound_s(mix: Mix) -> float:
    """Return a time that no schedule of a mix can beat, switches included.

    A job takes at least as long as alone. A device needs the time of its operations. Between two
    operations of a job it either stays with the job through the gap, which takes at least as long
    as when the job is alone, or it must switch the job in again.
    """
    sharing: dict[tuple[str, int], list[SimJob]] = {}
    for job in mix.jobs:
        for pool, indices in mix.nodes[job.name].items():
            for index in indices:
                sharing.setdefault((pool, index), []).append(job)
    lines = {job.name: _alone(job, mix.seed) for job in mix.jobs}
    bounds_s = [_end_alone_s(job, lines[job.name]) for job in mix.jobs]
    for (pool, _), jobs in sharing.items():
        busy_s = 0.0
        for job in jobs:
            spans = lines[job.name][pool]
            busy_s += sum(end_s - start_s for start_s, end_s in spans)
            others = [other for other in jobs if other is not job]
            if others:
                offload_s = min(other.demand(pool).offload_s for other in others)
                back_s = job.demand(pool).load_s + offload_s
                gaps_s = [after[0] - before[1] for before, after in itertools.pairwise(spans)]
                busy_s += sum(min(back_s, max(0.0, gap_s)) for gap_s in gaps_s)
        bounds_s.append(busy_s)
    return max(bounds_s)


Spans = dict[str, list[tuple[float, float]]]
"""Pool → start and end of each operation of a job that runs alone, from its arrival."""


def _alone(job: SimJob, seed: int) -> Spans:
    draws, spans, now_s = Draws(job, seed), Spans(), 0.0
    for iteration in range(job.iterations):
        for index, (phase, seconds) in enumerate(zip(job.phases, draws.of(iteration), strict=True)):
            spans.setdefault(phase.pool, []).append((now_s, now_s + seconds))
            waits = job.submission.waits_before((index + 1) % len(job.phases))
            now_s += seconds + (phase.think_s if waits else 0.0)
    return spans


def _end_alone_s(job: SimJob, spans: Spans) -> float:
    last_s = max(pool_spans[-1][1] for pool_spans in spans.values())
    return job.arrival_s + last_s + job.demand(ROLLOUT).load_s
