"""Operations side by side on an emulated device: how fast each is, and when it ends.

A table of slowdowns says how fast: by the units that an operation has, and by what runs beside it
just now. Of a rollout the sub-stage counts that is slowed down most. Reading operations of one
deployment run together, at the speed of one. When something begins or ends, or units change hands,
what is left of all that run is timed anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.specs import SlowdownTable
from phaseloom.scheduler.core.policies.sharing_view import Claim, speeds
from phaseloom.simulator.agenda import Agenda

_DONE_S = 1e-6
"""An operation with fewer seconds left than this has ended; rounding leaves such remainders."""


@dataclass(eq=False, slots=True)
class Work:
    """An operation that runs."""

    claim: Claim
    left_s: float
    """The rest of the operation, in seconds alone on the whole device."""
    end: Callable[[], None]
    """Called when the operation ends."""
    is_alive: Callable[[], bool] = lambda: True
    """Whether the operation's processes are alive; what is dead keeps nobody company."""
    speed: float = 0.0
    """1: as fast as alone on the whole device."""


def claim_of(deployment: str, job: str, kind: str) -> Claim:
    """The claim of an operation. Rollouts keep one unit busy, all else has use for every one."""
    return Claim(deployment, job, (kind,), most_units=1 if kind == "generate" else 0)


class Company:
    """The operations that run on one device."""

    def __init__(self, agenda: Agenda, units: int, slowdowns: SlowdownTable) -> None:
        self._agenda = agenda
        self._units = units
        self._slowdowns = slowdowns
        self._running: dict[OperationKey, Work] = {}
        self._shares: dict[str, int] = {}
        """The number of units that each deployment has."""
        self._since_s = 0.0
        self._version = 0
        """The number of changes; an end that was foreseen before the last one is not due."""

    def give(self, deployment: str, num_units: int) -> None:
        """Note how many units a deployment has from now on; 0: all."""
        self._pass()
        self._shares[deployment] = num_units or self._units
        self._foresee()

    def begin(self, key: OperationKey, work: Work) -> None:
        """Begin an operation of a deployment that has its units."""
        self._pass()
        self._running[key] = work
        self._foresee()

    def kinds_of(self, deployment: str) -> list[str]:
        """The kinds of a deployment's operations that run."""
        of = [each.claim for each in self._running.values() if each.claim.deployment == deployment]
        return [kind for claim in of for kind in claim.kinds]

    def _pass(self) -> None:
        """Let what runs have run until now."""
        passed_s = self._agenda.now_s - self._since_s
        for work in self._running.values():
            work.left_s -= passed_s * work.speed
        self._since_s = self._agenda.now_s

    def _foresee(self) -> None:
        """Put the next end on the agenda."""
        self._running = {key: each for key, each in self._running.items() if each.is_alive()}
        running = self._running.values()
        here = {each.claim.deployment: each.claim for each in running}
        claims = [replace(c, kinds=tuple(self.kinds_of(name))) for name, c in here.items()]
        counts = [self._shares.get(name, self._units) for name in here]
        found = dict(zip(here, speeds(self._slowdowns, self._units, claims, counts), strict=True))
        for each in running:
            each.speed = found[each.claim.deployment]
        self._version += 1
        if running:
            after_s = min(each.left_s / each.speed for each in running)
            self._agenda.after(max(0.0, after_s), self._ended, self._version)

    def _ended(self, version: int) -> None:
        if version != self._version:
            return
        self._pass()
        key = min(self._running, key=lambda key: self._running[key].left_s)
        ended = self._running.pop(key)
        assert ended.left_s <= _DONE_S, f"{key} has {ended.left_s} s left"
        self._foresee()
        ended.end()
