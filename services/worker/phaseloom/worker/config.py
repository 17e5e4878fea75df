"""The worker service's configuration."""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.specs import DeviceKind, Residency

EXACT_MATH = {"MKL_CBWR": "AVX2,STRICT"}
"""Variables that have MKL give the same bits for any number of threads. Ranks have them where that
number may change while they run; MKL reads them once."""


class WorkerConfig(msgspec.Struct, frozen=True):
    node: str
    """This node's name in the mesh."""
    pool: str
    """Kind of work that the node's devices are for: `rollout`, `train`."""
    devices: list[int]
    """Memory budget of each device for managed state, bytes."""
    host_memory_bytes: int
    """Budget of the state manager's host arena."""
    state_socket: str
    """Unix socket of this node's state manager."""
    state_secret: str
    """Secret by which the state manager knows its agent."""
    runtime_directory: str
    """Directory of the agent's own socket; a short path (Unix sockets allow 107 bytes)."""
    directory: str = ""
    """Directory on the node's disk in which the agent keeps how far the decision log has come, so
    that an older log is noticed: the state manager's will do. Empty: nothing is kept, and only a
    log that goes back while the agent runs is noticed."""
    device_kind: DeviceKind = DeviceKind.EMULATED
    cores_per_device: int = 1
    """Cores of each emulated device: jobs may divide them among one another."""
    exclusive_residency: Residency = Residency.SHARED
    """`job`: opening an activation offloads whatever another job left on the device."""
    price_per_hour: float = 0.0
    """Price of the node, in any currency that all nodes share: placement prefers what costs less. 0
    stands for the usual price of eight GPUs of its pool, or for 1 in any pool but `rollout` and
    `train`."""
    lease_ttl_s: float = 3.0
    """How long the node counts as alive without a renewal."""
    start_timeout_s: float = 120.0
    """A rank that is not up after this time is killed."""
    preload: bool = True
    """Whether torch is imported once, when the node starts, so that ranks start in a fraction of a
    second. False saves the memory on a node that runs `noop` alone; any other rank then imports
    torch itself."""
    interpreters: dict[str, str] = {}
    """Backend → the Python that its ranks run in, where that is not the agent's own: a runtime
    whose requirements differ has an environment of its own, with this same Phaseloom installed."""
    rank_host: str = "127.0.0.1"
    """Name or address at which ranks of other nodes reach those of this one, through a port of rank
    0's node. Their traffic is the backends' own (gloo, NCCL), neither encrypted nor authenticated:
    give it a network of its own."""
    rank_interface: str = ""
    """Network interface for the traffic between ranks; empty: the backend chooses."""

    @property
    def price(self) -> float:
        return self.price_per_hour or _USUAL_PRICES.get(self.pool, 1.0)


_USUAL_PRICES = {"rollout": 8 * 1.85, "train": 8 * 5.28}
"""Dollars an hour: eight H20, eight H800 (WEAVE §6.1)."""
