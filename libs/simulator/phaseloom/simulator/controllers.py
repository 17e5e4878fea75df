"""Emulated controllers: they submit their job, publish its operations, and end it.

Like a real controller, an emulated one reacts to outcomes and to the state of its job. If the job
fails, the controller submits it again and resumes after the last checkpointed iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from phaseloom.common.contract.api import JobStatus
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.events import (
    Event,
    JobFinished,
    JobSubmitted,
    QueuedOperation,
    SessionOpened,
)
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.kinds import MUTATING_KINDS
from phaseloom.common.contract.operations import After
from phaseloom.simulator.agenda import Agenda
from phaseloom.simulator.draws import Draws
from phaseloom.simulator.jobs import SimJob, deployment_of, period_s, spec_of
from phaseloom.simulator.metering import JobMeter, Meter
from phaseloom.simulator.tracing import Tracer


class Retries(msgspec.Struct, frozen=True):
    """How controllers behave when operations or jobs fail."""

    resubmit_s: float = 60.0
    """Time from a failure until the job is submitted again."""
    checkpoint_every: int = 1
    """Iterations between two checkpoints. A failure loses fewer than that."""
    max_attempts: int = 20
    """How often the controller submits a job before it counts the job as failed."""


USUAL = Retries()


@dataclass(eq=False, slots=True)
class _Op:
    key: OperationKey
    iteration: int
    phase: int
    duration_s: float
    ready_s: float
    """When all earlier operations had ended."""


class Controller:
    """The controller of one job."""

    def __init__(
        self,
        job: SimJob,
        draws: Draws,
        *,
        agenda: Agenda,
        append: Callable[[Event], None],
        meter: Meter,
        retries: Retries,
    ) -> None:
        self.job = job
        self.has_ended = False
        """Whether the job has ended and will not be submitted again."""
        self._meter = meter.jobs[str(job.key)] = JobMeter(job)
        self._cluster_meter = meter
        self._agenda = agenda
        self._append = append
        self._retries = retries
        self._draws = draws
        self._names = [deployment_of(phase.pool) for phase in job.phases]
        self._kinds = [phase.operation_kind for phase in job.phases]
        self._attempt = 0
        """Number of this submission. Actions that an earlier one scheduled are dropped."""
        self._completed = 0
        """Completed iterations, including those that earlier attempts had checkpointed."""
        self._reset()

    def _reset(self) -> None:
        self._is_placed = False
        self._tracer = Tracer(self.job)
        self._first_seq = dict.fromkeys(self._names, 1)
        self._ops: dict[str, list[_Op]] = {name: [] for name in self._names}
        """The operations of this attempt, by deployment and seq."""
        self._queued: dict[tuple[int, int], _Op] = {}
        """(iteration, phase) → the operation, from when it is published until it has ended."""
        self._started = self._completed
        self._rolled_out = self._completed
        """Number of iterations whose first phase has ended."""
        self._synced_s = self._agenda.now_s
        """When the weights of the last completed iteration reach the nodes that need them."""
        self._last_end_s = self._agenda.now_s

    def _later(self, delay_s: float, action: Callable[..., None], *args: object) -> None:
        self._agenda.after(delay_s, self._if_current, self._attempt, action, args)

    def _if_current(
        self, attempt: int, action: Callable[..., None], args: tuple[object, ...]
    ) -> None:
        if attempt == self._attempt:
            action(*args)

    # --- the job --------------------------------------------------------------------------------

    def submit(self) -> None:
        self._attempt += 1
        self._meter.attempts += 1
        self._cluster_meter.num_active += 1
        self._reset()
        if self._meter.submitted_s < 0:
            self._meter.submitted_s = self._agenda.now_s
        spec = spec_of(self.job, iterations=self.job.iterations - self._completed)
        self._append(JobSubmitted(self.job.key, spec, f"submit/{self.job.key}/{self._attempt}"))

    def on_answer(self, status: JobStatus | None, error: ErrorInfo | None) -> None:
        """Handle the scheduler's answer to a submission."""
        if status is None:
            self._end("rejected", error.message if error else "")
            return
        for deployment in status.deployments:
            self._first_seq[deployment.name] = deployment.next_seq

    def on_view(self, status: JobStatus) -> None:
        """Handle a change of the job's published state."""
        match status.state:
            case "placed" | "profiling" | "active" if not self._is_placed:
                self._is_placed = True
                if self._meter.placed_s < 0:
                    self._meter.placed_s = self._agenda.now_s
                self._later(0.0, self._attach)
            case "rejected":
                self._end("rejected", status.error.message if status.error else "")
            case "done":
                self._end("done", "")
            case "failed":
                self._resubmit(status.error.message if status.error else "")
            case _:
                pass

    def _end(self, outcome: str, reason: str) -> None:
        self._attempt += 1
        self._cluster_meter.num_active -= 1
        self.has_ended = True
        self._meter.outcome, self._meter.reason = outcome, reason
        self._meter.ended_s = self._agenda.now_s

    def _resubmit(self, reason: str) -> None:
        if self._meter.attempts >= self._retries.max_attempts:
            self._end("failed", reason)
            return
        self._attempt += 1
        self._is_placed = False
        self._cluster_meter.num_active -= 1
        self._completed -= self._completed % self._retries.checkpoint_every
        self._later(self._retries.resubmit_s, self.submit)

    def crash(self) -> None:
        """Fail the job now and submit it again later."""
        if self._is_placed:
            self._append(JobFinished(self.job.key, "crash", failed=True))

    def on_lost(self) -> None:
        """Handle an operation that was not completed: crash, because no later one can run."""
        self._later(0.0, self.crash)

    def _attach(self) -> None:
        if self.job.is_declared:
            self._later(0.0, self._append, self._tracer.declared())
        self._later(0.0, self._start_iterations)
        self._append(SessionOpened(self.job.key, self._attempt))

    def _start_iterations(self) -> None:
        self._last_end_s = self._agenda.now_s
        self._start_next()

    # --- its iterations -------------------------------------------------------------------------

    def _start_next(self) -> None:
        if self._started == self.job.iterations or self._rolled_out < self._started:
            return
        if self._started - self._completed > self.job.steps_ahead:
            return
        iteration = self._started
        self._started += 1
        # An iteration that runs ahead does not wait for the weights of the newest one.
        is_ahead = iteration > self._completed
        delay_s = 0.0 if is_ahead else max(0.0, self._synced_s - self._agenda.now_s)
        self._publish_from(iteration, 0, delay_s)

    def _publish_from(self, iteration: int, first: int, delay_s: float) -> None:
        """Publish an operation later, with those that the controller publishes together with it."""
        for phase in range(first, len(self.job.phases)):
            if phase > first and self.job.submission.waits_before(phase):
                return
            self._later(delay_s, self._publish, iteration, phase)

    def _publish(self, iteration: int, phase: int) -> None:
        name = self._names[phase]
        ops = self._ops[name]
        seq = self._first_seq[name] + len(ops)
        job = self.job
        key = OperationKey(job.tenant, job.name, name, str(seq))
        op = _Op(key, iteration, phase, self._draws.of(iteration)[phase], self._agenda.now_s)
        ops.append(op)
        after: list[After] = []
        self._queued[iteration, phase] = op
        if job.submission.waits_before(phase):
            self._tracer.on_ready(phase, op.ready_s)
        elif not self._is_ordered(phase):
            before = self._queued[iteration, phase - 1].key
            after = [After(before.deployment, int(before.slot))]
        self._append(
            QueuedOperation(key, str(len(ops)), self._kinds[phase], after, session=self._attempt)
        )

    def _is_ordered(self, phase: int) -> bool:
        """Whether the deployment's own order already runs this phase after its predecessor."""
        is_mutating = MUTATING_KINDS & {self._kinds[phase - 1], self._kinds[phase]}
        return self._names[phase - 1] == self._names[phase] and bool(is_mutating)

    def duration_s(self, key: OperationKey) -> float:
        return self._op(key).duration_s

    def _op(self, key: OperationKey) -> _Op:
        return self._ops[key.deployment][int(key.slot) - self._first_seq[key.deployment]]

    def on_completed(self, key: OperationKey, start_s: float) -> None:
        """Handle the completion of an operation of this attempt. Args: start_s: when it started."""
        op = self._op(key)
        self._meter.wait_s += start_s - op.ready_s
        self._meter.operations += 1
        now_s = self._agenda.now_s
        self._tracer.on_ended(op.phase, now_s)
        if op.phase == 0:
            self._rolled_out = op.iteration + 1
        if op.phase + 1 == len(self.job.phases):
            self._complete(op.iteration)
        elif self.job.submission.waits_before(op.phase + 1):
            self._publish_from(op.iteration, op.phase + 1, self.job.phases[op.phase].think_s)
        else:
            following = self._queued[op.iteration, op.phase + 1]
            following.ready_s = now_s
            self._tracer.on_ready(following.phase, now_s)
        self._queued.pop((op.iteration, op.phase), None)
        self._start_next()

    def _complete(self, iteration: int) -> None:
        now_s = self._agenda.now_s
        self._completed = iteration + 1
        self._synced_s = now_s + self.job.phases[-1].think_s + self.job.sync_s
        durations_s = self._draws.of(iteration)
        self._meter.iteration_s.append(now_s - self._last_end_s)
        self._meter.alone_s += period_s(self.job, durations_s)
        self._last_end_s = self._meter.last_end_s = now_s
        self._meter.completed = self._completed
        if self._completed % self._retries.checkpoint_every == 0:
            self._draws.forget_before(self._completed)
        if self._completed == self.job.iterations:
            self._later(0.0, self._append, JobFinished(self.job.key, "finish"))
            return
        trace = self._tracer.on_iteration(durations_s)
        if trace is not None:
            self._later(0.0, self._append, trace)
