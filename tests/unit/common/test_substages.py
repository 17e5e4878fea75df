"""Sub-stages of operations: steps are recorded as runs, and cut by the paper's rule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.events import MAX_STEP_RUNS, StepRun
from phaseloom.common.observability.substages import (
    EDGES,
    WINDOW,
    StepRecord,
    combine_replicas,
    merge_shortest,
    split_runs,
    split_steps,
)

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = json.loads((GOLDEN / "substages.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_cut_as_by_hand(case: dict[str, Any]) -> None:
    assert [list(part) for part in split_steps(case["tokens"])] == case["out"], case["why"]


@given(st.lists(st.integers(0, 2000), max_size=200))
def test_cut_covers_every_step_once_and_neighbours_differ(tokens: list[int]) -> None:
    parts = split_steps(tokens)
    assert [step for part in parts for step in range(part.start, part.end)] == [*range(len(tokens))]
    assert all(a.bucket != b.bucket for a, b in pairwise(parts))


def test_cut_by_edges_of_ones_own() -> None:
    tokens = [64] * 10 + [8] * 10
    assert len(split_steps(tokens)) == 1
    assert [part.bucket for part in split_steps(tokens, edges=(16,))] == [1, 0]


def recorded(tokens: list[int]) -> list[StepRun]:
    """The runs of an operation each of whose steps takes a second."""
    clock: Iterator[int] = count()
    record = StepRecord(lambda: float(next(clock)))
    for number in tokens:
        record.stepped(number)
    return record.runs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_recorded_steps_are_cut_as_single_ones(case: dict[str, Any]) -> None:
    parts = split_runs(recorded(case["tokens"]), EDGES, WINDOW)
    assert [part.steps for part in parts] == [end - start for _, start, end in case["out"]]
    assert sum(part.tokens for part in parts) == sum(case["tokens"])
    assert sum(part.duration_s for part in parts) == len(case["tokens"])


@given(st.lists(st.integers(1, 5000), max_size=400))
def test_record_is_short_and_loses_no_step(tokens: list[int]) -> None:
    runs = recorded(tokens)
    assert len(runs) <= MAX_STEP_RUNS
    assert sum(run.steps for run in runs) == len(tokens)
    assert sum(run.tokens for run in runs) == sum(tokens)
    assert sum(run.duration_s for run in runs) == pytest.approx(len(tokens))


@given(st.lists(st.sampled_from([1, 20, 100, 700, 3000]), max_size=60), st.integers(10, 20))
def test_cut_of_runs_is_that_of_their_steps(kinds: list[int], length: int) -> None:
    """Where runs are long enough, few are merged, and the rule finds the same edges in them."""
    tokens = [kind for kind in kinds[:MAX_STEP_RUNS] for _ in range(length)]
    parts = split_steps(tokens)
    assert [run.steps for run in split_runs(recorded(tokens), EDGES, WINDOW)] == [
        part.end - part.start for part in parts
    ]


def test_short_rollout_is_cut_as_a_long_one_of_its_shape() -> None:
    """Ten steps are half of a rollout of twenty: its full batch and its tail are told all the
    same, and a single step of another kind within a long one is not."""
    short = recorded([640, *[64] * 14, *[3] * 5])
    assert [run.steps for run in split_runs(short)] == [1, 14, 5]
    long = recorded([*[64] * 60, 640, *[64] * 60, *[3] * 40])
    assert [run.steps for run in split_runs(long)] == [121, 40]


def test_shortest_run_goes_into_the_one_before_it() -> None:
    runs = [StepRun(20, 20, 1.0), StepRun(2, 200, 0.5), StepRun(30, 60, 2.0)]
    assert merge_shortest(runs, 2) == [StepRun(22, 220, 1.5), StepRun(30, 60, 2.0)]
    assert merge_shortest(runs, 0) == [StepRun(52, 280, 3.5)]
    assert merge_shortest([], 2) == []


@pytest.mark.parametrize("replicas", [1, 3, 16, 40])
def test_replicas_share_the_room_that_there_is(replicas: int) -> None:
    runs = [[StepRun(10 + i, 10, 0.1) for i in range(20)]] * replicas
    told = combine_replicas(runs)
    assert len(told) <= MAX_STEP_RUNS
    assert {run.replica for run in told} == {*range(min(replicas, MAX_STEP_RUNS))}


def test_operation_without_steps_tells_none() -> None:
    assert combine_replicas([]) == []
    assert combine_replicas([[], [StepRun(1, 1, 0.1)]]) == [StepRun(1, 1, 0.1, 1)]
