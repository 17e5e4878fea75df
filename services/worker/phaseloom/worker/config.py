"""The worker service's configuration."""

from __future__ import annotations

import math

import msgspec

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.sizes import Size
from phaseloom.common.contract.specs import DeviceKind, Residency
from phaseloom.common.process import machine
from phaseloom.common.process.config import check_bounds

EXACT_MATH = {"MKL_CBWR": "AVX2,STRICT"}
"""Variables that make MKL results bit-identical for any number of threads. Ranks get them if their
number of threads may change while they run. MKL reads them once."""


class WorkerConfig(msgspec.Struct, frozen=True):
    node: str
    """Name of this node in the mesh."""
    pool: str
    """Kind of work that the node's devices are for: `rollout` or `train`."""
    devices: list[Size]
    """Budget of each device for managed state, in bytes."""
    host_memory_bytes: Size
    """Budget of the state manager's host arena, in bytes."""
    state_socket: str
    """Unix socket of this node's state manager."""
    state_secret: str
    """Secret that identifies the agent to the state manager."""
    runtime_directory: str
    """Directory of the agent's own socket. Use a short path: Unix sockets allow 107 bytes."""
    directory: str = ""
    """Directory on the node's disk in which the agent records its position in the decision log, so
    that it detects an older log after a restart. The state manager's directory is suitable. Empty:
    the agent records nothing and detects a rollback of the log only while it runs."""
    device_kind: DeviceKind = DeviceKind.EMULATED
    cores_per_device: int = 1
    """Cores of each emulated device. Jobs may share a device by dividing its cores."""
    exclusive_residency: Residency = Residency.SHARED
    """`job`: opening an activation offloads state of other jobs from the device."""
    price_per_hour: float = 0.0
    """Price of the node per hour, in one currency for all nodes. Placement prefers cheaper nodes.
    0:
    the usual price of eight GPUs of its pool, or 1 in pools other than `rollout` and `train`."""
    lease_ttl_s: float = 3.0
    """Seconds that the node counts as alive without renewing its lease."""
    start_timeout_s: float = 120.0
    """Seconds allowed for starting a rank. A slower rank is killed."""
    preload: bool = True
    """Whether the node imports torch once at startup, so that ranks start in a fraction of a
    second.
    False saves memory on a node that runs only `noop`; any other rank then imports torch itself."""
    interpreters: dict[str, str] = {}
    """Backend → the Python interpreter of its ranks, if it differs from the agent's. Use it for a
    runtime with its own environment; the same Phaseloom must be installed there."""
    rank_host: str = "127.0.0.1"
    """Name or address of this node for ranks of other nodes, which connect to a port of rank 0's
    node.
    This traffic is the backends' own (gloo, NCCL), neither encrypted nor authenticated, so use a
    separate network."""
    rank_interface: str = ""
    """Network interface for traffic between ranks; empty: the backend chooses."""

    @property
    def price(self) -> float:
        return self.price_per_hour or _USUAL_PRICES.get(self.pool, 1.0)

    def check(self) -> None:
        """Check bounds and devices. Raises: CallerError: a number is out of bounds, or a device is
        missing."""
        check_bounds(self, "worker", _BOUNDS)
        if not self.devices or min(self.devices) < 1:
            raise CallerError(
                f"each of the node's devices must have 1 byte or more, got {self.devices}",
                field="worker.devices",
                remedy="list the bytes of one or more devices",
            )
        machine.check_devices(self.device_kind, self.devices, "worker")


_BOUNDS = {
    "host_memory_bytes": (1, math.inf),
    "cores_per_device": (1, math.inf),
    "price_per_hour": (0, math.inf),
    "lease_ttl_s": (1, math.inf),
    "start_timeout_s": (1, math.inf),
}
_USUAL_PRICES = {"rollout": 8 * 1.85, "train": 8 * 5.28}
"""Dollars per hour of a node with eight H20 or eight H800 (WEAVE §6.1)."""
