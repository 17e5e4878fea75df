"""The tables of transitions: what the README shows of them, and that they leave nothing out."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from phaseloom.scheduler.core.state.transitions import (
    JOBS,
    MOVES,
    OPERATIONS,
    WPGS,
    InvalidTransition,
    OpEvent,
    OpState,
    next_state,
)

README = Path(__file__).parents[3] / "services" / "scheduler" / "README.md"
TABLES: dict[str, Mapping[tuple[Any, Any], StrEnum]] = {
    "operation": OPERATIONS,
    "WPG": WPGS,
    "job": JOBS,
    "move": MOVES,
}


def rows() -> list[str]:
    """A line for each state that something can follow on."""
    lines = ["| of | state | event → next state |", "| --- | --- | --- |"]
    for name, table in TABLES.items():
        state, event = next(iter(table))
        for before in type(state):
            arrows = [f"{e} → `{table[before, e]}`" for e in type(event) if (before, e) in table]
            if arrows:
                lines.append(f"| {name} | `{before}` | {', '.join(arrows)} |")
    return lines


def test_readme_shows_the_tables() -> None:
    assert "\n".join(rows()) in README.read_text(), "\n".join(rows())


@pytest.mark.parametrize("name", TABLES)
def test_every_state_and_event_is_in_its_table(name: str) -> None:
    table = TABLES[name]
    first = next(iter(table))
    states: type[StrEnum] = type(first[0])
    events: type[StrEnum] = type(first[1])
    assert {*(state for state, _ in table), *table.values()} == set(states)
    assert {event for _, event in table} == set(events)


def test_event_that_a_state_does_not_know_tells_its_story() -> None:
    with pytest.raises(
        InvalidTransition, match=r"operation t\.a\.policy\.1: .*completed.*queued.* 7"
    ):
        next_state(OPERATIONS, "operation", "t.a.policy.1", OpState.QUEUED, OpEvent.COMPLETED, 7)
