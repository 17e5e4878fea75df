"""What a node remembers of those to whom it has given slices."""

from __future__ import annotations

from pathlib import Path

from phaseloom.common.contract.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.statemgr.core.boxdealing import BoxDeal
from phaseloom.statemgr.core.dealing import Fetcher
from phaseloom.statemgr.core.slices import Box
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.mesh.permission import Gate
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.tiers.hierarchy import Hierarchy
from phaseloom.statemgr.versions.sliceserving import SliceServer
from phaseloom.statemgr.versions.slicing import Slices
from phaseloom.statemgr.versions.weights import Weights
from tests.support.meshcerts import identity

POLICY = DeploymentKey("acme", "job", "policy")
KEYS = [VersionKey(POLICY, seq) for seq in (3, 5, 7)]
SITE = "west"
BOX = (Box("w", [0], [64]), 64)


async def test_who_was_given_what_is_forgotten_with_the_version(tmp_path: Path) -> None:
    """There may be hundreds of thousands of boxes in each."""
    node = Node(NodeId("n"), [1], 2**20, 10.0)
    node.settled.set()
    directory = StateDirectory(tmp_path)
    hierarchy = Hierarchy(node, directory, 0)
    weights = Weights(node, directory, hierarchy, identity(), 10.0)
    slices = Slices(node, hierarchy, weights)
    server = SliceServer(
        *(Gate("secret"), 10.0),
        open_part=slices.reading,
        open_brought=slices.brought,
        digests_of=weights.digests_of,
        mend=weights.mend,
    )

    async def deal(key: VersionKey) -> BoxDeal:
        async with slices.reading(key) as part:
            return server._deal(part, SITE)

    for key in KEYS:
        extent = node.memory.reserve(64, "a version")
        node.versions.commit(node.versions.begin(key, 64, [], extent), "its digest")
    first, second = await deal(KEYS[0]), await deal(KEYS[1])
    first.ask([BOX], 64, [], Fetcher("node:1", "all"))
    assert await deal(KEYS[0]) is first
    node.drop_version(node.versions.find(KEYS[0]))
    third = await deal(KEYS[2])
    assert {id(each) for each in server._deals.values()} == {id(second), id(third)}
    node.keeper.close()
    node.memory.close()
