"""Measuring what work loses by a share: the table of many times, and the real processes once."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from phaseloom.cli.slowdowns import (
    Round,
    counts_of,
    disturbed_kinds,
    measure_slowdown,
    splits_of,
    steps,
    table_of,
    tables,
)
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.process.slowdowns import SUB_STAGES, read


def round_of(units: int, speed: float, *, train: float = 1.5, beside: float = 1.2) -> Round:
    """Every call takes `speed` seconds on the whole device; training gains by units."""
    found = Round()
    for step in steps(units):
        slow = train if step.kind == "train" and step.count < units else 1.0
        if step.neighbour:
            rest = units - step.count
            slow_neighbour = train if step.neighbour == "train" and rest < units else 1.0
            found.together[step.kind, step.count, step.neighbour] = speed * slow * beside
            found.together[step.neighbour, rest, step.kind] = speed * slow_neighbour * beside
        else:
            found.alone[step.kind, step.count] = speed * slow
    return found


def test_slowdowns_are_ratios_within_a_round_whatever_the_machines_speed() -> None:
    rounds = [round_of(2, 1.0), round_of(2, 3.0, train=1.7), round_of(2, 0.5, train=1.4)]
    table = table_of(rounds, 2, "test")
    assert table.kinds["train"].shares == {0.5: 1.5, 1.0: 1.0}
    assert table.kinds["train"].spread == {0.5: (1.4, 1.7)}
    assert table.kinds["decode_small"].shares == {0.5: 1.0, 1.0: 1.0}
    assert table.splits == (0.5,)
    assert table.beside["train"]["prefill"] == 1.2
    assert list(disturbed_kinds(table)) == []


def test_rounds_that_differ_much_are_told() -> None:
    """Something else took a core in one of them: such a table would mislead."""
    table = table_of([round_of(2, 1.0), round_of(2, 1.0, train=0.8)], 2, "test")
    assert list(disturbed_kinds(table)) == [("train", (0.8, 1.5))]


@pytest.mark.parametrize("units", [2, 3, 4, 8, 10])
def test_everything_is_measured_at_every_share_and_beside_everything(units: int) -> None:
    table = table_of([round_of(units, 1.0)], units, "test")
    for kind in SUB_STAGES:
        assert sorted(table.kinds[kind].shares) == [count / units for count in counts_of(units)]
        assert set(table.beside[kind]) == set(SUB_STAGES)
    assert {round(1 - split, 6) for split in table.splits} == {round(s, 6) for s in table.splits}
    assert splits_of(units)


def test_a_device_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(CallerError) as caught:
        measure_slowdown(cores=1)
    assert caught.value.info.field == "cores"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it needs two cores")
@pytest.mark.parametrize("field", ["rounds", "seconds", "config", "out"])
def test_what_cannot_be_measured_is_refused_before_it_is_tried(tmp_path: Path, field: str) -> None:
    config = tmp_path / "config.json"
    config.write_text("{")
    bad = {
        "rounds": 0,
        "seconds": math.nan,
        "config": config,
        "out": tmp_path / "none" / "mine.json",
    }
    given: dict[str, Any] = {"out": tmp_path / "mine.json", field: bad[field]}
    with pytest.raises(CallerError) as caught:
        measure_slowdown(**given)
    assert caught.value.info.field == field
    assert not (tmp_path / "mine.json").exists()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it needs two cores")
def test_json_that_is_no_model_is_refused_by_its_field(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"name": "a dataset"}')
    with pytest.raises(CallerError) as caught:
        measure_slowdown(config=config, out=tmp_path / "mine.json")
    assert caught.value.info.field == "config.model_type"
    assert "llama" in caught.value.info.remedy
    assert not (tmp_path / "mine.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it needs two cores")
def test_real_processes_make_a_table_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    measure_slowdown(rounds=1, seconds=0.1, out=path, console=Console(quiet=True))
    table = read(path, needed=SUB_STAGES)
    assert all(kind.shares[0.5] > 0 for kind in table.kinds.values())
    assert "2 cores" in table.source
    assert len(list(tables(table))) == 2
