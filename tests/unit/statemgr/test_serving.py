"""What a node remembers of those to whom it has given slices."""

from __future__ import annotations

import gc
from pathlib import Path

from phaseloom.common.contract.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.common.tensors.tensortable import EMPTY
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.seals.replicating import Replicator
from phaseloom.statemgr.seals.sealing import Sealer
from phaseloom.statemgr.serving import Server
from phaseloom.statemgr.tiering.tiering import Tiering
from phaseloom.statemgr.transfer.assignment import Assignment, Peer
from phaseloom.statemgr.transfer.fetching import Home
from phaseloom.statemgr.transfer.permission import Gate
from phaseloom.statemgr.transfer.tensorslices import Box
from phaseloom.statemgr.versions.fetch import VersionFetcher
from phaseloom.statemgr.versions.weights import Weights
from tests.support.meshcerts import identity

POLICY = DeploymentKey("acme", "job", "policy")
KEYS = [VersionKey(POLICY, seq) for seq in (3, 5, 7)]
SITE = "west"
BOX = (Box("w", [0], [64]), 64)


async def test_who_was_assigned_what_is_forgotten_with_the_version(tmp_path: Path) -> None:
    """There may be hundreds of thousands of boxes in each."""
    directory = StateDirectory(tmp_path)
    node = Node(NodeId("n"), directory, [1], 2**20, 10.0)
    node.settled.set()
    tiering = Tiering(node, 0)
    weights = Weights(VersionFetcher(node, tiering, Home(identity(), "", "", 10.0)))
    replicator = Replicator(node, Sealer(node, tiering, weights.verify), weights)
    server = Server(Gate("secret"), 10.0, node, weights, replicator)

    async def assignment(key: VersionKey) -> Assignment:
        async with weights.open_part(key) as part:
            return server._assignment(part, SITE)

    for key in KEYS:
        extent = node.memory.reserve(64, "a version")
        node.versions.commit(node.versions.begin(key, 64, EMPTY, extent), "its digest")
    first, second = await assignment(KEYS[0]), await assignment(KEYS[1])
    first.ask([BOX], 64, [], Peer("node:1", "all"))
    assert await assignment(KEYS[0]) is first
    node.drop_version(node.versions.find(KEYS[0]))
    third = await assignment(KEYS[2])
    gc.collect()
    known = [each for sites in server._assignments.values() for each in sites.values()]
    assert {id(each) for each in known} == {id(second), id(third)}
    node.handles.close()
    node.memory.close()
