"""Give each job a fixed part of the device, whether or not the other jobs have work.

The alternative to `greedy`: a partition as an operator would configure it by hand. Only one
deployment of a job runs at a time. If a device has more jobs than units, some jobs wait for a part.
"""

from __future__ import annotations

from phaseloom.scheduler.core.policies.sharing_view import Multiplexing, SharingView


def _share(view: SharingView) -> list[int] | None:
    part = view.units // max(1, min(view.num_jobs, view.units))
    claims = view.claims
    if view.newcomer is not None:
        is_in_use = any(claim.job == view.newcomer.job for claim in view.running)
        if is_in_use or part * len(claims) > view.units:
            return None
    return [part] * len(claims)


static = Multiplexing(_share)
