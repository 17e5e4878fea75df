"""Figures are merged by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadtest.records import Record, record


def _figure(name: str, value: float) -> Record:
    return Record(name, value, "ms", "a raw chain", 1.0, value)


def test_record_keeps_the_figures_of_other_benches(tmp_path: Path) -> None:
    file = tmp_path / "bench" / "latest.json"
    record([_figure("round_trip", 1.5), _figure("switch", 40.0)], file)

    merged = record([_figure("round_trip", 1.4), _figure("idle", 2.0)], file)

    assert [(r.name, r.value) for r in merged] == [
        ("round_trip", 1.4),
        ("switch", 40.0),
        ("idle", 2.0),
    ]
    assert msgspec.json.decode(file.read_bytes(), type=list[Record]) == merged


def test_record_refuses_a_file_that_holds_something_else(tmp_path: Path) -> None:
    file = tmp_path / "latest.json"
    file.write_text('{"name": "round_trip"}')

    with pytest.raises(msgspec.ValidationError):
        record([_figure("round_trip", 1.5)], file)

    assert file.read_text() == '{"name": "round_trip"}'
