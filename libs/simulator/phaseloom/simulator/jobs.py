"""A simulated job: its arrival, its resources, and how its controller acts.

Each phase is one operation. Times are in seconds unless a name says otherwise. This module draws no
random numbers and makes no decisions.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from phaseloom.common.contract import specs
from phaseloom.common.contract.ids import DeploymentKey, JobKey

ROLLOUT = "rollout"
TRAIN = "train"
_DEPLOYMENTS = {ROLLOUT: "sampler", TRAIN: "policy"}


class Submission(StrEnum):
    SERIAL = "serial"
    """The controller publishes an operation when the previous one has ended."""
    CYCLE = "cycle"
    """The controller publishes all operations of an iteration together, chained by `after`."""
    BURST = "burst"
    """The controller publishes the first operation alone and, when that has ended, all others of
    the iteration together, as examples/grpo_pretrained.py does."""

    def waits_before(self, phase: int) -> bool:
        """Whether the controller publishes this operation only after the previous one has ended."""
        return self is Submission.SERIAL or phase == 0 or (self is Submission.BURST and phase == 1)


class Phase(msgspec.Struct, frozen=True):
    """One operation on the job's deployment of a pool."""

    pool: str
    mean_s: float
    """The mean duration, before the cap."""
    worst_s: float = 0.0
    """Duration if every sample reaches its token limit, which caps the draws. 0: as `mean_s`."""
    sigma: float = 0.0
    """Sigma of the lognormal distribution of durations; 0: every one takes `mean_s`."""
    kind: str = ""
    """The operation's kind; empty: `generate` on `rollout`, `optim_step` elsewhere."""
    think_s: float = 0.0
    """The controller's own time between this phase and the next (rewards, tools)."""
    tail: float = 0.0
    """Share of its time in which only the long tail of a rollout runs. 0: the tail is never
    gathered on fewer devices."""

    @property
    def longest_s(self) -> float:
        return max(self.mean_s, self.worst_s)

    @property
    def operation_kind(self) -> str:
        return self.kind or ("generate" if self.pool == ROLLOUT else "optim_step")


class Demand(msgspec.Struct, frozen=True):
    """The resources and times of the job's deployment on one pool."""

    num_nodes: int = 1
    host_bytes: int = 0
    """Host memory that the deployment uses on each node."""
    load_s: float = 0.0
    """Time to load the state onto the devices."""
    offload_s: float = 0.0
    num_devices: int = 1
    """Devices that the deployment uses on each node."""


class Drift(msgspec.Struct, frozen=True):
    """How the durations on a pool change over the job's run.

    The factors apply at equal steps of the job's progress, with linear interpolation in between.
    """

    pool: str
    factors: tuple[float, ...]

    def factor(self, progress: float) -> float:
        """Return the factor. Args: progress: share of the iterations that are done, 0 to 1."""
        position = min(max(progress, 0.0), 1.0) * (len(self.factors) - 1)
        index = min(int(position), len(self.factors) - 2) if len(self.factors) > 1 else 0
        if len(self.factors) == 1:
            return self.factors[0]
        before, after = self.factors[index : index + 2]
        return before + (after - before) * (position - index)


class SimJob(msgspec.Struct, frozen=True):
    name: str
    arrival_s: float
    iterations: int
    phases: tuple[Phase, ...]
    """The phases of an iteration, one after the other."""
    demands: dict[str, Demand] = {}
    """Resources by pool. A missing pool means one node and switches that take no time."""
    slo: float = 0.0
    """Slowdown, relative to running alone, that the job tolerates: at least 1; 0: best effort."""
    tenant: str = "sim"
    sync_s: float = 0.0
    """Time from the end of an iteration to the first phase that needs its weights."""
    steps_ahead: int = 0
    """How many iterations may run ahead of training: 0 is synchronous, 1 is one step
    asynchronous."""
    submission: Submission = Submission.SERIAL
    is_declared: bool = True
    """Whether the job declares its cycle when it is submitted; otherwise it is profiled first."""
    may_wait: bool = True
    """Whether the job waits for placement, instead of being refused if none is possible now."""
    start_s: float = 0.0
    """Time from the job's placement until its workers are up."""
    move_s: float = 0.0
    """Time from the start of a move until the workers are up on the new nodes."""
    drift: tuple[Drift, ...] = ()
    model: str = ""

    @property
    def key(self) -> JobKey:
        return JobKey(self.tenant, self.name)

    @property
    def pools(self) -> list[str]:
        """The job's pools, in the order in which an iteration uses them."""
        return list(dict.fromkeys(phase.pool for phase in self.phases))

    def demand(self, pool: str) -> Demand:
        return self.demands.get(pool, Demand())

    def tail(self, deployment: str) -> float:
        """Share of the time of a deployment's operations that is the long tail of a rollout."""
        tails = (phase.tail for phase in self.phases if deployment_of(phase.pool) == deployment)
        return max(tails, default=0.0)

    def deployment(self, pool: str) -> DeploymentKey:
        return DeploymentKey(self.tenant, self.name, deployment_of(pool))

    @property
    def num_optim_steps(self) -> int:
        """Optimizer steps per iteration, at least 1."""
        return max(1, sum(phase.operation_kind == "optim_step" for phase in self.phases))

    @property
    def solo_s(self) -> float:
        """Time of an iteration alone with every phase at its longest; SLOs are multiples of it."""
        return period_s(self, [phase.longest_s for phase in self.phases])

    @property
    def mean_s(self) -> float:
        """Time of an iteration alone with every phase at its mean."""
        return period_s(self, [phase.mean_s for phase in self.phases])


def deployment_of(pool: str) -> str:
    return _DEPLOYMENTS.get(pool, pool)


def period_s(job: SimJob, durations_s: list[float]) -> float:
    """Return the steady-state time of an iteration that runs alone.

    Args: durations_s: the phases' durations, in the order of `job.phases`.
    """
    line_s = [d + phase.think_s for d, phase in zip(durations_s, job.phases, strict=True)]
    if not job.steps_ahead:
        return sum(line_s) + job.sync_s
    # Iterations overlap. The busiest pool is a lower bound, and an iteration must end before the
    # one that comes `steps_ahead` + 1 later starts.
    busiest_s = max(
        sum(d for d, phase in zip(durations_s, job.phases, strict=True) if phase.pool == pool)
        for pool in job.pools
    )
    return max(busiest_s, (sum(line_s) + job.sync_s) / (1 + job.steps_ahead), line_s[0])


def cycle_of(job: SimJob) -> specs.Cycle:
    """Return the job's cycle when alone. Consecutive phases on one pool form one segment."""
    period = job.mean_s
    segments: list[specs.Segment] = []
    offset_s = 0.0
    for index, phase in enumerate(job.phases):
        if index and job.phases[index - 1].pool == phase.pool:
            last = segments[-1]
            segments[-1] = msgspec.structs.replace(
                last,
                duration_s=last.duration_s + phase.mean_s,
                worst_s=last.worst_s + phase.longest_s,
            )
        else:
            at_s = offset_s % period if period else 0.0
            segments.append(specs.Segment(phase.pool, at_s, phase.mean_s, phase.longest_s))
        offset_s += phase.mean_s + phase.think_s
    return specs.Cycle(period, segments, job.num_optim_steps)


def spec_of(job: SimJob, *, iterations: int) -> specs.JobSpec:
    """Return the spec that the controller submits. Args: iterations: those that remain."""
    return specs.JobSpec(
        slo=job.slo,
        deployments=[_deployment(job, pool) for pool in job.pools],
        cycle=cycle_of(job) if job.is_declared else None,
        duration_s=iterations * job.solo_s,
        may_wait=job.may_wait,
    )


def _deployment(job: SimJob, pool: str) -> specs.DeploymentSpec:
    demand = job.demand(pool)
    is_sampler = pool == ROLLOUT
    has_tail = any(phase.tail for phase in job.phases if phase.pool == pool)
    return specs.DeploymentSpec(
        name=deployment_of(pool),
        pool=pool,
        backend="sampler" if is_sampler else "fsdp",
        model=specs.ModelSpec({}),
        trainable=not is_sampler,
        batching=specs.Batching.SHARED if has_tail else specs.Batching.OPERATION,
        layout=specs.Layout(dp=demand.num_nodes * demand.num_devices),
        num_nodes=demand.num_nodes,
        host_bytes=demand.host_bytes,
    )
