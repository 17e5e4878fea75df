"""What the scheduler knows, as one serialisable tree.

The tree is the fold of the decision log: nothing in it comes from anywhere else. Mappings are keyed
by the text form of a key (`str(DeploymentKey)`), so that a snapshot is plain MessagePack.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.events import PhaseTrace
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import SchedulerConfig
from phaseloom.scheduler.core.state.cluster import Cluster
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.node import Leave, Node

CORE_VERSION = 7
"""Raised whenever the same log would give other commands: a snapshot of another one is refused."""


class State(msgspec.Struct):
    sequence: int = 0
    now_s: float = 0.0
    config: SchedulerConfig | None = None
    nodes: dict[str, Node] = {}
    jobs: dict[str, Job] = {}
    deployments: dict[str, Deployment] = {}
    traces: dict[str, PhaseTrace] = {}
    switch_s: dict[str, tuple[float, float]] = {}
    """Newest (offload, load) seconds by deployment."""
    timers: dict[str, float] = {}
    """When each is due."""
    waiters: dict[str, list[str]] = {}
    """Operation key -> the operations that wait for it."""
    cluster: Cluster = msgspec.field(default_factory=Cluster)
    """What placement knows: nodes, groups, and the jobs that have a place or wait for one."""
    replanning: int = 0
    """Sequence of the step that asked for moves and has no answer yet; 0: none."""
    is_replan_due: bool = False
    """A job has come or left since."""
    moving: list[str] = []
    """Deployments that are to go elsewhere, in the order in which that was decided."""
    closing: dict[NodeId, Leave] = {}
    """Nodes that are drained, or do not come back."""
    crowded: list[NodeId] = []
    """Nodes whose host memory may not hold the states of all that are placed on them."""
    stopping: dict[str, dict[str, int]] = {}
    """Node -> deployments of ended jobs that it has not confirmed to have forgotten, and in which
    incarnation it was told."""


class SnapshotHead(msgspec.Struct, frozen=True):
    """What every core version can read of another's."""

    core_version: int


class Snapshot(SnapshotHead, frozen=True):
    state: State
