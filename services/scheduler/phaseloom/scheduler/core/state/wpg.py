"""The worker-process group of a deployment: the devices of its ranks, and its incarnation."""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.state.transitions import WpgState


class RankAssignment(msgspec.Struct, frozen=True):
    """Devices of one node on which ranks of a deployment run."""

    node: NodeId
    devices: list[int]
    """One device per rank, in order."""


class Wpg(msgspec.Struct):
    assignments: list[RankAssignment] = []
    """Devices of the ranks, the leader's first. Empty: the WPG is not placed."""
    state: WpgState = WpgState.UNPLACED
    starting_on: list[NodeId] = []
    """Nodes of a STARTING WPG that have not confirmed yet that their ranks are up."""
    dying_on: list[NodeId] = []
    """Nodes of a LOST WPG that have not confirmed yet that their ranks are dead."""
    incarnation: int = 0
    first_incarnation: int = 0
    """The deployment's first incarnation. Lower ones are those of earlier deployments of its
    name."""
    state_bytes: int = 0
    base: int = 0
    """Seal from which this incarnation was started."""
    checkpoint: str = ""
    """Checkpoint from which a WPG without a seal starts. Empty: it starts from its seeds."""
    origin_seq: int = 0
    """seq of the checkpoint or the fresh state."""
    losses: int = 0
    """Number of deaths of the WPG at the current `next_seq`, during start or while idle, since an
    operation was completed."""
    refusals: int = 0
    """Number of consecutive permanently refused switch-ins during the rebuild."""
    is_trial: bool = False
    """Whether the deployment was added to a placed job and has not been up yet. If it cannot start,
    only the deployment ends, not the job."""
    up_since_s: float = 0.0
    """When the ranks of the newest incarnation that came up were up on all nodes."""
    retry_at_s: float = 0.0
    """The next incarnation starts no earlier than this."""
    error: ErrorInfo | None = None
    """Reason of the last death, until the WPG is up again, or reason why it was stopped."""

    # --- placing ---------------------------------------------------------------------------------

    def put_on(self, assignments: list[RankAssignment]) -> None:
        self.assignments = assignments

    def lose_assignment(self, lost: RankAssignment) -> None:
        """Record that a node has come back without these devices."""
        self.assignments = [assigned for assigned in self.assignments if assigned is not lost]

    # --- an incarnation --------------------------------------------------------------------------

    def begin(self, seal_seq: int) -> None:
        """Start the next incarnation from this seal."""
        self.incarnation += 1
        self.first_incarnation = self.first_incarnation or self.incarnation
        self.base = seal_seq

    def complete_start(self, now_s: float) -> None:
        """Record that the ranks are up on all nodes."""
        self.up_since_s = now_s
        self.error = None
        self.is_trial = False

    def raise_incarnation(self, minimum: int) -> None:
        """Count incarnations up to `least` as used, because a node already knows or has reported
        one of them."""
        self.incarnation = max(self.incarnation, minimum)

    def next_incarnation(self) -> None:
        """Start a new incarnation number, so that late answers of the present one can be
        recognized."""
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
        """Start the next incarnation no earlier than this."""
        self.retry_at_s = until_s

    def count_refusal(self) -> None:
        self.refusals += 1

    def forgive_refusals(self) -> None:
        self.refusals = 0

    def fall_back(self, checkpoint: str, seq: int) -> None:
        """Start the next incarnation from a checkpoint at this seq."""
        self.checkpoint = checkpoint
        self.origin_seq = seq
        self.losses = 0

    def validate(self, name: str) -> None:
        """Check the invariants. Raises: AssertionError: names the invariant and the deployment."""
        nodes = {assigned.node for assigned in self.assignments}
        assert set(self.starting_on) <= nodes, (
            f"{name}: starting on {self.starting_on}, but assigned to {nodes}"
        )
        assert set(self.dying_on) <= nodes, (
            f"{name}: dying on {self.dying_on}, but assigned to {nodes}"
        )
        if self.starting_on:
            assert self.state is WpgState.STARTING, (
                f"{name}: starting on nodes, but the WPG is {self.state}"
            )
        if self.dying_on:
            assert self.state is WpgState.LOST, (
                f"{name}: dying on nodes, but the WPG is {self.state}"
            )
