"""One logical model of a job: its key and spec, and a record for each subject.

The records are `queue`, `wpg`, `activation`, `durability` and `move`, each with a module of its
own. Other modules read the fields.
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


class Deployment(msgspec.Struct, dict=True):
    key: DeploymentKey
    spec: DeploymentSpec
    queue: OperationQueue = msgspec.field(default_factory=OperationQueue)
    wpg: Wpg = msgspec.field(default_factory=Wpg)
    activation: Activation = msgspec.field(default_factory=Activation)
    durability: DeploymentDurability = msgspec.field(default_factory=DeploymentDurability)
    move: Move = msgspec.field(default_factory=Move)

    @cached_property
    def name(self) -> str:
        return str(self.key)

    @cached_property
    def job_name(self) -> str:
        return str(self.key.job_key)

    @property
    def node(self) -> NodeId | None:
        """The leader's node."""
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
        """The devices that a deployment is moving to; where it does not move, its own."""
        move = self.move.relocation
        return self.wpg.assignments if move is None else move.assignments

    @property
    def is_on_its_way(self) -> bool:
        """Whether a deployment is moving, and its move is not put off."""
        move = self.move.relocation
        return move is not None and move.stage is not MoveStage.WAITING

    @property
    def last_seq(self) -> int:
        """The last seq that was ever used, as far as is known."""
        queue = self.queue
        return max(queue.next_seq - 1, self.durability.applied, max(queue.operations, default=0))

    def validate(self) -> None:
        """Raises: AssertionError: names the invariant and the deployment."""
        name = self.name
        for record in (self.queue, self.wpg, self.activation, self.durability, self.move):
            record.validate(name)
        if self.activation.epoch:
            is_up = self.wpg.state in (WpgState.READY, WpgState.RECOVERING)
            assert is_up, f"{name}: an activation of a WPG that is {self.wpg.state}"
        if self.activation.hinted_s >= 0:
            assert self.wpg.assignments, f"{name}: a hint for nothing"
        if self.wpg.state is WpgState.READY:
            assert not self.durability.replay, f"{name}: ready with mutations still to replay"
