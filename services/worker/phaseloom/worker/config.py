"""The worker service's configuration."""

from __future__ import annotations

import math

import msgspec

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import DeviceKind, Residency
from phaseloom.common.process import machine
from phaseloom.common.process.config import check_bounds

EXACT_MATH = {"MKL_CBWR": "AVX2,STRICT"}
"""Variables with which MKL gives the same bits for any number of threads. Ranks get them where that
number may change while they run; MKL reads them once."""


class WorkerConfig(msgspec.Struct, frozen=True):
    node: str
    """The name of this node in the mesh."""
    pool: str
    """The kind of work that the node's devices are for: `rollout`, `train`."""
    devices: list[int]
    """The memory budget of each device for managed state, in bytes."""
    host_memory_bytes: int
    """The budget of the state manager's host arena."""
    state_socket: str
    """The Unix socket of this node's state manager."""
    state_secret: str
    """The secret by which the state manager knows its agent."""
    runtime_directory: str
    """The directory of the agent's own socket; a short path (Unix sockets allow 107 bytes)."""
    directory: str = ""
    """The directory on the node's disk in which the agent records how far the decision log has
    come, so that an older log is noticed; the state manager's directory will do. Empty: nothing is
    recorded, and only a log that goes back while the agent runs is noticed."""
    device_kind: DeviceKind = DeviceKind.EMULATED
    cores_per_device: int = 1
    """The cores of each emulated device, which jobs may divide among one another."""
    exclusive_residency: Residency = Residency.SHARED
    """`job`: opening an activation offloads whatever another job left on the device."""
    price_per_hour: float = 0.0
    """The price of the node, in any currency that all nodes share: placement prefers cheaper nodes.
    0: the usual price of eight GPUs of its pool, or 1 in any pool but `rollout` and `train`."""
    lease_ttl_s: float = 3.0
    """Seconds for which the node counts as alive without a renewal."""
    start_timeout_s: float = 120.0
    """Seconds after which a rank that is not up is killed."""
    preload: bool = True
    """Whether torch is imported once, when the node starts, so that ranks start in a fraction of a
    second. False saves the memory on a node that runs `noop` alone; any other rank then imports
    torch itself."""
    interpreters: dict[str, str] = {}
    """Backend → the Python that its ranks run in, where that is not the agent's own: a runtime
    whose requirements differ has an environment of its own, with this same Phaseloom installed."""
    rank_host: str = "127.0.0.1"
    """The name or address at which ranks of other nodes reach those of this one, through a port of
    rank 0's node. Their traffic is the backends' own (gloo, NCCL), neither encrypted nor
    authenticated: give it a network of its own."""
    rank_interface: str = ""
    """The network interface for the traffic between ranks; empty: the backend chooses."""

    @property
    def price(self) -> float:
        return self.price_per_hour or _USUAL_PRICES.get(self.pool, 1.0)

    def check(self) -> None:
        """Raises: CallerError: a number is out of its bounds, or this machine has no such
        devices."""
        check_bounds(self, "worker", _BOUNDS)
        if not self.devices or min(self.devices) < 1:
            raise CallerError(
                f"the node has devices of {self.devices} bytes",
                field="worker.devices",
                remedy="name the bytes of one device or more, each 1 or more",
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
"""Dollars an hour of a node with eight H20 or eight H800 (WEAVE §6.1)."""
