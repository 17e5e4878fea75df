"""The scheduler's shell: reads the log, calls the core and performs its outputs in order.

Every output is idempotent, so a restart may repeat outputs when in doubt. All outputs of an entry
are stored before the next entry is handled, with two exceptions. Of entries with only permits, up
to `MAX_STORING` permits are sent to the server concurrently, because their order does not matter.
Outcomes of operations that never ran are stored behind the fold (`outcomes`). A snapshot is stored
only when everything before it is stored, so it is never ahead of its commands; the fold does not
wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from opentelemetry.context import Context

from phaseloom.common.contract import events
from phaseloom.common.contract.commands import Permit, Permits
from phaseloom.common.contract.errors import InternalError, ResourceError, to_exception
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.specs import SchedulerConfig
from phaseloom.common.observability import telemetry
from phaseloom.common.transport.decisionlog import LogEntry, log_entries_missing
from phaseloom.scheduler import observing
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.placement import repack
from phaseloom.scheduler.core.state.outputs import (
    Answer,
    ComputeReplan,
    DeleteOperations,
    DropCheckpoint,
    ForgetJob,
    Output,
    SendCommand,
    SetTimer,
    WriteCompletion,
)
from phaseloom.scheduler.outcomes import OutcomeWriter
from phaseloom.scheduler.permits import batched, permits_in

log = logging.getLogger(__name__)

MAX_STORING = 64
"""Maximum number of permits being sent to the server at once."""
_FINAL_OUTPUTS = DeleteOperations | Answer
"""Outputs that wait until all other outputs of their entry are stored. An operation is deleted only
once its outcome is stored, and an answer is sent only once its content is true."""
_STALE_TIMERS = 64
"""Number of withdrawn timers tolerated beyond the number of set timers before the heap is
rebuilt."""


class Clock(Protocol):
    """The shell's clock, which tests can replace."""

    def now_s(self) -> float:
        """Seconds since a fixed moment, the same as the log's if the clocks agree."""
        ...

    async def wait(self, event: asyncio.Event, until_s: float | None) -> None:
        """Wait until the event is set or this clock has passed `until_s`. None: no time limit."""
        ...


class WallClock:
    def now_s(self) -> float:
        return time.time()

    async def wait(self, event: asyncio.Event, until_s: float | None) -> None:
        delay_s = None if until_s is None else until_s - time.time()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), delay_s)


class DecisionLog(Protocol):
    async def append(self, event: events.Event, *, msg_id: str | None = None) -> int: ...

    def read_entries(self, start_sequence: int = 1) -> AsyncIterator[LogEntry]: ...

    async def end(self) -> int: ...


class Sink(Protocol):
    async def perform(self, output: Output, context: Context | None) -> None:
        """Perform an output. Returns once its effect is stored."""
        ...

    async def save(self, sequence: int, snapshot: bytes) -> None: ...


Replan = Callable[[ComputeReplan], Awaitable[events.ReplanComputed]]
"""Computes worthwhile moves, outside the loop."""


async def _replan_in_thread(request: ComputeReplan) -> events.ReplanComputed:
    return await asyncio.to_thread(repack.compute, request)


class Shell:
    """Drives one core. `run` runs until cancelled; API handlers call `request`."""

    def __init__(
        self,
        core: Core,
        decision_log: DecisionLog,
        sink: Sink,
        config: SchedulerConfig,
        snapshot_every: int,
        *,
        clock: Clock | None = None,
        replan: Replan | None = None,
    ) -> None:
        self.core = core
        self.caught_up = asyncio.Event()
        """Set once the log was folded up to its end at startup and contains the configuration."""
        self._log = decision_log
        self._sink = sink
        self._config = config
        self._snapshot_every = snapshot_every
        self._clock = clock or WallClock()
        self._replan = replan or _replan_in_thread
        self._timers: list[tuple[float, str]] = []
        self._timer_set = asyncio.Event()
        self._ahead_s = 0.0
        """Lead of this clock over the log's, learned from timers that fired too early."""
        self._ahead_when_fired_s: dict[str, float] = {}
        """Fired timer that has not appeared in the log yet → `_ahead_s` at the time of firing."""
        self._answers: dict[str, asyncio.Future[Answer]] = {}
        self._handling = asyncio.Lock()
        """Held while an entry is handled."""
        self._tasks: asyncio.TaskGroup | None = None
        """Task group of the running shell."""
        self._storing: set[asyncio.Task[None]] = set()
        """Permits being sent to the server."""
        self._outcomes: OutcomeWriter | None = None
        """Writer of the running shell."""
        self._saving: asyncio.Task[None] | None = None
        """The newest snapshot, until it is stored."""
        self._traces: dict[str, tuple[Context, float]] = {}
        """Open operation → its trace context and the time when it was queued."""

    async def run(self) -> None:
        for timer, due_s in self.core.state.timers.items():
            heapq.heappush(self._timers, (due_s, timer))
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._outcomes = OutcomeWriter(lambda output: self._perform(output, None), tasks)
            tasks.create_task(self._fold())
            tasks.create_task(self._fire_timers())

    async def quiesce(self) -> None:
        """Stop handling entries. Returns once all outputs are performed."""
        await self._handling.acquire()
        await self._wait_until_all_stored()

    def now_s(self) -> float:
        """Estimated present time of the log's clock."""
        return max(self.core.state.now_s, self._clock.now_s() - self._ahead_s)

    async def append(self, event: events.Event) -> None:
        """Append an event without waiting for an answer."""
        await self._log.append(event)

    async def request(
        self, make_event: Callable[[str], events.Event], timeout_s: float = 10.0
    ) -> Answer:
        """Append a request event and wait for the core's answer.

        Args: make_event: builds the event from the request's id, which the answer repeats.
        Raises: PhaseloomError: the core refused the request.
              ResourceError: there was no answer in time.
        """
        request_id = uuid.uuid4().hex
        event = make_event(request_id)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = future
        try:
            await self._log.append(event, msg_id=f"request:{request_id}")
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise ResourceError(
                "the scheduler did not answer in time: it is behind its log",
                remedy="check the job's status before trying again",
            ) from None
        finally:
            del self._answers[request_id]

    # --- the fold -------------------------------------------------------------------------------

    async def _fold(self) -> None:
        backlog_end = await self._log.end()
        if backlog_end <= self.core.state.sequence:
            await self._finish_catch_up()
        since_snapshot = 0
        async for entry in self._log.read_entries(self.core.state.sequence + 1):
            if entry.sequence != self.core.state.sequence + 1:
                # Entries are dropped only below the snapshot before the newest one.
                raise log_entries_missing(self.core.state.sequence + 1, entry.sequence - 1)
            async with self._handling:
                outputs = await self.handle(entry)
                since_snapshot += len(events.parts(entry.event))
                if _has_unrepeatable(outputs):
                    await self._wait_until_all_stored()
                    await self._sink.save(self.core.state.sequence, self.core.snapshot())
                    since_snapshot = 0
                elif since_snapshot >= self._snapshot_every and self._saving is None:
                    self._start_saving()
                    since_snapshot = 0
            if entry.sequence >= backlog_end and not self.caught_up.is_set():
                await self._finish_catch_up()
        raise InternalError("the decision log ended")

    def _start_saving(self) -> None:
        """Take a snapshot, and store it once the outputs so far are stored."""
        assert self._tasks is not None
        saving = self._save(self.core.state.sequence, self.core.snapshot(), set(self._storing))
        self._saving = self._tasks.create_task(saving)

    async def _save(self, sequence: int, snapshot: bytes, permits: set[asyncio.Task[None]]) -> None:
        assert self._outcomes is not None
        await self._outcomes.stored()
        if permits:
            await asyncio.wait(permits)
        await self._sink.save(sequence, snapshot)
        self._saving = None

    async def _finish_catch_up(self) -> None:
        if self.core.state.config != self._config:
            await self._log.append(events.SchedulerConfigured(self._config))
        self.caught_up.set()
        self._start_replan(repack.unanswered(self.core.state))

    async def handle(self, entry: LogEntry) -> list[Output]:
        """Fold one entry, perform its outputs and return them."""
        began_s = time.perf_counter()
        outputs = self.core.step(entry.sequence, entry.time_s, entry.event)
        step_s = time.perf_counter() - began_s
        self._record_traces(entry)
        if isinstance(entry.event, events.TimerFired):
            self._learn_clock_lead(entry.event, entry.time_s)
        permits = permits_in(outputs)
        contexts = [self._trace_permit(permit, entry) for permit in permits]
        remaining = outputs if self._outcomes is None else self._outcomes.add(outputs)
        await self._perform_all(batched(remaining, contexts))
        for permit in permits:
            self._trace_queue(permit, entry)  # its span can wait, the permit could not
        if self.caught_up.is_set():
            observing.stepped(outputs, step_s)
        for event in events.parts(entry.event):
            if isinstance(event, events.OperationFinished):
                self._traces.pop(str(event.key), None)
        for output in outputs:
            if isinstance(output, WriteCompletion):
                self._traces.pop(str(output.key), None)
        return outputs

    async def _perform_all(self, outputs: list[tuple[Output, Context | None]]) -> None:
        may_overlap = all(
            isinstance(o, DeleteOperations | SetTimer) or _is_permit(o) for o, _ in outputs
        )
        if self._tasks is None or not may_overlap:
            await self._wait_until_stored()
            effects = [pair for pair in outputs if not isinstance(pair[0], _FINAL_OUTPUTS)]
            await asyncio.gather(*(self._perform(output, context) for output, context in effects))
            for output, context in outputs:
                if isinstance(output, _FINAL_OUTPUTS):
                    await self._perform(output, context)
            return
        for output, context in outputs:
            while len(self._storing) >= MAX_STORING:
                await asyncio.wait(self._storing, return_when=asyncio.FIRST_COMPLETED)
            task = self._tasks.create_task(self._perform(output, context))
            self._storing.add(task)
            task.add_done_callback(self._storing.discard)

    async def _wait_until_stored(self) -> None:
        while self._storing:
            await asyncio.wait(self._storing)

    async def _wait_until_all_stored(self) -> None:
        """Wait for permits, outcomes and a snapshot."""
        await self._wait_until_stored()
        if self._outcomes is not None:
            await self._outcomes.stored()
        if self._saving is not None:
            await asyncio.wait([self._saving])

    async def _perform(self, output: Output, context: Context | None) -> None:
        match output:
            case SetTimer():
                self._add_timer(output)
            case Answer():
                self._answer(output)
            case ComputeReplan():
                # While catching up, older requests are obsolete: only the last one is then started.
                if self.caught_up.is_set():
                    self._start_replan(output)
            case _:
                await self._sink.perform(output, context)

    def _answer(self, answer: Answer) -> None:
        future = self._answers.get(answer.request)
        if future is None or future.done():
            return
        if answer.error is not None:
            future.set_exception(to_exception(answer.error))
        else:
            future.set_result(answer)

    # --- replanning -----------------------------------------------------------------------------

    def _start_replan(self, request: ComputeReplan | None) -> None:
        if request is not None and self._tasks is not None:
            self._tasks.create_task(self._answer_replan(request))

    async def _answer_replan(self, request: ComputeReplan) -> None:
        computed = await self._replan(request)
        await self._log.append(computed, msg_id=f"replan:{request.as_of}")

    # --- timers ---------------------------------------------------------------------------------

    def _add_timer(self, timer: SetTimer) -> None:
        heapq.heappush(self._timers, (timer.due_s, timer.timer))
        pending = self.core.state.timers
        if len(self._timers) > 2 * len(pending) + _STALE_TIMERS:
            # Most long timers are withdrawn long before they are due.
            self._timers = [(due_s, name) for name, due_s in pending.items()]
            heapq.heapify(self._timers)
        self._timer_set.set()

    async def _fire_timers(self) -> None:
        await self.caught_up.wait()
        while True:
            self._timer_set.clear()
            until_s = self._timers[0][0] + self._ahead_s if self._timers else None
            if until_s is None or until_s > self._clock.now_s():
                await self._clock.wait(self._timer_set, until_s)
                continue
            due_s, timer = heapq.heappop(self._timers)
            # Most timers that were set before a restart have already fired.
            if self.core.state.timers.get(timer) == due_s:
                self._ahead_when_fired_s[timer] = self._ahead_s
                await self._log.append(events.TimerFired(timer))

    def _learn_clock_lead(self, event: events.TimerFired, time_s: float) -> None:
        """Learn how far this clock is ahead from a timer that fired early and is therefore still
        set."""
        ahead_when_fired_s = self._ahead_when_fired_s.pop(event.timer, 0.0)
        due_s = self.core.state.timers.get(event.timer)
        if due_s is not None:
            self._ahead_s = max(self._ahead_s, ahead_when_fired_s + due_s - time_s)

    # --- tracing --------------------------------------------------------------------------------

    def _record_traces(self, entry: LogEntry) -> None:
        match entry.event:
            case events.QueuedOperation(key=key):
                self._record_trace(key, entry.headers, entry.time_s)
            case events.OperationsQueued(operations, traceparents):
                for i, operation in enumerate(operations):
                    headers = {"traceparent": traceparents[i]} if traceparents else {}
                    self._record_trace(operation.key, headers, entry.time_s)

    def _record_trace(self, key: OperationKey, headers: dict[str, str], time_s: float) -> None:
        deployment = self.core.state.deployments.get(key.deployment_name)
        op = deployment.queue.find(key) if deployment else None
        if op is not None and not op.has_ended:
            self._traces.setdefault(str(key), (telemetry.extract(headers), time_s))

    def _trace_permit(self, permit: Permit, entry: LogEntry) -> Context:
        """Record the span `permit`. Returns the context for sending the permit."""
        parent, _ = self._trace_start(permit, entry)
        now_s = self._clock.now_s()
        span = telemetry.record("permit", entry.time_s, now_s, parent, **_attributes(permit))
        return telemetry.child_context(span)

    def _trace_queue(self, permit: Permit, entry: LogEntry) -> None:
        """Record the span `queue`, from the operation's entry in the log to the entry that permits
        it."""
        parent, queued_s = self._trace_start(permit, entry)
        telemetry.record("queue", queued_s, entry.time_s, parent, **_attributes(permit))

    def _trace_start(self, permit: Permit, entry: LogEntry) -> tuple[Context | None, float]:
        return self._traces.get(str(permit.operation), (None, entry.time_s))


def _has_unrepeatable(outputs: list[Output]) -> bool:
    """Whether some output must not be repeated.

    If a restart repeated it, it would delete data that a new job has stored meanwhile under the
    same name. Taking a snapshot at once prevents that.
    """
    return any(isinstance(output, DropCheckpoint | ForgetJob) for output in outputs)


def _is_permit(output: Output) -> bool:
    return isinstance(output, SendCommand) and isinstance(output.command, Permit | Permits)


def _attributes(permit: Permit) -> dict[str, Any]:
    key = permit.operation
    return {
        "tenant": key.tenant,
        "job": key.job,
        "deployment": key.deployment,
        "seq": key.slot,
        "kind": permit.kind,
        "node": permit.node,
        "epoch": permit.epoch,
    }
