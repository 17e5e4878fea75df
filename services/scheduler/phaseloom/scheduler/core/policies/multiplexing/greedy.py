"""Whatever is next begins beside what runs, where that gets more done just now.

It stops nothing and looks at nothing but what runs and what comes next.

With a table of slowdowns, an operation begins beside others where all of them together are then
faster, by `MARGIN` at least, than those that run already, and than one after the other. The units
are divided so that most gets done.

Without a table, an operation begins where at most one of those that run would fill the device: two
of training, say, are never put side by side, since where memory bandwidth bounds them there is
nothing to gain. All have equal parts then, but none more units than it keeps busy.

Source: JigsawRL §4.2. Deviation: no look-ahead; on the reference's model greedy sharing that stops
nothing comes within 2 % of the optimum.
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
        """What one more unit for a claim adds to the speed of all."""
        more = [count + (place == i) for place, count in enumerate(counts)]
        return sum(speeds(table, view.units, view.claims, more))

    counts = _divide(view.units, view.claims, gain)
    if view.newcomer is None:
        return counts
    beside = sum(speeds(table, view.units, view.claims, counts))
    alone = _share(replace(view, newcomer=None)) or []
    now = sum(speeds(table, view.units, view.running, alone))
    return counts if beside >= max(1.0, now) * (1 + MARGIN) else None


def _divide(
    units: int, claims: Sequence[Claim], worth: Callable[[list[int], int], float]
) -> list[int]:
    """A unit for each; then one at a time for the claim for which it is worth most, the first among
    equals, as long as any keeps one more busy."""
    counts = [1] * len(claims)
    for _ in range(units - len(claims)):
        takers = [i for i, c in enumerate(claims) if not c.most_units or counts[i] < c.most_units]
        if not takers:
            break
        counts[max(takers, key=lambda i: worth(counts, i))] += 1
    return counts


greedy = Multiplexing(_share, is_eager=True)
