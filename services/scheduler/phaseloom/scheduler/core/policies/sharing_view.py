"""The input of multiplexing policies: the operations that may share a device.

The ordering policy decides which operation is next. The multiplexing policy decides whether it runs
next to the running ones, and with how many of the device's compute units. A policy is a pure
function of a `SharingView`. It is called for a newcomer whose memory fits alongside the running
operations, and again for the remaining operations whenever one ends.
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
"""Operation kind → the kinds of sub-stages that it goes through, the usual one first."""


def stages_of(kind: str, most_units: int) -> tuple[str, ...]:
    """Kinds of sub-stages that an operation of this kind may be in, the usual one first."""
    if kind == "forward":
        # A forward pass on all units divides as training does; one on a single unit does not.
        return ("reference",) if most_units == 1 else ("train",)
    return _SUB_STAGES.get(kind, ())


def alike(stage: str) -> tuple[str, ...]:
    """Kinds of sub-stages of the operations that are usually in this one."""
    return next((stages for stages in _SUB_STAGES.values() if stages[0] == stage), (stage,))


MARGIN = 0.05
"""Minimum gain for starting an operation next to others. The table has errors, and changing shares
has a cost."""


class Claim(msgspec.Struct, frozen=True):
    """A deployment that runs on the device or is about to."""

    deployment: str
    job: str
    kinds: tuple[str, ...]
    """Kinds of the deployment's operations that are running or would start."""
    most_units: int = 0
    """Maximum number of units that the deployment can use. 0: all."""
    ahead: Chain = ()
    """Predicted sub-stages of the job on the device: the rest of the current operation, then those
    queued behind it. Empty if nothing is predicted or the policy does not use predictions."""
    age_s: float = 0.0
    lag_s: float = 0.0
    """Seconds for which other jobs or switches have delayed the job since its first operation."""

    @property
    def fills(self) -> bool:
        """Whether the deployment can keep every unit of the device busy.

        Decoding cannot: a step reads the weights for only a few rows. Neither can operations that
        move state, nor runtimes that use one unit.
        """
        return self.most_units != 1 and not all(
            KINDS[kind].shares_calls or KINDS[kind].moves_state for kind in self.kinds
        )

    @property
    def stages(self) -> list[str]:
        """Kinds of sub-stages that the operations may be in. Empty for operations that move state,
        which the table of slowdowns does not cover."""
        return [stage for kind in self.kinds for stage in stages_of(kind, self.most_units)]


class SharingView(msgspec.Struct, frozen=True):
    units: int
    """Number of compute units of the device."""
    num_jobs: int
    """Number of jobs placed on the device."""
    running: list[Claim]
    """Running claims, in the order in which they started."""
    newcomer: Claim | None = None
    """The claim that would start next to the running ones. None: only the running ones share the
    device."""
    slowdowns: SlowdownTable | None = None
    """Measured slowdowns of each kind of sub-stage, by share and by neighbour. None: not
    measured."""

    @property
    def claims(self) -> list[Claim]:
        return [*self.running, *([] if self.newcomer is None else [self.newcomer])]


def speeds(
    table: SlowdownTable, units: int, claims: Sequence[Claim], counts: Sequence[int]
) -> list[float]:
    """Predict the speeds of claims that run side by side.

    If an operation may be in several sub-stages, the slowest one counts.

    Args: units: compute units of the device.
          counts: units of each claim.
    Returns: the speed of each claim, where 1 is the speed of running alone on the whole device.
    """
    results = []
    for place, (claim, count) in enumerate(zip(claims, counts, strict=True)):
        neighbours = [neighbour.stages for i, neighbour in enumerate(claims) if i != place]
        slow = [
            table.alone(stage, count / units)
            * math.prod(max((table.factor(stage, s) for s in o), default=1.0) for o in neighbours)
            for stage in claim.stages
        ]
        unknown = units / count if claim.fills else 1.0
        results.append(1 / max(slow, default=unknown))
    return results


def rollouts_beside(table: SlowdownTable, units: int) -> tuple[float, ...]:
    """Worst-case slowdown of a rollout with 1, 2, … neighbours, relative to running alone.

    Assumes the slowest sub-stage of a rollout, the greatest measured slowdown, and one compute unit
    for each rollout. The sequence stops before the first neighbour that does not raise the combined
    speed by at least `MARGIN`.

    Args: units: compute units of the device.
    Returns: one slowdown per number of neighbours. Empty if sharing gives no certain gain, or if
        the table lacks a sub-stage of rollouts.
    """
    stages = _SUB_STAGES["generate"]
    if any(stage not in table.kinds for stage in stages):
        return ()
    stages += tuple(stage for stage in stages_of("forward", 1) if stage in table.kinds)
    worst = table.at_worst()
    slowdowns: list[float] = []
    for num_neighbours in range(1, units):
        slowdown = max(
            worst.alone(stage, 1 / units)
            * max(1.0, *(worst.factor(stage, neighbour) for neighbour in stages)) ** num_neighbours
            for stage in stages
        )
        if (num_neighbours + 1) / slowdown < num_neighbours * (1 + MARGIN):
            break
        slowdowns.append(slowdown)
    return tuple(slowdowns)


class Multiplexing(NamedTuple):
    share: Callable[[SharingView], list[int] | None]
    """Decide the number of units of each of `view.claims`, in their order.

    Each claim gets at least one unit, and together they get at most all of them. None: do not start
    the newcomer next to the running claims.
    """
    is_on: bool = True
    """Whether operations may ever run side by side."""
    predicts: bool = False
    """Whether the policy uses the claims' `ahead`."""
    is_eager: bool = False
    """Whether this policy always starts an operation as soon as sharing saves time, so that
    placement policies can rely on it."""
