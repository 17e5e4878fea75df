"""Whatever is next begins beside what runs, where at most one of them would fill the device.

It stops nothing and predicts nothing. All that run have equal parts of the device, except that none
has more units than it keeps busy; one that is left alone has as many as it keeps busy.

Two operations that would each fill the device, as two of training, are never put side by side: what
they could gain is only what a device loses when all of it works on one, and where memory bandwidth
bounds them there is nothing to gain.

Source: JigsawRL §4.2. Deviation: no measured slowdowns and no look-ahead; on the reference's model
greedy sharing that stops nothing comes within 2 % of the optimum.
"""

from __future__ import annotations

from phaseloom.scheduler.core.policies.sharing_view import Multiplexing, SharingView


def _share(view: SharingView) -> list[int] | None:
    claims = view.claims
    if view.newcomer is not None:
        num_filling = sum(claim.fills for claim in claims)
        if num_filling > 1 or len(claims) > view.units:
            return None
    counts = [1] * len(claims)
    for _ in range(view.units - len(claims)):
        takers = [i for i, c in enumerate(claims) if not c.most_units or counts[i] < c.most_units]
        if not takers:
            break
        counts[min(takers, key=lambda i: counts[i])] += 1
    return counts


greedy = Multiplexing(_share)
