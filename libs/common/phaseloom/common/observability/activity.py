"""Device activity from the decision log: executions, switches and open operations.

This is a fold for observers: metrics, `phaseloom top` and the console. Its memory is bounded by the
number of open operations. A log may start in the middle: a deployment that is not known yet has the
pool `unknown` and no devices.

An operation *waits* from the time it is ready (queued, with its predecessors and everything in
`after` done) until it starts. A switch is *hidden* as long as no ready operation waits for its
devices. Operations that end without running have no log entry of their own. They count as ended
when the cause of their end appears: a failed predecessor named in `after`, a cancel, their timeout,
or the end of their job.

Start times come from the workers' clocks, all other times from the log. Cost: that of `Readiness`,
plus O(ready operations of the affected devices) for a switch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from phaseloom.common.contract import events
from phaseloom.common.contract.ids import DeploymentKey, JobKey, OperationKey
from phaseloom.common.contract.kinds import MUTATING_KINDS
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.observability.intervals import Interval, merge, subtract, total
from phaseloom.common.observability.readiness import Readiness

UNKNOWN_POOL = "unknown"
NOT_READY = float("inf")
_MAX_BUSY = 64
"""Number of newest busy intervals kept per device, because later reports may overlap them."""

Device = tuple[str, int]
"""(node, index)."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One run of an operation on its devices."""

    key: OperationKey
    kind: str
    pool: str
    outcome: Outcome
    queued_s: float
    """Time of the operation's log entry; `ready_s` if the log starts after it."""
    ready_s: float
    start_s: float
    end_s: float
    num_tokens: int
    is_replay: bool
    busy_s: dict[Device, float]
    """Per device, the seconds of this execution that no earlier execution has counted there."""

    @property
    def waited_s(self) -> float:
        return max(0.0, self.start_s - self.ready_s)


@dataclass(frozen=True, slots=True)
class Switch:
    """An activation that moved bytes."""

    deployment: DeploymentKey
    node: str
    end_s: float
    """Time of the switch's log entry."""
    offload_s: float
    load_s: float
    bytes_out: int
    bytes_in: int
    hidden_s: float

    @property
    def duration_s(self) -> float:
        return self.offload_s + self.load_s


Observation = Execution | Switch


@dataclass(frozen=True, slots=True)
class Head:
    """The first ready operation of a deployment that has no outcome. It is running, or runs
    next."""

    key: OperationKey
    kind: str
    ready_s: float
    num_ready: int
    """Number of ready operations of the deployment, including this one."""


@dataclass(slots=True)
class _OpenOperation:
    operation: events.QueuedOperation
    queued_s: float
    ready_s: float = NOT_READY

    def waits_at(self, time_s: float) -> bool:
        timeout_s = self.operation.timeout_s
        return not timeout_s or time_s < self.queued_s + timeout_s


@dataclass(slots=True)
class Activity:
    """A fold over the log entries. `step` returns what each entry reports."""

    holders: dict[str, DeploymentKey] = field(default_factory=dict)
    """Node → the deployment of its newest activation."""
    pools: dict[str, str] = field(default_factory=dict)
    _open: dict[DeploymentKey, dict[OperationKey, _OpenOperation]] = field(default_factory=dict)
    """Deployment → its open operations, in order of arrival."""
    _ready: dict[DeploymentKey, dict[OperationKey, _OpenOperation]] = field(default_factory=dict)
    """The ready operations among `_open`."""
    _dependents: dict[tuple[JobKey, str, int | None], list[OperationKey]] = field(
        default_factory=dict
    )
    """The operations that run after another one: after which job's deployment and `seq`."""
    _readiness: Readiness = field(default_factory=Readiness)
    _devices: dict[DeploymentKey, tuple[Device, ...]] = field(default_factory=dict)
    _incarnations: dict[DeploymentKey, int] = field(default_factory=dict)
    _deployment_pools: dict[DeploymentKey, str] = field(default_factory=dict)
    _busy: dict[Device, list[Interval]] = field(default_factory=dict)

    def step(  # noqa: PLR0912 - one arm an event
        self, time_s: float, event: events.Event, ready: Sequence[OperationKey] | None = None
    ) -> list[Observation]:
        """Apply one event of the log. Returns: the execution or switch that it reports.

        Args:   time_s: time of the log entry, in Unix seconds.
                ready: operations that the event made ready, if the caller has its own `Readiness`;
                    None: compute them here.
        """
        if ready is None:
            ready = self._readiness.step(event)
        observations: list[Observation] = []
        match event:
            case events.NodeUp():
                self.pools[event.node] = event.pool
                self.holders.pop(event.node, None)
            case events.JobSubmitted(job=job):
                for spec in event.spec.deployments:
                    key = DeploymentKey(job.tenant, job.job, spec.name)
                    self._deployment_pools[key] = spec.pool
            case events.DeploymentCreated(job=job, spec=spec):
                self._deployment_pools[DeploymentKey(job.tenant, job.job, spec.name)] = spec.pool
            case events.WpgStarted():
                self._record_devices(event)
            case events.WpgLost(deployment=key):
                # A dead WPG holds nothing; a late report of an earlier incarnation says nothing.
                is_newest = event.incarnation >= self._incarnations.get(key, 0)
                if is_newest and self.holders.get(event.node) == key:
                    del self.holders[event.node]
            case events.ActivationOpened():
                observations = self._switch(time_s, event)
            case events.QueuedOperation():
                if event.error is not None:
                    self._end_dependents(event.key)
                else:
                    operations = self._open.setdefault(event.key.deployment_key, {})
                    operations.setdefault(event.key, _OpenOperation(event, time_s))
                    for after in event.after:
                        target = (event.key.job_key, after.deployment, after.seq)
                        self._dependents.setdefault(target, []).append(event.key)
            case events.OperationFinished():
                observations = [self._finish(event)]
            case events.CancelRequested(key=key):
                if self._drop(key) is not None:
                    self._end_dependents(key)
            case events.DeploymentDeleted(deployment=key):
                self._open.pop(key, None)
                self._ready.pop(key, None)
                self.holders = {n: held for n, held in self.holders.items() if held != key}
            case events.JobFinished(job=job):
                self._forget(job)
        for operation in ready:
            opened = self._open.get(operation.deployment_key, {}).get(operation)
            if opened is not None:
                opened.ready_s = time_s
                self._ready.setdefault(operation.deployment_key, {})[operation] = opened
        return observations

    def depth(self) -> Counter[JobKey]:
        """Number of operations without an outcome, by job."""
        depths: Counter[JobKey] = Counter()
        for deployment, operations in self._open.items():
            depths[deployment.job_key] += len(operations)
        return depths

    def waiting(self, now_s: float) -> Counter[str]:
        """Number of ready operations without an outcome, by node.

        A running operation counts too.
        """
        counts: Counter[str] = Counter()
        for deployment, operations in self._ready.items():
            if devices := self._devices.get(deployment):
                counts[devices[0][0]] += sum(o.waits_at(now_s) for o in operations.values())
        return counts

    def heads(self, now_s: float) -> list[Head]:
        """Return the head of each deployment that has a ready operation."""
        heads = []
        for operations in self._ready.values():
            for opened in operations.values():
                if opened.waits_at(now_s):
                    operation = opened.operation
                    heads.append(
                        Head(operation.key, operation.kind, opened.ready_s, len(operations))
                    )
                    break
        return heads

    def devices_of(self, key: DeploymentKey) -> tuple[Device, ...]:
        """Return the devices of a deployment's WPG; empty: the log has not reported them."""
        return self._devices.get(key, ())

    # --- operations -----------------------------------------------------------------------------

    def _record_devices(self, event: events.WpgStarted) -> None:
        """Record the devices of a WPG. Each of its nodes reports separately, and a new incarnation
        starts from an empty list."""
        key = event.deployment
        reported = tuple((event.node, device) for device in event.devices or [0])
        is_same = self._incarnations.get(key) == event.incarnation
        earlier = self._devices.get(key, ()) if is_same else ()
        self._incarnations[key] = event.incarnation
        self._devices[key] = (*(d for d in earlier if d[0] != event.node), *reported)

    def _drop(self, key: OperationKey) -> _OpenOperation | None:
        self._ready.get(key.deployment_key, {}).pop(key, None)
        return self._open.get(key.deployment_key, {}).pop(key, None)

    def _finish(self, event: events.OperationFinished) -> Execution:
        key, start_s = event.key, event.started_unix_s
        opened = self._drop(key)
        if event.outcome is not Outcome.COMPLETED:
            self._end_dependents(key)
        else:
            self._dependents.pop((key.job_key, key.deployment, key.seq), None)
        if event.kind in MUTATING_KINDS and not event.replay:
            # All lower `seq` have ended. Stop at the first higher one: it drops the rest.
            operations = self._open.get(key.deployment_key, {})
            for lower in list(takewhile(lambda o: not _is_above(o, key), operations)):
                if lower.seq is not None:
                    self._drop(lower)
        ready_s = start_s if opened is None else min(opened.ready_s, start_s)
        interval = (start_s, start_s + event.duration_s)
        return Execution(
            key=key,
            kind=event.kind,
            pool=self._pool(key.deployment_key),
            outcome=event.outcome,
            queued_s=ready_s if opened is None else min(opened.queued_s, ready_s),
            ready_s=ready_s,
            start_s=start_s,
            end_s=interval[1],
            num_tokens=event.num_tokens,
            is_replay=event.replay,
            busy_s={
                d: self._occupy(d, interval) for d in self._devices.get(key.deployment_key, ())
            },
        )

    def _pool(self, key: DeploymentKey) -> str:
        pool = self._deployment_pools.get(key)
        if pool is not None:
            return pool
        devices = self._devices.get(key)
        return self.pools.get(devices[0][0], UNKNOWN_POOL) if devices else UNKNOWN_POOL

    def _occupy(self, device: Device, interval: Interval) -> float:
        busy = self._busy.setdefault(device, [])
        start_s, end_s = interval
        if not busy or busy[-1][1] <= start_s:  # nearly always
            if start_s < end_s:
                busy.append(interval)
                del busy[:-_MAX_BUSY]
            return max(0.0, end_s - start_s)
        # Reports may arrive late and overlap, so count only the time that is not counted yet.
        fresh = subtract(merge([interval]), busy)
        self._busy[device] = merge([*busy, *fresh])[-_MAX_BUSY:]
        return total(fresh)

    def _end_dependents(self, key: OperationKey) -> None:
        # Follow `after` transitively: an operation that did not complete ends all its dependents.
        ended = [key]
        while ended:
            target = ended.pop()
            where = (target.job_key, target.deployment, target.seq)
            for dependent in self._dependents.pop(where, ()):
                if self._drop(dependent) is not None:
                    ended.append(dependent)

    def _forget(self, job: JobKey) -> None:
        tables: tuple[dict[DeploymentKey, Any], ...]
        tables = (
            *(self._open, self._ready, self._devices),
            *(self._incarnations, self._deployment_pools),
        )
        for keyed in tables:
            for key in [k for k in keyed if k.job_key == job]:
                del keyed[key]
        for target in [target for target in self._dependents if target[0] == job]:
            del self._dependents[target]
        for node in [node for node, key in self.holders.items() if key.job_key == job]:
            del self.holders[node]

    # --- switches -------------------------------------------------------------------------------

    def _switch(self, time_s: float, event: events.ActivationOpened) -> list[Observation]:
        key = event.deployment
        self._devices.setdefault(key, ((event.node, 0),))
        self.holders[event.node] = key
        if not event.bytes_out + event.bytes_in:
            return []
        duration_s = event.offload_s + event.load_s
        return [
            Switch(
                deployment=key,
                node=event.node,
                end_s=time_s,
                offload_s=event.offload_s,
                load_s=event.load_s,
                bytes_out=event.bytes_out,
                bytes_in=event.bytes_in,
                hidden_s=self._hidden_s(key, event.started_unix_s, duration_s, time_s),
            )
        ]

    def _hidden_s(
        self, key: DeploymentKey, start_s: float, duration_s: float, now_s: float
    ) -> float:
        """Seconds of a switch before the first operation that now waits for its devices was ready.

        Nothing ran on these devices during the switch, so every ready operation has waited since it
        became ready.
        """
        devices = set(self._devices[key])
        since = (
            opened.ready_s
            for deployment, operations in self._ready.items()
            if devices.intersection(self._devices.get(deployment, ()))
            for opened in operations.values()
            if opened.waits_at(now_s)
        )
        return max(0.0, min(duration_s, min(since, default=now_s) - start_s))


def _is_above(key: OperationKey, reference: OperationKey) -> bool:
    return key.seq is not None and reference.seq is not None and key.seq > reference.seq
