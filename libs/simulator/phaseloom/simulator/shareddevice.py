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
    is_alive: Callable[[], bool] = lambda: True
    """Whether the operation's processes are alive. Dead ones slow nobody down."""
    speed: float = 0.0
    """Relative to running alone on the whole device, which is 1."""


def claim_of(deployment: str, job: str, kind: str) -> Claim:
    """Return an operation's claim: one unit for a rollout, every unit for anything else."""
    return Claim(deployment, job, (kind,), most_units=1 if kind == "generate" else 0)


class SharedDevice:
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

    def set_units(self, deployment: str, num_units: int) -> None:
        """Set the number of units that a deployment has from now on. 0 means all of them."""
        self._advance()
        self._shares[deployment] = num_units or self._units
        self._schedule_next()

    def run(self, key: OperationKey, work: Work) -> None:
        """Start an operation. Its deployment must have its units already."""
        self._advance()
        self._running[key] = work
        self._schedule_next()

    def kinds_of(self, deployment: str) -> list[str]:
        """The kinds of a deployment's running operations."""
        claims = [
            work.claim for work in self._running.values() if work.claim.deployment == deployment
        ]
        return [kind for claim in claims for kind in claim.kinds]

    def _advance(self) -> None:
        passed_s = self._agenda.now_s - self._since_s
        for work in self._running.values():
            work.left_s -= passed_s * work.speed
        self._since_s = self._agenda.now_s

    def _schedule_next(self) -> None:
        self._running = {key: work for key, work in self._running.items() if work.is_alive()}
        running = self._running.values()
        claim_by_name = {work.claim.deployment: work.claim for work in running}
        claims = [replace(c, kinds=tuple(self.kinds_of(name))) for name, c in claim_by_name.items()]
        counts = [self._shares.get(name, self._units) for name in claim_by_name]
        speed_by_name = dict(
            zip(
                claim_by_name,
                speeds(self._slowdowns, self._units, claims, counts),
                strict=True,
            )
        )
        for work in running:
            work.speed = speed_by_name[work.claim.deployment]
        self._version += 1
        if running:
            after_s = min(work.left_s / work.speed for work in running)
            self._agenda.after(max(0.0, after_s), self._end_next, self._version)

    def _end_next(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        key = min(self._running, key=lambda key: self._running[key].left_s)
        ended = self._running.pop(key)
        assert ended.left_s <= _DONE_S, f"{key} has {ended.left_s} s left"
        self._schedule_next()
        ended.end()
