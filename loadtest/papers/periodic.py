"""The best periodic schedule of two or three jobs on one rollout and one train device.

A step of a job is a rollout, then training. A device that changes to another job needs a switch,
which may run before the operation is ready. A schedule repeats one word for each device: the order
of the jobs' visits. All words are tried in which each job has a few visits. The result is the least
slowdown of the slowest job; one job after another, with lives of equal length, gives their number.

Cost: about a second of processor time for each case.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

_WARM_UP, _MEASURED = 8, 16
"""Repetitions of the words before and during the measurement."""
_MOST_VISITS = {2: 4, 3: 2}
"""Number of jobs → most visits of one job in a word."""
_LONGEST_WORD = {2: 8, 3: 6}
Steps = tuple[tuple[float, float], ...]
"""The seconds of each job's rollout and training."""
SHAPES: dict[str, Steps] = {
    "2 x (3, 3)": ((3, 3),) * 2,
    "(4, 2) (2, 4)": ((4, 2), (2, 4)),
    "2 x (4.5, 1.5)": ((4.5, 1.5),) * 2,
    "2 x (1.5, 4.5)": ((1.5, 4.5),) * 2,
    "(6, 2) (2, 1)": ((6, 2), (2, 1)),
    "3 x (3, 3)": ((3, 3),) * 3,
    "(4, 2) (3, 3) (2, 4)": ((4, 2), (3, 3), (2, 4)),
    "3 x (4.5, 1.5)": ((4.5, 1.5),) * 3,
}
PHASE_S = 3.0
"""The mean phase, to which the ratios of switches refer."""
RATIOS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0)


class Optimum(NamedTuple):
    slowdown: float
    words: tuple[str, ...]
    """The jobs' visits to the rollout and the train device; empty: one job after another."""


def optimum(steps: Steps, switch_s: float) -> Optimum:
    count = len(steps)
    best = Optimum(float(count), ())
    for visits in itertools.product(range(1, _MOST_VISITS[count] + 1), repeat=count):
        if sum(visits) > _LONGEST_WORD[count]:
            continue
        words = list(_words(visits))
        # A period starts anywhere, so the first word may start with the first job.
        for rollouts, trainings in itertools.product([w for w in words if w[0] == 0], words):
            period_s = _period_s(rollouts, trainings, steps, switch_s)
            slowdown = max(
                period_s / (n * sum(step)) for n, step in zip(visits, steps, strict=True)
            )
            if slowdown < best.slowdown - 1e-9:
                words_by_name = tuple(
                    "".join("ABC"[job] for job in word) for word in (rollouts, trainings)
                )
                best = Optimum(slowdown, words_by_name)
    return best


def _words(visits: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Return every order in which each job has its number of visits."""
    if not any(visits):
        yield ()
    for job, left in enumerate(visits):
        if left:
            rest = tuple(n - (other == job) for other, n in enumerate(visits))
            yield from ((job, *word) for word in _words(rest))


def _period_s(
    rollouts: tuple[int, ...], trainings: tuple[int, ...], steps: Steps, switch_s: float
) -> float:
    """Return the seconds that a repetition of the words takes. inf: they block each other."""
    words, length = (rollouts, trainings), len(rollouts)
    total, warm_up = (_WARM_UP + _MEASURED) * length, _WARM_UP * length
    position, free_s, last = [0, 0], [0.0, 0.0], [-1, -1]
    ready_s, turn = [0.0] * len(steps), [0] * len(steps)
    mark_s = 0.0
    while position[0] < total:
        has_moved = False
        for device in (0, 1):
            job = words[device][position[device] % length]
            while turn[job] == device and position[device] < total:
                setup_s = switch_s if last[device] not in (-1, job) else 0.0
                start_s = max(free_s[device] + setup_s, ready_s[job])
                free_s[device] = ready_s[job] = start_s + steps[job][device]
                last[device], turn[job] = job, 1 - device
                position[device] += 1
                has_moved = True
                if not device and position[0] == warm_up:
                    mark_s = free_s[0]
                job = words[device][position[device] % length]
        if not has_moved:
            return float("inf")
    return (free_s[0] - mark_s) / _MEASURED
