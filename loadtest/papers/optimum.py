"""The cost of the cheapest strict round robin of a set of jobs with free moves: the yardstick.

`cheapest_partition` is exact. It takes every feasible co-execution group, with its cheapest rollout
nodes, and finds the partition of the jobs into such groups of least price (WEAVE §6.5, *Offline
Optimal*): up to nine jobs by dynamic programming over subsets, beyond that as set partitioning by
OR-Tools CP-SAT (the `test` extra). `regrouping_bound` repeats that for every span between two
arrivals or departures, as if regrouping took no time: no online policy that keeps to the strict
round robin can cost less.

A solver that is given an effort stops there. It then gives a proven bound below which no partition
can be, beside the best partition that it found. The effort is counted in operations and not in
seconds, so the same jobs give the same bound on every machine. So are the tries to put groups on
nodes, of which jobs of many nodes need so many that nothing is found in the end.

Feasibility shrinks with membership, since a further job never shortens a period. So groups are
grown one job at a time, each arrival adding the groups that it is in. A group is given to the
solver only where it is cheaper than every split of it in two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise, permutations
from math import floor, inf
from typing import NamedTuple

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.scheduler.core.planning.weave.period import Phases, period_s

SLACK = 1e-9
SCALE = 100
"""The factor for prices, which are given to the solver in hundredths."""
BY_SUBSETS = 9


class Job(NamedTuple):
    """A job as WEAVE's planner sees it: worst-case seconds an iteration, bytes a node."""

    name: str
    rollout_s: float
    train_s: float
    allowed_s: float
    """The longest iteration that the job's SLO tolerates."""
    rollout_nodes: int = 1
    train_nodes: int = 1
    rollout_bytes: int = 0
    train_bytes: int = 0
    gap_s: float = 0.0

    @property
    def solo_s(self) -> float:
        return self.rollout_s + self.train_s + self.gap_s


class Terms(NamedTuple):
    """The prices and sizes of nodes, and how many jobs may share them."""

    rollout_price: float = 14.8
    """The price of a node-hour: eight H20 at 1.85 (WEAVE, Table 1)."""
    train_price: float = 42.24
    """The price of a node-hour: eight H800 at 5.28."""
    host_bytes: int = 2048 * 10**9
    """The size of a node's memory; 0: no bound."""
    max_group_jobs: int = 5
    switch_s: float = 0.0
    """The time planned for a switch in each phase of a group of several jobs; 0: it is free."""
    rollout_gain: float = 1.0
    """By which factor two rollouts are done sooner side by side on a node than one after the other;
    1: they take turns. A bound: no job is taken to lose anything by it."""
    train_gain: float = 1.0
    """The same for training."""


Group = frozenset[Job]


class Partition(NamedTuple):
    price_per_hour: float
    groups: tuple[tuple[str, ...], ...]
    bound_per_hour: float
    """A price below which no partition is; the price itself where it is proven to be the least."""


class _Part(NamedTuple):
    """A partition of jobs that share no group with others."""

    groups: tuple[Group, ...]
    price: float
    bound: float


class Span(NamedTuple):
    """A job and the time in which it is present, in any unit."""

    job: Job
    start: float
    end: float


class TooLarge(Exception):
    """The tries that were allowed are used up, and nothing is known of the optimum."""


class Pricing:
    """The prices of groups, remembered over all sets of jobs that one workload brings.

    Args: effort: the solver's deterministic seconds for each set of jobs that share groups; inf:
              until the optimum is proven, which may take hours.
          tries: how often a group may be put on nodes, over all groups; then `TooLarge` is raised.
    """

    def __init__(
        self, terms: Terms | None = None, *, effort: float = inf, tries: float = inf
    ) -> None:
        self.terms = terms or Terms()
        self.effort = effort
        self._tries_left = tries
        self._prices: dict[Group, float | None] = {frozenset(): 0.0}
        self._useful: dict[Group, bool] = {}
        self._parts: dict[Group, _Part] = {}

    def price(self, group: Group) -> float | None:
        """The price of the cheapest nodes on which every job's SLO holds; None: there are none."""
        if group not in self._prices:
            self._prices[group] = _group_price(sorted(group), self.terms, self._try)
        return self._prices[group]

    def _try(self) -> None:
        self._tries_left -= 1
        if self._tries_left < 0:
            raise TooLarge

    def total(self, groups: Iterable[Group]) -> float:
        """The price of several feasible groups."""
        return sum(self.price(group) or 0.0 for group in groups)

    def solo(self, job: Job) -> float:
        return (
            job.rollout_nodes * self.terms.rollout_price + job.train_nodes * self.terms.train_price
        )

    def is_useful(self, group: Group) -> bool:
        """Whether a group is feasible and cheaper than the best two groups that split it."""
        if group not in self._useful:
            self._useful[group] = self._saves(group)
        return self._useful[group]

    def _saves(self, group: Group) -> bool:
        price = self.price(group)
        if price is None:
            return False
        first, *rest = sorted(group)
        for size in range(len(rest)):
            for others in combinations(rest, size):
                part = frozenset((first, *others))
                one, two = self.price(part), self.price(group - part)
                if one is not None and two is not None and one + two <= price + SLACK:
                    return False
        return True

    def part(self, jobs: Group, groups: Sequence[Group], likely: Collection[Group]) -> _Part:
        """The best partition of jobs that share no group with others.

        Args: groups: the useful groups of these jobs, each of at least two.
              likely: the groups at which the solver looks first.
        """
        if jobs not in self._parts:
            if len(jobs) <= BY_SUBSETS:
                self._parts[jobs] = _by_subsets(self, jobs, groups)
            else:
                self._parts[jobs] = _by_solver(self, jobs, groups, likely)
        return self._parts[jobs]


class Present:
    """The jobs that are present, and the groups that they could form."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self._jobs: set[Job] = set()
        self._feasible: list[Group] = []
        self._useful: list[Group] = []
        """The useful groups of at least two jobs."""
        self._chosen: set[Group] = set()
        """The last partition, without the jobs that have gone since."""

    def come(self, job: Job) -> None:
        """Add a job.

        Every part of a feasible group is feasible, so the new groups are the old ones with the job.
        """
        pricing, full = self.pricing, self.pricing.terms.max_group_jobs
        grown = (group | {job} for group in self._feasible if len(group) < full)
        added = [group for group in grown if pricing.price(group) is not None]
        self._jobs.add(job)
        self._feasible += [frozenset((job,)), *added]
        self._useful += filter(pricing.is_useful, added)

    def go(self, job: Job) -> None:
        self._jobs.remove(job)
        self._feasible = [group for group in self._feasible if job not in group]
        self._useful = [group for group in self._useful if job not in group]
        self._chosen = {group - {job} for group in self._chosen}

    def partition(self) -> Partition:
        """The cheapest partition, its groups in the order of their first job."""
        everybody = sorted(self._jobs)
        inside: dict[Group, list[Group]] = {}
        of = {job: part for part in _components(everybody, self._useful) for job in part}
        for part in of.values():
            inside[part] = []
        for group in self._useful:
            inside[of[next(iter(group))]].append(group)
        parts = [self.pricing.part(part, own, self._chosen) for part, own in inside.items()]
        self._chosen = {group for part in parts for group in part.groups}
        names = sorted(tuple(sorted(job.name for job in group)) for group in self._chosen)
        price, bound = sum(part.price for part in parts), sum(part.bound for part in parts)
        return Partition(price, tuple(names), bound)


def cheapest_partition(jobs: Iterable[Job], terms: Terms | None = None) -> Partition:
    """The exact cheapest partition of some jobs.

    Raises: CallerError: there are more than nine jobs, and OR-Tools is not installed.
    """
    present = Present(Pricing(terms))
    for job in sorted(jobs):
        present.come(job)
    return present.partition()


class Regrouping(NamedTuple):
    """The price over time, in $/h times the unit of the spans (dollars where they are hours)."""

    bound: float
    """The price below which no regrouping is."""
    price: float
    """The price of the best that was found; the bound itself where everything is proven."""

    @property
    def gap(self) -> float:
        """The most that the optimum can be above the bound, relative to it; 0: it is exact."""
        return self.price / self.bound - 1.0 if self.bound else 0.0


def regrouping_bound(
    spans: Sequence[Span], pricing: Pricing, tell: Callable[[int, int], None] | None = None
) -> Regrouping:
    """The price of the cheapest partition of the jobs that are present, over all times.

    Args:   tell: called with the number of arrivals and departures that are done, and of all.
    Raises: TooLarge: the tries that were allowed are used up.
    """
    coming: dict[float, list[Job]] = {}
    going: dict[float, list[Job]] = {}
    for span in spans:
        if span.end > span.start:
            coming.setdefault(span.start, []).append(span.job)
            going.setdefault(span.end, []).append(span.job)
    present = Present(pricing)
    bound = price = 0.0
    times = sorted(coming.keys() | going.keys())
    for done, (start, end) in enumerate(pairwise(times)):
        if tell is not None:
            tell(done, len(times) - 1)
        for job in going.get(start, ()):
            present.go(job)
        for job in coming.get(start, ()):
            present.come(job)
        found = present.partition()
        bound += found.bound_per_hour * (end - start)
        price += found.price_per_hour * (end - start)
    return Regrouping(bound, price)


def _components(jobs: Sequence[Job], groups: Iterable[Group]) -> Iterator[Group]:
    """The sets of jobs that no group connects: each is a problem of its own."""
    of = {job: frozenset((job,)) for job in jobs}
    for group in groups:
        parts = {of[job] for job in group}
        if len(parts) > 1:
            merged = frozenset().union(*parts)
            of.update(dict.fromkeys(merged, merged))
    yield from dict.fromkeys(of[job] for job in jobs)


def _by_subsets(pricing: Pricing, jobs: Group, groups: Sequence[Group]) -> _Part:
    """The best partition by dynamic programming: the group of the first job, then the rest."""
    everybody = [*groups, *(frozenset((job,)) for job in sorted(jobs))]

    @cache
    def best(left: Group) -> tuple[float, tuple[Group, ...]]:
        if not left:
            return 0.0, ()
        first = min(left)
        options = []
        for group in everybody:
            if first in group and group <= left:
                price, rest = best(left - group)
                options.append(((pricing.price(group) or 0.0) + price, (group, *rest)))
        return min(options, key=lambda option: option[0])

    price, chosen = best(jobs)
    return _Part(chosen, price, price)


def _by_solver(
    pricing: Pricing, jobs: Group, groups: Sequence[Group], likely: Collection[Group]
) -> _Part:
    """The best partition by the solver: disjoint groups that save most over every job alone.

    Where the effort ends before the optimum is proven, the solver's bound on the saving gives a
    bound on the price.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise CallerError(
            "the optimum of more than nine jobs needs OR-Tools, which is not installed",
            code=Code.FAILED_PRECONDITION,
            remedy="pip install ortools",
        ) from None

    alone = sum(map(pricing.solo, jobs))
    model = cp_model.CpModel()
    chosen = [model.new_bool_var("") for _ in groups]
    for job in sorted(jobs):
        model.add_at_most_one(
            [var for var, group in zip(chosen, groups, strict=True) if job in group]
        )
    saved = [
        round(SCALE * (sum(map(pricing.solo, group)) - (pricing.price(group) or 0.0)))
        for group in groups
    ]
    model.maximize(sum(s * var for s, var in zip(saved, chosen, strict=True)))
    for var, group in zip(chosen, groups, strict=True):
        model.add_hint(var, group in likely)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = pricing.effort
    status = solver.solve(model)
    is_found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    assert is_found or status == cp_model.UNKNOWN, solver.status_name(status)
    picked = [
        group for var, group in zip(chosen, groups, strict=True) if is_found and solver.value(var)
    ]
    rest = jobs.difference(*picked)
    parts = (*picked, *(frozenset((job,)) for job in sorted(rest)))
    price = pricing.total(parts)
    if status == cp_model.OPTIMAL:
        return _Part(parts, price, price)
    most = _most_saved(jobs, groups, saved)
    if is_found:
        most = min(most, solver.best_objective_bound)
    return _Part(parts, price, min(price, alone - floor(most + SLACK) / SCALE))


def _most_saved(jobs: Group, groups: Sequence[Group], saved: Sequence[int]) -> float:
    """A bound on the saving: each job saves at most an equal share of the best of its groups."""
    shares = dict.fromkeys(jobs, 0.0)
    for group, amount in zip(groups, saved, strict=True):
        for job in group:
            shares[job] = max(shares[job], amount / len(group))
    return sum(shares.values())


def _group_price(jobs: Sequence[Job], terms: Terms, tried: Callable[[], None]) -> float | None:
    """The price of the fewest rollout nodes with which a group keeps every SLO; None: none does.

    Args: tried: called for each try to put some of the jobs on nodes.
    """
    tried()
    first = jobs[0]
    if len(jobs) == 1:
        nodes: int | None = first.rollout_nodes
    else:
        if len(jobs) > terms.max_group_jobs or any(
            job.train_nodes != first.train_nodes for job in jobs
        ):
            return None
        if _exceeds(sum(job.train_bytes for job in jobs), terms.host_bytes):
            return None
        nodes = _rollout_nodes(jobs, terms, tried)
    if nodes is None:
        return None
    return nodes * terms.rollout_price + first.train_nodes * terms.train_price


def _exceeds(taken_bytes: int, host_bytes: int) -> bool:
    return 0 < host_bytes < taken_bytes


def _rollout_nodes(jobs: Sequence[Job], terms: Terms, tried: Callable[[], None]) -> int | None:
    """The fewest rollout nodes for a group, over all node sets and orders of the jobs."""
    allowed_s = min(job.allowed_s for job in jobs) + SLACK
    train_s = sum(job.train_s + terms.switch_s for job in jobs) / terms.train_gain
    if max(train_s, *(job.solo_s + terms.switch_s for job in jobs)) > allowed_s:
        return None
    if max(job.rollout_nodes for job in jobs) <= 1:
        return _bins(jobs, terms, allowed_s)
    return _node_sets(jobs, terms, allowed_s, tried)


def _bins(jobs: Sequence[Job], terms: Terms, allowed_s: float) -> int | None:
    """The fewest nodes by bin packing: one node a job, so the period is max(T_load, T_cycle)."""

    def is_packed(bins: list[list[Job]]) -> bool:
        return all(_holds(inside, terms, allowed_s) for inside in bins)

    rolling = [job for job in jobs if job.rollout_nodes]
    packed = [bins for bins in _partitions(rolling) if is_packed(bins)]
    return min((len(bins) for bins in packed), default=None)


def _holds(inside: Sequence[Job], terms: Terms, allowed_s: float) -> bool:
    """Whether jobs can share a rollout node. A phase alone on its node needs no switch there."""
    switch_s = terms.switch_s if len(inside) > 1 else 0.0
    if _exceeds(sum(job.rollout_bytes for job in inside), terms.host_bytes):
        return False
    if sum(job.rollout_s + switch_s for job in inside) / terms.rollout_gain > allowed_s:
        return False
    return all(job.solo_s + switch_s + terms.switch_s <= allowed_s for job in inside)


def _partitions(jobs: Sequence[Job]) -> Iterator[list[list[Job]]]:
    if not jobs:
        yield []
        return
    first, rest = jobs[0], jobs[1:]
    for bins in _partitions(rest):
        yield [[first], *bins]
        for i, inside in enumerate(bins):
            yield [*bins[:i], [first, *inside], *bins[i + 1 :]]


def _node_sets(
    jobs: Sequence[Job], terms: Terms, allowed_s: float, tried: Callable[[], None]
) -> int | None:
    """The fewest nodes where rollouts span several.

    Node sets may overlap, so the period is that of the max-plus system in the best order.
    """
    most = sum(job.rollout_nodes for job in jobs)
    for num_nodes in range(max(job.rollout_nodes for job in jobs), most + 1):
        for sets in _assignments(list(jobs), num_nodes, terms, allowed_s, tried):
            if _keeps_time(jobs, sets, terms, allowed_s):
                return num_nodes
    return None


def _assignments(
    jobs: list[Job], num_nodes: int, terms: Terms, allowed_s: float, tried: Callable[[], None]
) -> Iterator[list[tuple[int, ...]]]:
    """Node sets for all jobs in which no node is over its time or memory.

    Nodes that no job uses yet are interchangeable, so they are taken in order.
    """

    def extend(i: int, sets: list[tuple[int, ...]], used: int) -> Iterator[list[tuple[int, ...]]]:
        if i == len(jobs):
            yield sets
            return
        count = jobs[i].rollout_nodes
        for num_new in range(min(count, num_nodes - used) + 1):
            new = tuple(range(used, used + num_new))
            for old in combinations(range(used), count - num_new):
                tried()
                extended = [*sets, old + new]
                if _fits(jobs, extended, terms, allowed_s):
                    yield from extend(i + 1, extended, used + num_new)

    yield from extend(0, [], 0)


def _fits(
    jobs: Sequence[Job], sets: Sequence[tuple[int, ...]], terms: Terms, allowed_s: float
) -> bool:
    """Whether the last job's nodes still have time and memory."""
    for node in sets[-1]:
        inside = [job for job, nodes in zip(jobs, sets, strict=False) if node in nodes]
        if not _holds(inside, terms, allowed_s):
            return False
    return True


def _keeps_time(
    jobs: Sequence[Job], sets: Sequence[tuple[int, ...]], terms: Terms, allowed_s: float
) -> bool:
    shared = [n for nodes in sets for n in nodes]
    items = []
    for job, nodes in zip(jobs, sets, strict=True):
        is_shared = any(shared.count(n) > 1 for n in nodes)
        rollout_s = job.rollout_s + (terms.switch_s if is_shared else 0.0)
        train_s = job.train_s + terms.switch_s
        # What is gained side by side is room for others: an iteration is no shorter than alone.
        room_s = rollout_s * (1 - 1 / terms.rollout_gain) + train_s * (1 - 1 / terms.train_gain)
        items.append(
            Phases(
                rollout_s / terms.rollout_gain,
                train_s / terms.train_gain,
                tuple(str(n) for n in sorted(nodes)),
                job.gap_s + room_s,
            )
        )
    first, *rest = items
    return any(period_s([first, *order]) <= allowed_s for order in permutations(rest))
