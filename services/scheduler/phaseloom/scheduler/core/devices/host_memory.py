"""Nodes whose host memory may not hold the states of all deployments that are placed on them."""

from __future__ import annotations

from phaseloom.scheduler.core.devices import devices
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Node
from phaseloom.scheduler.core.state.step import Step

ROOM = 3
"""Times the states of a node: with so much host memory it has room for their weights versions too,
and nothing goes to NVMe."""


def weigh(step: Step, deployment: Deployment) -> None:
    """Note which nodes of a deployment are crowded, now that its size is known."""
    for node in step.nodes_of(deployment):
        if is_crowded(step, node):
            step.state.crowd(node.node)


def is_crowded(step: Step, node: Node) -> bool:
    deployments = step.state.deployments
    placed = [deployments[name] for name in devices.placed_on(node)]
    return ROOM * sum(deployment.wpg.state_bytes for deployment in placed) > node.host_memory_bytes
