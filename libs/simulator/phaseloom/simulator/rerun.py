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
from phaseloom.simulator.company import Company, Work
from phaseloom.simulator.engine import Engine
from phaseloom.simulator.metering import Meter
from phaseloom.simulator.predictions import Entry

Window = tuple[float, float]
"""The operations that were queued between these times are run again; seconds of the log's clock."""
LONGEST = 10.0
"""How many times as long as the recorded run what is predicted may take; beyond it is an error."""

K = TypeVar("K")
Times = dict[K, list[float]]


def makespan_s(
    entries: Sequence[Entry], window: Window, multiplexing: str, table: SlowdownTable
) -> float:
    """The time from the window's start until the last of its operations would have had an outcome.

    Args:   entries: the log from its first entry on, of a run in which nothing ran beside anything.
            multiplexing: the policy; it decides by the table that the run's scheduler had.
            table: how much slower operations are in truth.
    Raises: ValueError: no operation that was queued in the window has ended, or not all of them
            would have in `LONGEST` times the window.
    """
    recorded = _read(entries, window)
    agenda, core = Agenda(window[0]), Core.restore(recorded.snapshot)
    assert core.state.config is not None, "the log starts with SchedulerConfigured"
    engine = Engine(agenda, Meter(), core=core)
    devices = _Devices(agenda, engine, recorded, table)
    until_s = window[0] + LONGEST * (window[1] - window[0])
    engine.run(devices, replace(core.state.config, multiplexing=multiplexing), until_s)
    if devices.open:
        late = f"{len(devices.open)} operations, {min(map(str, devices.open))} too,"
        raise ValueError(f"{late} have not ended in {LONGEST:.0f} times as long")
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
        self._companies: dict[tuple[NodeId, int], Company] = {}
        """Device → what runs on it."""
        self._told: dict[DeploymentKey, tuple[CommandId, int]] = {}
        """The newest command that has told a deployment its units, and how many they are."""
        self._asked: dict[DeploymentKey, list[commands.AdjustClaims]] = defaultdict(list)
        """Those that take units away and wait for a boundary."""
        self._open_s: dict[DeploymentKey, float] = {}
        """When the newest activation is open."""
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

    def _permit(self, permit: commands.Permit) -> None:
        key = permit.operation.deployment_key
        self._tell(key, permit.id, permit.units)
        begins_s = self._agenda.now_s + self._command_s
        self._agenda.at(max(begins_s, self._open_s.get(key, 0.0)), self._begin, permit)

    def _begin(self, permit: commands.Permit) -> None:
        key = permit.operation.deployment_key
        self._reach_boundary(key)
        began = replace(
            self._recorded.finished[permit.operation],
            epoch=permit.epoch,
            incarnation=permit.incarnation,
            started_unix_s=self._agenda.now_s,
        )
        claim = Claim(str(key), str(key.job_key), (permit.kind,), self._most_units(key))
        work = Work(claim, began.duration_s, partial(self._end, began))
        self._company_of(key).begin(permit.operation, work)

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
        begun = self._company_of(key).kinds_of(str(key))
        if not command.shrinks or all(KINDS[kind].shares_calls for kind in begun):
            self._reach_boundary(key)

    def _reach_boundary(self, key: DeploymentKey) -> None:
        """Use the units that a deployment was told, and say so where it was asked for some."""
        self._company_of(key).give(str(key), self._told[key][1])
        for asked in self._asked.pop(key, []):
            taken = events.ClaimsAdjusted(key, asked.incarnation, asked.node, asked.id)
            self._agenda.after(self._outcome_s, self._append, taken)

    def _company_of(self, key: DeploymentKey) -> Company:
        """The operations on the device of a deployment's first rank."""
        place = self._state.deployments[str(key)].places[0]
        if place not in self._companies:
            self._companies[place] = Company(self._agenda, self._num_units(key), self._table)
        return self._companies[place]

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
