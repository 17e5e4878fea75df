"""The move of a deployment: where it goes, and which nodes it has left.

One record a deployment. Each of its fields is written by one module: here, or by its owner.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.state.transitions import MoveStage
from phaseloom.scheduler.core.state.wpg import RankAssignment


class Relocation(msgspec.Struct):
    """The way of a deployment to other devices."""

    assignments: list[RankAssignment]
    """The devices that the deployment is to have."""
    is_sealed: bool = False
    """Whether the seal of the move was asked for. It is asked for once, whether or not it comes."""
    is_last: bool = False
    """Whether the deployment leaves with the seal that is made now: nothing runs meanwhile."""
    began_s: float = 0.0
    """When the sealing and copying began."""
    copy_s: float = 0.0
    """How long the sealing and copying took."""
    stage: MoveStage = MoveStage.BEGUN
    fetching: list[NodeId] = []
    """The new nodes that have not yet said that they have their copy."""
    asked: int = 0
    """Log sequence at which the new nodes were told to fetch their copies."""
    retry_at_s: float = 0.0
    """A new node that could not take its copy is not asked again before this time."""
    failures: int = 0
    """Failed tries to take a copy in a row."""


class Move(msgspec.Struct):
    relocation: Relocation | None = None
    """None: the deployment stays where it is."""
    stale_holders: list[NodeId] = []
    """Nodes that the deployment was on and that keep its seal, until it has made a new one."""

    def begin(self, assignments: list[RankAssignment]) -> None:
        self.relocation = Relocation(assignments)

    def end(self) -> None:
        """Note that the move is over: the deployment has arrived, stays after all, or has ended."""
        self.relocation = None

    def keep(self, nodes: Iterable[NodeId], *, but: Iterable[NodeId] = ()) -> None:
        """Make these nodes, except those in `but`, the stale holders."""
        excluded = set(but)
        self.stale_holders = [node for node in dict.fromkeys(nodes) if node not in excluded]

    def validate(self, name: str) -> None:
        """Raises: AssertionError: names the invariant and the deployment."""
        stale = self.stale_holders
        assert len(set(stale)) == len(stale), f"{name}: a stale holder twice in {stale}"
