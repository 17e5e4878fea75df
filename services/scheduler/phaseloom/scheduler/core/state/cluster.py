"""The cluster as placement policies see it, and the decisions that they return.

The cluster is part of the scheduler's state and is maintained by `planning/groups.py`; policies
only read it. A job is pinned to nodes of a *node group* (WEAVE §4.2): the jobs of a group share its
nodes, and no node belongs to two groups. Nodes without a group are free; only using a free node
costs extra.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import Capabilities, Cycle, SchedulerSettings

Pool = str
_DEFAULTS = SchedulerSettings()


class Demand(msgspec.Struct, frozen=True, order=True):
    """Requirements of a deployment on its backend."""

    backend: str
    trains: bool = False
    axes: tuple[str, ...] = ()
    """Axes of its layout with more than one rank."""
    model_type: str = ""
    """Architecture of the model. Empty if not declared."""
    dtype: str = ""
    """Dtype of the model's weights. Empty if not declared."""
    is_shared: bool = False
    """Whether its operations share batches."""
    caches_prefixes: bool = False
    """Whether it caches keys and values from one `generate` to the next."""
    has_adapter: bool = False


class Need(msgspec.Struct, frozen=True):
    """A job's need for nodes of one pool."""

    num_nodes: int = 1
    num_devices: int = 1
    """Number of devices on each node."""
    host_bytes: int = 0
    """Working set in the host memory of each node. 0 if unknown."""
    demands: tuple[Demand, ...] = ()
    """Demands that each node must meet, sorted and without duplicates. It is not a set, because
    a set's order could change when a snapshot is restored."""


class Host(msgspec.Struct):
    """A node as placement sees it."""

    node: NodeId
    pool: Pool
    num_devices: int
    host_bytes: int
    price_per_hour: float
    is_up: bool = True
    """Whether jobs may use the node: it is up and is not being drained."""
    group: str = ""
    """Group of the node. Empty: the node is free."""
    backends: dict[str, Capabilities] = {}
    """Backend → its capabilities. Empty: no restrictions."""
    leaving: list[str] = []
    """Deployments that still have to leave the node. Until then it is not free."""
    device_bytes: int = 0
    """Memory of its smallest device."""
    rollout_slowdowns: tuple[float, ...] = ()
    """Worst-case slowdown of a rollout on one of its devices with 1, 2, … neighbours, relative to
    running alone. Empty: rollouts on the node take turns."""


class Member(msgspec.Struct):
    """A job as placement sees it."""

    job: str
    slo: float
    """Maximum slowdown relative to running alone. 0: best effort."""
    needs: dict[Pool, Need]
    cycle: Cycle | None = None
    """Cycle of the job when alone, including the worst case. None: not measured yet."""
    submitted_s: float = 0.0
    ends_s: float = 0.0
    """Time by which the job should have ended. For a waiting job, the end if it were placed now. 0
    if unknown."""
    nodes: dict[Pool, list[NodeId]] = {}
    """Nodes to which the job is pinned, by pool. Empty: the job is waiting."""
    shift_s: float = 0.0
    """Seconds by which the job's cycle was shifted to fit (PlexRL §4.3.2)."""
    began_s: float = 0.0
    """When the job's cycle started on its nodes: the time of placement plus the shift."""
    iterations: int = 0
    """Number of finished iterations since the job was submitted."""
    num_optim_steps: int = 0
    """Number of optimiser steps since the last finished iteration."""
    alone_s: float = 0.0
    """Seconds that the finished iterations would have taken alone: as measured, net of waiting. An
    SLO is a multiple of this."""
    lag_s: float = 0.0
    """Seconds for which the job had been delayed when its last iteration finished."""
    num_late: int = 0
    """Number of finished iterations that took longer than the SLO allows for one."""
    recent_s: list[float] = []
    """Durations of the last iterations, net of waiting, oldest first. Those since its cycle was
    set."""
    has_drifted: bool = False
    """Whether the job's cycle changed while the job ran."""
    iterated_s: float = 0.0
    """When the last iteration finished."""
    num_iterations: int = 0
    """Total number of iterations expected. 0 if unknown."""
    is_exclusive: bool = False
    """Whether no operation of another job may run next to the job's."""
    takes_turns: bool = False
    """Whether rollouts on the job's node must take turns even if they could run side by side. The
    decision made for the newest job of a node applies to the node."""


class Bounds(msgspec.Struct, frozen=True):
    """Bounds that the members of a group put on another member. Cheap to compare, because every
    placement checks every group."""

    allowed_s: float = math.inf
    """Longest iteration time that meets the SLO of every job; inf if all jobs are best effort."""
    solo_s: float = 0.0
    """Longest iteration of a member alone, at worst-case durations."""
    train_s: float = 0.0
    """Total training time of one iteration of each member."""
    are_known: bool = True
    """Whether the cycles of all members are known."""
    rollout_s: float = 0.0
    """Total rollout time of one iteration of each member on their least used rollout node."""


class Group(msgspec.Struct):
    name: str
    members: dict[str, Member] = {}
    """Job → member, in the order in which they joined, which is also their order in a
    meta-iteration."""
    nodes: dict[Pool, list[NodeId]] = {}
    is_closed: bool = False
    """Whether other jobs may not join, because the cycle of the only member is still being
    measured."""
    version: int = 0
    """Grows with each change of the members, of the facts about them, or of the nodes."""
    bounds: Bounds | None = None
    """Bounds of the members, updated with each such change. None if an older core made the last
    change."""


class Limits(msgspec.Struct, frozen=True):
    """The settings that placement depends on: see `SchedulerSettings`."""

    max_group_jobs: int = _DEFAULTS.max_group_jobs
    duty_limit: float = _DEFAULTS.duty_limit
    switch_s: float = _DEFAULTS.switch_s
    slo_percentile: float = _DEFAULTS.slo_percentile
    counts_on_space: bool = False
    """Whether placement counts on jobs running side by side. If so, they run side by side only as
    planned."""


class Cluster(msgspec.Struct):
    hosts: dict[NodeId, Host] = {}
    groups: dict[str, Group] = {}
    free: dict[Pool, list[NodeId]] = {}
    """Free nodes by pool, sorted by name: they are up, belong to no group, and no deployment is on
    them."""
    placed: dict[str, str] = {}
    """Job → its group."""
    waiting: list[Member] = []
    """Jobs that wait for a placement, oldest first."""
    limits: Limits = Limits()
    num_groups: int = 0
    """Number of groups created so far. Names the next group."""
    now_s: float = 0.0
    joined_s: float = 0.0
    """When the newest node was up for the first time."""


class Placed(msgspec.Struct, frozen=True):
    group: str
    """Group that the job joins. Empty: a new one."""
    nodes: dict[Pool, list[NodeId]]
    """Nodes to pin the job to. Free ones among them join the group."""
    reason: str = ""
    shift_s: float = 0.0
    takes_turns: bool = False
    """Whether rollouts on the job's node must take turns even if they could run side by side."""
    merged: str = ""
    """Another group, with other pools, that is merged into `group`. Empty: none."""


class Waits(msgspec.Struct, frozen=True):
    """Decision: the job cannot be placed now."""

    reason: str
    """Reason, with numbers."""


class Refused(msgspec.Struct, frozen=True):
    """Decision: the job can never be placed."""

    error: ErrorInfo


Decision = Placed | Waits | Refused


class Move(msgspec.Struct, frozen=True):
    """A planned move of a placed job to other nodes."""

    job: str
    placed: Placed


class Placement(NamedTuple):
    place: Callable[[Cluster, Member], Decision]
    """Decide where to place a job. Pure; breaks ties explicitly. The member is new, or waits in the
    cluster."""
    replan: Callable[[Cluster], list[Move]] | None = None
    """Plan moves that pay off, after a job has come or left. Computed outside the scheduler's loop;
    a move is valid only while its groups are unchanged."""
    may_overtake: bool = False
    """Whether a job may be placed while an older one waits for the same pool."""
    is_overloaded: Callable[[Cluster, Group], bool] | None = None
    """Whether a group can no longer keep its members' SLOs with their present cycles. None: use the
    rule of the strict round robin (`planning/weave/period.py`)."""
    counts_on_space: bool = False
    """Whether the policy can evaluate groups whose members run side by side."""
