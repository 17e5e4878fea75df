"""The input and output of ordering policies: a view of a free device, and the choice for it.

A policy is a pure function of a `DeviceView`. It chooses one of the candidates, or makes the device
wait until a given time. A policy that waits must bound the wait itself; the caller does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

Key = tuple[float, bool, int, str]


class Candidate(msgspec.Struct, frozen=True):
    operation: str
    """Key of the operation."""
    deployment: str
    job: str
    arrival_s: float
    """When the operation became ready: it was queued and its dependencies on other deployments were
    done."""
    arrival: int
    """Log sequence number of the operation; breaks ties."""
    duration_s: float
    """Estimated duration. For a running operation, the estimated remaining time."""
    switch_s: float
    """Cost of switching the deployment in now: offload and load. 0 if it is resident."""
    setup_s: float = 0.0
    """Offload and load time of the deployment, whether or not it is resident."""
    phase_s: float = 0.0
    """Total time of what the job usually runs in one phase on the device, including this
    operation."""
    back_s: float = 0.0
    """Cost of later switching the displaced resident job back in. 0 if nothing is displaced."""
    slack_s: float = math.inf
    """How long the job may still be delayed before it misses its SLO."""
    period_s: float = 0.0
    """Period of the job's cycle when it runs alone. 0 if unknown."""
    served: int = 0
    """Log sequence number at which the job's operations last started on the device. 0 if never."""
    continues: bool = False
    """Whether the operation belongs to the resident job's current phase."""
    is_running: bool = False
    """Whether the operation is running. A running candidate starts a plan, but is never a choice,
    because nothing is preempted."""

    @property
    def leaving_s(self) -> float:
        """Cost of both switches if this is chosen: away from the resident job, and back to it."""
        return self.switch_s + self.back_s if self.back_s else 0.0

    def waited_s(self, now_s: float) -> float:
        return now_s - self.arrival_s

    @property
    def by_arrival(self) -> Key:
        """Sort key without ties: earlier arrival, running first, log order, operation key."""
        return (self.arrival_s, not self.is_running, self.arrival, self.operation)


class Resident(msgspec.Struct, frozen=True):
    """The job that used the device last, while its turn may continue."""

    job: str
    since_s: float
    """When the job acquired the device."""
    idle_since_s: float
    """When its last operation on the device ended."""
    phase_until_s: float = 0.0
    """Time until which its phase is assumed to continue although nothing is ready. 0: the phase is
    over."""
    net_gap_s: float = math.inf
    """Predicted gap until its next operation on the device, without the time for which other jobs
    keep it waiting elsewhere; inf if unknown."""
    period_s: float = 0.0
    """Period of the job's cycle when it runs alone. 0 if unknown."""
    away_switch_s: float = 0.0
    """Time to switch in the job's deployments that are on no device at present."""
    is_busy: bool = False
    """Whether the job runs, or is switched in, on another device."""
    is_blocked: bool = False
    """Whether an operation of the job waits for another device."""


class TurnMember(msgspec.Struct, frozen=True):
    """A job of the node group, whose turns on the device round robin serves."""

    job: str
    until_s: float
    """Time until which the device waits for its next phase. A past time means no wait."""


class DeviceView(msgspec.Struct, frozen=True):
    now_s: float
    candidates: Sequence[Candidate]
    """The first ready operation of each deployment. Never empty."""
    resident: Resident | None = None
    members: Sequence[TurnMember] = ()
    """Jobs in round-robin order, starting after the one served last. Only filled for policies that
    use it."""
    may_wait: bool = False
    """Whether the policy may return `Wait`. False if it never waits, or if the caller only needs an
    order."""

    def of(self, job: str) -> list[Candidate]:
        """Candidates of a job, earliest arrival first."""
        return sorted([c for c in self.candidates if c.job == job], key=lambda c: c.by_arrival)


class Wait(msgspec.Struct, frozen=True):
    """Leave the device idle for an expected operation."""

    until_s: float
    """A later time. The policy decides again then, or earlier if anything happens on the device."""
    job: str
    """The job for which the device waits."""
    why: str
    """Reason, shown to users."""


class PlannedRun(msgspec.Struct, frozen=True):
    operation: str
    start_s: float
    """Start of the operation itself, after any switch."""
    end_s: float


def timeline(ordered: Sequence[Candidate], now_s: float) -> list[PlannedRun]:
    """Predict when each operation starts and ends if they run one after another in this order.

    A job that is resident now must be switched in again after another job was switched in. The job
    that was switched in last runs further operations without a switch.

    Source: PlexRL §4.4, Algorithm 1, lines 13-24. Deviation: each switch is charged once, before
        the operation that needs it. The printed algorithm charges it inside every waiting
        operation, and again at the head of the timeline.
    """
    entries: list[PlannedRun] = []
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
        entries.append(PlannedRun(planned.operation, start_s, cursor_s))
        if switch_s:
            last_in = planned.job
            came_in.add(last_in)
    return entries


class Ordering(NamedTuple):
    choose: Callable[[DeviceView], Candidate | Wait]
    """Choose the next operation, or wait. A pure function that breaks ties explicitly."""
    why: Callable[[Candidate, DeviceView], str]
    """Describe to users why the candidate is preferred or not at this moment."""
    may_wait: bool = False
    """Whether the policy may wait. If so, it is also consulted when there is only one candidate."""
    is_strict: bool = False
    """Whether a choice that cannot start on all of its devices yet blocks later candidates."""
    weighs: bool = True
    """Whether the policy uses durations and slack. If not, candidates come without them."""
    timeline: Callable[[Sequence[Candidate], float], list[PlannedRun]] = timeline
    """Predict the start and end of each operation of an order."""
