"""A core goes on from an older one's snapshot where nobody has decided anything since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from phaseloom.common.contract.errors import Code, InternalError, ResourceError
from phaseloom.common.contract.events import SchedulerConfigured
from phaseloom.common.contract.specs import SchedulerConfig
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.state.tree import CORE_VERSION
from phaseloom.scheduler.core.state.upgrades import UPGRADES, unchanged, upgrade
from tests.support.world import CONFIG, World

PRESENT = 7
"""The core version that the tests of snapshots pretend to have: there is one before it."""
OLDER = PRESENT - 1


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phaseloom.scheduler.core.core.CORE_VERSION", PRESENT)


def running(config: SchedulerConfig = CONFIG) -> Core:
    """A core in the middle of a job's work."""
    world = World(config=config)
    world.submit("a")
    world.run()
    for seq in range(1, 6):
        world.queue("a", "policy", seq, "optim_step")
    world.run(until_s=world.now_s + 2.5 * world.duration_s)
    return world.core


def snapshot(core: Core, core_version: int, change: Callable[[dict[str, Any]], None]) -> bytes:
    fields = msgspec.msgpack.decode(core.snapshot())
    fields["core_version"] = core_version
    change(fields["state"])
    return msgspec.msgpack.encode(fields)


def test_every_version_has_a_way_to_the_next() -> None:
    """Whoever raises `CORE_VERSION` says what becomes of the snapshots of the version before."""
    assert sorted(UPGRADES) == list(range(1, CORE_VERSION))


@pytest.mark.usefixtures("present")
def test_core_goes_on_from_the_last_snapshot_of_an_older_version() -> None:
    core = running()

    def older(tree: dict[str, Any]) -> None:
        tree["groups"] = tree.pop("deployments")

    def newer(tree: dict[str, Any]) -> None:
        tree["deployments"] = tree.pop("groups")

    payload = snapshot(core, OLDER, older)
    restored = Core.restore(payload, led_since=0, upgrades={OLDER: newer})
    assert restored.state == core.state
    assert restored.state.deployments, "there is something that had to be renamed"
    again = Core.restore(payload, led_since=PRESENT, upgrades={OLDER: newer})
    assert again.state == core.state, "after a kill of the one that had gone on from it"


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize("led_since", [None, OLDER, PRESENT + 1])
def test_snapshot_is_refused_where_another_version_has_decided_since(led_since: int | None) -> None:
    payload = snapshot(running(), OLDER, unchanged)
    with pytest.raises(ResourceError, match="has not stopped cleanly") as caught:
        Core.restore(payload, led_since=led_since, upgrades={OLDER: unchanged})
    assert caught.value.info.code is Code.FAILED_PRECONDITION
    last = OLDER if led_since is None else led_since
    assert f"start a scheduler of core version {last} again" in caught.value.info.remedy


@pytest.mark.usefixtures("present")
def test_own_snapshot_is_refused_where_a_later_version_has_decided_since() -> None:
    with pytest.raises(ResourceError, match="has not stopped cleanly"):
        Core.restore(running().snapshot(), led_since=PRESENT + 1)


@pytest.mark.usefixtures("present")
def test_snapshot_of_a_version_without_a_way_here_is_refused() -> None:
    for version in (OLDER - 1, PRESENT + 1):
        payload = snapshot(running(), version, unchanged)
        with pytest.raises(ResourceError, match=f"of core version {version}") as caught:
            Core.restore(payload, led_since=0)
        assert caught.value.info.code is Code.FAILED_PRECONDITION


@pytest.mark.usefixtures("present")
def test_wrong_upgrade_is_our_error() -> None:
    def spoil(tree: dict[str, Any]) -> None:
        tree["nodes"] = 7

    payload = snapshot(running(), OLDER, unchanged)
    with pytest.raises(InternalError, match="gives an invalid state"):
        Core.restore(payload, led_since=0, upgrades={OLDER: spoil})


def test_log_and_snapshot_with_a_replaced_ordering_continue_with_its_replacement() -> None:
    core = running(replace(CONFIG, ordering="hold"))

    def older(tree: dict[str, Any]) -> None:
        assert tree["config"]["ordering"] == "hold"
        tree["config"]["ordering"] = "hrrs_anticipatory"

    restored = Core.restore(snapshot(core, CORE_VERSION, older))
    assert restored.state == core.state
    assert core.state.config is not None
    stored = msgspec.json.encode(SchedulerConfigured(core.state.config))
    entry = stored.replace(b'"hold"', b'"hrrs_anticipatory"')
    assert entry != stored
    event = msgspec.json.decode(entry, type=SchedulerConfigured)
    restored.step(restored.state.sequence + 1, restored.state.now_s, event)
    assert restored.state.config == core.state.config


def test_upgrades_are_made_one_version_at_a_time() -> None:
    def added(name: str) -> Callable[[dict[str, Any]], None]:
        return lambda tree: tree["steps"].append(name)

    table = {1: added("to 2"), 2: added("to 3"), 4: added("to 5")}
    tree: dict[str, Any] = {"steps": []}
    assert upgrade(tree, 1, 3, table)
    assert tree == {"steps": ["to 2", "to 3"]}
    for core_version, to in ((3, 5), (2, 5), (3, 3), (3, 1)):
        assert not upgrade(tree, core_version, to, table)
    assert tree == {"steps": ["to 2", "to 3"]}
