"""Start the next operation alongside the running ones if that raises throughput at once.

Considers only the running operations and the next one, and never stops any.

With a table of slowdowns, an operation starts if the combined speed is then higher, by at least
`MARGIN`, than both the present combined speed and that of running one after another. The units are
divided to maximize the combined speed.

Without a table, an operation starts if at most one of the resulting operations fills the device.
For example, two training operations never run side by side: if memory bandwidth limits them, there
is nothing to gain. All get equal shares, up to the number of units that they can use.

Source: JigsawRL §4.2. Deviation: no look-ahead. On the reference's model, greedy sharing without
    preemption comes within 2 % of the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from phaseloom.common.contract.specs import SlowdownTable
from phaseloom.scheduler.core.policies.sharing_view import (
    MARGIN,
    Claim,
    Multiplexing,
    SharingView,
    speeds,
)


def _share(view: SharingView) -> list[int] | None:
    if view.newcomer is not None and len(view.claims) > view.units:
        return None
    if view.slowdowns is None:
        return _by_kind(view)
    return _by_table(view, view.slowdowns)


def _by_kind(view: SharingView) -> list[int] | None:
    claims = view.claims
    if view.newcomer is not None and sum(claim.fills for claim in claims) > 1:
        return None
    return _divide(view.units, claims, lambda counts, i: -counts[i])


def _by_table(view: SharingView, table: SlowdownTable) -> list[int] | None:
    def gain(counts: list[int], i: int) -> float:
        """Return the combined speed if claim `i` had one more unit."""
        increased = [count + (place == i) for place, count in enumerate(counts)]
        return sum(speeds(table, view.units, view.claims, increased))

    counts = _divide(view.units, view.claims, gain)
    if view.newcomer is None:
        return counts
    shared_speed = sum(speeds(table, view.units, view.claims, counts))
    present_counts = _share(replace(view, newcomer=None)) or []
    present_speed = sum(speeds(table, view.units, view.running, present_counts))
    return counts if shared_speed >= max(1.0, present_speed) * (1 + MARGIN) else None


def _divide(
    units: int, claims: Sequence[Claim], worth: Callable[[list[int], int], float]
) -> list[int]:
    """Divide the units: one per claim, then each remaining unit to the claim that gains most.

    Ties go to the first claim. A claim gets at most the units that it can use.
    """
    counts = [1] * len(claims)
    for _ in range(units - len(claims)):
        takers = [i for i, c in enumerate(claims) if not c.most_units or counts[i] < c.most_units]
        if not takers:
            break
        counts[max(takers, key=lambda i: worth(counts, i))] += 1
    return counts


greedy = Multiplexing(_share, is_eager=True)
