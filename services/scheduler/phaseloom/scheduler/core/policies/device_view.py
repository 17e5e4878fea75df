"""What an ordering policy sees of a device that is free, and what it answers.

A policy is a pure function on a `DeviceView`: it chooses one of the candidates, or says until when
the device should rather wait. Whoever asks bounds nothing: a policy that waits states its own
bound.
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
    """Its key."""
    deployment: str
    job: str
    arrival_s: float
    """When it was queued and what it waits for on other deployments was done."""
    arrival: int
    """Log sequence: breaks ties."""
    duration_s: float
    """Estimated; of one that runs: what is left."""
    switch_s: float
    """Offload and load that running it would cost now; 0: it is resident."""
    setup_s: float = 0.0
    """Its offload and load, resident or not."""
    phase_s: float = 0.0
    """What its job usually does on the device once it is there, this operation included."""
    back_s: float = 0.0
    """Switching back in what it would displace of the resident job; 0: nothing."""
    slack_s: float = math.inf
    """How much longer its job may be kept from running before it misses its SLO."""
    served: int = 0
    """Log sequence at which its job's operations last began on the device; 0: never."""
    continues: bool = False
    """It belongs to the phase that the resident job is in."""
    is_running: bool = False
    """Never one of those to choose from: nothing is preempted. Plans begin with it."""

    @property
    def leaving_s(self) -> float:
        """The two switches that choosing it costs: away from the resident job, and back."""
        return self.switch_s + self.back_s if self.back_s else 0.0

    def waited_s(self, now_s: float) -> float:
        return now_s - self.arrival_s

    @property
    def by_arrival(self) -> Key:
        """Breaks every tie: earlier arrival, the running one, the log's order, the key."""
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
    """From when on that prediction counts as wrong."""
    phase_until_s: float = 0.0
    """Until when its phase is taken to go on though nothing of it is ready; 0: it is over."""


class Member(msgspec.Struct, frozen=True):
    """A job that is pinned to the device."""

    job: str
    until_s: float
    """Until when its next phase is to be waited for; a past time: not at all."""


class DeviceView(msgspec.Struct, frozen=True):
    now_s: float
    candidates: Sequence[Candidate]
    """At least one; each of another deployment."""
    resident: Resident | None = None
    members: Sequence[Member] = ()
    """In the order of their turns, from the one after the last that was served; only for policies
    that go by it."""
    may_wait: bool = False
    """Else an answer must be a candidate: it is not for the policy to wait, or only the order is
    asked for."""

    def of(self, job: str) -> list[Candidate]:
        """The job's candidates, by arrival."""
        return sorted((c for c in self.candidates if c.job == job), key=lambda c: c.by_arrival)


class Wait(msgspec.Struct, frozen=True):
    """Better than any candidate: leave the device idle for something that is expected."""

    until_s: float
    """After now; then, or when anything happens on the device, the policy is asked again."""
    job: str
    """That it waits for."""
    why: str
    """For people."""


class Entry(msgspec.Struct, frozen=True):
    operation: str
    start_s: float
    """After its switch."""
    end_s: float


def timeline(ordered: Sequence[Candidate], now_s: float) -> list[Entry]:
    """When each operation of an order would begin and end, one after the other.

    What is resident now has to come back once a foreign one came in.
    Source: PlexRL §4.4, Algorithm 1, lines 13-24. Deviation: a switch is charged once and where it
    happens, before the operation that needs it; the algorithm as printed charges it inside every
    operation that waits, and once more at the head.
    """
    entries: list[Entry] = []
    cursor_s = now_s
    came_in: set[str] = set()
    for planned in ordered:
        is_displaced = bool(came_in - {planned.job})
        start_s = cursor_s + (planned.setup_s if is_displaced else planned.switch_s)
        cursor_s = start_s + planned.duration_s
        entries.append(Entry(planned.operation, start_s, cursor_s))
        if planned.switch_s:
            came_in.add(planned.job)
    return entries


class Ordering(NamedTuple):
    choose: Callable[[DeviceView], Candidate | Wait]
    """Pure; ties are explicit."""
    why: Callable[[Candidate, DeviceView], str]
    """What decides about this candidate now, for people."""
    may_wait: bool = False
    """Whether it ever waits: it is asked about a lone candidate too."""
    is_strict: bool = False
    """Nobody overtakes: where its choice cannot begin on all of its devices, they wait for it."""
    weighs: bool = True
    """Whether it goes by what operations take and how long they may wait: candidates come without
    these figures otherwise."""
    timeline: Callable[[Sequence[Candidate], float], list[Entry]] = timeline
    """When each of an order would begin and end."""
