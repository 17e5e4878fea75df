"""What a node remembers of those to whom it has given slices."""

from __future__ import annotations

import gc
from pathlib import Path

from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.tensors.tensortable import EMPTY
from phaseloom.statemgr.serving import Server
from phaseloom.statemgr.transfer.assignment import Assignment, Peer
from phaseloom.statemgr.transfer.permission import Gate
from phaseloom.statemgr.transfer.tensorslices import Box
from tests.support.nodeparts import node_on, parts_on
from tests.support.statefiles import state_directory

POLICY = DeploymentKey("acme", "job", "policy")
KEYS = [VersionKey(POLICY, seq) for seq in (3, 5, 7)]
SITE = "west"
BOX = (Box("w", [0], [64]), 64)


async def test_who_was_assigned_what_is_forgotten_with_the_version(tmp_path: Path) -> None:
    """There may be hundreds of thousands of boxes in each."""
    directory = state_directory(tmp_path)
    node = node_on(directory, device_bytes=1, host_bytes=2**20)
    node.ledger.settled.set()
    parts = parts_on(node)
    weights = parts.weights
    nearby = node.ledger, node.versions, weights, parts.replicator
    server = Server(Gate("secret"), *nearby, home=parts.home)

    async def assignment(key: VersionKey) -> Assignment:
        async with weights.open_part(key) as part:
            return server._assignment(part, SITE)

    for key in KEYS:
        extent = node.memory.reserve(64, "a version")
        version = node.records.versions.begin(key, 64, EMPTY, extent)
        node.records.versions.commit(version, "its digest")
    del version
    first, second = await assignment(KEYS[0]), await assignment(KEYS[1])
    first.assign([BOX], 64, [], Peer("node:1", "all"))
    assert await assignment(KEYS[0]) is first
    dropped = node.records.versions.find(KEYS[0])
    assert dropped is not None
    node.versions.drop(dropped)
    del dropped
    third = await assignment(KEYS[2])
    gc.collect()
    known = [each for sites in server._assignments.values() for each in sites.values()]
    assert {id(each) for each in known} == {id(second), id(third)}
    node.close()
