"""The features of a state manager, wired as the daemon wires them, on a node without sockets."""

from __future__ import annotations

from pathlib import Path

from phaseloom.common.contract.ids import NodeId
from phaseloom.statemgr.checkpoints.files import Checkpoints
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.main import wire
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.shell import Parts
from phaseloom.statemgr.transfer.fetching import Home
from tests.support.meshcerts import identity


def node_on(directory: StateDirectory, *, device_bytes: int, host_bytes: int) -> Node:
    """A node with one device."""
    return Node(NodeId("n"), directory, [device_bytes], host_bytes, 10.0)


def parts_on(
    node: Node,
    *,
    nvme_bytes: int = 0,
    checkpoint_root: Path | None = None,
) -> Parts:
    return wire(
        node,
        Home(identity(), "", "", 10.0),
        Checkpoints(checkpoint_root, node.ledger.node),
        node.directory,
        checkpoint_file_bytes=10**9,
        checkpoint_bytes_of=lambda _: 0,
        nvme_budget_bytes=nvme_bytes,
    )
