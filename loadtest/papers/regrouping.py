"""Optimal dynamic regrouping: every hour the cheapest groups for the profiles of that hour.

The baseline of WEAVE §6.6. Moving a job pauses it; solving costs no time, and a job that arrives
between two hours has nodes of its own until the next. A group runs its strict round robin as a
fluid: every period each member completes one iteration.

Cost: one partition for each hour. Profiles are those at a sixteenth of a job's progress, so that
prices of groups are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import floor

from loadtest.papers.optimum import Group, Job, Present, Pricing

_STEPS = 16
_HOUR_S = 3600.0


@dataclass(eq=False)
class Regrouped:
    """A job under regrouping.

    Args: at: the job with the durations of its `progress`, from 0 to 1.
    """

    name: str
    arrival_s: float
    iterations: float
    move_s: float
    slo: float
    at: Callable[[float], Job]
    done: float = 0.0
    ended_s: float = -1.0
    paused_s: float = 0.0
    alone_s: float = 0.0
    """The time that the completed iterations take alone."""

    def profile(self) -> Job:
        return self.at((floor(self.done / self.iterations * _STEPS) + 0.5) / _STEPS)


@dataclass
class Totals:
    dollars: float = 0.0
    moves: int = 0
    busy_s: dict[str, float] = field(default_factory=lambda: {"rollout": 0.0, "train": 0.0})
    """Node-seconds with an operation, by pool."""
    held_s: dict[str, float] = field(default_factory=lambda: {"rollout": 0.0, "train": 0.0})

    def utilisation(self, pool: str) -> float:
        return self.busy_s[pool] / self.held_s[pool]


def regroup(
    jobs: Sequence[Regrouped], pricing: Pricing, tell: Callable[[int, int], None] | None = None
) -> Totals:
    """Run all jobs to their ends, which are stored in them.

    Raises: TooLarge: the tries that were allowed are used up.
    """
    totals = Totals()
    groups: list[list[Regrouped]] = []
    waiting = sorted(jobs, key=lambda job: job.arrival_s)
    now_s, num_jobs = 0.0, len(jobs)
    while waiting or groups:
        groups = _partition([job for group in groups for job in group], groups, pricing, totals)
        end_s = now_s + _HOUR_S
        for job in [job for job in waiting if job.arrival_s < end_s]:
            waiting.remove(job)
            _run([job], max(now_s, job.arrival_s), end_s, pricing, totals)
            groups.append([job])
        for group in [group for group in groups if group[0].arrival_s < now_s]:
            _run(group, now_s, end_s, pricing, totals)
        groups = [left for group in groups if (left := [j for j in group if j.ended_s < 0])]
        now_s = end_s
        if tell is not None:
            tell(sum(job.ended_s >= 0 for job in jobs), num_jobs)
    return totals


def _partition(
    jobs: Sequence[Regrouped], before: list[list[Regrouped]], pricing: Pricing, totals: Totals
) -> list[list[Regrouped]]:
    """The cheapest groups. A job that leaves the nodes of its group pauses for a move."""
    if not jobs:
        return []
    present = Present(pricing)
    of_name = {job.name: job for job in jobs}
    for profile in sorted(job.profile() for job in jobs):
        present.come(profile)
    groups = [[of_name[name] for name in names] for names in present.partition().groups]
    claimed: list[list[Regrouped]] = []
    for group in groups:
        # The nodes of an earlier group have one heir; all others move.
        heritable = [old for old in before if old not in claimed]
        stays = max(heritable, key=lambda old: sum(job in group for job in old), default=[])
        claimed.append(stays)
        for job in group:
            if job not in stays:
                job.paused_s = job.move_s
                totals.moves += 1
    return groups


def _run(
    group: Sequence[Regrouped], now_s: float, end_s: float, pricing: Pricing, totals: Totals
) -> None:
    members = list(group)
    while members and now_s < end_s:
        profiles = [job.profile() for job in members]
        nodes = _nodes(frozenset(profiles), pricing)
        seconds = end_s - now_s
        pause_s = max(job.paused_s for job in members)
        if pause_s:  # the others wait for members that move
            seconds = min(seconds, pause_s)
        else:
            period_s = max(
                sum(p.train_s for p in profiles),
                sum(p.rollout_s * p.rollout_nodes for p in profiles) / nodes["rollout"],
                *(p.solo_s for p in profiles),
            )
            least_left = min(job.iterations - job.done for job in members)
            seconds = min(seconds, least_left * period_s)
        for pool, count in nodes.items():
            totals.held_s[pool] += count * seconds
        totals.dollars += (
            seconds
            / _HOUR_S
            * (
                nodes["rollout"] * pricing.terms.rollout_price
                + nodes["train"] * pricing.terms.train_price
            )
        )
        now_s += seconds
        for job, profile in zip(members, profiles, strict=True):
            if pause_s:
                job.paused_s = max(0.0, job.paused_s - seconds)
                continue
            rounds = seconds / period_s
            job.done += rounds
            job.alone_s += rounds * profile.solo_s
            totals.busy_s["rollout"] += rounds * profile.rollout_s * profile.rollout_nodes
            totals.busy_s["train"] += rounds * profile.train_s * profile.train_nodes
            if job.done >= job.iterations * (1 - 1e-9):
                job.ended_s = now_s
        members = [job for job in members if job.ended_s < 0]


def _nodes(group: Group, pricing: Pricing) -> dict[str, float]:
    """The nodes of a group. A group that no longer keeps its SLOs stays on the nodes of the hour
    in which it was made, which the loads of its members give."""
    train = max(job.train_nodes for job in group)
    price = pricing.price(group)
    if price is None:
        return {"rollout": float(max(job.rollout_nodes for job in group)), "train": float(train)}
    rollout = (price - train * pricing.terms.train_price) / pricing.terms.rollout_price
    return {"rollout": rollout, "train": float(train)}
