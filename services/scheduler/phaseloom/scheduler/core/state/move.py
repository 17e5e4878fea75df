"""The move of a deployment: its destination, and the nodes that it has left."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.state.transitions import MoveStage
from phaseloom.scheduler.core.state.wpg import RankAssignment


class Relocation(msgspec.Struct):
    """A deployment's way to other devices."""

    assignments: list[RankAssignment]
    """The devices that the deployment will have."""
    stage: MoveStage = MoveStage.PREPARING
    requested_seal: int = 0
    """Seq of the seal that the move requested in its newest try; 0: none was needed."""
    began_s: float = 0.0
    """When sealing and copying began."""
    copy_s: float = 0.0
    """How long sealing and copying took."""
    fetching: list[NodeId] = []
    """The new nodes that have not yet reported their copy."""
    fetch_sequence: int = 0
    """Log sequence at which the new nodes were told to fetch their copies."""
    retry_at_s: float = 0.0
    """The move is not retried before this time."""
    failures: int = 0
    """Consecutive failures to take a copy."""


class Move(msgspec.Struct):
    relocation: Relocation | None = None
    """None: the deployment does not move."""
    stale_holders: list[NodeId] = []
    """Nodes that the deployment has left and that keep its seal until it has made a new one."""

    def begin(self, assignments: list[RankAssignment]) -> None:
        self.relocation = Relocation(assignments)

    def end(self) -> None:
        """Record that the move is over: the deployment has arrived, stays after all, or has
        ended."""
        self.relocation = None

    def keep(self, nodes: Iterable[NodeId], *, but: Iterable[NodeId] = ()) -> None:
        """Set the stale holders to these nodes, except those in `but`."""
        excluded = set(but)
        self.stale_holders = [node for node in dict.fromkeys(nodes) if node not in excluded]

    def validate(self, name: str) -> None:
        """Check the invariants. Raises: AssertionError: names the invariant and the deployment."""
        stale = self.stale_holders
        assert len(set(stale)) == len(stale), f"{name}: a stale holder twice in {stale}"
