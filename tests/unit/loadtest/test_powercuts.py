"""What a run under power cuts counts as failed, and what is published of it."""

from __future__ import annotations

from loadtest.powercuts import Cut, JobEnd, PowerCutsReport, Settings
from loadtest.publishing import power_cuts_table
from loadtest.records import describe


def report(*, is_same: bool = True, lost: str = "", failure: str = "") -> PowerCutsReport:
    end = JobEnd("sums-1", "chain_sum", "ab", is_same, 40, lost.split())
    cuts = [Cut(1.0, None, 3, 5000, 7.0), Cut(9.0, 1, 2, 1000, 5.0)]
    return PowerCutsReport(describe(), Settings(2), 20.0, {"chain_sum": "ab"}, [end], cuts, failure)


def test_other_weights_lost_operations_and_an_early_end_are_failures() -> None:
    assert not report().has_failed
    assert report(is_same=False).has_failed
    assert report(lost="policy.3").has_failed
    assert report(failure="no step for 300 s").has_failed


def test_table_has_what_was_cut_and_what_was_lost() -> None:
    table = power_cuts_table(report(lost="policy.3 policy.4"))
    assert "| power cuts | 2 |" in table
    assert "| bytes not fsynced when it was cut, median | 3,000 |" in table
    assert "| until the mesh was up again, median | 6.0 s |" in table
    assert "| lost, or with another outcome | 2 |" in table
