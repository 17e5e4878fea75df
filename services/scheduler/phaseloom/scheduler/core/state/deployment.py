"""A deployment, which is one logical model of a job: its key, its spec and a record for each
subject.

The records `queue`, `wpg`, `activation`, `durability` and `move` are each defined in their own
module.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from phaseloom.common.contract.ids import DeploymentKey, NodeId
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.scheduler.core.state.activation import Activation
from phaseloom.scheduler.core.state.durability import DeploymentDurability
from phaseloom.scheduler.core.state.move import Move
from phaseloom.scheduler.core.state.queue import OperationQueue
from phaseloom.scheduler.core.state.transitions import MoveStage, WpgState
from phaseloom.scheduler.core.state.wpg import RankAssignment, Wpg

FULL_COUNT = 4
"""Weight of the newest duration is 1 / FULL_COUNT. Values from 3 to 5 predict best on recorded
logs, and better than the median of the last 32 durations."""


class Deployment(msgspec.Struct, dict=True):
    key: DeploymentKey
    spec: DeploymentSpec
    queue: OperationQueue = msgspec.field(default_factory=OperationQueue)
    wpg: Wpg = msgspec.field(default_factory=Wpg)
    activation: Activation = msgspec.field(default_factory=Activation)
    durability: DeploymentDurability = msgspec.field(default_factory=DeploymentDurability)
    move: Move = msgspec.field(default_factory=Move)
    recent: dict[str, tuple[float, int]] = {}
    """Kind → (geometric mean duration in seconds, favouring recent operations; number of operations
    in it, up to `FULL_COUNT`). Only used for predictions: it is more recent than a phase trace, but
    less steady."""

    @cached_property
    def name(self) -> str:
        return str(self.key)

    @cached_property
    def job_name(self) -> str:
        return str(self.key.job_key)

    @property
    def node(self) -> NodeId | None:
        """Node of the leader."""
        return self.wpg.assignments[0].node if self.wpg.assignments else None

    @property
    def nodes(self) -> list[NodeId]:
        return [assigned.node for assigned in self.wpg.assignments]

    @property
    def places(self) -> list[tuple[NodeId, int]]:
        """(node, device) of each rank."""
        return [(a.node, index) for a in self.wpg.assignments for index in a.devices]

    @property
    def destination(self) -> list[RankAssignment]:
        """Devices to which the deployment is moving, or its present ones if it does not move."""
        move = self.move.relocation
        return self.wpg.assignments if move is None else move.assignments

    @property
    def is_on_its_way(self) -> bool:
        """Whether the deployment is moving and the move is not suspended."""
        move = self.move.relocation
        return move is not None and move.stage is not MoveStage.WAITING

    @property
    def last_seq(self) -> int:
        """Highest seq known to have been used."""
        queue = self.queue
        return max(queue.next_seq - 1, self.durability.applied, max(queue.operations, default=0))

    def note_duration(self, kind: str, duration_s: float) -> None:
        """Include the duration of a completed operation in the recent mean of its kind."""
        if duration_s > 0.0:
            before_s, count = self.recent.get(kind, (duration_s, 0))
            count = min(count + 1, FULL_COUNT)
            self.recent[kind] = before_s * (duration_s / before_s) ** (1 / count), count

    def validate(self) -> None:
        """Check the invariants. Raises: AssertionError: names the invariant and the deployment."""
        name = self.name
        for record in (self.queue, self.wpg, self.activation, self.durability, self.move):
            record.validate(name)
        if self.activation.epoch:
            is_up = self.wpg.state in (WpgState.READY, WpgState.RECOVERING)
            assert is_up, f"{name}: has an activation, but its WPG is {self.wpg.state}"
        if self.activation.hinted_s >= 0:
            assert self.wpg.assignments, f"{name}: has a hint, but is not placed"
        if self.wpg.state is WpgState.READY:
            assert not self.durability.replay, f"{name}: ready with mutations still to replay"
