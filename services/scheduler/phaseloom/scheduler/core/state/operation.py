"""An open operation, and the record that remains of one that took effect."""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import OperationKey, VersionKey
from phaseloom.common.contract.kinds import MUTATING_KINDS
from phaseloom.common.contract.operations import After
from phaseloom.common.contract.specs import Adapter
from phaseloom.scheduler.core.state.transitions import OpState


class Op(msgspec.Struct, omit_defaults=True):
    """An operation without an outcome."""

    key: OperationKey
    id: str
    kind: str
    after: list[After]
    version: VersionKey | None
    content_type: str
    arrival: int
    """Log sequence number of its QueuedOperation; breaks ties."""
    queued_s: float
    state: OpState = OpState.QUEUED
    eligible_s: float = -1.0
    """When the last of its dependencies on other deployments was done. -1: some are not done
    yet."""
    uncertain: bool = False
    """Whether the WPG died while the operation was permitted, so that it may have taken effect."""
    refusals: int = 0
    expires_s: float = 0.0
    """When the operation expires unless it has a permit. 0: never."""
    is_cancelled: bool = False
    """Whether the operation was cancelled. It gets no further permit."""
    is_settling: bool = False
    """Whether the operation's stored outcome, which is authoritative, is being looked up."""
    permitted_s: float = 0.0
    """When the operation was last permitted."""
    num_bytes: int = 0
    ttl_s: float = 0.0
    """Seconds for which the version of a `publish_weights` may be named."""
    payer: str = ""
    """Job that is charged for the device time. Empty: the operation's own."""
    adapter: Adapter | None = None
    """Adapter whose weights the operation names. None: none."""
    has_snapshot: bool = False
    """Whether this is a `save_state` whose state was copied and whose file is being written. The
    operations behind it may already run. If the WPG dies meanwhile, the `save_state` is run again
    in its original position among the mutations."""

    @property
    def is_mutating(self) -> bool:
        return self.kind in MUTATING_KINDS

    @property
    def has_ended(self) -> bool:
        return self.state not in (OpState.QUEUED, OpState.PERMITTED)

    @property
    def ready_s(self) -> float:
        """Time since which the operation waits for no other deployment."""
        return max(self.queued_s, self.eligible_s)


class Ending(msgspec.Struct):
    """Operations of a deployment that have all failed with one error, as far as their outcomes are
    not written yet."""

    error: ErrorInfo
    ops: list[Op]

    @property
    def tenant(self) -> str:
        return self.ops[0].key.tenant

    def take(self, count: int) -> list[Op]:
        """Remove and return the first operations."""
        taken, self.ops = self.ops[:count], self.ops[count:]
        return taken


class Mutation(msgspec.Struct, frozen=True):
    """A mutating operation that took effect, above the purge floor."""

    seq: int
    kind: str
    num_bytes: int = 0
    version: VersionKey | None = None
    """Weights version that the operation loaded. It is needed as long as the operation may be
    replayed."""
    duration_s: float = 0.0
