"""What a placement policy sees of a node."""

from __future__ import annotations

import msgspec

from phaseloom.common.ids import NodeId


class NodeView(msgspec.Struct, frozen=True):
    """A node that has enough devices for every deployment of the job."""

    node: NodeId
    num_jobs: int
    """Jobs pinned to it."""
