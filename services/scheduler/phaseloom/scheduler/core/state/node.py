"""Nodes and their devices: resident, running and expected deployments."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import CommandId, DeviceSpec, Residency


class Closing(StrEnum):
    """Reason for evacuating a node."""

    DRAIN = "drain"
    """An operator requested it. Everything on the node moves elsewhere."""
    AWAY = "away"
    """The node has been away for a while. Deployments that can be rebuilt without it move
    elsewhere."""
    GONE = "gone"
    """The node will not come back. Data that only it had is lost."""


class Leave(msgspec.Struct):
    """Evacuation of a node."""

    reason: Closing
    is_drained: bool = False
    """Whether an operator requested a drain. This lasts until it is undone, even if the node is
    lost or comes back."""
    is_reported: bool = False
    """Whether the notice that the node is empty was published."""


class Expected(msgspec.Struct):
    """Predicted time of a job's next operation on a device, after the end of another one."""

    after: str
    """The operation that ended, as `<deployment>.<kind>`."""
    ended_s: float
    soonest_s: float
    """10th percentile of the predicted time, if the profiler knows it."""
    at_s: float
    late_s: float
    """Time after which the prediction counts as wrong."""
    is_tried: bool = False
    """Whether a speculative activation was opened or deliberately skipped. There is one attempt per
    gap."""
    is_hinted: bool = False
    """Whether the state managers were given a hint of the prediction."""


class SlotPhase(msgspec.Struct):
    """A series of one job's operations on a device."""

    job: str = ""
    kinds: list[str] = []
    """`<deployment>.<kind>` of each operation that started in the phase."""
    began_s: float = 0.0


class Pace(msgspec.Struct):
    """Speed of a deployment while it has a share, according to the table of slowdowns, by
    neighbours."""

    stage: str
    """Kind of sub-stage of the deployment. Empty: it moves state."""
    began_s: float
    since_s: float
    """Time up to which `work_s` and `time_by_neighbours_s` are complete."""
    min_units: int
    """Minimum number of units while it had this share."""
    neighbours: str = ""
    """Kinds of sub-stages of its neighbours since then, as in `Observed`."""
    speed: float = 1.0
    """Speed since then, where 1 is the speed alone on the whole device."""
    work_s: float = 0.0
    """Seconds that the finished work would take alone on the whole device."""
    time_by_neighbours_s: dict[str, float] = {}
    """Neighbours → seconds next to them."""


class Share(msgspec.Struct):
    """Compute units of a device that a running deployment may use."""

    deployment: str
    units: list[int]
    """Units that it may be using. Shares of a device never overlap."""
    remaining_units: list[int] = []
    """Units that remain after the rank confirms that it has given up the others. Empty: no request
    is open."""
    command: CommandId | None = None
    """Command that requested units back."""
    pace: Pace | None = None
    """Speed measurements. None: there is no table of slowdowns."""


class Slot(msgspec.Struct):
    """A device's resident, running and expected deployments. One deployment runs, or several side
    by side, each with a share of the compute units. Only `devices` writes these fields."""

    node: NodeId
    device: int
    resident: list[str] = []
    """Deployments whose state is on the device, least recently used first."""
    placed: list[str] = []
    """Deployments assigned to the device, running or not."""
    ready: dict[str, str] = {}
    """Placed deployments with a ready operation → their job."""
    holder: str = ""
    """Job that used the slot last."""
    held_since_s: float = 0.0
    """When the holder acquired the slot."""
    running: str = ""
    """Deployment that is running here, or will once its activation is open. If there are several,
    the one that has been running longest."""
    shares: list[Share] = []
    """Shares of all deployments running here, in order of arrival. Empty if devices are not shared
    in space or nothing is running."""
    used_by: str = ""
    """Deployment that used the slot last."""
    used_since_s: float = 0.0
    """Time since which only that deployment has used the slot."""
    is_released: bool = False
    """Whether the holder has ended its phase, so the slot is not reserved for it."""
    speculative: str = ""
    """Deployment whose activation was opened speculatively, before its operation came."""
    expected: dict[str, Expected] = {}
    """Job → its next operation here, if predicted."""
    last: str = ""
    """The last operation that ended, as `<deployment>.<kind>`. Key of the profiler's estimate of
    the gap."""
    idle_since_s: float = 0.0
    phase: SlotPhase = msgspec.field(default_factory=SlotPhase)
    """Current phase of the slot, or its last one."""
    served: dict[str, int] = {}
    """Job → log sequence number at which its operations last started here."""
    rounds: dict[str, int] = {}
    """Job → the last round in which it started a phase here."""
    timer: str = ""
    """Timer at which the slot is examined again."""

    @property
    def runs(self) -> list[str]:
        """Deployments running here."""
        return [share.deployment for share in self.shares] or ([self.running] * bool(self.running))

    def share_of(self, deployment: str) -> Share | None:
        for share in self.shares:
            if share.deployment == deployment:
                return share
        return None


class Device(msgspec.Struct):
    memory_bytes: int
    slots: list[Slot]
    """Always one slot. Deployments that run side by side have shares in it."""
    units: int = 1
    """Number of compute units."""


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
    """Deployments that were chosen and wait until all of their devices are free, oldest choice
    first. Any two of them have the same order on every node that they share."""


def new_devices(node: NodeId, specs: list[DeviceSpec]) -> list[Device]:
    return [Device(spec.memory_bytes, [Slot(node, i)], spec.units) for i, spec in enumerate(specs)]
