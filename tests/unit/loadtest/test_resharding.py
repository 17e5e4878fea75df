"""The bench of the planner plans what it says."""

from __future__ import annotations

from loadtest import resharding
from phaseloom.common.tensors.resharding import missing_bytes, plan, scatter_broadcast, traffic

_BYTES = 470_187_269_120
"""Of the model in bfloat16."""


def test_the_model_is_planned_whole_and_crosses_once() -> None:
    model, topology = resharding.parameters(), resharding.topology()
    assert len(model) == 36_757
    direct = plan(model, resharding.SOURCE, resharding.TARGET, topology)
    assert missing_bytes(direct, topology) == {"west": _BYTES}
    cost = traffic(scatter_broadcast(direct, topology), topology)
    assert cost.crossing == {("east", "west"): _BYTES}
    assert traffic(direct, topology).crossing[("east", "west")] == direct.num_bytes > 8 * _BYTES


def test_figures_name_what_they_are_held_against() -> None:
    figures = resharding.measure(1)
    assert [figure.name for figure in figures] == [
        "plan_235b",
        "plan_235b_scatter",
        "plan_235b_one_rank",
    ]
    assert all(figure.value > 0 and figure.limit_value == 2.0 for figure in figures)
