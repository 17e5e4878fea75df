"""The view that a multiplexing policy gets of a device that several operations may divide.

Ordering says who is next; multiplexing says beside whom, and with how many of the device's compute
units. A policy is a pure function on a `SharingView`. It is asked about a newcomer whose memory
fits beside what runs, and again about those that run whenever one of them has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from phaseloom.common.contract.kinds import KINDS
from phaseloom.common.contract.specs import SlowdownTable
from phaseloom.scheduler.core.planning.chains import Chain

_SUB_STAGES: dict[str, tuple[str, ...]] = {
    "generate": ("decode_large", "decode_small", "prefill"),
    "forward_backward": ("train",),
    "optim_step": ("train",),
}
"""The kinds of sub-stages that an operation goes through, in any order."""


def stages_of(kind: str, most_units: int) -> tuple[str, ...]:
    """The kinds of sub-stages that an operation of a kind may be in, the usual one first."""
    if kind == "forward":
        # A forward pass on all units divides as training does; one on a single unit does not.
        return ("reference",) if most_units == 1 else ("train",)
    return _SUB_STAGES.get(kind, ())


def alike(stage: str) -> tuple[str, ...]:
    """The kinds of sub-stages that an operation may be in whose usual one this is."""
    return next((each for each in _SUB_STAGES.values() if each[0] == stage), (stage,))


MARGIN = 0.05
"""The gain below which nothing begins beside others: a table has errors, and a change of shares
costs something too."""


class Claim(msgspec.Struct, frozen=True):
    """A deployment that runs on the device, or is about to."""

    deployment: str
    job: str
    kinds: tuple[str, ...]
    """The kinds of the deployment's operations that run, or would begin."""
    most_units: int = 0
    """The most units that the deployment keeps busy; 0: all that there are."""
    ahead: Chain = ()
    """The sub-stages that the job is predicted to go through on the device from now on: what is
    left of the operation, then what is queued behind it. Empty: nothing is predicted, or the policy
    does not ask for predictions."""
    age_s: float = 0.0
    """Seconds since the job's first operation."""
    lag_s: float = 0.0
    """Seconds since the job's first operation in which other jobs or a switch kept it waiting."""

    @property
    def fills(self) -> bool:
        """Whether the deployment keeps every unit of the device busy, given the chance.

        Decoding does not: a step reads the weights for a few rows. Neither does an operation whose
        work is to move state, nor a runtime that works on one unit.
        """
        return self.most_units != 1 and not all(
            KINDS[kind].shares_calls or KINDS[kind].moves_state for kind in self.kinds
        )

    @property
    def stages(self) -> list[str]:
        """The kinds of sub-stages that the operations may be in; none for operations that move
        state, which a table of slowdowns does not have."""
        return [stage for kind in self.kinds for stage in stages_of(kind, self.most_units)]


class SharingView(msgspec.Struct, frozen=True):
    units: int
    """The compute units of the device."""
    num_jobs: int
    """How many jobs are placed on the device."""
    running: list[Claim]
    """The claims that run, in the order in which they came."""
    newcomer: Claim | None = None
    """The claim that would begin beside those that run; None: only these divide the device."""
    slowdowns: SlowdownTable | None = None
    """How much slower each kind of sub-stage is with a share and beside another, as it was
    measured; None: nothing is known."""

    @property
    def claims(self) -> list[Claim]:
        return [*self.running, *([] if self.newcomer is None else [self.newcomer])]


def speeds(
    table: SlowdownTable, units: int, claims: Sequence[Claim], counts: Sequence[int]
) -> list[float]:
    """The speeds of claims that run side by side.

    Where an operation may be in one of several sub-stages, the one that is slowed down most counts.

    Args:    units: the compute units of the device. counts: the units that each claim has.
    Returns: the speed of each claim; 1: as fast as alone on the whole device.
    """
    found = []
    for place, (claim, count) in enumerate(zip(claims, counts, strict=True)):
        others = [other.stages for i, other in enumerate(claims) if i != place]
        slow = [
            table.alone(stage, count / units)
            * math.prod(max((table.factor(stage, s) for s in o), default=1.0) for o in others)
            for stage in claim.stages
        ]
        unknown = units / count if claim.fills else 1.0
        found.append(1 / max(slow, default=unknown))
    return found


def rollouts_beside(table: SlowdownTable, units: int) -> tuple[float, ...]:
    """How many times as long as alone a rollout takes beside one other, beside two, and so on, on a
    device of so many units.

    Everything is at its worst: the sub-stage of a rollout that is slowed down most, the greatest
    slowdown that was measured of it, a single unit for each rollout. The numbers go on as long as
    one more rollout surely gets more done, by `MARGIN` at least.

    Returns: the numbers; none where nothing is sure, or the table lacks a sub-stage of rollouts.
    """
    stages = _SUB_STAGES["generate"]
    if any(stage not in table.kinds for stage in stages):
        return ()
    stages += tuple(stage for stage in stages_of("forward", 1) if stage in table.kinds)
    worst = table.at_worst()
    found: list[float] = []
    for others in range(1, units):
        slowdown = max(
            worst.alone(stage, 1 / units)
            * max(1.0, *(worst.factor(stage, other) for other in stages)) ** others
            for stage in stages
        )
        if (others + 1) / slowdown < others * (1 + MARGIN):
            break
        found.append(slowdown)
    return tuple(found)


class Multiplexing(NamedTuple):
    share: Callable[[SharingView], list[int] | None]
    """How many units each of `claims` gets, in their order: at least one each, and no more than
    there are together. None: the newcomer does not begin beside those that run."""
    is_on: bool = True
    """Whether anything ever runs beside anything."""
    predicts: bool = False
    """Whether the policy goes by `ahead` of the claims."""
    is_eager: bool = False
    """Whether whatever gets more done beside others begins at once, so that a placement policy can
    count on it."""
