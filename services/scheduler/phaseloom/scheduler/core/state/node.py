"""Nodes and their devices: what is on each, who holds it, who is expected."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import CommandId, DeviceSpec, Residency


class Closing(StrEnum):
    """Why a node is to be left."""

    DRAIN = "drain"
    """On request: what is on it goes elsewhere."""
    AWAY = "away"
    """The node has not come back for a while: what can be rebuilt without it is."""
    GONE = "gone"
    """The node will not come back: what it alone had is lost."""


class Leave(msgspec.Struct):
    """A node that is to be left."""

    why: Closing
    is_drained: bool = False
    """Whether an operator has asked for it. This holds until it is undone, even where the node is
    lost or comes back."""
    is_told: bool = False
    """Whether people know that nothing is on the node any more."""


class Expected(msgspec.Struct):
    """When a job's next operation on a device is predicted, after one that ended."""

    after: str
    """The operation that ended: `<deployment>.<kind>`."""
    ended_s: float
    soonest_s: float
    """The 10th percentile of the predicted time, where the profiler knows it."""
    at_s: float
    late_s: float
    """The prediction counts as wrong from this time on."""
    is_tried: bool = False
    """Whether an activation was opened for the prediction, or deliberately not: one try a gap."""
    is_told: bool = False
    """Whether state managers were given a hint of the prediction."""


class Phase(msgspec.Struct):
    """A run of one job's operations on a device."""

    job: str = ""
    kinds: list[str] = []
    """`<deployment>.<kind>` of each operation that began in the phase."""
    began_s: float = 0.0


class Pace(msgspec.Struct):
    """How fast a deployment is by the table of slowdowns, and beside what, while it has a share."""

    stage: str
    """The kind of sub-stage that it is in; empty: it moves state."""
    began_s: float
    since_s: float
    """The time up to which `work_s` and `beside_s` count."""
    least_units: int
    """The fewest units that it has had."""
    company: str = ""
    """The kinds of sub-stages beside it since then, as in `Observed`."""
    speed: float = 1.0
    """Its speed since then; 1: as fast as alone on the whole device."""
    work_s: float = 0.0
    """The seconds that the work done so far takes alone on the whole device."""
    beside_s: dict[str, float] = {}
    """Company → the seconds beside it."""


class Share(msgspec.Struct):
    """The compute units of a device that a deployment has while it runs."""

    deployment: str
    units: list[int]
    """The units that it may be using. No two shares of a device have one in common."""
    asked: list[int] = []
    """The units that remain to the share once its rank has confirmed that it uses no others; empty:
    it was not asked to give any up."""
    command: CommandId | None = None
    """The command by which the share was asked to give units up."""
    pace: Pace | None = None
    """How fast it has been; None: there is no table of slowdowns."""


class Slot(msgspec.Struct):
    """What runs on a device: one deployment, or several beside one another, each with a share of
    its compute units. `devices` alone writes its fields."""

    node: NodeId
    device: int
    resident: list[str] = []
    """Deployments whose state is in the slot, least recently used first."""
    placed: list[str] = []
    """Deployments that run here when it is their turn."""
    ready: dict[str, str] = {}
    """Placed deployments with a ready operation → their job."""
    holder: str = ""
    """The job that used the slot last."""
    held_since_s: float = 0.0
    """The time at which the holder took the slot."""
    running: str = ""
    """Deployment whose operations run here now, or will once its activation is open. Where several
    run, the one that has been here longest."""
    shares: list[Share] = []
    """The shares of all deployments that run here, in the order in which they came; empty where
    devices are not shared in space, or nothing runs."""
    used_by: str = ""
    """Deployment that used the slot last."""
    used_since_s: float = 0.0
    """The time since which no other deployment has used the slot."""
    is_released: bool = False
    """Whether the holder has said that its phase here is over: the slot is not kept for it."""
    speculative: str = ""
    """Deployment whose activation was opened before its operation, which has not come yet."""
    expected: dict[str, Expected] = {}
    """Job → its next operation here, where predicted."""
    last: str = ""
    """The operation that ended last, as `<deployment>.<kind>`; the profiler's gap is looked up by
    it."""
    idle_since_s: float = 0.0
    phase: Phase = msgspec.field(default_factory=Phase)
    """The phase that the slot is in, or was in last."""
    served: dict[str, int] = {}
    """Job → log sequence at which its operations last began here."""
    rounds: dict[str, int] = {}
    """Job → the last round of which it began a phase here."""
    timer: str = ""
    """The timer at which the slot is looked at again."""

    @property
    def runs(self) -> list[str]:
        """The deployments that run here."""
        return [share.deployment for share in self.shares] or ([self.running] * bool(self.running))

    def share_of(self, deployment: str) -> Share | None:
        for share in self.shares:
            if share.deployment == deployment:
                return share
        return None


class Device(msgspec.Struct):
    memory_bytes: int
    slots: list[Slot]
    """The slots, of which there is one; deployments beside one another have shares in it."""
    units: int = 1
    """The number of the device's compute units."""


class Node(msgspec.Struct):
    """A node under its present lease."""

    node: NodeId
    pool: str
    devices: list[Device]
    host_memory_bytes: int
    revision: int
    state_endpoint: str
    residency: Residency
    is_up: bool = True
    claims: list[str] = []
    """Deployments that were chosen and wait until all of their devices are free, the oldest choice
    first. Any two of them are in the same order on every node that they share."""


def new_devices(node: NodeId, specs: list[DeviceSpec]) -> list[Device]:
    return [Device(spec.memory_bytes, [Slot(node, i)], spec.units) for i, spec in enumerate(specs)]
