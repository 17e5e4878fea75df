"""The view that an ordering policy gets of a free device, and the answers that it can give.

A policy is a pure function on a `DeviceView`: it chooses one of the candidates, or says until when
the device should rather wait. A policy that waits states its own bound; the caller sets none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

Key = tuple[float, bool, int, str]


class Candidate(msgspec.Struct, frozen=True):
    """The first ready operation of one deployment."""

    operation: str
    """The operation's key."""
    deployment: str
    job: str
    arrival_s: float
    """When the operation was queued and all that it waits for on other deployments was done."""
    arrival: int
    """Log sequence of the operation; breaks ties."""
    duration_s: float
    """Estimated duration; for a running operation what is left of it."""
    switch_s: float
    """Offload and load that running it would cost now; 0 where it is resident."""
    setup_s: float = 0.0
    """Offload and load of the deployment, resident or not."""
    phase_s: float = 0.0
    """Time of the work that its job usually does once it is on the device, with this operation."""
    back_s: float = 0.0
    """Switching back in what it would displace of the resident job; 0 where that is nothing."""
    slack_s: float = math.inf
    """Time that its job may still be kept from running before it misses its SLO."""
    served: int = 0
    """Log sequence at which its job's operations last began on the device; 0: never."""
    continues: bool = False
    """Whether it belongs to the phase that the resident job is in."""
    is_running: bool = False
    """Whether it runs now. Such a candidate begins a plan and is never one to choose from: nothing
    is preempted."""

    @property
    def leaving_s(self) -> float:
        """The two switches that choosing it costs: away from the resident job, and back."""
        return self.switch_s + self.back_s if self.back_s else 0.0

    def waited_s(self, now_s: float) -> float:
        return now_s - self.arrival_s

    @property
    def by_arrival(self) -> Key:
        """A key that breaks every tie: earlier arrival, the running one, the log's order, the
        key."""
        return (self.arrival_s, not self.is_running, self.arrival, self.operation)


class Resident(msgspec.Struct, frozen=True):
    """The job that used the device last, while its turn may go on."""

    job: str
    since_s: float
    """When it took the device."""
    idle_since_s: float
    """When its last operation there ended."""
    at_s: float = math.inf
    """When its next operation there is predicted; inf: not known."""
    late_s: float = math.inf
    """Time from which on that prediction counts as wrong."""
    phase_until_s: float = 0.0
    """Time until which its phase is taken to go on though nothing of it is ready; 0: it is over."""


class Member(msgspec.Struct, frozen=True):
    """A job that is pinned to the device."""

    job: str
    until_s: float
    """Time until which its next phase is to be waited for; a past time: not at all."""


class DeviceView(msgspec.Struct, frozen=True):
    now_s: float
    candidates: Sequence[Candidate]
    """At least one candidate; each of another deployment."""
    resident: Resident | None = None
    members: Sequence[Member] = ()
    """Members by round-robin position, from the one after the last that was served. Filled only
    for policies that use it."""
    may_wait: bool = False
    """Whether the answer may be `Wait`. It must be a candidate where the policy is not one that
    waits, or only the order is asked for."""

    def of(self, job: str) -> list[Candidate]:
        """The job's candidates, by arrival."""
        return sorted([c for c in self.candidates if c.job == job], key=lambda c: c.by_arrival)


class Wait(msgspec.Struct, frozen=True):
    """An answer: leave the device idle for something that is expected."""

    until_s: float
    """A later time; then, or when anything happens on the device, the policy is asked again."""
    job: str
    """The job that the device waits for."""
    why: str
    """The reason, for people."""


class Entry(msgspec.Struct, frozen=True):
    operation: str
    start_s: float
    """Start, after the switch."""
    end_s: float


def timeline(ordered: Sequence[Candidate], now_s: float) -> list[Entry]:
    """When each operation of an order would begin and end, one after the other.

    What is resident now has to be switched in again once another job came in. A job that has come
    in stays until another one does: its next operations begin without a switch.

    Source: PlexRL §4.4, Algorithm 1, lines 13-24. Deviation: a switch is charged once and where it
    happens, before the operation that needs it; the algorithm as printed charges it inside every
    operation that waits, and once more at the head.
    """
    entries: list[Entry] = []
    cursor_s = now_s
    came_in: set[str] = set()
    last_in = ""
    for planned in ordered:
        is_displaced = bool(came_in - {planned.job})
        switch_s = planned.setup_s if is_displaced else planned.switch_s
        if planned.job == last_in:
            switch_s = 0.0
        start_s = cursor_s + switch_s
        cursor_s = start_s + planned.duration_s
        entries.append(Entry(planned.operation, start_s, cursor_s))
        if switch_s:
            last_in = planned.job
            came_in.add(last_in)
    return entries


class Ordering(NamedTuple):
    choose: Callable[[DeviceView], Candidate | Wait]
    """The choice: a pure function with explicit ties."""
    why: Callable[[Candidate, DeviceView], str]
    """The reason for or against a candidate now, for people."""
    may_wait: bool = False
    """Whether the policy ever waits; if so it is asked about a lone candidate, too."""
    is_strict: bool = False
    """Whether nobody overtakes: a choice that cannot begin on all of its devices is waited for."""
    weighs: bool = True
    """Whether the policy uses durations and slack; otherwise candidates come without them."""
    timeline: Callable[[Sequence[Candidate], float], list[Entry]] = timeline
    """When each operation of an order would begin and end."""
