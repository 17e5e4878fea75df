"""When a state is sealed: by the number of mutations, by the bytes of the log, by age."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from phaseloom.common.contract.commands import SealState
from phaseloom.common.contract.operations import Outcome
from tests.support.world import CONFIG, World, deployment

STEPS = 20
PAYLOAD_BYTES = 100


def busy(**config: Any) -> World:
    """One job whose policy always has its next operation queued."""
    world = World(config=msgspec.structs.replace(CONFIG, **config))
    world.submit("a")
    world.run()
    for seq in range(1, 2 * STEPS + 1):
        kind = "optim_step" if seq % 2 == 0 else "forward_backward"
        event = world.queue("a", "policy", seq, kind)
        world.feed(msgspec.structs.replace(event, num_bytes=PAYLOAD_BYTES))
    world.run()
    assert list(world.done.values()) == [Outcome.COMPLETED] * 2 * STEPS
    return world


def seals(world: World) -> list[int]:
    return [command.seq for command in world.commands if isinstance(command, SealState)]


def test_nothing_is_sealed_when_little_changed_lately() -> None:
    assert seals(busy(seal_every=1000)) == []


def test_nothing_is_sealed_when_seals_are_off() -> None:
    assert seals(busy(seal_every=0, seal_bytes=1, seal_age_s=0.0)) == []


@pytest.mark.parametrize(
    "config", [{"seal_bytes": 10 * PAYLOAD_BYTES}, {"seal_age_s": 1.0}], ids=["bytes", "age"]
)
def test_log_of_a_busy_deployment_does_not_grow_for_ever(config: dict[str, Any]) -> None:
    world = busy(seal_every=1000, **config)
    ordered = seals(world)
    assert len(ordered) >= 2
    assert all(seq % 2 == 0 for seq in ordered), "a seal with gradients"
    sealed = world.core.state.deployments[str(deployment("a", "policy"))].durability.seal_seq
    assert sealed >= ordered[-2]
    left = [int(name.rsplit(".", 1)[1]) for name in world.payloads if ".policy." in name]
    assert all(seq > sealed for seq in left)


def test_busy_deployment_is_sealed_after_four_times_the_usual_number() -> None:
    assert seals(busy(seal_every=4))[0] == 16
