"""A job as the scheduler knows it."""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import JobKey, NodeId, VersionKey
from phaseloom.common.contract.specs import JobSpec
from phaseloom.scheduler.core.state.durability import Copying
from phaseloom.scheduler.core.state.transitions import JobState


class Job(msgspec.Struct):
    key: JobKey
    spec: JobSpec
    state: JobState = JobState.SUBMITTED
    submitted_s: float = 0.0
    submitted_sequence: int = 0
    session: int = 0
    """The newest: operations of older ones are refused."""
    has_controller: bool = True
    """Until its newest session's heartbeat has ended."""
    published: list[VersionKey] = []
    """Weights versions that exist."""
    phases: dict[str, int] = {}
    """Pool → session whose controller declared a phase there that is open."""
    follows: dict[str, str] = {}
    """`<deployment>.<kind>` → deployment that ran next on its pool, last time after a gap."""
    began_s: float = -1.0
    """When its first operation was ready; -1: none has begun."""
    round: int = 0
    """Of its group's meta-iterations, under a policy that serves them: the last that it began."""
    lag_s: float = 0.0
    """For how long, since then, others or a switch kept its operations from running."""
    early_misses: int = 0
    """Activations opened early for it, in a row, that were displaced before their operation."""
    early_skips: int = 0
    """Gaps still to pass before an activation is opened early for it again."""
    checkpoint: str = ""
    """Name of the newest checkpoint with a controller's blob."""
    checkpoints: dict[str, str] = {}
    """Deployment -> its checkpoint that belongs to that one."""
    ended_session: int = -1
    """Sessions up to this one ended with a roll-back: what they send is refused."""
    last_seqs: dict[str, int] = {}
    """Deployment that was deleted, or of an earlier job of this name -> the last seq that it
    used."""
    incarnations: dict[str, int] = {}
    """Deployment that was deleted, or of an earlier job of this name -> its last incarnation."""
    orphans: dict[str, list[NodeId]] = {}
    """Weights version of a deleted policy that others need → the nodes that have it."""
    copying: dict[str, Copying] = {}
    """Of those, the ones that another node fetches."""
    why_here: str = ""
    """Why placement chose its place."""
    error: ErrorInfo | None = None
