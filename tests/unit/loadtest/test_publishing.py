"""What readers are told is what was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadtest.papers.scenarios import SCENARIOS
from loadtest.papers.scenarios.report import markdown, read
from loadtest.publishing import (
    DOCS,
    PUBLISHED,
    SIMULATED,
    SIMULATIONS_PAGE,
    publish,
    replaced,
    spatial_table,
)
from loadtest.records import Record, describe, record
from loadtest.spatial import SpatialReport
from phaseloom.demo.spatial import SpatialRun, SpatialSummary, summarize


def test_table_takes_the_place_between_its_markers() -> None:
    page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n"
    assert replaced(page, "x", "| new |") == "a\n<!-- begin x -->\n| new |\n<!-- end x -->\nb\n"


def test_a_page_without_the_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for x"):
        replaced("a\n", "x", "| new |")


def test_publish_takes_over_what_there_is(tmp_path: Path) -> None:
    runs, docs = tmp_path / "runs", tmp_path / "docs"
    (docs / "measured").mkdir(parents=True)
    page = docs / "measured" / "performance.md"
    page.write_text("<!-- begin bench -->\n<!-- end bench -->\n")
    record(
        [Record("trip", 3.0, "ms", "a chain", 2.0, 1.5, "≤ 1.5")], describe(), runs / "latest.json"
    )

    written = publish(runs, docs)

    assert written == [docs / "measured" / "bench.json", page]
    assert "| `trip` | 3 ms | 2 | 1.50 | ≤ 1.5 |" in page.read_text()


def test_each_setting_of_a_shared_device_has_a_row_with_all_that_was_measured() -> None:
    def summary(setting: str, *seconds: tuple[str, float]) -> SpatialSummary:
        runs = [
            SpatialRun(number, policy, taken * number, {"a": "11"})
            for number in (1, 2)
            for policy, taken in seconds
        ]
        return SpatialSummary("r", 0, 2, summarize(runs, setting))

    both = {
        "tools": summary("tools", ("off", 30.0), ("static", 25.0), ("greedy", 20.0)),
        "steady": summary(
            "steady", ("off", 30.0), ("static", 20.0), ("greedy", 20.0), ("fair", 24.0)
        ),
    }
    _, _, head, _, steady, tools, *_ = spatial_table(SpatialReport(describe(), both)).splitlines()
    assert head == "| setting | by turns | `static` | `greedy` | `fair` |"
    assert steady.startswith("| `steady` | 45.0 s | 1.50 (1.50 to 1.50) | 1.50 (1.50 to 1.50) | 1")
    assert tools.endswith("| 1.20 (1.20 to 1.20) | 1.50 (1.50 to 1.50) |  |")


def test_predictions_stand_below_the_ratios_of_a_shared_device() -> None:
    runs = [
        SpatialRun(number, policy, 10.0, {"a": "11"}, predicted_seconds=predicted_s)
        for number, predicted_s in enumerate((9.5, 10.0, 11.2), 1)
        for policy in ("off", "static", "greedy")
    ]
    summary = SpatialSummary("r", 0, 2, summarize(runs))
    table = spatial_table(SpatialReport(describe(), {"steady": summary}))
    head, _, row = table.splitlines()[-5:-2]
    assert head == "| setting | by turns | `static` | `greedy` |"
    assert row == "| `steady` |" + 3 * " +0 % (-5 % to +12 %) |"
    assert "1.00 (1.00 to 1.00)" in table


@pytest.mark.parametrize("name", PUBLISHED)
def test_table_in_the_docs_is_that_of_the_report_beside_it(name: str) -> None:
    _, page, kind, table = PUBLISHED[name]
    text = (DOCS / page).read_text()
    measured = DOCS / "measured" / f"{name}.json"
    if not measured.exists():
        assert f"<!-- begin {name} -->\n<!-- end {name} -->" in text, "there is nothing to tell"
        return
    report = msgspec.json.decode(measured.read_bytes(), type=kind)
    assert replaced(text, name, table(report)) == text


@pytest.mark.parametrize("name", sorted(p.stem for p in (DOCS / SIMULATED).glob("*.json")))
def test_table_of_a_scenario_in_the_docs_is_that_of_its_report(name: str) -> None:
    assert name in SCENARIOS
    report = read(DOCS / SIMULATED / f"{name}.json")
    text = (DOCS / SIMULATIONS_PAGE).read_text()
    assert replaced(text, name, markdown(report)) == text
    assert (DOCS / SIMULATED / f"{name}.png").exists()
