"""An operation on the books, and what is kept of one that took effect."""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.ids import OperationKey, VersionKey
from phaseloom.common.contract.kinds import MUTATING_KINDS
from phaseloom.common.contract.operations import After
from phaseloom.scheduler.core.state.transitions import CutState, OpState


class Op(msgspec.Struct):
    """An operation that has no outcome yet."""

    key: OperationKey
    id: str
    kind: str
    after: list[After]
    version: VersionKey | None
    content_type: str
    arrival: int
    """Log sequence of its QueuedOperation: breaks ties."""
    queued_s: float
    state: OpState = OpState.QUEUED
    eligible_s: float = -1.0
    """When the last thing it waits for on other deployments was done; -1: not yet."""
    uncertain: bool = False
    """Its WPG died while it was permitted: it may have taken effect in the dead incarnation."""
    refusals: int = 0
    expires_s: float = 0.0
    """It ends EXPIRED where it has no permit by then; 0: it waits."""
    is_cancelled: bool = False
    """Whoever made it wants it no more: it is not permitted again."""
    is_settling: bool = False
    """Its outcome is being found out: what is stored decides."""
    permitted_s: float = 0.0
    """When it was permitted last."""
    num_bytes: int = 0
    """Of its payload."""
    cut: CutState = CutState.NONE
    """Whether what a `save_state` saves is apart from its deployment."""

    @property
    def is_cut(self) -> bool:
        """Whether it is a `save_state` that needs neither devices nor state any more."""
        return self.cut is not CutState.NONE

    @property
    def is_mutating(self) -> bool:
        return self.kind in MUTATING_KINDS

    @property
    def has_ended(self) -> bool:
        return self.state not in (OpState.QUEUED, OpState.PERMITTED)

    @property
    def ready_s(self) -> float:
        """Since when it could run, as far as other deployments go."""
        return max(self.queued_s, self.eligible_s)


class Mutation(msgspec.Struct, frozen=True):
    """A mutating operation that took effect, above the purge floor."""

    seq: int
    kind: str
    num_bytes: int = 0
    version: VersionKey | None = None
    """That it brought: it is needed as long as this may have to be run again."""
    duration_s: float = 0.0
    """That it took."""
