"""What readers are told is what was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadtest.publishing import (
    DOCS,
    PUBLISHED,
    SIMULATED,
    SIMULATIONS_PAGE,
    publish,
    replaced,
)
from loadtest.records import Record, describe, record
from phaseloom.simulator.scenarios import SCENARIOS
from phaseloom.simulator.scenarios.report import markdown, read


def test_table_takes_the_place_between_its_markers() -> None:
    page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n"
    assert replaced(page, "x", "| new |") == "a\n<!-- begin x -->\n| new |\n<!-- end x -->\nb\n"


def test_a_page_without_the_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for x"):
        replaced("a\n", "x", "| new |")


def test_publish_takes_over_what_there_is(tmp_path: Path) -> None:
    runs, docs = tmp_path / "runs", tmp_path / "docs"
    (docs / "measured").mkdir(parents=True)
    page = docs / "performance.md"
    page.write_text("<!-- begin bench -->\n<!-- end bench -->\n")
    record(
        [Record("trip", 3.0, "ms", "a chain", 2.0, 1.5, "≤ 1.5")], describe(), runs / "latest.json"
    )

    written = publish(runs, docs)

    assert written == [docs / "measured" / "bench.json", page]
    assert "| `trip` | 3 ms | 2 | 1.50 | ≤ 1.5 |" in page.read_text()


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
