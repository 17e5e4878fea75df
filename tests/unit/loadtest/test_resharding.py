"""The bench of the planner plans what it says."""

from __future__ import annotations

from loadtest import resharding
from phaseloom.common.tensors.resharding import node_fetches, plan

_BYTES = 470_187_269_120
"""Of the model in bfloat16."""


def test_the_model_is_planned_whole_and_comes_once() -> None:
    model = resharding.parameters()
    assert len(model) == 36_757
    made = plan(model, resharding.SOURCE, resharding.TARGET)
    fetches = node_fetches(made, resharding.ONE_NODE)
    assert sum(fetch.num_bytes for fetch in fetches) == _BYTES


def test_figures_name_what_they_are_held_against() -> None:
    figures = resharding.measure(1)
    assert [figure.name for figure in figures] == [
        "plan_235b",
        "plan_235b_one_node",
    ]
    assert all(figure.value > 0 and figure.limit_value == 2.0 for figure in figures)
