"""Which process is killed when, and what is made of it."""

from __future__ import annotations

import random
from collections import Counter

from loadtest.chaos import ChaosReport, JobEnd, Kill, Settings, Victim, summaries, victims_in_order
from loadtest.records import describe


def test_every_victim_is_killed_as_often_as_any_other() -> None:
    counts = Counter(victims_in_order(random.Random(3), 20))
    assert sum(counts.values()) == 20
    assert set(counts.values()) == {2, 3}
    assert set(counts) == set(Victim)


def test_the_same_seed_kills_in_the_same_order() -> None:
    assert victims_in_order(random.Random(3), 40) == victims_in_order(random.Random(3), 40)
    assert victims_in_order(random.Random(3), 40) != victims_in_order(random.Random(4), 40)


def test_summary_has_the_median_and_the_longest_recovery_of_each_victim() -> None:
    kills = [
        Kill(Victim.RANK, float(n), recovery_s) for n, recovery_s in enumerate((1.0, 5.0, 2.0))
    ]
    kills.append(Kill(Victim.NATS, 9.0, 0.5))
    rank, nats = summaries(kills)
    assert (rank.victim, rank.kills, rank.recovery_median_s, rank.recovery_max_s) == (
        Victim.RANK,
        3,
        2.0,
        5.0,
    )
    assert (nats.victim, nats.kills) == (Victim.NATS, 1)


def _report(*, is_same: bool, stuck: str = "") -> ChaosReport:
    end = JobEnd("sums-1", "chain_sum", "ab", is_same=is_same, controller_starts=1)
    return ChaosReport(describe(), Settings(), 1.0, {"chain_sum": "ab"}, [end], [], [], stuck)


def test_report_has_failed_when_weights_differ_or_a_job_is_stuck() -> None:
    assert not _report(is_same=True).has_failed
    assert _report(is_same=False).has_failed
    assert _report(is_same=True, stuck="sums-1: nothing completed for 120 s").has_failed
