"""How fast the jobs of a group go round when every node serves in order of arrival.

Each job goes on with its next phase as soon as its nodes are free, waiting for nobody to finish a
meta-iteration: a short job may go round twice while a long one goes round once. The strict round
robin holds everybody to the longest. Price: a job can be delayed by one that is faster now than
before, so means are those of the orbit that the group settles in, not bounds.
Source: WEAVE §5.1 (a FIFO queue per node). Deviation: no barrier between meta-iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

WARM_LAPS = 4
MAX_LAPS = 48
"""Of the slowest job, until its orbit closes; then the means over what was seen."""
NUM_STARTS = 12
ROOT = 1.1347241384015194
"""Of x^6 = x + 1: multiples of its powers fill five dimensions evenly (Roberts' R sequence)."""
SPREAD = tuple(ROOT ** -(i + 1) for i in range(64))
RESOLUTION_S = 1e-3
"""States that differ by less are the same."""


class Rollout(NamedTuple):
    """A job as the simulation sees it. Nodes are numbered within the group."""

    rollout_s: float
    train_s: float
    gap_s: float
    nodes: tuple[int, ...]


def mean_iterations_s(jobs: tuple[Rollout, ...], switch_s: float) -> tuple[float, ...]:
    """Mean seconds an iteration of each job takes if all start at once, in the order given.

    `switch_s` is charged when a node starts a phase of another job than its last.
    Cost: some microseconds a phase, hundreds of phases; memoised.
    """
    if len(jobs) == 1:
        return (jobs[0].rollout_s + jobs[0].train_s + jobs[0].gap_s,)
    return _orbit(jobs, switch_s, (0.0,) * len(jobs))


@lru_cache(maxsize=65536)
def worst_iterations_s(jobs: tuple[Rollout, ...], switch_s: float) -> tuple[float, ...]:
    """The same, the worst over the orbits found from several starts.

    A group can settle in one orbit or in another that is slower for somebody by a fifth; which, is
    decided by when its jobs happened to start. Starts are spread evenly over all offsets.
    """
    if len(jobs) == 1:
        return mean_iterations_s(jobs, switch_s)
    solos_s = [job.rollout_s + job.train_s + job.gap_s for job in jobs]
    found = []
    for k in range(NUM_STARTS):
        starts_s = tuple((k * SPREAD[i]) % 1.0 * solo_s for i, solo_s in enumerate(solos_s))
        found.append(_orbit(jobs, switch_s, starts_s))
    return tuple(max(means) for means in zip(*found, strict=True))


@lru_cache(maxsize=65536)
def _orbit(
    jobs: tuple[Rollout, ...], switch_s: float, starts_s: tuple[float, ...]
) -> tuple[float, ...]:
    """Phases in the order in which they are asked for: each begins as soon as its nodes are done
    with all that were asked for earlier. This loop is what placement spends its time in."""
    count = len(jobs)
    width = 1 + max((node for job in jobs for node in job.nodes), default=-1)
    free_s = [0.0] * width
    last = [-1] * width
    train_free_s = 0.0
    train_last = -1
    ready_s = list(starts_s)
    trains = [False] * count
    laps = [0] * count
    pace = max(range(count), key=lambda i: jobs[i].rollout_s + jobs[i].train_s + jobs[i].gap_s)
    seen: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {}
    warm: tuple[float, tuple[int, ...]] | None = None
    while True:
        now_s = min(ready_s)
        i = ready_s.index(now_s)
        rollout_s, train_s, gap_s, nodes = jobs[i]
        if trains[i]:
            begins_s = train_free_s if train_free_s > now_s else now_s
            if train_last != i:
                begins_s += switch_s
                train_last = i
            train_free_s = begins_s + train_s
            ready_s[i] = train_free_s + gap_s
            laps[i] += 1
            trains[i] = False
            continue
        if i == pace and laps[i] >= WARM_LAPS:
            here = now_s, tuple(laps)
            if warm is None:
                warm = here
            state = _state(now_s, ready_s, [*free_s, train_free_s], trains)
            before = seen.setdefault(state, here)
            if before is not here:
                return _means(before, here)
            if laps[i] >= MAX_LAPS:
                return _means(warm, here)
        begins_s = now_s
        comes_back = True
        for node in nodes:
            begins_s = max(begins_s, free_s[node])
            if last[node] != i:
                comes_back = False
                last[node] = i
        if not comes_back:
            begins_s += switch_s
        ends_s = begins_s + rollout_s
        for node in nodes:
            free_s[node] = ends_s
        ready_s[i] = ends_s
        trains[i] = True


def _state(
    now_s: float, ready_s: Sequence[float], free_s: Sequence[float], trains: Sequence[bool]
) -> tuple[int, ...]:
    """All that the future depends on, relative to now."""
    return (
        *[int((at - now_s) / RESOLUTION_S) for at in ready_s],
        *[int((at - now_s) / RESOLUTION_S) if at > now_s else 0 for at in free_s],
        *trains,
    )


def _means(
    before: tuple[float, tuple[int, ...]], after: tuple[float, tuple[int, ...]]
) -> tuple[float, ...]:
    """A job that came round not once in the whole time gets all of it."""
    took_s = after[0] - before[0]
    return tuple(took_s / max(1, b - a) for a, b in zip(before[1], after[1], strict=True))
