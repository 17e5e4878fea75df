"""What a node tells of itself."""

from __future__ import annotations

import pytest

from phaseloom.worker.config import WorkerConfig


@pytest.mark.parametrize(
    ("pool", "given", "price"),
    [("rollout", 0.0, 14.8), ("train", 0.0, 42.24), ("tpu", 0.0, 1.0), ("train", 3.0, 3.0)],
)
def test_price_of_a_node_is_the_usual_one_of_its_pool_where_none_is_given(
    pool: str, given: float, price: float
) -> None:
    config = WorkerConfig("n0", pool, [1], 1, "s", "secret", "/run", price_per_hour=given)
    assert config.price == pytest.approx(price)
