"""The durability of a deployment: its seal, the nodes that have it, and the operations after it."""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.ids import NodeId, VersionKey
from phaseloom.common.contract.specs import CommandId
from phaseloom.scheduler.core.state.node import Node
from phaseloom.scheduler.core.state.operation import Mutation


class Copying(msgspec.Struct):
    """A copy that a node fetches because another node that has it is being evacuated."""

    node: NodeId
    revision: int
    """Revision of the node's lease at that time. After a new lease it no longer fetches the
    copy."""
    command: CommandId
    """Command that requested the copy."""
    part: int = 0
    """Index of the seal's part."""
    has_failed: bool = False
    """Whether the node's last attempt failed. A later one may still succeed."""
    failures: int = 0
    """Number of consecutive failed attempts, on any node."""
    retry_at_s: float = 0.0
    """The node is not asked again before this time. Another node may be."""

    def is_under_way(self, node: Node) -> bool:
        """Whether the node is still fetching: no attempt has failed, and the node still has the
        same lease."""
        return not self.has_failed and node.is_up and node.revision == self.revision


class DeploymentDurability(msgspec.Struct):
    applied: int = 0
    """seq of the last mutating operation in the state of this incarnation."""
    history: list[Mutation] = []
    """Mutating operations that took effect and may have to be replayed, by seq."""
    replay: list[int] = []
    """Seqs of the mutating operations that this incarnation still has to replay."""
    holds: VersionKey | None = None
    """Weights version loaded by the last `sync_weights`."""
    seal_seq: int = 0
    """seq of the newest seal. 0: none."""
    replicas: list[list[NodeId]] = []
    """Nodes that have each part of the newest seal, by rank. Nodes that do not run the deployment
    keep it until the next seal is committed."""
    copying: list[Copying] = []
    """Copies of parts of the newest seal that are being fetched, because a node that has them is
    evacuated."""
    sealing: int = 0
    """seq of the seal in progress. 0: none."""
    requested_seal: int = 0
    """seq of the last requested seal. 0: that request failed."""
    seal_parts: dict[NodeId, list[int]] = {}
    """Nodes that have committed their part of the seal in progress → the weights versions that are
    durable there. Used for deployments on several nodes."""
    part_copies: dict[NodeId, list[NodeId]] = {}
    """For each node in `seal_parts`, the other nodes that have its part too."""
    since_seal: int = 0
    """Number of mutating operations since the last seal or the last attempt."""
    since_seal_bytes: int = 0
    """Total payload bytes of these operations."""
    changed_s: float = 0.0
    """When the first of these operations took effect."""
    durable_versions: list[int] = []
    """Weights versions stored on disk with the newest seal, by seq."""
    unfinished_versions: list[int] = []
    """Weights versions that were being published when the job fell back to its checkpoint. They may
    exist anyway until the next incarnation has started."""

    @property
    def last_kind(self) -> str:
        return self.history[-1].kind if self.history else ""

    # --- what took effect ------------------------------------------------------------------------

    def took_effect(self, mutation: Mutation) -> None:
        self.history.append(mutation)
        self.applied = mutation.seq

    def start_from(self, applied: int) -> None:
        """Record that this incarnation starts from the state after this mutating operation."""
        self.applied = applied

    def count_change(self, num_bytes: int, now_s: float) -> None:
        """Record that an operation with this payload size has changed the state since the last
        seal."""
        if not self.since_seal:
            self.changed_s = now_s
        self.since_seal += 1
        self.since_seal_bytes += num_bytes

    def hold(self, version: VersionKey | None) -> None:
        self.holds = version

    def forget_before_last(self) -> list[int]:
        """Forget all mutations before the last one, which replaced the whole state. Returns their
        seqs."""
        forgotten = [mutation.seq for mutation in self.history[:-1]]
        self.history = self.history[-1:]
        return forgotten

    def forget(self, seqs: list[int]) -> None:
        """Forget these mutations, which no longer affect the state."""
        self.history = [mutation for mutation in self.history if mutation.seq not in seqs]

    def forget_up_to(self, floor: int) -> list[int]:
        """Forget the mutations up to a purge floor. Returns their seqs."""
        forgotten = [mutation.seq for mutation in self.history if mutation.seq <= floor]
        self.history = [mutation for mutation in self.history if mutation.seq > floor]
        return forgotten

    def plan_replay(self, seqs: list[int]) -> None:
        self.replay = seqs

    def replayed(self, seq: int) -> None:
        """Record that the next operation to replay has been replayed."""
        self.replay.pop(0)
        if any(mutation.seq == seq for mutation in self.history):
            self.applied = seq

    # --- seals -----------------------------------------------------------------------------------

    def seal(self) -> None:
        """Record that a seal of the present state was requested."""
        self.sealing = self.requested_seal = self.applied
        self.seal_parts = {}
        self.part_copies = {}

    def note_part(self, node: NodeId, versions: list[int], copies: list[NodeId]) -> None:
        self.seal_parts[node] = versions
        self.part_copies[node] = copies

    def sealed(self, seq: int, versions: list[int], replicas: list[list[NodeId]]) -> None:
        self.seal_seq = seq
        self.durable_versions = versions
        self.copying = []
        self.replicas = replicas

    def count_from_seal(self, now_s: float) -> None:
        """Count the changes since the seal that was just committed."""
        later = [mutation for mutation in self.history if mutation.seq > self.seal_seq]
        self.since_seal = len(later)
        self.since_seal_bytes = sum(mutation.num_bytes for mutation in later)
        self.changed_s = now_s
        if self.sealing <= self.seal_seq:
            self.sealing = 0

    def skip_seal(self) -> None:
        """Record that a seal cannot be made now, so that the next attempt comes later."""
        self.requested_seal = self.since_seal = self.since_seal_bytes = 0

    def seal_failed(self) -> None:
        """Record that the seal failed. The next attempt comes later, because a full disk is
        probably still full."""
        self.sealing = 0
        self.skip_seal()

    def clear_seal_request(self) -> None:
        self.requested_seal = 0

    def incarnation_died(self) -> None:
        self.replay = []
        self.sealing = 0

    def incarnation_begins(self) -> None:
        self.sealing = 0

    def note_unfinished(self, seq: int) -> None:
        self.unfinished_versions.append(seq)

    def take_unfinished(self) -> list[int]:
        unfinished, self.unfinished_versions = self.unfinished_versions, []
        return unfinished

    # --- replicas --------------------------------------------------------------------------------

    def set_replicas(self, replicas: list[list[NodeId]]) -> None:
        self.replicas = replicas

    def note_replica(self, part: int, node: NodeId) -> None:
        if node not in self.replicas[part]:
            self.replicas[part] = [*self.replicas[part], node]

    def drop_replicas(self) -> None:
        self.replicas = []
        self.copying = []

    def drop_replicas_on(self, nodes: set[NodeId]) -> None:
        self.replicas = [[node for node in part if node not in nodes] for part in self.replicas]

    def begin_copying(self, copying: Copying) -> None:
        self.copying.append(copying)

    def end_copying(self, copying: Copying) -> None:
        self.copying.remove(copying)

    def stop_copying(self) -> None:
        self.copying = []

    # --- ending ----------------------------------------------------------------------------------

    def fall_back(self, seq: int) -> None:
        """Record that the state is now that of a checkpoint, at this seq, and has no seal."""
        self.applied = seq
        self.seal_seq = 0
        self.durable_versions = []
        self.history = []
        self.since_seal = self.since_seal_bytes = 0
        self.holds = None

    def end(self) -> None:
        """Record that the deployment has ended: nothing will be replayed."""
        self.history = []

    def validate(self, name: str) -> None:
        """Check the invariants. Raises: AssertionError: names the invariant and the deployment."""
        seqs = [mutation.seq for mutation in self.history]
        assert seqs == sorted(set(seqs)), f"I2 {name}: history out of order {seqs}"
        assert self.replay == sorted(set(self.replay)), f"I2 {name}: replay {self.replay}"
        assert set(self.part_copies) == set(self.seal_parts), f"{name}: copies of unknown parts"
