"""The bench of the planner plans what it says."""

from __future__ import annotations

import pytest

from loadtest import resharding
from phaseloom.common.tensors.resharding import parts_of, plan_fetches

_SIZES = {"30b_a3b": (18_867, 61_064_245_248, 16), "235b": (36_945, 470_187_269_120, 96)}
"""Of each model the number of tensors, its bytes in bfloat16, and its parts."""


@pytest.mark.parametrize("plan", resharding.PLANS, ids=lambda plan: plan.name)
def test_model_is_planned_whole_and_comes_once(plan: resharding.Plan) -> None:
    num_tensors, num_bytes, num_parts = _SIZES[plan.name]
    model, held = plan.tensors(), plan.source()
    assert len(model) == num_tensors
    parts = [held[ranks[0]] for ranks in parts_of(held)]
    assert len(parts) == num_parts
    found = plan_fetches(model, parts, plan.target())
    assert sum(fetch.num_bytes for fetch in found) == num_bytes


def test_figures_name_what_they_are_held_against() -> None:
    figures = resharding.measure(1)
    assert [figure.name for figure in figures] == ["plan_30b_a3b_one_node", "plan_235b_one_node"]
    for figure in figures:
        assert figure.value > 0
        assert figure.limit_value == 2.0
