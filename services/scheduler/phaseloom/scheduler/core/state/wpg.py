"""The worker-process group of a deployment: where its ranks are, and in which incarnation.

One record a deployment. Each of its fields is written by one module: here, or by its owner.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.state.transitions import WpgState


class RankAssignment(msgspec.Struct, frozen=True):
    """The devices of one node that ranks of a deployment run on."""

    node: NodeId
    devices: list[int]
    """One a rank, in order."""


class Wpg(msgspec.Struct):
    assignments: list[RankAssignment] = []
    """The devices of the ranks, the leader's first. Empty: the WPG has no place."""
    state: WpgState = WpgState.UNPLACED
    starting_on: list[NodeId] = []
    """The nodes of a STARTING WPG that have not yet said that their ranks are up."""
    dying_on: list[NodeId] = []
    """The nodes of a LOST WPG that have not yet said that their ranks are dead."""
    incarnation: int = 0
    state_bytes: int = 0
    base: int = 0
    """The seal that this incarnation was started from."""
    checkpoint: str = ""
    """The checkpoint that a WPG without a seal starts from; empty: its seeds."""
    origin_seq: int = 0
    """The seq that the checkpoint, or the fresh state, stands for."""
    losses: int = 0
    """Deaths of the WPG at the current `next_seq`, in its start or while nothing ran, since an
    operation was completed."""
    refusals: int = 0
    """Switch-ins in a row that were refused for good while it is rebuilt."""
    is_trial: bool = False
    """Whether the deployment was added to a job that was placed already, and is not up yet: if it
    cannot start, it ends alone."""
    up_since_s: float = 0.0
    """When the ranks of this incarnation, or of the last one that came up, were up on all nodes."""
    retry_at_s: float = 0.0
    """The next incarnation does not begin before this time."""
    error: ErrorInfo | None = None
    """Why the WPG died last, until it is up again; or why it was stopped."""

    # --- placing ---------------------------------------------------------------------------------

    def put_on(self, assignments: list[RankAssignment]) -> None:
        self.assignments = assignments

    def lose_assignment(self, lost: RankAssignment) -> None:
        """Note that a node has come back without these devices."""
        self.assignments = [other for other in self.assignments if other is not lost]

    # --- an incarnation --------------------------------------------------------------------------

    def begin(self, seal_seq: int) -> None:
        """Begin the next incarnation, which starts from this seal."""
        self.incarnation += 1
        self.base = seal_seq

    def complete_start(self, now_s: float) -> None:
        """Note that the ranks on all nodes are up."""
        self.up_since_s = now_s
        self.error = None
        self.is_trial = False

    def raise_incarnation(self, least: int) -> None:
        """Count incarnations up to `least` as used: a node was told, or has reported, one of them
        already."""
        self.incarnation = max(self.incarnation, least)

    def next_incarnation(self) -> None:
        """Begin to count anew, so that late answers of the present incarnation are told apart."""
        self.incarnation += 1

    # --- failures --------------------------------------------------------------------------------

    def try_alone(self) -> None:
        self.is_trial = True

    def failed(self, error: ErrorInfo) -> None:
        self.error = error

    def count_loss(self) -> None:
        self.losses += 1

    def forgive_losses(self) -> None:
        self.losses = 0

    def put_off(self, until_s: float) -> None:
        """Begin the next incarnation no earlier than this."""
        self.retry_at_s = until_s

    def count_refusal(self) -> None:
        self.refusals += 1

    def forgive_refusals(self) -> None:
        self.refusals = 0

    def fall_back(self, checkpoint: str, seq: int) -> None:
        """Start the next incarnation from a checkpoint that stands for this seq."""
        self.checkpoint = checkpoint
        self.origin_seq = seq
        self.losses = 0

    def validate(self, name: str) -> None:
        """Raises: AssertionError: names the invariant and the deployment."""
        nodes = {assigned.node for assigned in self.assignments}
        assert set(self.starting_on) <= nodes, f"{name}: starts on {self.starting_on}"
        assert set(self.dying_on) <= nodes, f"{name}: dies on {self.dying_on}"
        if self.starting_on:
            assert self.state is WpgState.STARTING, f"{name}: starts, and is {self.state}"
        if self.dying_on:
            assert self.state is WpgState.LOST, f"{name}: dies, and is {self.state}"
