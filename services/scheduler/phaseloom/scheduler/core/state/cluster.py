"""The cluster as a placement policy sees it, and the answers of a policy.

The cluster is part of the scheduler's state and is kept by `planning/groups.py`; policies only read
it. A job is pinned to nodes of a *node group* (WEAVE §4.2): the jobs of a group share its nodes,
and no node belongs to two groups. Nodes of no group are free: taking one is what costs.
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
    """What a deployment asks of a backend."""

    backend: str
    trains: bool = False
    axes: tuple[str, ...] = ()
    """Axes of its layout with more than one rank."""
    model_type: str = ""
    """The name of the model's architecture; empty: not told."""
    dtype: str = ""
    """The dtype of the model's weights; empty: not told."""
    is_shared: bool = False
    """Whether its operations share batches."""
    caches_prefixes: bool = False
    """Whether it keeps keys and values from one `generate` to the next."""
    has_adapter: bool = False


class Need(msgspec.Struct, frozen=True):
    """The demand of a job on one pool."""

    num_nodes: int = 1
    num_devices: int = 1
    """Devices on each of the nodes."""
    host_bytes: int = 0
    """Working set in the host memory of each of the nodes; 0: not known."""
    demands: tuple[Demand, ...] = ()
    """The demands that each of the nodes must meet, in order, each once. They are no set, whose
    order would change with a snapshot that is restored."""


class Host(msgspec.Struct):
    """A node as placement sees it."""

    node: NodeId
    pool: Pool
    num_devices: int
    host_bytes: int
    price_per_hour: float
    is_up: bool = True
    """Whether the node may be given to jobs: it is up and is not being drained."""
    group: str = ""
    """The group that the node belongs to; empty: it is free."""
    backends: dict[str, Capabilities] = {}
    """What its ranks can do, by backend; empty: anything."""
    leaving: list[str] = []
    """Deployments that are still on the node and are to leave it: until then it is not free."""
    device_bytes: int = 0
    """The size of its smallest device."""
    beside: tuple[float, ...] = ()
    """How many times as long as alone a rollout takes on one of its devices beside one other,
    beside two, and so on, at worst. Empty: rollouts on the node take turns."""


class Member(msgspec.Struct):
    """A job as placement sees it."""

    job: str
    slo: float
    """0: best effort."""
    needs: dict[Pool, Need]
    cycle: Cycle | None = None
    """The cycle of the job alone, worst case included; None: not known yet."""
    submitted_s: float = 0.0
    ends_s: float = 0.0
    """The time by which the job should have ended; for a job that waits, as if it were placed now.
    0: not known."""
    nodes: dict[Pool, list[NodeId]] = {}
    """The nodes that the job is pinned to, by pool; empty: it waits."""
    shift_s: float = 0.0
    """Seconds by which the job's cycle was shifted to fit (PlexRL §4.3.2)."""
    began_s: float = 0.0
    """When the job's cycle began on its nodes: the time of its placing, plus the shift."""
    iterations: int = 0
    """Iterations finished since the job was submitted."""
    num_optim_steps: int = 0
    """Optimiser steps since the last iteration was finished."""
    alone_s: float = 0.0
    """Seconds that the finished iterations take alone at worst: each as it was measured, net of
    waits, times how much longer the cycle's worst case is than its usual one. An SLO is a multiple
    of it."""
    lag_s: float = 0.0
    """Seconds for which the job had been kept from running when its last iteration was finished."""
    num_late: int = 0
    """Finished iterations that took longer than the SLO allows one to take."""
    recent_s: list[float] = []
    """Seconds that each of the last iterations took, net of waits, the oldest first."""
    has_drifted: bool = False
    """Whether the job's cycle has changed while it ran."""
    iterated_s: float = 0.0
    """When the last iteration was finished."""
    num_iterations: int = 0
    """Iterations expected in all; 0: not known."""
    is_exclusive: bool = False
    """Whether no operation of another job may run beside the job's."""
    takes_turns: bool = False
    """Whether the job was placed so that rollouts on its node take turns, where they could be side
    by side. The choice counts that was made for the newest job of the node."""


class Bounds(msgspec.Struct, frozen=True):
    """What the members of a group leave to one more job, in figures that are cheap to compare,
    because each placement asks every group."""

    allowed_s: float = math.inf
    """Longest iteration that all of their SLOs tolerate; inf: all are best effort."""
    solo_s: float = 0.0
    """Longest iteration of a member alone, at worst-case durations."""
    train_s: float = 0.0
    """Seconds that an iteration of each of them trains, in all."""
    are_known: bool = True
    """Whether the cycle of every member is known."""
    rollout_s: float = 0.0
    """Seconds that the rollouts of an iteration take on the rollout node that they use least."""


class Group(msgspec.Struct):
    name: str
    members: dict[str, Member] = {}
    """The members by job, in the order in which they came: that of a meta-iteration."""
    nodes: dict[Pool, list[NodeId]] = {}
    is_closed: bool = False
    """Whether no further job may join: the only member's cycle is still being measured."""
    version: int = 0
    """A number that grows with each change of the members, of what is known of them, or of the
    nodes."""
    bounds: Bounds | None = None
    """The bounds of the members, worked out at each such change; None: an older core made the last
    change."""


class Limits(msgspec.Struct, frozen=True):
    """The settings that placement depends on: see `SchedulerSettings`."""

    max_group_jobs: int = _DEFAULTS.max_group_jobs
    duty_limit: float = _DEFAULTS.duty_limit
    switch_s: float = _DEFAULTS.switch_s
    slo_percentile: float = _DEFAULTS.slo_percentile
    counts_on_space: bool = False
    """Whether jobs are placed by what they get side by side, and run beside one another only where
    that was counted on."""


class Cluster(msgspec.Struct):
    hosts: dict[NodeId, Host] = {}
    groups: dict[str, Group] = {}
    free: dict[Pool, list[NodeId]] = {}
    """Nodes that are up, belong to no group and have nothing on them, by name."""
    placed: dict[str, str] = {}
    """Job → the group that it is a member of."""
    waiting: list[Member] = []
    """Jobs without a place, the oldest first."""
    limits: Limits = Limits()
    num_groups: int = 0
    """Groups ever made: the number names the next one."""
    now_s: float = 0.0


class Placed(msgspec.Struct, frozen=True):
    group: str
    """The group that the job joins; empty: a new one."""
    nodes: dict[Pool, list[NodeId]]
    """The nodes that the job is pinned to; free ones among them join the group."""
    why: str = ""
    shift_s: float = 0.0
    takes_turns: bool = False
    """Whether the job's rollouts take turns with those of others on their node, where they could be
    side by side."""
    merged: str = ""
    """Another group, of other pools, that becomes one with `group` by this; empty: none."""


class Waits(msgspec.Struct, frozen=True):
    """An answer: there is no place now."""

    why: str
    """The reason, with the numbers."""


class Refused(msgspec.Struct, frozen=True):
    """An answer: there never will be a place."""

    error: ErrorInfo


Decision = Placed | Waits | Refused


class Move(msgspec.Struct, frozen=True):
    """A move of a job of a running group to other nodes."""

    job: str
    placed: Placed


class Placement(NamedTuple):
    place: Callable[[Cluster, Member], Decision]
    """Pure; ties are explicit. The member is not in the cluster yet, or waits there."""
    replan: Callable[[Cluster], list[Move]] | None = None
    """The moves that are worth their price once a job has come or left. They are worked out beside
    the scheduler's loop, and hold only while the groups are as they were."""
    may_overtake: bool = False
    """Whether a job may be placed while an older one waits for the same pool."""
    is_overloaded: Callable[[Cluster, Group], bool] | None = None
    """Whether a group cannot keep what was promised to its members, as their cycles are now; None:
    the rule of a strict round robin decides (`planning/weave/period.py`)."""
    counts_on_space: bool = False
    """Whether it can judge a group by what its members get side by side."""
