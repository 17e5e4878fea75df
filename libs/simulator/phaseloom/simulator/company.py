"""Operations that share an emulated device: the speed of each, and when it ends.

The speed comes from a table of slowdowns. It depends on the units that an operation has and on the
operations that run next to it. A rollout runs at the speed of the sub-stage that is slowed down
most. Reading operations of one deployment run together at the speed of one. When an operation
starts or ends, or units change hands, the end of every running operation is computed again.
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
    """The remaining work, in seconds alone on the whole device."""
    end: Callable[[], None]
    """Called when the operation ends."""
    is_alive: Callable[[], bool] = lambda: True
    """Whether the operation's processes are alive. Dead ones slow nobody down."""
    speed: float = 0.0
    """Relative to running alone on the whole device, which is 1."""


def claim_of(deployment: str, job: str, kind: str) -> Claim:
    """Return an operation's claim: one unit for a rollout, every unit for anything else."""
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
        """Counts the changes. An end that was scheduled before the newest change is ignored."""

    def give(self, deployment: str, num_units: int) -> None:
        """Set the number of units that a deployment has from now on. 0 means all of them."""
        self._pass()
        self._shares[deployment] = num_units or self._units
        self._foresee()

    def begin(self, key: OperationKey, work: Work) -> None:
        """Start an operation. Its deployment must have its units already."""
        self._pass()
        self._running[key] = work
        self._foresee()

    def kinds_of(self, deployment: str) -> list[str]:
        """The kinds of a deployment's running operations."""
        of = [each.claim for each in self._running.values() if each.claim.deployment == deployment]
        return [kind for claim in of for kind in claim.kinds]

    def _pass(self) -> None:
        """Account for the work done since the last change."""
        passed_s = self._agenda.now_s - self._since_s
        for work in self._running.values():
            work.left_s -= passed_s * work.speed
        self._since_s = self._agenda.now_s

    def _foresee(self) -> None:
        """Schedule the next end."""
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
