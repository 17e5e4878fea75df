"""The pace of a group's jobs when every node serves phases in order of arrival.

Each job starts its next phase as soon as its nodes are free, without waiting for a meta-iteration
to end. A short job may complete two iterations while a long one completes one; the strict round
robin would hold all jobs to the longest. The price: a job can be delayed by another that has become
faster. The means are therefore those of the orbit in which the group settles, and no bounds.

Source: WEAVE §5.1 (a FIFO queue per node). Deviation: no barrier between meta-iterations.
Cost: placement spends most of its time here: tens of microseconds per orbit, memoised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

WARM_LAPS = 4
MAX_LAPS = 48
"""Number of laps of the slowest job after which an orbit that has not closed is abandoned. The
means are then those of the simulated time."""
SEEN_LAPS = 32
"""Number of laps of the slowest job in which late iterations are counted."""
TRAIN_NODES = -1
"""Node number of the group's train nodes, which are used as one."""
NUM_STARTS = 12
ROOT = 1.1347241384015194
"""Root of x^6 = x + 1. Multiples of its powers fill five dimensions evenly (R sequence,
Roberts)."""
SPREAD = tuple(ROOT ** -(i + 1) for i in range(64))
RESOLUTION_S = 1e-3
"""States that differ by less count as equal."""
MEMO = 8192
"""Number of groups memoised by each of the functions: some 10 MiB. That covers all subsets of a
hundred groups of five, each with a new job on any of its nodes."""


Rollout = tuple[float, float, float, tuple[int, ...]]
"""One job in the simulation: seconds of rollout, of training and of neither, and its nodes,
numbered within the group. A plain tuple, because thousands are memoised and the garbage collector
traverses class instances every time."""
Means = tuple[float, ...]
_State = tuple[int, ...]


class _Moment(NamedTuple):
    """State of a group at a moment when its slowest job requests its next rollout."""

    now_s: float
    laps: tuple[int, ...]
    """Number of iterations that each job has finished."""
    ready_s: list[float]
    """When each job requests its next phase."""
    trains: list[bool]
    asked_s: list[float]
    """When each job requested its newest rollout. Maintained for jobs that never wait for rollout
    nodes."""
    free_s: list[float]
    """When each node becomes free. The train nodes come last, as one."""
    last: list[int]
    """Job that used each node last, in the same order."""
    mark: int


class _Seen(NamedTuple):
    """Moments after warm-up in one run, and the marks of similar states."""

    moments: list[_Moment]
    marks: set[int]


class _Orbit(NamedTuple):
    """The loop in which a group settles, seen from a moment on the way there."""

    means: Means
    away: int
    """Number of laps until the group enters the loop."""
    laps: int
    """Number of laps in the loop."""


@lru_cache(maxsize=MEMO)
def mean_iterations_s(jobs: tuple[Rollout, ...], switch_s: float) -> Means:
    """Mean iteration of each job, in seconds, if all jobs start at once in the given order.

    `switch_s` is added whenever a node starts a phase of a different job than its last one.
    """
    if len(jobs) == 1:
        return (sum(jobs[0][:3]),)
    return _Queues(jobs, switch_s).settle((0.0,) * len(jobs))


@lru_cache(maxsize=MEMO)
def worst_iterations_s(jobs: tuple[Rollout, ...], switch_s: float) -> Means:
    """Mean iteration of each job, in seconds, in its worst orbit over several starts.

    Depending on when its jobs start, a group can settle in different orbits; one can be slower by a
    fifth for some job. The starts are spread evenly over all offsets.
    """
    if len(jobs) == 1:
        return mean_iterations_s(jobs, switch_s)
    return _Queues(jobs, switch_s).worst()


@lru_cache(maxsize=MEMO)
def late_shares(jobs: tuple[Rollout, ...], switch_s: float, allowed_s: tuple[float, ...]) -> Means:
    """Largest share of each job's iterations that exceed the allowed time, over several starts.

    An iteration lasts from the end of one training phase, including the gap after it, to the end of
    the next.
    """
    solos_s = [rollout_s + train_s + gap_s for rollout_s, train_s, gap_s, _ in jobs]
    worst = [0.0] * len(jobs)
    for k in range(NUM_STARTS):
        starts_s = [(k * SPREAD[i]) % 1.0 * solo_s for i, solo_s in enumerate(solos_s)]
        for i, took_s in enumerate(_iterations_s(jobs, switch_s, starts_s)):
            late = sum(each_s > allowed_s[i] + RESOLUTION_S for each_s in took_s)
            worst[i] = max(worst[i], late / max(1, len(took_s)))
    return tuple(worst)


def _iterations_s(
    jobs: tuple[Rollout, ...], switch_s: float, starts_s: Sequence[float]
) -> list[list[float]]:
    """Durations of each job's iterations during `SEEN_LAPS` laps of the slowest job, after
    warm-up."""
    free_s: dict[int, float] = {}
    last: dict[int, int] = {}
    ready_s, trains = list(starts_s), [False] * len(jobs)
    ended_s: list[list[float]] = [[] for _ in jobs]
    laps = [0] * len(jobs)
    pace = max(range(len(jobs)), key=lambda i: sum(jobs[i][:3]))
    while laps[pace] < WARM_LAPS + SEEN_LAPS:
        now_s = min(ready_s)
        i = ready_s.index(now_s)
        rollout_s, train_s, gap_s, nodes = jobs[i]
        used = (TRAIN_NODES,) if trains[i] else nodes
        begins_s = max([now_s, *[free_s.get(node, 0.0) for node in used]])
        if any(last.get(node, -1) != i for node in used):
            begins_s += switch_s
        ends_s = begins_s + (train_s if trains[i] else rollout_s)
        for node in used:
            free_s[node], last[node] = ends_s, i
        ready_s[i] = ends_s
        if trains[i]:
            ready_s[i] += gap_s
            laps[i] += 1
            if laps[pace] >= WARM_LAPS:
                ended_s[i].append(ready_s[i])
        trains[i] = not trains[i]
    return [[b - a for a, b in pairwise(ends)] for ends in ended_s]


class _Queues:
    """The queues of a group's nodes, simulated from several starts."""

    def __init__(self, jobs: tuple[Rollout, ...], switch_s: float) -> None:
        self._jobs = [(*job, _only(job[3])) for job in jobs]
        self._switch_s = switch_s
        solos_s = [rollout_s + train_s + gap_s for rollout_s, train_s, gap_s, _ in jobs]
        self._pace = solos_s.index(max(solos_s))
        users = Counter(node for _, _, _, nodes in jobs for node in nodes)
        self._num_nodes = 1 + max(users, default=-1)
        self._watched = [n for n in range(self._num_nodes) if users[n] > 1] + [self._num_nodes]
        """Nodes used by several jobs. The train nodes come last."""
        # A job whose training overlaps its own rollouts may request the next rollout in the past.
        goes_ahead = any(gap_s < -RESOLUTION_S for _, _, gap_s, _ in jobs)
        self._is_alone = [
            not goes_ahead and i != self._pace and all(users[node] == 1 for node in nodes)
            for i, (_, _, _, nodes) in enumerate(jobs)
        ]
        """Whether each job never waits for rollout nodes. The end of such a rollout is known as
        soon as it is requested, and no other job depends on it. The slowest job is excluded,
        because laps are counted at its rollouts."""
        self._known: dict[tuple[_State, _State], _Orbit] = {}
        """Moment on the way into an orbit → that orbit, for orbits that closed. Another start that
        reaches such a moment continues identically."""
        self._known_marks: set[int] = set()
        self._is_learning = False

    def worst(self) -> Means:
        """Worst mean of each job over the orbits from several starts."""
        self._is_learning = True
        solos_s = [rollout_s + train_s + gap_s for rollout_s, train_s, gap_s, _, _ in self._jobs]
        worst_s = (0.0,) * len(solos_s)
        for k in range(NUM_STARTS):
            starts_s = [(k * SPREAD[i]) % 1.0 * solo_s for i, solo_s in enumerate(solos_s)]
            worst_s = tuple(map(max, worst_s, self.settle(starts_s)))
        return worst_s

    def settle(self, starts_s: Sequence[float]) -> Means:  # noqa: PLR0912, PLR0915 - one loop
        """Simulate from these starts and return the means of the orbit in which the group settles.

        Phases are served in the order in which they are requested. Each starts as soon as its nodes
        have finished all earlier requests.
        """
        jobs, switch_s, pace, is_alone = self._jobs, self._switch_s, self._pace, self._is_alone
        free_s = [0.0] * self._num_nodes
        last = [-1] * self._num_nodes
        train_free_s, train_last = 0.0, -1
        asked_s = list(starts_s)
        ready_s = list(starts_s)
        for i, (rollout_s, _, _, nodes, _) in enumerate(jobs):
            if is_alone[i]:
                ready_s[i] += (switch_s if nodes else 0.0) + rollout_s
        trains = list(is_alone)
        laps = [0] * len(jobs)
        seen = _Seen([], set())
        index_of = ready_s.index
        while True:
            now_s = min(ready_s)
            i = index_of(now_s)
            rollout_s, train_s, gap_s, nodes, only = jobs[i]
            if trains[i]:
                begins_s = train_free_s if train_free_s > now_s else now_s
                if train_last != i:
                    begins_s += switch_s
                    train_last = i
                train_free_s = begins_s + train_s
                laps[i] += 1
                ends_s = train_free_s + gap_s
                if is_alone[i]:
                    asked_s[i] = ends_s
                    ready_s[i] = ends_s + rollout_s
                else:
                    ready_s[i] = ends_s
                    trains[i] = False
                continue
            if i == pace and laps[i]:
                mark = self._mark(now_s, ready_s)
                if laps[i] >= WARM_LAPS or mark in self._known_marks:
                    moment = _Moment(
                        now_s,
                        tuple(laps),
                        ready_s[:],
                        trains[:],
                        asked_s[:],
                        [*free_s, train_free_s],
                        [*last, train_last],
                        mark,
                    )
                    means = self._arrive(moment, seen)
                    if means is not None:
                        return means
            trains[i] = True
            if only >= 0:
                begins_s = free_s[only] if free_s[only] > now_s else now_s
                if last[only] != i:
                    begins_s += switch_s
                    last[only] = i
                free_s[only] = ready_s[i] = begins_s + rollout_s
                continue
            begins_s = max([now_s, *[free_s[node] for node in nodes]])
            if any(last[node] != i for node in nodes):
                begins_s += switch_s
            ready_s[i] = ends_s = begins_s + rollout_s
            for node in nodes:
                last[node] = i
                free_s[node] = ends_s

    def _mark(self, now_s: float, ready_s: list[float]) -> int:
        """Hash a state cheaply. Similar states have equal or adjacent marks; only those are
        compared."""
        return int((sum(ready_s) - len(ready_s) * now_s) / (len(ready_s) * RESOLUTION_S))

    def _arrive(self, moment: _Moment, seen: _Seen) -> Means | None:
        """Return the means of the orbit if it is known by now."""
        laps = moment.laps[self._pace]
        if moment.mark in self._known_marks:
            orbit = self._known.get(self._place(moment))
            # Only if the simulation would also find it from here without the memory.
            if orbit and max(WARM_LAPS, laps + orbit.away) + orbit.laps <= MAX_LAPS:
                return orbit.means
        if laps < WARM_LAPS:
            return None
        if moment.mark in seen.marks:
            state = self._state(moment)
            for number, earlier in enumerate(seen.moments):
                if abs(earlier.mark - moment.mark) <= 1 and self._state(earlier) == state:
                    return self._close(seen, number, moment)
        if laps >= MAX_LAPS:
            return _means(seen.moments[0], moment)
        seen.moments.append(moment)
        seen.marks.update((moment.mark - 1, moment.mark, moment.mark + 1))
        return None

    def _close(self, seen: _Seen, first: int, last_moment: _Moment) -> Means:
        """Return the means of an orbit that has closed: the state equals that of an earlier moment.

        Args: first: index of that moment.
        """
        means = _means(seen.moments[first], last_moment)
        if not self._is_learning:
            return means
        for number, moment in enumerate(seen.moments):
            orbit = _Orbit(means, max(0, first - number), len(seen.moments) - first)
            self._known.setdefault(self._place(moment), orbit)
        self._known_marks |= seen.marks
        return means

    def _place(self, moment: _Moment) -> tuple[_State, _State]:
        return self._state(moment), tuple([moment.last[node] for node in self._watched])

    def _state(self, moment: _Moment) -> _State:
        """Everything that determines the future, relative to now, except the last user of each
        node.

        A rollout of a job that never waits counts as running once it was requested, as all others
        do.
        """
        now_s = moment.now_s
        state: list[int] = []
        for i, ready_s in enumerate(moment.ready_s):
            at_s, trains = ready_s, moment.trains[i]
            if self._is_alone[i]:
                asked_s = moment.asked_s[i]
                if asked_s > now_s or (asked_s == now_s and i > self._pace):
                    at_s, trains = asked_s, False
            state += (int((at_s - now_s) / RESOLUTION_S), trains)
        for node in self._watched:
            at_s = moment.free_s[node]
            state.append(int((at_s - now_s) / RESOLUTION_S) if at_s > now_s else 0)
        return tuple(state)


def _only(nodes: tuple[int, ...]) -> int:
    """Return the single node of a job, or -1 if it has several or none."""
    return nodes[0] if len(nodes) == 1 else -1


def _means(before: _Moment, after: _Moment) -> Means:
    """Mean iteration of each job between two moments. The whole time for a job that finished
    none."""
    took_s = after.now_s - before.now_s
    return tuple([took_s / max(1, b - a) for a, b in zip(before.laps, after.laps, strict=True)])
