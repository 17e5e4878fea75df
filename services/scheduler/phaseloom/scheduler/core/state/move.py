"""The move of a deployment: where it goes, and which nodes it has left.

One record a deployment. Its fields are changed by its methods only. Other modules read them.
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

    def enter(self, stage: MoveStage) -> bool:
        """Returns: whether that is another stage than before."""
        is_new = self.stage is not stage
        self.stage = stage
        return is_new

    def begin_again(self) -> None:
        self.is_sealed = False

    def note_sealed(self) -> None:
        self.is_sealed = True

    def note_began(self, now_s: float) -> None:
        self.began_s = now_s

    def note_copied(self, now_s: float) -> None:
        self.copy_s = now_s - self.began_s

    def seal_last(self) -> None:
        self.is_last = True

    def ask(self, sequence: int, nodes: list[NodeId]) -> None:
        """These new nodes were told to fetch their copies."""
        self.asked = sequence
        self.fetching = nodes

    def note_fetched(self, node: NodeId) -> None:
        """A new node has its copy, or could not get it."""
        self.fetching.remove(node)

    def failed(self, now_s: float, pause_s: float, max_pause_s: float) -> None:
        """Args: pause_s: after a first failure; twice as long after each further one."""
        self.failures += 1
        self.retry_at_s = now_s + min(pause_s * 2 ** (self.failures - 1), max_pause_s)

    def wait(self) -> None:
        self.fetching = []
        self.is_last = False


class Move(msgspec.Struct):
    relocation: Relocation | None = None
    """None: the deployment stays where it is."""
    stale_holders: list[NodeId] = []
    """Nodes that the deployment was on and that keep its seal, until it has made a new one."""

    def begin(self, assignments: list[RankAssignment]) -> None:
        self.relocation = Relocation(assignments)

    def end(self) -> None:
        """The deployment has arrived, stays after all, or has ended."""
        self.relocation = None

    def keep(self, nodes: Iterable[NodeId], *, but: Iterable[NodeId] = ()) -> None:
        """These nodes, except those in `but`, are the stale holders from now on."""
        excluded = set(but)
        self.stale_holders = [node for node in dict.fromkeys(nodes) if node not in excluded]

    def validate(self, name: str) -> None:
        """Raises: AssertionError: names the invariant and the deployment."""
        stale = self.stale_holders
        assert len(set(stale)) == len(stale), f"{name}: a stale holder twice in {stale}"
