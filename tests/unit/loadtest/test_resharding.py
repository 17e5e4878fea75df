"""The bench of the planner plans what it says."""

from __future__ import annotations

from loadtest import resharding
from phaseloom.common.tensors.resharding import fetches, parts_of

_BYTES = 470_187_269_120
"""Of the model in bfloat16."""


def test_the_model_is_planned_whole_and_comes_once() -> None:
    model, held = resharding.tensors(), resharding.source()
    assert len(model) == 36_757 + 2 * resharding.NUM_LAYERS
    parts = [held[ranks[0]] for ranks in parts_of(held)]
    assert len(parts) == 96
    found = fetches(model, parts, resharding.target())
    assert sum(fetch.num_bytes for fetch in found) == _BYTES


def test_figures_name_what_they_are_held_against() -> None:
    (figure,) = resharding.measure(1)
    assert figure.name == "plan_235b_one_node"
    assert figure.value > 0
    assert figure.limit_value == 2.0
