"""The first two policies, one node of each pool at a time, until jobs are placed by group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from phaseloom.common.ids import NodeId


class NodeView(msgspec.Struct, frozen=True):
    node: NodeId
    num_jobs: int


def isolated(nodes: Sequence[NodeView]) -> NodeView | None:
    return min((n for n in nodes if n.num_jobs == 0), key=lambda n: n.node, default=None)


def pack(nodes: Sequence[NodeView]) -> NodeView | None:
    return min(nodes, key=lambda n: (-n.num_jobs, n.node))


POLICIES: dict[str, Callable[[Sequence[NodeView]], NodeView | None]] = {
    "isolated": isolated,
    "pack": pack,
}
