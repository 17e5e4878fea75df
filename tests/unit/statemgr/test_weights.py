"""Weights versions that come and go while somebody asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.tiers.hierarchy import Hierarchy
from phaseloom.statemgr.versions.incoming import Incoming
from phaseloom.statemgr.versions.weights import Weights
from phaseloom.statemgr.versions.wire import VersionDescription
from tests.support.meshcerts import identity

KEY = VersionKey(DeploymentKey("acme", "sums", "policy"), 3)


async def test_version_that_is_dropped_on_its_way_is_not_found_by_who_relays_it(
    tmp_path: Path,
) -> None:
    node = Node(NodeId("n"), [1], 4096, 1.0)
    node.settled.set()
    directory = StateDirectory(tmp_path)
    weights = Weights(node, directory, Hierarchy(node, directory, 0), identity(), 1.0)
    description = VersionDescription(0, [], "0" * 32)
    weights._bringing.incoming[KEY] = Incoming(description, memoryview(b""))
    with pytest.raises(CallerError) as caught:
        async with weights.reading(KEY, may_be_incoming=True):
            pass
    assert caught.value.info.code is Code.NOT_FOUND
    node.keeper.close()
    node.memory.close()
