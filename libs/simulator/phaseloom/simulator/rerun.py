"""Predict how long a recorded run of jobs in turns would take under a multiplexing policy.

The recorded log is folded up to the start of a window. From there the scheduler's own core
continues under the other policy, with emulated devices and controllers. So the scheduler decides as
on the mesh which operations run together, and only times are predicted:

- An operation takes its recorded time, when it had the device to itself, times the slowdown that a
  table has for its share and its neighbours.
- A controller queues an operation as long after the newest outcome of its job as in the recorded
  run. This is the time of the controller's own work or of its tools.
- Commands and outcomes travel for their recorded median time. A switch-in takes the recorded median
  time of the same deployment.
- A rank releases units at once while it decodes or has not started, otherwise when its operation
  ends.

Services, controllers and seals also need cores. Their effect on operations is not modelled.

`phaseloom demo --spatial` compares each of its runs with the prediction from its run in turns.
Cost: two folds of the log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TypeVar

from msgspec.structs import replace

from phaseloom.common.contract import commands, events
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey
from phaseloom.common.contract.kinds import KINDS
from phaseloom.common.contract.specs import CommandId, SlowdownTable
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.policies.sharing_view import Claim
from phaseloom.scheduler.core.state.outputs import Output, SendCommand
from phaseloom.simulator.agenda import Agenda
from phaseloom.simulator.engine import Engine
from phaseloom.simulator.metering import Meter
from phaseloom.simulator.predictions import Entry
from phaseloom.simulator.shareddevice import SharedDevice, Work

Window = tuple[float, float]
"""The operations that were queued between these two times run again; seconds of the log's clock."""
LONGEST = 10.0
"""Largest allowed ratio of the predicted to the recorded time. A longer prediction is an error."""

K = TypeVar("K")
Times = dict[K, list[float]]


def makespan_s(
    entries: Sequence[Entry], window: Window, multiplexing: str, table: SlowdownTable
) -> float:
    """Return the time from the window's start to the last predicted outcome of its operations.

    Args:   entries: the log, from its first entry, of a run in which no operations ran together.
            multiplexing: the policy, which uses the table of the recorded run's scheduler.
            table: the real slowdowns.
    Raises: ValueError: no operation that was queued in the window has ended, or some would not end
            within `LONGEST` times the window.
    """
    recorded = _read(entries, window)
    agenda, core = Agenda(window[0]), Core.restore(recorded.snapshot)
    assert core.state.config is not None, "the log starts with SchedulerConfigured"
    engine = Engine(agenda, Meter(), core=core)
    devices = _Devices(agenda, engine, recorded, table)
    until_s = window[0] + LONGEST * (window[1] - window[0])
    engine.run(devices, replace(core.state.config, multiplexing=multiplexing), until_s)
    if devices.open:
        late = f"{len(devices.open)} operations ({min(map(str, devices.open))} and others)"
        raise ValueError(f"{late} would not end within {LONGEST:.0f} times the recorded window")
    return devices.ended_s - window[0]


# --- the recorded run -----------------------------------------------------------------------------


@dataclass
class _Recorded:
    """The times of a recorded run, and the scheduler's state at the start of its window."""

    snapshot: bytes = b""
    queued: set[OperationKey] = field(default_factory=set)
    """The operations that run again."""
    finished: dict[OperationKey, events.OperationFinished] = field(default_factory=dict)
    follows: dict[OperationKey | None, list[tuple[float, events.Event]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Operation → the events that followed its outcome, each with the delay in seconds. None → the
    events before any outcome of their job, and answers to commands from before the window, each
    with the seconds since the window's start."""
    commands_s: list[float] = field(default_factory=list)
    """Times from a permit to the start of its operation."""
    outcomes_s: list[float] = field(default_factory=list)
    """Times from the end of an operation to the entry of its outcome in the log."""
    switches_s: Times[tuple[DeploymentKey, bool]] = field(default_factory=lambda: defaultdict(list))
    """(deployment, whether it displaced another) → the times of its switch-ins."""

    def knows(self, event: events.Event) -> bool:
        """Whether the duration of the operation that an event queues is known."""
        return not isinstance(event, events.QueuedOperation) or event.key in self.finished


def _read(entries: Sequence[Entry], window: Window) -> _Recorded:
    reader = _Reader(window)
    for entry in entries:
        reader.step(*entry)
    recorded = reader.recorded
    recorded.queued &= recorded.finished.keys()
    if not recorded.queued:
        raise ValueError("no operation that was queued in the window has ended")
    for after, followers in recorded.follows.items():
        recorded.follows[after] = [
            follower for follower in followers if recorded.knows(follower[1])
        ]
    return recorded


class _Reader:
    """Folds a recorded log. Its own scheduler core tells which commands were sent when."""

    def __init__(self, window: Window) -> None:
        self.recorded = _Recorded()
        self._start_s, self._end_s = window
        self._core = Core()
        self._now_s = 0.0
        self._first = 0
        """Sequence of the window's first entry; 0 before it."""
        self._sent_s: dict[OperationKey | tuple[DeploymentKey, int], float] = {}
        """When each permit and each request for a seal was sent."""
        self._newest: dict[JobKey, tuple[OperationKey, float]] = {}
        """Job → its newest outcome within the window, with its time."""

    def step(self, sequence: int, time_s: float, event: events.Event) -> None:
        self._now_s = time_s
        if time_s >= self._start_s and not self._first:
            self._first, self.recorded.snapshot = sequence, self._core.snapshot()
        for part in events.parts(event):
            self._record(part)
        for output in self._core.step(sequence, time_s, event):
            match output:
                case SendCommand(commands.Permit(operation=key)):
                    self._sent_s[key] = time_s
                case SendCommand(commands.SealState(deployment=deployment, seq=seq)):
                    self._sent_s[deployment, seq] = time_s

    def _record(self, part: events.Event) -> None:
        is_inside = bool(self._first) and self._now_s <= self._end_s
        match part:
            case events.OperationFinished(replay=False):
                self._record_outcome(part)
            case events.ActivationOpened(deployment=deployment, displaced=displaced):
                seconds = part.offload_s + part.load_s
                self.recorded.switches_s[deployment, bool(displaced)].append(seconds)
                self._record_answer(part, is_older=part.epoch < self._first)
            case events.SealCommitted(deployment=deployment, seq=seq):
                self._record_answer(part, is_older=self._is_older((deployment, seq)))
            case events.QueuedOperation(key=key) if is_inside:
                self.recorded.queued.add(key)
                self._follow(key.job_key, part)
            case events.PhaseTrace(job=job) if is_inside:
                self._follow(job, part)
            case _:
                pass

    def _record_outcome(self, part: events.OperationFinished) -> None:
        key, recorded = part.key, self.recorded
        recorded.finished[key] = part
        self._record_answer(part, is_older=self._is_older(key))
        if self._first:
            self._newest[key.job_key] = key, self._now_s
        if key in self._sent_s:
            recorded.commands_s.append(part.started_unix_s - self._sent_s[key])
            recorded.outcomes_s.append(self._now_s - part.started_unix_s - part.duration_s)

    def _is_older(self, command: OperationKey | tuple[DeploymentKey, int]) -> bool:
        return self._sent_s.get(command, self._start_s) < self._start_s

    def _record_answer(self, part: events.Event, *, is_older: bool) -> None:
        """Record an answer within the window to a command from before it."""
        if self._first and is_older:
            self.recorded.follows[None].append((self._now_s - self._start_s, part))

    def _follow(self, job: JobKey, part: events.Event) -> None:
        after, since_s = self._newest.get(job, (None, self._start_s))
        self.recorded.follows[after].append((self._now_s - since_s, part))


# --- emulated devices and controllers -------------------------------------------------------------


class _Devices:
    """The devices and controllers that the scheduler talks to from the window's start."""

    def __init__(
        self, agenda: Agenda, engine: Engine, recorded: _Recorded, table: SlowdownTable
    ) -> None:
        self.open = set(recorded.queued)
        """Operations without an outcome."""
        self.ended_s = 0.0
        """Time of the newest outcome."""
        self._agenda = agenda
        self._append = engine.append
        self._state = engine.core.state
        self._recorded = recorded
        self._command_s = median(recorded.commands_s)
        self._outcome_s = median(recorded.outcomes_s)
        self._table = table
        self._shared_devices: dict[tuple[NodeId, int], SharedDevice] = {}
        """Device → its running operations."""
        self._units: dict[DeploymentKey, tuple[CommandId, int]] = {}
        """Deployment → its newest command about units, and their number."""
        self._shrinks: dict[DeploymentKey, list[commands.AdjustClaims]] = defaultdict(list)
        """Commands that take units away and wait for the deployment's next boundary."""
        self._open_s: dict[DeploymentKey, float] = {}
        """Deployment → when its newest activation is open."""
        self._follow(None)

    @property
    def is_over(self) -> bool:
        return not self.open

    def _follow(self, key: OperationKey | None) -> None:
        for delay_s, event in self._recorded.follows.get(key, []):
            is_outcome = isinstance(event, events.OperationFinished)
            self._agenda.after(delay_s, self._finish if is_outcome else self._append, event)

    def perform(self, output: Output) -> None:
        match output:
            case SendCommand(commands.OpenActivation() as command):
                self._open(command)
            case SendCommand(commands.Permit() as command):
                key = command.operation.deployment_key
                self._set_units(key, command.id, command.units)
                begins_s = self._agenda.now_s + self._command_s
                self._agenda.at(max(begins_s, self._open_s.get(key, 0.0)), self._run, command)
            case SendCommand(commands.AdjustClaims() as command):
                self._agenda.after(self._command_s, self._adjust, command)
            case SendCommand(commands.SealState() as command):
                versions, copies = command.versions, [*command.replicas]
                sealed = events.SealCommitted(
                    command.deployment, command.seq, command.node, versions, copies
                )
                self._agenda.after(0.0, self._append, sealed)
            case _:
                pass

    def _open(self, command: commands.OpenActivation) -> None:
        key, now_s = command.deployment, self._agenda.now_s
        known_s = self._recorded.switches_s.get((key, bool(command.displaces)))
        switch_s = median(known_s) if known_s else 0.0
        self._open_s[key] = now_s + self._command_s + switch_s
        opened = events.ActivationOpened(
            key,
            command.epoch,
            command.node,
            now_s + self._command_s,
            switch_s,
            0.0,
            0,
            0,
            displaced=command.displaces,
            is_speculative=command.is_speculative,
        )
        self._agenda.at(self._open_s[key] + self._outcome_s, self._append, opened)

    def _run(self, permit: commands.Permit) -> None:
        key = permit.operation.deployment_key
        self._reach_boundary(key)
        began = replace(
            self._recorded.finished[permit.operation],
            epoch=permit.epoch,
            incarnation=permit.incarnation,
            started_unix_s=self._agenda.now_s,
        )
        claim = Claim(str(key), str(key.job_key), (permit.kind,), self._max_units(key))
        work = Work(claim, began.duration_s, partial(self._end, began))
        self._device_of(key).run(permit.operation, work)

    def _end(self, began: events.OperationFinished) -> None:
        finished = replace(began, duration_s=self._agenda.now_s - began.started_unix_s)
        self._agenda.after(self._outcome_s, self._finish, finished)
        self._reach_boundary(began.key.deployment_key)

    def _finish(self, finished: events.OperationFinished) -> None:
        self._follow(finished.key)
        self.open.discard(finished.key)
        self.ended_s = self._agenda.now_s
        self._append(finished)

    # --- shares ---------------------------------------------------------------------------------

    def _set_units(self, key: DeploymentKey, command: CommandId, units: Sequence[int]) -> None:
        """Record the number of units of a deployment. The newest command wins."""
        newest = self._units.get(key)
        if newest is None or command >= newest[0]:
            self._units[key] = command, len(units) or self._num_units(key)

    def _adjust(self, command: commands.AdjustClaims) -> None:
        key = command.deployment
        self._set_units(key, command.id, command.units)
        if command.shrinks:
            self._shrinks[key].append(command)
        running = self._device_of(key).kinds_of(str(key))
        if not command.shrinks or all(KINDS[kind].shares_calls for kind in running):
            self._reach_boundary(key)

    def _reach_boundary(self, key: DeploymentKey) -> None:
        """Apply the newest number of units, and acknowledge the commands that took units away."""
        self._device_of(key).set_units(str(key), self._units[key][1])
        for command in self._shrinks.pop(key, []):
            adjusted = events.ClaimsAdjusted(key, command.incarnation, command.node, command.id)
            self._agenda.after(self._outcome_s, self._append, adjusted)

    def _device_of(self, key: DeploymentKey) -> SharedDevice:
        device = self._state.deployments[str(key)].places[0]
        if device not in self._shared_devices:
            self._shared_devices[device] = SharedDevice(
                self._agenda, self._num_units(key), self._table
            )
        return self._shared_devices[device]

    def _num_units(self, key: DeploymentKey) -> int:
        """Units of the device of the deployment's first rank."""
        node, device = self._state.deployments[str(key)].places[0]
        return self._state.nodes[node].devices[device].units

    def _max_units(self, key: DeploymentKey) -> int:
        """Maximum number of units that the deployment's runtime can keep busy; 0: all of them."""
        deployment = self._state.deployments[str(key)]
        node, _ = deployment.places[0]
        backend = self._state.cluster.hosts[node].backends.get(deployment.spec.backend)
        return backend.most_units if backend else 0
