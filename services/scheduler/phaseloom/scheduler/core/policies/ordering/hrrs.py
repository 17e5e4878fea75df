"""Highest response ratio with setup (PlexRL §4.4, eq. 3-4).

Deviation: the printed Algorithm 1 charges a switch to every waiting operation. This policy follows
    eq. 3 and charges only operations that would actually switch (`hrrs_literal` is the printed
    form). A running operation is scored by its remaining time and is never preempted.
"""

from __future__ import annotations

from collections.abc import Iterable

from phaseloom.scheduler.core.policies.device_view import Candidate, DeviceView, Ordering

_SHORTEST_S = 1e-6


def response_ratio(waited_s: float, service_s: float) -> float:
    """Return (W + S) / S. An operation that has not waited has ratio 1, regardless of its service
    time."""
    service_s = max(service_s, _SHORTEST_S)
    return (waited_s + service_s) / service_s


def score(candidate: Candidate, now_s: float) -> float:
    """Return (W + S) / S, where S = duration + (offload + load, if it must switch)."""
    service_s = candidate.duration_s + candidate.switch_s
    return response_ratio(candidate.waited_s(now_s), service_s)


def highest(candidates: Iterable[Candidate], now_s: float) -> Candidate:
    """Return the highest score. Ties go to the earlier arrival, the running operation, the log
    entry and the key, in that order."""
    return min(candidates, key=lambda c: (-score(c, now_s), c.by_arrival))


def _choose(view: DeviceView) -> Candidate:
    return highest(view.candidates, view.now_s)


def why(candidate: Candidate, view: DeviceView) -> str:
    return (
        f"response ratio {score(candidate, view.now_s):.2f}: waited "
        f"{candidate.waited_s(view.now_s):.2f} s for {candidate.duration_s:.2f} s of work"
        f" and {candidate.switch_s:.2f} s of switching"
    )


hrrs = Ordering(_choose, why)
