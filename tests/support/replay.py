"""A log folded again, by a core that is restored from its snapshot before every entry."""

from __future__ import annotations

from collections.abc import Iterable

from phaseloom.common.contract.events import Event
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.state.outputs import Output


def restored_at_every_step(log: Iterable[tuple[float, Event]]) -> tuple[Core, list[list[Output]]]:
    """Returns: the core at the end, and what each step brought. What a core keeps beside its state
    it lacks here, so it tells whether anything is decided on that."""
    core, made = Core(), []
    for sequence, (time_s, event) in enumerate(log, start=1):
        core = Core.restore(core.snapshot())
        made.append(core.step(sequence, time_s, event))
    return core, made
