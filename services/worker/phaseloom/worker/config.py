"""The worker service's configuration."""

from __future__ import annotations

import msgspec

from phaseloom.common.messages import Residency


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
    checkpoint_root: str
    """Directory that holds `<tenant>/<job>/<deployment>/<checkpoint>`."""
    exclusive_residency: Residency = Residency.SHARED
    """`job`: opening an activation offloads whatever another job left on the device."""
    lease_ttl_s: float = 3.0
    """How long the node counts as alive without a renewal."""
    start_timeout_s: float = 120.0
    """A rank that is not up by then is killed."""
