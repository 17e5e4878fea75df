"""The scheduler's hint reaches the state manager through the node's agent."""

from __future__ import annotations

import pytest

from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.commands import CloseActivation, PrefetchState
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from phaseloom.common.contract.state_agent import StatusReport
from phaseloom.common.contract.streams import state_subject
from tests.support.node import NODE, TestNode, running_node

PAGE = 4096
SPEC = DeploymentSpec("policy", "train", "noop", ModelSpec({}), trainable=True)


async def report(node: TestNode) -> StatusReport:
    answer = await node.bus.client.request(state_subject(NODE), timeout=30)
    told: StatusReport = decode(answer.data, StatusReport)
    return told


async def demoted(node: TestNode) -> set[DeploymentKey]:
    deployments = (await report(node)).deployments
    return {state.deployment for state in deployments if state.nvme_bytes}


@pytest.mark.usefixtures("noop_nodes")
async def test_hint_of_the_scheduler_brings_a_state_up() -> None:
    """Host memory for two states of a page, and three deployments."""
    async with running_node(host_memory_bytes=2 * PAGE) as node, node.fresh():
        keys = []
        for name in ("first", "second", "third"):
            key, _ = await node.start_wpg(SPEC, job=name)
            await node.command(CloseActivation, deployment=key, incarnation=1, epoch=1)
            keys.append(key)
            while any((await report(node)).device_used_bytes):
                pass
        assert await demoted(node) == {keys[0]}
        gone = DeploymentKey("acme", "gone", "policy")
        for key in (gone, keys[0]):
            await node.command(PrefetchState, deployment=key, incarnation=1, in_s=3.0)
        while await demoted(node) != {keys[1]}:
            pass
        await node.open(keys[0], 1, epoch=2)
