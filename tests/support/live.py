"""The live shell, with all that it talks to emulated: the same world as the simulator's engine has,
the same virtual time, and a decision log in memory.

The driver lets something happen only when the shell is at rest: everything in the log is folded,
every output performed, and its timers sleep. What is due at one time happens in the engine's order:
the world first, then timers one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from opentelemetry.context import Context

from phaseloom.common.contract.commands import Command, Permits
from phaseloom.common.contract.events import Event, ReplanComputed, TimerFired
from phaseloom.common.contract.specs import SchedulerConfig
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.decisionlog import LogEntry
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.placement import repack
from phaseloom.scheduler.core.state.outputs import (
    Answer,
    ComputeReplan,
    Output,
    SendCommand,
    SetTimer,
)
from phaseloom.scheduler.shell import Shell
from phaseloom.simulator.agenda import NEVER_S, Agenda
from phaseloom.simulator.world import World


class Live:
    """Drives a shell and a world; `append` is the world's."""

    def __init__(self, agenda: Agenda, config: SchedulerConfig, replan_s: float) -> None:
        self.log: list[tuple[float, Event]] = []
        self.commands: list[Command] = []
        self._agenda = agenda
        self._replan_s = replan_s
        self._world: World | None = None
        self._core = _Watched(self)
        self._shell = Shell(
            self._core, self, self, config, 10_000, clock=self, replan=self._compute
        )
        self._grown = asyncio.Event()
        self._changed = asyncio.Event()
        """Something that `_rest` waits for may be so now."""
        self._is_read = False
        """The shell waits for the log to grow."""
        self._emitted: list[Output] = []
        """Outputs of the step in hand: they reach the world together, as they were decided."""
        self._num_arrived = 0
        """Of those, by way of the shell."""
        self._num_plans = 0
        """On their way from the core to here, or from here to the log."""
        self._due_s: float | None = None
        """Until when the shell's timers sleep; None: they do not."""
        self._wake = asyncio.Event()
        self._listens: asyncio.Event | None = None
        """What else ends that sleep."""

    async def run(self, world: World) -> None:
        """Until every job has ended and the nodes have done what they were told."""
        self._world = world
        task = asyncio.create_task(self._shell.run())
        try:
            await self._drive(world, task)
        finally:
            await lifecycle.end([task])

    async def _drive(self, world: World, shell: asyncio.Task[None]) -> None:
        agenda = self._agenda
        while True:
            await self._rest(shell)
            assert self._due_s is not None
            timer_s = NEVER_S if world.is_over else self._due_s
            if agenda.next_s <= timer_s:
                if agenda.next_s == NEVER_S:
                    return
                agenda.run_next()
            else:
                agenda.advance(timer_s)
                self._due_s = None
                self._wake.set()

    async def _rest(self, shell: asyncio.Task[None]) -> None:
        while not self._is_at_rest():
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait({changed, shell}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if shell.done():
                shell.result()  # it never ends but with an error

    def _is_at_rest(self) -> bool:
        is_folded = self._core.state.sequence == len(self.log) and self._is_read
        is_asleep = self._due_s is not None and not (self._listens and self._listens.is_set())
        return is_folded and is_asleep and not self._emitted and not self._num_plans

    # --- the decision log -----------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """From the world."""
        self.log.append((self._agenda.now_s, event))
        self._is_read = False
        self._grown.set()

    async def append(self, event: Event, *, msg_id: str | None = None) -> int:
        """From the shell. The next timer waits until all that comes of this one has happened."""
        self.take(event)
        if isinstance(event, ReplanComputed):
            self._num_plans -= 1
        if isinstance(event, TimerFired):
            await self._sleep(self._agenda.now_s)
        return len(self.log)

    async def read_entries(self, start_sequence: int = 1) -> AsyncIterator[LogEntry]:
        index = start_sequence - 1
        while True:
            while index < len(self.log):
                yield LogEntry(index + 1, *self.log[index], {})
                index += 1
            self._grown.clear()
            self._is_read = True
            self._changed.set()
            await self._grown.wait()

    async def end(self) -> int:
        return len(self.log)

    async def _compute(self, asked: ComputeReplan) -> ReplanComputed:
        is_due = asyncio.Event()
        self._agenda.after(self._replan_s, self._answer, is_due)
        self._num_plans -= 1
        self._changed.set()
        await is_due.wait()
        return repack.compute(asked)

    def _answer(self, is_due: asyncio.Event) -> None:
        self._num_plans += 1
        is_due.set()

    # --- the clock ------------------------------------------------------------------------------

    def now_s(self) -> float:
        return self._agenda.now_s

    async def wait(self, event: asyncio.Event, until_s: float | None) -> None:
        self._listens = event
        is_set = asyncio.create_task(event.wait())
        sleeps = asyncio.create_task(self._sleep(NEVER_S if until_s is None else until_s))
        try:
            await asyncio.wait({is_set, sleeps}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await lifecycle.end([is_set, sleeps])
            self._due_s = self._listens = None

    async def _sleep(self, until_s: float) -> None:
        self._wake.clear()
        self._due_s = until_s
        self._changed.set()
        await self._wake.wait()

    # --- the sink -------------------------------------------------------------------------------

    def emitted(self, outputs: list[Output]) -> None:
        """The core has made them; the shell keeps timers to itself, and answers."""
        assert self._world is not None
        for output in outputs:
            match output:
                case Answer():
                    self._world.perform(output)
                case ComputeReplan():
                    self._num_plans += 1
                case SetTimer():
                    pass
                case _:
                    self._emitted.append(output)

    async def perform(self, output: Output, context: Context | None) -> None:
        """What a step sends reaches its nodes in no order: permits may go together."""
        commands: list[Command] = []
        if isinstance(output, SendCommand):
            sent = output.command
            commands = [*sent.permits] if isinstance(sent, Permits) else [sent]
        self.commands += commands
        self._num_arrived += max(1, len(commands))
        if self._num_arrived == len(self._emitted):
            assert self._world is not None
            for emitted in self._emitted:
                self._world.perform(emitted)
            self._emitted.clear()
            self._num_arrived = 0
            self._changed.set()

    async def save(self, sequence: int, snapshot: bytes) -> None:
        """A restart is not what this is for."""


class _Watched(Core):
    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live

    def step(self, sequence: int, time_s: float, event: Event) -> list[Output]:
        outputs = super().step(sequence, time_s, event)
        self._live.emitted(outputs)
        return outputs
