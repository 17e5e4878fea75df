"""The worker service's configuration."""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.specs import DeviceKind, Residency


class WorkerConfig(msgspec.Struct, frozen=True):
    node: str
    """This node's name in the mesh."""
    pool: str
    """What its devices are for: `rollout`, `train`."""
    devices: list[int]
    """Memory budget of each device for managed state, bytes."""
    host_memory_bytes: int
    """Budget of the state manager's host arena."""
    state_socket: str
    """Unix socket of this node's state manager."""
    state_secret: str
    """What the state manager knows its agent by."""
    runtime_directory: str
    """For the agent's own socket; a short path (Unix sockets allow 107 bytes)."""
    device_kind: DeviceKind = DeviceKind.EMULATED
    exclusive_residency: Residency = Residency.SHARED
    """`job`: opening an activation offloads whatever another job left on the device."""
    price_per_hour: float = 0.0
    """Of the node, in any currency that all nodes share: placement prefers what costs less. 0: as
    eight GPUs of its pool's usual kind, 1 for any other pool than `rollout` and `train`."""
    lease_ttl_s: float = 3.0
    """How long the node counts as alive without a renewal."""
    start_timeout_s: float = 120.0
    """A rank that is not up by then is killed."""
    preload: bool = True
    """Whether torch is imported once, when the node starts, so that ranks start in a fraction of a
    second. False saves that on a node that runs `noop` alone; any other rank then imports torch
    itself."""
    rank_host: str = "127.0.0.1"
    """Name or address of this node where ranks of other nodes reach those of this one: which meet
    at a port of rank 0's. Their traffic is the backends' own (gloo, NCCL): neither encrypted nor
    authenticated, so it belongs into a network of its own."""
    rank_interface: str = ""
    """The network interface that this traffic goes over; empty: what the backend chooses."""

    @property
    def price(self) -> float:
        return self.price_per_hour or _USUAL_PRICES.get(self.pool, 1.0)


_USUAL_PRICES = {"rollout": 8 * 1.85, "train": 8 * 5.28}
"""Dollars an hour: eight H20, eight H800 (WEAVE §6.1)."""
