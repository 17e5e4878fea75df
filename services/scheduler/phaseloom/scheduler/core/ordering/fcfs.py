"""First come, first served: on every device a queue in the order of arrival.

This is the FIFO execution of co-execution groups, too: a phase joins its node's queue when what it
comes after has ended, and runs when it is at the head.
"""

from __future__ import annotations

from phaseloom.scheduler.core.ordering.scene import Candidate, Ordering, Scene


def _choose(scene: Scene) -> Candidate:
    """The earliest arrival; ties: the earlier log entry, then the key."""
    return min(scene.candidates, key=lambda c: c.by_arrival)


def _why(candidate: Candidate, scene: Scene) -> str:
    return f"first come, first served: it came {candidate.waited_s(scene.now_s):.2f} s ago"


fcfs = Ordering(_choose, _why, weighs=False)
