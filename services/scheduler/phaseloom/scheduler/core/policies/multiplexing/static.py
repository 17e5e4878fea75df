"""Each job has a fixed part of the device, whether or not another one has work.

The rival of `greedy`: a partition as an operator would make it by hand. One deployment of a job
runs at a time. Where more jobs are placed on a device than it has units, some of them wait for a
part.
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
