"""The simulator's shell: the scheduler's own core, folded under a virtual clock.

Like the live shell, it appends events to the decision log, folds each with `Core.step`, and
performs the outputs in order; timers return as events. Here an event is folded as soon as it is
appended. At equal times, actions of the world run before timers, and timers run by (due time,
name).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from phaseloom.common.contract import events
from phaseloom.common.contract.commands import Command
from phaseloom.common.contract.specs import SchedulerConfig, SlowdownTable
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.placement import repack
from phaseloom.scheduler.core.state.outputs import ComputeReplan, Output, SendCommand, SetTimer
from phaseloom.simulator.agenda import NEVER_S, Agenda
from phaseloom.simulator.controllers import USUAL, Retries
from phaseloom.simulator.jobs import SimJob
from phaseloom.simulator.metering import Meter
from phaseloom.simulator.metrics import Result, summarise
from phaseloom.simulator.nodes import FREE, Costs, PoolSpec
from phaseloom.simulator.world import Fault, World

REPLAN_S = 1.0
"""Simulated time to compute a plan. Real plans for hundreds of jobs take less."""
STALE_TIMERS = 1024
"""Cancelled timers that may stay in the heap, in addition to as many as are set."""


class Surroundings(Protocol):
    """Everything that a shell talks to. It appends events at times of the agenda."""

    @property
    def is_over(self) -> bool:
        """Whether only answers to commands are outstanding."""
        ...

    def perform(self, output: Output) -> None:
        """Carry out an output. Resulting events are appended later, never within this call."""
        ...


class Engine:
    """A shell that folds events under a virtual clock.

    Args: core: the state to continue from; None: an empty log.
          replan_s: simulated time to compute a plan outside the scheduler's loop.
          records: whether to keep the log and the commands, for replays and comparisons.
          times_steps: whether to time every step instead of only those that place or release a job.
          after_step: called with the core after each fold (for checks).
    """

    def __init__(
        self,
        agenda: Agenda,
        meter: Meter,
        *,
        core: Core | None = None,
        replan_s: float = REPLAN_S,
        records: bool = False,
        times_steps: bool = False,
        after_step: Callable[[Core], None] | None = None,
    ) -> None:
        self.core = core or Core()
        self.log: list[tuple[float, events.Event]] = []
        self.commands: list[Command] = []
        self._agenda = agenda
        self._meter = meter
        self._replan_s = replan_s
        self._records = records
        self._times_steps = times_steps
        self._after_step = after_step
        state = self.core.state
        self._timers = [(due_s, timer) for timer, due_s in state.timers.items()]
        heapq.heapify(self._timers)
        self.num_events = state.sequence
        """Number of events in the log, which equals the sequence of the last one."""
        self._world: Surroundings | None = None

    def append(self, event: events.Event) -> None:
        """Append an event to the log, and fold it with the core."""
        assert self._world is not None, "run has not begun"
        now_s = self._agenda.now_s
        self.num_events += 1
        if self._times_steps or isinstance(event, events.JobSubmitted | events.JobFinished):
            num_jobs = self._meter.num_active
            started_s = time.thread_time()
            outputs = self.core.step(self.num_events, now_s, event)
            self._meter.stepped(event, num_jobs, time.thread_time() - started_s)
        else:
            outputs = self.core.step(self.num_events, now_s, event)
        if self._records:
            self.log.append((now_s, event))
            self.commands += [o.command for o in outputs if isinstance(o, SendCommand)]
        perform = self._world.perform
        for output in outputs:
            match output:
                case SetTimer(timer, due_s):
                    heapq.heappush(self._timers, (due_s, timer))
                case ComputeReplan():
                    self._agenda.after(self._replan_s, self.append, repack.compute(output))
                case _:
                    perform(output)
        if self._after_step is not None:
            self._after_step(self.core)

    def run(self, world: Surroundings, config: SchedulerConfig, until_s: float = NEVER_S) -> None:
        """Run until every job has ended and the nodes have carried out all commands."""
        self._world = world
        self.append(events.SchedulerConfigured(config))
        agenda = self._agenda
        while True:
            timer_s = NEVER_S if world.is_over else self._next_timer_s()
            if min(agenda.next_s, timer_s) > until_s:
                return
            if agenda.next_s <= timer_s:
                if agenda.next_s == NEVER_S:
                    return
                agenda.run_next()
            else:
                due_s, timer = heapq.heappop(self._timers)
                due_by_timer = self.core.state.timers
                if due_by_timer.get(timer) == due_s:
                    self._agenda.advance(due_s)
                    self.append(events.TimerFired(timer))
                elif len(self._timers) > 2 * len(due_by_timer) + STALE_TIMERS:
                    self._timers = [(due_s, name) for name, due_s in due_by_timer.items()]
                    heapq.heapify(self._timers)

    def _next_timer_s(self) -> float:
        return self._timers[0][0] if self._timers else NEVER_S


def simulate(
    jobs: Sequence[SimJob],
    pools: Sequence[PoolSpec],
    config: SchedulerConfig,
    *,
    seed: int = 0,
    costs: Costs = FREE,
    retries: Retries = USUAL,
    faults: Sequence[Fault] = (),
    replan_s: float = REPLAN_S,
    until_s: float = NEVER_S,
    records_spans: bool = False,
    times_steps: bool = False,
    slowdowns: SlowdownTable | None = None,
) -> Result:
    """Run a workload to its end under one configuration.

    Args: jobs: the workload; names are unique per tenant.
          until_s: when to stop, even if jobs are still running.
          slowdowns: the real slowdowns of operations that share a device of several units. The
                     scheduler may decide by another table.
    """
    agenda, meter = Agenda(), Meter(records_spans=records_spans)
    engine = Engine(agenda, meter, replan_s=replan_s, times_steps=times_steps)
    world = World(
        agenda,
        engine.append,
        meter,
        jobs,
        pools,
        seed=seed,
        costs=costs,
        retries=retries,
        faults=faults,
        slowdowns=slowdowns,
    )
    engine.run(world, config, until_s)
    return summarise(meter, agenda.now_s, engine.num_events)
