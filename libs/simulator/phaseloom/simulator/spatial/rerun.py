"""A recorded run of jobs that took turns, run again from a moment on under a multiplexing policy.

The recorded log is folded up to that moment. From there on the scheduler's own core goes on under
the other policy, among emulated devices and controllers. So what runs beside what is decided as on
the mesh, and only times are predicted:

- An operation takes as long as it did in the recorded run, where it had its device to itself, times
  the slowdown that a table has for its share and for what runs beside it.
- A controller queues an operation so long after the newest outcome of its job as it did then. This
  time is the controller's own work, or its tools'.
- A command and an outcome travel for as long as they did then, at the median. A switch-in takes as
  long as those of the same deployment did then, at the median.
- A rank gives units up at once while it decodes or has not begun, else when its operation has
  ended.

Services, controllers and seals need cores too; that they slow operations down is not modelled.

`phaseloom demo --spatial` compares each of its runs with what is predicted from the one by turns.
Cost: two folds of the log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from msgspec.structs import replace

from phaseloom.common.contract import commands, events
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey
from phaseloom.common.contract.kinds import KINDS
from phaseloom.common.contract.specs import CommandId, SlowdownTable
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.policies.sharing_view import Claim, speeds
from phaseloom.scheduler.core.state.outputs import Output, SendCommand
from phaseloom.simulator.agenda import Agenda
from phaseloom.simulator.engine import Engine
from phaseloom.simulator.metering import Meter
from phaseloom.simulator.predictions import Entry

Window = tuple[float, float]
"""The operations that were queued between these times are run again; seconds of the log's clock."""
_DONE_S = 1e-6
"""An operation with less work left than this has ended; rounding leaves such remainders, as the
clock counts from 1970."""

K = TypeVar("K")
Times = dict[K, list[float]]


def makespan_s(
    entries: Sequence[Entry], window: Window, multiplexing: str, table: SlowdownTable
) -> float:
    """The time from the window's start until the last of its operations would have had an outcome.

    Args:   entries: the log from its first entry on, of a run in which nothing ran beside anything.
            multiplexing: the policy; it decides by the table that the run's scheduler had.
            table: how much slower operations are in truth.
    Raises: ValueError: no operation that was queued in the window has ended.
    """
    recorded = _read(entries, window)
    agenda, core = Agenda(window[0]), Core.restore(recorded.snapshot)
    assert core.state.config is not None, "the log starts with SchedulerConfigured"
    engine = Engine(agenda, Meter(), core=core)
    devices = _Devices(agenda, engine, recorded, table)
    engine.run(devices, replace(core.state.config, multiplexing=multiplexing))
    assert devices.is_over, f"{len(devices.open)} never ran, {min(map(str, devices.open))} too"
    return devices.ended_s - window[0]


# --- the recorded run -----------------------------------------------------------------------------


@dataclass
class _Recorded:
    """The times in a recorded run, and the scheduler's state where its window begins."""

    snapshot: bytes = b""
    queued: set[OperationKey] = field(default_factory=set)
    """The operations that are run again."""
    finished: dict[OperationKey, events.OperationFinished] = field(default_factory=dict)
    follows: dict[OperationKey | None, list[tuple[float, events.Event]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Operation → the events that came after its outcome, with the seconds in between. None → the
    events that came before any outcome of their job, or answer a command from before the window,
    with the seconds since the window's start."""
    commands_s: list[float] = field(default_factory=list)
    """From each permit until its operation began."""
    outcomes_s: list[float] = field(default_factory=list)
    """From the end of each operation until its outcome was in the log."""
    switches_s: Times[tuple[DeploymentKey, bool]] = field(default_factory=lambda: defaultdict(list))
    """The times of a deployment's switch-ins, those that displaced another one apart."""

    def knows(self, event: events.Event) -> bool:
        """Whether it is known how long what an event brings takes."""
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
        recorded.follows[after] = [each for each in followers if recorded.knows(each[1])]
    return recorded


class _Reader:
    """A fold of a recorded log, with a scheduler's core beside it that tells which commands it sent
    when."""

    def __init__(self, window: Window) -> None:
        self.recorded = _Recorded()
        self._begin_s, self._end_s = window
        self._core = Core()
        self._now_s = 0.0
        self._first = 0
        """The sequence of the window's first entry; 0: it is to come."""
        self._sent_s: dict[OperationKey | tuple[DeploymentKey, int], float] = {}
        """When each permit was given, and each seal asked for."""
        self._newest: dict[JobKey, tuple[OperationKey, float]] = {}
        """The newest outcome of each job within the window, and when it came."""

    def step(self, sequence: int, time_s: float, event: events.Event) -> None:
        self._now_s = time_s
        if time_s >= self._begin_s and not self._first:
            self._first, self.recorded.snapshot = sequence, self._core.snapshot()
        for part in events.parts(event):
            self._take(part)
        for output in self._core.step(sequence, time_s, event):
            match output:
                case SendCommand(commands.Permit(operation=key)):
                    self._sent_s[key] = time_s
                case SendCommand(commands.SealState(deployment=deployment, seq=seq)):
                    self._sent_s[deployment, seq] = time_s

    def _take(self, part: events.Event) -> None:
        is_inside = bool(self._first) and self._now_s <= self._end_s
        match part:
            case events.OperationFinished(replay=False):
                self._take_outcome(part)
            case events.ActivationOpened(deployment=deployment, displaced=displaced):
                seconds = part.offload_s + part.load_s
                self.recorded.switches_s[deployment, bool(displaced)].append(seconds)
                self._answer(part, is_older=part.epoch < self._first)
            case events.SealCommitted(deployment=deployment, seq=seq):
                self._answer(part, is_older=self._is_older((deployment, seq)))
            case events.QueuedOperation(key=key) if is_inside:
                self.recorded.queued.add(key)
                self._follow(key.job_key, part)
            case events.PhaseTrace(job=job) if is_inside:
                self._follow(job, part)
            case _:
                pass

    def _take_outcome(self, part: events.OperationFinished) -> None:
        key, recorded = part.key, self.recorded
        recorded.finished[key] = part
        self._answer(part, is_older=self._is_older(key))
        if self._first:
            self._newest[key.job_key] = key, self._now_s
        if key in self._sent_s:
            recorded.commands_s.append(part.started_unix_s - self._sent_s[key])
            recorded.outcomes_s.append(self._now_s - part.started_unix_s - part.duration_s)

    def _is_older(self, command: OperationKey | tuple[DeploymentKey, int]) -> bool:
        """Whether a command was sent before the window's start."""
        return self._sent_s.get(command, self._begin_s) < self._begin_s

    def _answer(self, part: events.Event, *, is_older: bool) -> None:
        """Keep an answer that comes within the window, to a command from before it."""
        if self._first and is_older:
            self.recorded.follows[None].append((self._now_s - self._begin_s, part))

    def _follow(self, job: JobKey, part: events.Event) -> None:
        after, since_s = self._newest.get(job, (None, self._begin_s))
        self.recorded.follows[after].append((self._now_s - since_s, part))


# --- its devices and controllers, emulated --------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Running:
    """An operation that runs, or is about to."""

    permit: commands.Permit
    left_s: float
    """The rest of its work, in seconds alone on the device."""
    began_s: float = -1.0
    """-1: it has not begun."""
    speed: float = 0.0

    @property
    def deployment(self) -> DeploymentKey:
        return self.permit.operation.deployment_key


class _Devices:
    """The devices and controllers that a scheduler talks to, emulated from the window on."""

    def __init__(
        self, agenda: Agenda, engine: Engine, recorded: _Recorded, table: SlowdownTable
    ) -> None:
        self.open = set(recorded.queued)
        """The operations without an outcome."""
        self.ended_s = 0.0
        """When the newest outcome came."""
        self._agenda = agenda
        self._append = engine.append
        self._state = engine.core.state
        self._recorded = recorded
        self._command_s = median(recorded.commands_s)
        self._outcome_s = median(recorded.outcomes_s)
        self._table = table
        self._running: dict[OperationKey, _Running] = {}
        self._told: dict[DeploymentKey, tuple[CommandId, int]] = {}
        """The newest command that has told a deployment its units, and how many they are."""
        self._units: dict[DeploymentKey, int] = {}
        """The number of units that a deployment uses."""
        self._asked: dict[DeploymentKey, list[commands.AdjustClaims]] = defaultdict(list)
        """Those that take units away and wait for a boundary."""
        self._open_s: dict[DeploymentKey, float] = {}
        """When the newest activation is open."""
        self._settled_s = agenda.now_s
        """The time up to which the work done is counted."""
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
                self._permit(command)
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

    def _permit(self, command: commands.Permit) -> None:
        key = command.operation
        running = _Running(command, self._recorded.finished[key].duration_s)
        self._running[key] = running
        self._tell(running.deployment, command.id, command.units)
        begins_s = self._agenda.now_s + self._command_s
        self._agenda.at(
            max(begins_s, self._open_s.get(running.deployment, 0.0)), self._begin, running
        )

    def _begin(self, running: _Running) -> None:
        self._settle()
        running.began_s = self._agenda.now_s
        self._reach_boundary(running.deployment)
        self._go_on()

    def _end(self, running: _Running) -> None:
        self._settle()
        now_s, key = self._agenda.now_s, running.permit.operation
        if running.left_s > _DONE_S or key not in self._running:
            return  # its speed has changed since this end was foreseen
        finished = replace(
            self._recorded.finished[key],
            epoch=running.permit.epoch,
            incarnation=running.permit.incarnation,
            started_unix_s=running.began_s,
            duration_s=now_s - running.began_s,
        )
        del self._running[key]
        self._agenda.after(self._outcome_s, self._finish, finished)
        self._reach_boundary(running.deployment)
        self._go_on()

    def _finish(self, finished: events.OperationFinished) -> None:
        self._follow(finished.key)
        self.open.discard(finished.key)
        self.ended_s = self._agenda.now_s
        self._append(finished)

    # --- shares ---------------------------------------------------------------------------------

    def _tell(self, key: DeploymentKey, command: CommandId, units: Sequence[int]) -> None:
        """Note the units that a deployment is to use; of several commands the newest one counts."""
        newest = self._told.get(key)
        if newest is None or command >= newest[0]:
            self._told[key] = command, len(units) or self._num_units(key)

    def _adjust(self, command: commands.AdjustClaims) -> None:
        key = command.deployment
        self._tell(key, command.id, command.units)
        if command.shrinks:
            self._asked[key].append(command)
        begun = [r for r in self._running.values() if r.deployment == key and r.began_s >= 0]
        if not command.shrinks or all(KINDS[r.permit.kind].shares_calls for r in begun):
            self._settle()
            self._reach_boundary(key)
            self._go_on()

    def _reach_boundary(self, key: DeploymentKey) -> None:
        """Use the units that a deployment was told, and say so where it was asked for some."""
        self._units[key] = self._told[key][1]
        for asked in self._asked.pop(key, []):
            taken = events.ClaimsAdjusted(key, asked.incarnation, asked.node, asked.id)
            self._agenda.after(self._outcome_s, self._append, taken)

    # --- work -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Count the work that was done since the last time."""
        now_s = self._agenda.now_s
        for running in self._running.values():
            if running.began_s >= 0:
                running.left_s -= (now_s - self._settled_s) * running.speed
        self._settled_s = now_s

    def _go_on(self) -> None:
        """Run on at the speeds of those that run now."""
        by_place: dict[tuple[NodeId, int], list[_Running]] = defaultdict(list)
        for running in self._running.values():
            if running.began_s >= 0:
                running.speed = 1.0
                places = self._state.deployments[str(running.deployment)].places
                if len(places) == 1:
                    by_place[places[0]].append(running)
        for here in by_place.values():
            self._divide(here)
        for running in self._running.values():
            if running.began_s >= 0:
                self._agenda.after(max(0.0, running.left_s) / running.speed, self._end, running)

    def _divide(self, running: Sequence[_Running]) -> None:
        """Set the speeds of the operations that run on one device."""
        kinds: dict[DeploymentKey, list[str]] = defaultdict(list)
        for each in running:
            kinds[each.deployment].append(each.permit.kind)
        claims = [
            Claim(str(key), str(key.job_key), tuple(of), self._most_units(key))
            for key, of in kinds.items()
        ]
        counts = [self._units[key] for key in kinds]
        units = max(self._num_units(key) for key in kinds)
        found = dict(zip(kinds, speeds(self._table, units, claims, counts), strict=True))
        for each in running:
            each.speed = found[each.deployment]

    def _num_units(self, key: DeploymentKey) -> int:
        """The units of the device of a deployment's first rank."""
        node, device = self._state.deployments[str(key)].places[0]
        return self._state.nodes[node].devices[device].units

    def _most_units(self, key: DeploymentKey) -> int:
        """The most units that a deployment's runtime keeps busy; 0: all that there are."""
        deployment = self._state.deployments[str(key)]
        node, _ = deployment.places[0]
        known = self._state.cluster.hosts[node].backends.get(deployment.spec.backend)
        return known.most_units if known else 0
