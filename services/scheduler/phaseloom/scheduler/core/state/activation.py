"""The activation of a deployment: its claim on its devices, and what runs under it.

One record a deployment. Each of its fields is written by one module: here, or by its owner.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.ids import NodeId, OperationKey

NOT_TOLD_S = -1.0
"""`hinted_s` where no state manager was told."""


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
    """Ranks with no part in what runs, because its long tail was gathered on the others, or because
    it began when another's tail went on on their devices: these devices are others' to use."""
    idle_since_s: float = 0.0
    """When the last operation that ran ended."""
    hinted_s: float = NOT_TOLD_S
    """The time of the next use that the state managers were told while the deployment is off its
    devices; `NOT_TOLD_S`: they were told nothing."""
    retry_at_s: float = 0.0
    """Nothing of the deployment runs before this time: its activation was refused, or the weights
    version that its next operation brings was out of reach."""

    @property
    def is_opening(self) -> bool:
        """Whether the activation is not open yet on all of its nodes."""
        return self.epoch > 0 and bool(self.opening_on)

    def open(self, epoch: int, now_s: float, nodes: list[NodeId]) -> None:
        """Ask for an activation. Args: nodes: those that are to say when it is open."""
        self.epoch = epoch
        self.opening_s = now_s
        self.opening_on = nodes
        self.hinted_s = NOT_TOLD_S

    def opened_on(self, node: NodeId) -> bool:
        """A node has switched its part in. Returns: whether it was waited for."""
        if node not in self.opening_on:
            return False
        self.opening_on.remove(node)
        return True

    def close(self) -> None:
        """There is no activation any more."""
        self.epoch = 0
        self.opening_on = []
        self.idle_ranks = []

    def leave_out(self, ranks: list[int]) -> None:
        """These ranks have no part in what runs, or is about to."""
        self.idle_ranks = ranks

    def began(self, key: OperationKey) -> None:
        self.running.append(key)

    def ended(self, key: OperationKey, now_s: float) -> None:
        self.running.remove(key)
        self.idle_since_s = now_s

    def hint(self, use_s: float) -> None:
        """State managers were told of the next use; `NOT_TOLD_S`: there is none to tell."""
        self.hinted_s = use_s

    def validate(self, name: str) -> None:
        """Raises: AssertionError: names the invariant and the deployment."""
        assert self.epoch or not self.opening_on, f"{name}: opens without an activation"
        assert self.running or not self.idle_ranks, f"{name}: a part of nothing"
        if self.hinted_s >= 0:
            assert not self.epoch, f"{name}: active, and state managers wait for it"
