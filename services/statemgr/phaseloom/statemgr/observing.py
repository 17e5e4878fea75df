"""The state manager's gauges: memory in use, and its budgets, by host and device."""

from __future__ import annotations

from phaseloom.common.observability import metrics
from phaseloom.common.observability.metrics import Reading
from phaseloom.statemgr.node.node import Node


def register(node: Node) -> None:
    """Let every scrape of the metrics read the node's records."""
    here = {"node": node.name}
    arena, residency = node.memory.arena, node.residency
    devices = range(len(residency.device_budget_bytes))

    def by_device(values: list[int]) -> list[Reading]:
        return [(value, {**here, "device": str(d)}) for d, value in enumerate(values)]

    metrics.observe(metrics.ARENA_USED, lambda: [(arena.used_bytes, here)])
    metrics.observe(metrics.ARENA_BUDGET, lambda: [(arena.budget_bytes, here)])
    metrics.observe(
        metrics.DEVICE_USED,
        lambda: by_device([residency.device_used_bytes(d) for d in devices]),
    )
    metrics.observe(metrics.DEVICE_BUDGET, lambda: by_device(residency.device_budget_bytes))
