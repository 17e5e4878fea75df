"""A deployment whose optimizer works in host memory, through everything that may happen to it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.operations import (
    Args,
    LoadState,
    Outcome,
    PublishWeights,
    PublishWeightsResult,
    SaveState,
    SaveStateResult,
)
from phaseloom.common.contract.specs import Layout, OptimizerOn
from tests.support.node import STEP, TestNode, lesson, policy_spec, running_node

LESSONS: list[Args] = [lesson(1), STEP, lesson(2), STEP, lesson(3), STEP]
PUBLISH = len(LESSONS) + 1
ALONE, PAIR = Layout(), Layout(dp=2)


async def learn(
    node: TestNode, key: DeploymentKey, first: int, last: int, incarnation: int = 1, epoch: int = 0
) -> None:
    for seq in range(first, last + 1):
        fields = {"epoch": epoch or incarnation}
        args = LESSONS[seq - 1]
        done = await node.run(key, seq, args, seq - 1, incarnation=incarnation, **fields)
        assert done.outcome is Outcome.COMPLETED, done


async def published(node: TestNode, key: DeploymentKey, incarnation: int = 1) -> str:
    """The digest of its weights in the end."""
    done = await node.run(key, PUBLISH, PublishWeights(), PUBLISH - 1, incarnation=incarnation)
    assert isinstance(done.result, PublishWeightsResult), done
    return done.result.digest


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ALONE, marks=pytest.mark.slow, id="one rank"),
        pytest.param(PAIR, id="two ranks"),
    ],
)
async def test_weights_are_the_same_whatever_is_switched_sealed_and_killed(layout: Layout) -> None:
    devices = list(range(layout.num_ranks))
    async with running_node(num_devices=len(devices)) as node, node.fresh():
        on_device = policy_spec(layout=layout)
        on_host = replace(on_device, optimizer_on=OptimizerOn.HOST)
        plain, started = await node.start_wpg(on_device, job="plain", devices=devices)
        whole_bytes = started.state_bytes
        await learn(node, plain, 1, len(LESSONS))
        expected = await published(node, plain)

        key, started = await node.start_wpg(on_host, devices=devices)
        assert started.state_bytes < 0.6 * whole_bytes
        await learn(node, key, 1, 1)
        # Away between a forward_backward and its step, and back.
        await node.open(plain, 1, [key], epoch=2)
        await node.open(key, 1, [plain], epoch=3)
        await learn(node, key, 2, 2, epoch=3)
        await node.seal(key, 2)
        await learn(node, key, 3, 3, epoch=3)
        await node.kill("statemgr")
        await node.start("statemgr")
        await learn(node, key, 4, 4, epoch=3)

        # Rebuilt from the seal: moments and steps taken are those of then.
        await node.kill_rank(key)
        await node.lost(key)
        await node.start_wpg(on_host, incarnation=4, devices=devices, seal_seq=2)
        for seq in (3, 4):
            again = await node.put_again(key, seq)
            args = LESSONS[seq - 1]
            await node.permit(again, args, seq - 1, 4, replay=True)
            finished = await node.finished(again, incarnation=4)
            assert finished.outcome is Outcome.COMPLETED
        await learn(node, key, 5, len(LESSONS), incarnation=4)
        assert await published(node, key, incarnation=4) == expected


async def test_optimizer_on_the_host_of_what_has_none_is_refused() -> None:
    async with running_node() as node, node.fresh():
        spec = replace(policy_spec(), trainable=False, optimizer_on=OptimizerOn.HOST)
        with pytest.raises(CallerError, match="needs a trainable deployment"):
            await node.start_wpg(spec)


async def saved(node: TestNode, key: DeploymentKey, name: str) -> str:
    """The SHA-256 of its weights."""
    done = await node.run(key, f"r{name}", SaveState(name))
    assert isinstance(done.result, SaveStateResult), done
    return done.result.weights_sha256


async def test_checkpoint_has_moments_and_steps_of_host_memory() -> None:
    async with running_node() as node, node.fresh():
        spec = replace(policy_spec(), optimizer_on=OptimizerOn.HOST)
        key, _ = await node.start_wpg(spec)
        await learn(node, key, 1, 2)
        await saved(node, key, "middle")
        await learn(node, key, 3, 4)
        expected = await saved(node, key, "ahead")
        loaded = await node.run(key, 5, LoadState("middle"), 4)
        assert loaded.outcome is Outcome.COMPLETED, loaded
        assert await saved(node, key, "back") != expected
        for seq, args in ((6, LESSONS[2]), (7, LESSONS[3])):
            assert (await node.run(key, seq, args, seq - 1)).outcome is Outcome.COMPLETED
        assert await saved(node, key, "again") == expected
