"""An open operation, and what is kept of one that took effect."""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.ids import OperationKey, VersionKey
from phaseloom.common.contract.kinds import MUTATING_KINDS
from phaseloom.common.contract.operations import After
from phaseloom.common.contract.specs import Adapter
from phaseloom.scheduler.core.state.transitions import OpState


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
    """The time at which the last thing that the operation waits for on other deployments was done;
    -1: something is not done yet."""
    uncertain: bool = False
    """Whether the WPG died while the operation was permitted, which may have taken effect then."""
    refusals: int = 0
    expires_s: float = 0.0
    """The time at which the operation ends EXPIRED, unless it has a permit; 0: it waits."""
    is_cancelled: bool = False
    """Whether the operation was cancelled, and is not permitted again."""
    is_settling: bool = False
    """Whether the operation's stored outcome, which decides, is being looked up."""
    permitted_s: float = 0.0
    """The time at which the operation was permitted last."""
    num_bytes: int = 0
    """The size of the payload."""
    ttl_s: float = 0.0
    """How long the version of a `publish_weights` may be named, in seconds."""
    payer: str = ""
    """The job that the devices' time is charged to; empty: the operation's own."""
    adapter: Adapter | None = None
    """The adapter whose weights the operation names; None: it names no adapter."""
    has_snapshot: bool = False
    """Whether this is a `save_state` whose state has been copied, and whose file is being written:
    the operations behind it may go on. Where the WPG dies meanwhile, the `save_state` is run again
    in its place among the mutations."""

    @property
    def is_mutating(self) -> bool:
        return self.kind in MUTATING_KINDS

    @property
    def has_ended(self) -> bool:
        return self.state not in (OpState.QUEUED, OpState.PERMITTED)

    @property
    def ready_s(self) -> float:
        """The time since which nothing on another deployment keeps the operation from running."""
        return max(self.queued_s, self.eligible_s)


class Mutation(msgspec.Struct, frozen=True):
    """A mutating operation that took effect, above the purge floor."""

    seq: int
    kind: str
    num_bytes: int = 0
    version: VersionKey | None = None
    """The weights version that it brought, which is needed as long as it may be run again."""
    duration_s: float = 0.0
    """How long it took."""
