"""Jobs that share one device, in virtual time, around the scheduler's real core.

Durations, switches and the controllers' own time are given, so that switches and waits can be
counted to the second: what `World` draws, a contention between policies must not.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean

from phaseloom.common.contract.commands import OpenActivation, Permit, StartWpg
from phaseloom.common.contract.events import (
    ActivationOpened,
    Event,
    JobSubmitted,
    KindEstimate,
    NodeUp,
    OperationFinished,
    PhaseTrace,
    QueuedOperation,
    SchedulerConfigured,
    TimerFired,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import (
    Cycle,
    DeploymentSpec,
    DeviceSpec,
    JobSpec,
    ModelSpec,
    Residency,
    SchedulerConfig,
    Segment,
)
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.validate import validate

OFFLOAD_S, LOAD_S = 8.0, 12.0
TENANT = "t"


def config_of(ordering: str, **changes: object) -> SchedulerConfig:
    """Nothing but the policy decides, unless told otherwise."""
    pure: dict[str, object] = {
        "placement": "pack",
        "ordering": ordering,
        "idle_grace_s": 0.0,
        "quantum_s": 0.0,
        "seal_every": 0,
        "max_losses": 3,
        "max_reading": 1,
        "phase_hold_s": 0.0,
        "speculative_switch_in": False,
        "switch_s": OFFLOAD_S + LOAD_S,
        "outcome_retention_s": 1e12,
        "max_group_jobs": 9,
        "duty_limit": 1.0,
    }
    return SchedulerConfig(**{**pure, **changes})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Call:
    """One operation of a cycle."""

    kind: str
    duration_s: float
    think_s: float = 0.0
    """The controller's own time after it: rollout elsewhere, rewards."""


@dataclass
class Loop:
    """A controller that runs the same calls again and again."""

    name: str
    calls: list[Call]
    cycles: int
    is_serial: bool = True
    """Else a cycle's operations are queued together."""
    slo: float = 0.0
    starts_s: float = 0.0
    is_profiled: bool = True
    silent_after: int | None = None
    """Operations after which its controller says nothing any more."""
    order: Iterator[tuple[int, int]] = field(init=False)
    """(seq, call) of what is still to come."""

    def __post_init__(self) -> None:
        indices = itertools.cycle(range(len(self.calls)))
        seqs = range(1, self.cycles * len(self.calls) + 1)
        every = zip(seqs, indices, strict=False)
        self.order = itertools.islice(every, self.silent_after)

    @property
    def key(self) -> DeploymentKey:
        return DeploymentKey(TENANT, self.name, "policy")

    @property
    def period_s(self) -> float:
        return sum(call.duration_s + call.think_s for call in self.calls)

    @property
    def cycle(self) -> Cycle:
        work_s = sum(call.duration_s for call in self.calls)
        return Cycle(self.period_s, [Segment("train", 0.0, work_s)])

    @property
    def trace(self) -> PhaseTrace:
        """Alone: the next operation comes after the controller's own time."""
        estimates = [
            KindEstimate("policy", c.kind, c.duration_s, c.think_s, count=9) for c in self.calls
        ]
        return PhaseTrace(self.key.job_key, self.period_s, self.cycle.segments, estimates)


@dataclass
class Contention:
    config: SchedulerConfig
    loops: list[Loop]
    core: Core = field(default_factory=Core)
    now_s: float = 1000.0
    switches: int = 0
    waits_s: list[float] = field(default_factory=list)
    """Of each operation: ready until permitted."""
    runs: list[tuple[float, float, str]] = field(default_factory=list)
    """(start, end, operation); the switch before it is not in it."""
    busy_s: float = 0.0
    log: list[tuple[float, Event, list[outputs.Output]]] = field(default_factory=list)
    steps: int = 0
    _queued_s: dict[str, float] = field(default_factory=dict)
    _free_s: float = 0.0
    _pending: list[tuple[float, int, Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._by_job = {loop.name: loop for loop in self.loops}
        self.later(0, SchedulerConfigured(self.config))
        device = DeviceSpec(10**9)
        self.later(0, NodeUp(NodeId("t0"), "train", [device], 10**9, 1, "t0:1", Residency.JOB))
        for loop in self.loops:
            spec = DeploymentSpec("policy", "train", "fsdp", ModelSpec({}), trainable=True)
            cycle = loop.cycle if loop.is_profiled else None
            job = JobSpec(deployments=[spec], slo=loop.slo, cycle=cycle)
            self.later(0, JobSubmitted(loop.key.job_key, job, f"submit-{loop.name}"))
            if loop.is_profiled:
                self.later(0.001, loop.trace)
            self.call(loop, 10.0 + loop.starts_s)

    def later(self, delay_s: float, event: Event) -> None:
        self.steps += 1
        heapq.heappush(self._pending, (self.now_s + delay_s, self.steps, event))

    def call(self, loop: Loop, delay_s: float) -> None:
        """Queue the next operation, or the next cycle's."""
        for seq, index in loop.order:
            kind = loop.calls[index].kind
            key = OperationKey(TENANT, loop.name, "policy", str(seq))
            self._queued_s[str(key)] = self.now_s + delay_s
            self.later(delay_s, QueuedOperation(key, f"id-{key}", kind))
            if loop.is_serial or index == len(loop.calls) - 1:
                return

    def run(self, until_s: float = 1e9) -> Contention:
        while self._pending and self._pending[0][0] <= until_s:
            time_s, _, event = heapq.heappop(self._pending)
            self.now_s = max(self.now_s, time_s)
            self.feed(event)
        return self

    def feed(self, event: Event) -> None:
        if isinstance(event, OperationFinished):
            self._ended(event)
        made = self.core.step(self.core.state.sequence + 1, self.now_s, event)
        validate(self.core.state)
        self.log.append((self.now_s, event, made))
        for output in made:
            self._obey(output)

    def _obey(self, output: outputs.Output) -> None:
        match output:
            case outputs.SetTimer(timer, due_s):
                self.later(max(0.0, due_s - self.now_s), TimerFired(timer))
            case outputs.SendCommand(StartWpg() as start):
                started = WpgStarted(start.deployment, start.incarnation, start.node, 1, 0)
                self.later(1.0, started)
            case outputs.SendCommand(OpenActivation() as opened):
                self.switches += 1
                self._free_s = self.now_s + OFFLOAD_S + LOAD_S
                self.later(
                    OFFLOAD_S + LOAD_S,
                    ActivationOpened(
                        deployment=opened.deployment,
                        epoch=opened.epoch,
                        node=opened.node,
                        started_unix_s=self.now_s,
                        offload_s=OFFLOAD_S,
                        load_s=LOAD_S,
                        bytes_out=1,
                        bytes_in=1,
                    ),
                )
            case outputs.SendCommand(Permit() as permit):
                self._permitted(permit)
            case _:
                pass

    def _permitted(self, permit: Permit) -> None:
        key, start_s = permit.operation, max(self.now_s, self._free_s)
        duration_s = self._call_of(key).duration_s
        self.waits_s.append(self.now_s - self._queued_s[str(key)])
        self.busy_s += duration_s
        self.runs.append((start_s, start_s + duration_s, f"{key.job}.{key.slot}"))
        finished = OperationFinished(
            key=key,
            kind=permit.kind,
            outcome=Outcome.COMPLETED,
            epoch=permit.epoch,
            incarnation=permit.incarnation,
            started_unix_s=start_s,
            duration_s=duration_s,
        )
        self.later(start_s + duration_s - self.now_s, finished)

    def _call_of(self, key: OperationKey) -> Call:
        assert key.seq is not None
        calls = self._by_job[key.job].calls
        return calls[(key.seq - 1) % len(calls)]

    def _ended(self, event: OperationFinished) -> None:
        loop, call = self._by_job[event.key.job], self._call_of(event.key)
        is_last = call is loop.calls[-1]
        if loop.is_serial or is_last:
            self.call(loop, call.think_s)

    # --- what came of it ------------------------------------------------------------------------

    @property
    def order(self) -> list[str]:
        """Jobs in the order in which they ran."""
        return [operation.partition(".")[0] for _, _, operation in self.runs]

    def waits_of(self, job: str) -> float:
        """Mean, of this job's operations."""
        return mean(
            wait for wait, name in zip(self.waits_s, self.order, strict=True) if name == job
        )

    @property
    def mean_wait_s(self) -> float:
        return mean(self.waits_s)

    @property
    def makespan_s(self) -> float:
        return max(end for _, end, _ in self.runs) - min(start for start, _, _ in self.runs)

    @property
    def utilisation(self) -> float:
        return self.busy_s / self.makespan_s
