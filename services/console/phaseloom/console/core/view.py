"""The console's view of a mesh: a fold over the decision log with bounded memory.

It keeps the newest `history` operations and activations, `NUM_DECISIONS` decisions, `NUM_REPORTS`
reports of each job, and everything that is still open. `update` returns all of it, or the changes
since an earlier update; a tenant sees only its own rows. The shell feeds the view; pages and
`phaseloom replay` read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TypeVar

import msgspec

from phaseloom.common.contract import events
from phaseloom.common.contract.api import JobReport, JobStatus
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, JobKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.observability.activity import Activity, Device, Execution, Switch
from phaseloom.console.core import wire
from phaseloom.console.core.decisions import decision_of, moves_of
from phaseloom.console.core.wire import TICK_S, Decision

HISTORY = 100_000
NUM_DECISIONS = 1000
NUM_REPORTS = 4000
"""Maximum number of reports kept of each job."""

_SLOW_S = 1.0
"""Seconds between two updates of jobs and nodes to a page."""
_SILENCE_S = 5.0
"""Seconds after which a page gets an update even if nothing changed, to show that the connection
is alive."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Operation:
    execution: Execution
    logged_s: float
    devices: tuple[Device, ...]

    @property
    def tenant(self) -> str:
        return self.execution.key.tenant


@dataclass(frozen=True, slots=True)
class _Activation:
    event: events.ActivationOpened
    devices: tuple[Device, ...]
    hidden_s: float

    @property
    def tenant(self) -> str:
        return self.event.deployment.tenant


@dataclass(slots=True)
class _Counts:
    num_done: int = 0
    num_failed: int = 0
    device_s: float = 0.0


class _Newest(deque[T]):
    """The newest items of a sequence, and a count of all items that were added."""

    def __init__(self, length: int) -> None:
        super().__init__(maxlen=length)
        self.num_added = 0

    def put(self, item: T) -> None:
        self.append(item)
        self.num_added += 1

    def since(self, number: int) -> Iterable[T]:
        """Return the items after the first `number`, without those that were already dropped."""
        return islice(self, max(0, len(self) - (self.num_added - number)), None)


@dataclass(slots=True)
class View:
    """A fold over the decision log's events, and over the views of jobs in KV."""

    history: int = HISTORY
    origin_s: float = 0.0
    """Time of the first event, in Unix seconds; 0: no event yet."""
    _activity: Activity = field(default_factory=Activity)
    _newest: _Newest[_Operation | _Activation | Decision | wire.ReportRow] = field(init=False)
    _decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=NUM_DECISIONS))
    _nodes: dict[str, wire.NodeRow] = field(default_factory=dict)
    _jobs: dict[JobKey, JobStatus] = field(default_factory=dict)
    _cycles: dict[JobKey, events.PhaseTrace] = field(default_factory=dict)
    _counts: dict[JobKey, _Counts] = field(default_factory=dict)
    _reports: dict[str, deque[wire.ReportRow]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._newest = _Newest(self.history)

    # --- events and reports -----------------------------------------------------------------------

    def step(self, time_s: float, event: events.Event) -> None:
        """Fold the next event of the decision log. Events of one entry are passed one at a time."""
        self.origin_s = self.origin_s or time_s
        hidden_s = 0.0
        for observation in self._activity.step(time_s, event):
            match observation:
                case Execution():
                    self._ran(time_s, observation)
                case Switch():
                    hidden_s = observation.hidden_s
        match event:
            case events.NodeUp():
                self._nodes[event.node] = wire.NodeRow(
                    event.node,
                    event.pool,
                    [device.memory_bytes for device in event.devices],
                    event.host_memory_bytes,
                )
            case events.NodeLost() if row := self._nodes.get(event.node):
                self._nodes[event.node] = wire.NodeRow(
                    row.node, row.pool, row.devices, row.host_memory_bytes, is_up=False
                )
            case events.ActivationOpened():
                devices = self._activity.devices_of(event.deployment)
                self._newest.put(_Activation(event, devices, hidden_s))
            case events.ReplanComputed():
                for move in moves_of(time_s, event):
                    self.decided(move)
        decision = decision_of(time_s, event)
        if decision is not None:
            self.decided(decision)

    def status(self, time_s: float, job: JobKey, status: JobStatus | None) -> None:
        """Store a job's new status, or forget the job if it is None."""
        before = self._jobs.get(job)
        if status is None:
            for by_job in (self._jobs, self._cycles, self._counts):
                by_job.pop(job, None)
            self._reports.pop(str(job), None)
            return
        if before is not None and before.run != status.run:
            self._counts.pop(job, None)
            self._cycles.pop(job, None)
        self._jobs[job] = status
        if status.placement and (before is None or before.placement != status.placement):
            self.decided(Decision(time_s, "placed", status.placement, str(job)))
        if status.error is not None and (before is None or before.error != status.error):
            reason = f"{status.error.code}: {status.error.message}"
            self.decided(Decision(time_s, status.state, reason, str(job), is_trouble=True))

    def cycle(self, job: JobKey, trace: events.PhaseTrace | None) -> None:
        """Store the cycle that the profiler learned for a job, or forget it if it is None."""
        if trace is None:
            self._cycles.pop(job, None)
        else:
            self._cycles[job] = trace

    def decided(self, decision: Decision) -> None:
        """Store a decision."""
        self._newest.put(decision)
        self._decisions.append(decision)

    def reported(self, job: JobKey, report: JobReport) -> None:
        """Store a report of a job's controller."""
        row = wire.ReportRow(str(job), report.step, report.values, report.run)
        self._newest.put(row)
        self._reports.setdefault(row.job, deque(maxlen=NUM_REPORTS)).append(row)

    def _ran(self, time_s: float, execution: Execution) -> None:
        devices = self._activity.devices_of(execution.key.deployment_key)
        self._newest.put(_Operation(execution, time_s, devices))
        if execution.is_replay:
            return
        counts = self._counts.setdefault(execution.key.job_key, _Counts())
        counts.num_done += 1
        counts.num_failed += execution.outcome is not Outcome.COMPLETED
        counts.device_s += sum(execution.busy_s.values())

    # --- updates of pages -----------------------------------------------------------------------

    def update(
        self, now_s: float, *, since: int | None = None, tenant: str = "", with_jobs: bool = True
    ) -> wire.Update:
        """Return the whole view, or the changes since an earlier update.

        Args: since: `cursor` of the earlier update. If it is None or no longer kept, the whole view
                  is returned.
              tenant: return only this tenant's rows. Empty: all tenants.
              with_jobs: whether to include jobs and nodes.
        """
        oldest = self._newest.num_added - len(self._newest)
        is_whole = since is None or not oldest <= since <= self._newest.num_added
        rows = _Rows(self.origin_s, tenant)
        begin = oldest if since is None or is_whole else since
        decisions = list(self._decisions) if is_whole else []
        reports = [*chain.from_iterable(self._reports.values())] if is_whole else []
        for item in self._newest.since(begin):
            match item:
                case Decision() | wire.ReportRow() if is_whole:
                    pass  # included above, from the longer lists
                case Decision():
                    decisions.append(item)
                case wire.ReportRow():
                    reports.append(item)
                case _:
                    rows.add(item)
        return wire.Update(
            cursor=self._newest.num_added,
            now_s=now_s,
            origin_s=self.origin_s,
            is_whole=is_whole,
            operations=rows.operations,
            activations=rows.activations,
            decisions=[d for d in decisions if rows.has_job(d.job)],
            reports=[r for r in reports if rows.has_job(r.job)],
            heads=self._heads(rows, now_s),
            nodes=[*self._nodes.values()] if with_jobs or is_whole else None,
            jobs=self.jobs(tenant) if with_jobs or is_whole else None,
            # The lists of names come last, because building rows adds to them.
            deployments=[*rows.deployments],
            kinds=[*rows.kinds],
            devices=[*rows.devices],
        )

    def jobs(self, tenant: str = "") -> list[wire.JobRow]:
        """Return the rows of a tenant's jobs. Empty tenant: all jobs."""
        depths = self._activity.depth()
        return [
            _job_row(
                job,
                status,
                self._cycles.get(job),
                self._counts.get(job, _Counts()),
                0 if status.has_ended else depths.get(job, 0),
            )
            for job, status in sorted(self._jobs.items())
            if tenant in ("", job.tenant)
        ]

    def _heads(self, rows: _Rows, now_s: float) -> list[wire.HeadRow]:
        return [
            wire.HeadRow(
                rows.deployment(head.key.deployment_key),
                rows.kind(head.kind),
                head.key.slot,
                rows.ticks(head.ready_s),
                head.num_ready,
                rows.device_indices(self._activity.devices_of(head.key.deployment_key)),
            )
            for head in self._activity.heads(now_s)
            if rows.has(head.key.tenant) and not self._has_ended(head.key.job_key)
        ]

    def _has_ended(self, job: JobKey) -> bool:
        """Whether a job has ended. The log does not say so of a job that failed or was drained."""
        status = self._jobs.get(job)
        return status is not None and status.has_ended


@dataclass(slots=True)
class Listener:
    """The state of one open page, which determines its next update.

    Args: tenant: tenant of the page. Empty: an operator's page.
          since: `cursor` of the page's last update. None: it has none yet.
    """

    view: View
    tenant: str
    since: int | None
    _heads: list[wire.HeadRow] | None = None
    _slow: object = None
    """The jobs and nodes of the last update."""
    _slow_s: float = 0.0
    _updated_s: float = 0.0

    def news(self, now_s: float) -> wire.Update | None:
        """Return the page's next update, or None if nothing is new and the last one is recent."""
        asks_slow = now_s - self._slow_s >= _SLOW_S
        update = self.view.update(now_s, since=self.since, tenant=self.tenant, with_jobs=asks_slow)
        has_slow = update.jobs is not None
        if has_slow:
            self._slow_s = now_s
            slow = (update.jobs, update.nodes)
            if slow == self._slow and not update.is_whole:
                update, has_slow = msgspec.structs.replace(update, jobs=None, nodes=None), False
            self._slow = slow
        is_news = has_slow or update.is_whole or update.cursor != self.since
        if not is_news and update.heads == self._heads and now_s - self._updated_s < _SILENCE_S:
            return None
        self.since, self._heads, self._updated_s = update.cursor, update.heads, now_s
        return update


@dataclass(slots=True)
class _Rows:
    """Rows of an update and the lists of names that they refer to by index."""

    origin_s: float
    tenant: str
    operations: list[wire.OperationRow] = field(default_factory=list)
    activations: list[wire.ActivationRow] = field(default_factory=list)
    deployments: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    devices: dict[str, int] = field(default_factory=dict)
    _keys: dict[DeploymentKey, int] = field(default_factory=dict)
    _device_indices: dict[tuple[Device, ...], list[int]] = field(default_factory=dict)

    def has(self, tenant: str) -> bool:
        return self.tenant in ("", tenant)

    def has_job(self, job: str) -> bool:
        return not self.tenant or job.startswith(f"{self.tenant}.")

    def add(self, item: _Operation | _Activation) -> None:
        if not self.has(item.tenant):
            return
        if isinstance(item, _Operation):
            self.operations.append(self._operation(item))
        else:
            self.activations.append(self._activation(item))

    def ticks(self, time_s: float) -> int:
        return round((time_s - self.origin_s) / TICK_S)

    def deployment(self, key: DeploymentKey) -> int:
        number = self._keys.get(key)
        if number is None:
            number = self._keys[key] = self.deployments.setdefault(str(key), len(self.deployments))
        return number

    def kind(self, kind: str) -> int:
        return self.kinds.setdefault(kind, len(self.kinds))

    def device_indices(self, devices: tuple[Device, ...]) -> list[int]:
        indices = self._device_indices.get(devices)
        if indices is None:
            names = [f"{node}/{index}" for node, index in devices]
            indices = [self.devices.setdefault(name, len(self.devices)) for name in names]
            self._device_indices[devices] = indices
        return indices

    def _operation(self, item: _Operation) -> wire.OperationRow:
        ran = item.execution
        return wire.OperationRow(
            self.deployment(ran.key.deployment_key),
            self.kind(ran.kind),
            ran.key.slot,
            self.ticks(ran.queued_s),
            self.ticks(ran.ready_s),
            self.ticks(ran.start_s),
            self.ticks(ran.end_s),
            max(0, self.ticks(item.logged_s) - self.ticks(ran.end_s)),
            self.device_indices(item.devices),
            ran.num_tokens,
            "" if ran.outcome is Outcome.COMPLETED else ran.outcome.value,
            ran.is_replay,
        )

    def _activation(self, item: _Activation) -> wire.ActivationRow:
        event = item.event
        return wire.ActivationRow(
            self.deployment(event.deployment),
            self.ticks(event.started_unix_s),
            round(event.offload_s / TICK_S),
            round(event.load_s / TICK_S),
            round(item.hidden_s / TICK_S),
            self.device_indices(item.devices),
            event.bytes_out,
            event.bytes_in,
            event.is_speculative,
            [self.deployment(key) for key in event.displaced if self.has(key.tenant)],
        )


def _job_row(
    job: JobKey,
    status: JobStatus,
    cycle: events.PhaseTrace | None,
    counts: _Counts,
    num_open: int,
) -> wire.JobRow:
    deployments = [
        wire.DeploymentRow(
            deployment.name,
            deployment.pool,
            deployment.node,
            deployment.state,
            deployment.incarnation,
            deployment.moving,
            _problem(deployment.error),
        )
        for deployment in status.deployments
    ]
    return wire.JobRow(
        str(job),
        status.state,
        status.has_ended,
        status.placement,
        _problem(status.error),
        deployments,
        num_open,
        counts.num_done,
        counts.num_failed,
        counts.device_s,
        cycle.period_s if cycle else 0.0,
        cycle.worst_period_s if cycle else 0.0,
        cycle.drift if cycle else 0.0,
        [
            wire.SegmentRow(segment.pool, segment.offset_s, segment.duration_s)
            for segment in (cycle.segments if cycle else [])
        ],
        status.run,
        status.submitted_s,
        status.ended_s,
        status.tags,
        bool(status.config),
    )


def _problem(error: ErrorInfo | None) -> wire.ProblemRow | None:
    return None if error is None else wire.ProblemRow(error.message, error.remedy)
