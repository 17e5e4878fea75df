"""The activation of a deployment: its hold on its devices, and the operations running under it."""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.ids import NodeId, OperationKey

NOT_HINTED_S = -1.0
"""Value of `hinted_s` if no state manager was given a hint."""


class Activation(msgspec.Struct):
    epoch: int = 0
    """Log sequence number at which the activation was opened. 0: none is open."""
    opening_on: list[NodeId] = []
    """Nodes that have not confirmed yet that the activation is open."""
    opening_s: float = 0.0
    """When the activation was requested."""
    lead_s: float = 0.0
    """Longest time that recent activations took to open."""
    running: list[OperationKey] = []
    """Permitted operations of this incarnation that have not ended: one mutating, or several
    reading."""
    idle_ranks: list[int] = []
    """Ranks whose devices other deployments may use although this one is running. Either the long
    tail of its operation was gathered on its other ranks, or it started while another deployment's
    long tail still occupied these devices."""
    idle_since_s: float = 0.0
    """When the last operation ended."""
    hinted_s: float = NOT_HINTED_S
    """Time of the deployment's next use, in seconds, as hinted to the state managers while it is
    off its devices. `NOT_HINTED_S` if none was hinted."""
    retry_at_s: float = 0.0
    """The deployment runs nothing before this time: its activation was refused, or the weights
    version for its next operation was unreachable."""

    @property
    def is_opening(self) -> bool:
        """Whether the activation is still opening on some node."""
        return self.epoch > 0 and bool(self.opening_on)

    def open(self, epoch: int, now_s: float, nodes: list[NodeId]) -> None:
        """Record that an activation was requested.

        Args: epoch: log sequence number of the request.
              nodes: the nodes that must confirm when their part is open.
        """
        self.epoch = epoch
        self.opening_s = now_s
        self.opening_on = nodes
        self.hinted_s = NOT_HINTED_S

    def opened_on(self, node: NodeId) -> bool:
        """Record that a node has finished switching in its ranks.

        Returns: whether the confirmation was still outstanding.
        """
        if node not in self.opening_on:
            return False
        self.opening_on.remove(node)
        return True

    def close(self) -> None:
        """Record that the deployment no longer has an activation."""
        self.epoch = 0
        self.opening_on = []
        self.idle_ranks = []

    def leave_out(self, ranks: list[int]) -> None:
        """Record that these ranks take no part in the running operations."""
        self.idle_ranks = ranks

    def began(self, key: OperationKey) -> None:
        self.running.append(key)

    def ended(self, key: OperationKey, now_s: float) -> None:
        self.running.remove(key)
        self.idle_since_s = now_s

    def hint(self, use_s: float) -> None:
        """Record the hinted time of the next use, in seconds, or `NOT_HINTED_S`."""
        self.hinted_s = use_s

    def validate(self, name: str) -> None:
        """Check the invariants. Raises: AssertionError: names the invariant and the deployment."""
        assert self.epoch or not self.opening_on, (
            f"{name}: nodes are opening, but there is no activation"
        )
        assert self.running or not self.idle_ranks, (
            f"{name}: ranks are left out, but nothing is running"
        )
        if self.hinted_s >= 0:
            assert not self.epoch, f"{name}: has an activation and a hint of its next use"
