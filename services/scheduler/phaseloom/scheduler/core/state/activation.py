"""The activation of a deployment: its claim on its devices, and what runs under it.

One record a deployment. Each of its fields is written by one module: here, or by its owner.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.ids import NodeId, OperationKey

NOT_TOLD_S = -1.0
"""The value of `hinted_s` while no state manager has been told of a next use."""


class Activation(msgspec.Struct):
    epoch: int = 0
    """Log sequence at which the activation was opened; 0: there is none."""
    opening_on: list[NodeId] = []
    """The nodes that have not yet said that the activation is open, where there are several."""
    opening_s: float = 0.0
    """When the activation was asked for."""
    lead_s: float = 0.0
    """How long recent activations took to open, at the most."""
    running: list[OperationKey] = []
    """Operations that were permitted in this incarnation and have not ended: a mutating one, or
    reading ones."""
    idle_ranks: list[int] = []
    """Ranks whose devices are others' to use although the deployment runs: its long tail was
    gathered on the other ranks, or it began when another's tail went on on these devices."""
    idle_since_s: float = 0.0
    """When the last operation that ran ended."""
    hinted_s: float = NOT_TOLD_S
    """The time of the deployment's next use that state managers were told while it is off its
    devices, in seconds; `NOT_TOLD_S` where they were told nothing."""
    retry_at_s: float = 0.0
    """Nothing of the deployment runs before this time: its activation was refused, or the weights
    version that its next operation brings was out of reach."""

    @property
    def is_opening(self) -> bool:
        """Whether the activation is not open yet on all of its nodes."""
        return self.epoch > 0 and bool(self.opening_on)

    def open(self, epoch: int, now_s: float, nodes: list[NodeId]) -> None:
        """Note that an activation was asked for.

        Args: epoch: the log sequence at which it was.
              nodes: the nodes that are to say when their part of it is open.
        """
        self.epoch = epoch
        self.opening_s = now_s
        self.opening_on = nodes
        self.hinted_s = NOT_TOLD_S

    def opened_on(self, node: NodeId) -> bool:
        """Note that a node has switched its part in.

        Returns: whether that was still waited for.
        """
        if node not in self.opening_on:
            return False
        self.opening_on.remove(node)
        return True

    def close(self) -> None:
        """Note that the deployment has no activation any more."""
        self.epoch = 0
        self.opening_on = []
        self.idle_ranks = []

    def leave_out(self, ranks: list[int]) -> None:
        """Note that these ranks have no part in the operations that run, or are about to."""
        self.idle_ranks = ranks

    def began(self, key: OperationKey) -> None:
        self.running.append(key)

    def ended(self, key: OperationKey, now_s: float) -> None:
        self.running.remove(key)
        self.idle_since_s = now_s

    def hint(self, use_s: float) -> None:
        """Note which time of the next use state managers were told, in seconds; `NOT_TOLD_S`:
        none."""
        self.hinted_s = use_s

    def validate(self, name: str) -> None:
        """Raises: AssertionError: names the invariant and the deployment."""
        assert self.epoch or not self.opening_on, f"{name}: opens without an activation"
        assert self.running or not self.idle_ranks, f"{name}: a part of nothing"
        if self.hinted_s >= 0:
            assert not self.epoch, f"{name}: active, and state managers wait for it"
