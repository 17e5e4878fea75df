"""The state of the scheduler, as one serialisable tree.

The tree is the fold of the decision log: nothing in it comes from anywhere else. Mappings are keyed
by the text form of a key (`str(DeploymentKey)`), so that a snapshot is plain MessagePack. They are
changed by the methods of `State`, or by the one module that owns the mapping.
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
from phaseloom.scheduler.core.state.observed import MOST_SIZES, Observed, name_of

CORE_VERSION = 1
"""Raised whenever the same log would give other commands, or the state has another shape; the
snapshot of an older version is taken over as `upgrades.py` says."""


MAX_LATENCY_S = 1.0
"""A longer one is a pause of something, and none to go by."""


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
    latency_s: float = 0.0
    """Seconds by which the log usually tells the end of an operation later than its permit, switch
    and duration say: commands and outcomes on their way. Predictions alone go by it."""
    observed: dict[str, dict[str, Observed]] = {}
    """Deployment → kind and size of operations → how long these take beside others, where devices
    are shared in space by a table of slowdowns."""
    timers: dict[str, float] = {}
    """Timer → when it is due."""
    waiters: dict[str, list[str]] = {}
    """Operation → the operations that wait for it."""
    cluster: Cluster = msgspec.field(default_factory=Cluster)
    """The cluster as placement sees it: nodes, groups, and the jobs placed or waiting."""
    replanning: int = 0
    """Log sequence of the question for moves that has no answer yet; 0: there is none."""
    is_replan_due: bool = False
    """Whether a job has left or drifted since moves were asked for."""
    moving: list[str] = []
    """Deployments that are to go elsewhere, in the order in which that was decided."""
    closing: dict[NodeId, Leave] = {}
    """Nodes that are drained, or do not come back."""
    crowded: list[NodeId] = []
    """Nodes whose host memory may not hold the states of all that are placed on them."""
    stopping: dict[NodeId, dict[str, int]] = {}
    """Node → deployments that it was told to forget and has not confirmed, each with the
    incarnation in which it was told."""

    # --- the log ---------------------------------------------------------------------------------

    def advance(self, sequence: int, time_s: float) -> None:
        """Take the place and time of the next entry. The time stays where the log's clock steps
        back."""
        self.sequence = sequence
        self.now_s = self.cluster.now_s = max(self.now_s, time_s)

    def record_latency(self, latency_s: float) -> None:
        """Take a measured latency into the usual one, most of which are the last ten."""
        latency_s = min(max(0.0, latency_s), MAX_LATENCY_S)
        self.latency_s += (latency_s - self.latency_s) / 10

    def set_timer(self, timer: str, due_s: float) -> None:
        self.timers[timer] = due_s

    def pop_timer(self, timer: str) -> float | None:
        """Take a timer off the list; returns when it was due, None where it is not set."""
        return self.timers.pop(timer, None)

    # --- jobs, deployments, nodes ----------------------------------------------------------------

    def add_deployment(self, deployment: Deployment) -> None:
        self.deployments[deployment.name] = deployment

    def drop_deployment(self, name: str) -> None:
        del self.deployments[name]

    def set_trace(self, job: str, trace: PhaseTrace) -> None:
        """Note what the profiler has measured of a job."""
        self.traces[job] = trace

    def drop_trace(self, job: str) -> None:
        self.traces.pop(job, None)

    def record_switch(self, deployment: str, offload_s: float, load_s: float) -> None:
        self.switch_s[deployment] = (offload_s, load_s)

    def drop_switch(self, deployment: str) -> None:
        self.switch_s.pop(deployment, None)

    def observe(self, deployment: str, kind: str, stage: str, num_tokens: int) -> Observed:
        """Find the record of a deployment's operations of a kind and about this size, or begin one.

        Args: stage: the kind of sub-stage that the table of slowdowns has for them.
        """
        records = self.observed.setdefault(deployment, {})
        name = name_of(kind, num_tokens)
        records[name] = observed = records.pop(name, None) or Observed(kind, stage)
        if len(records) > MOST_SIZES:
            del records[next(iter(records))]
        return observed

    def age_observed(self, deployment: str) -> None:
        """Note that an operation of a deployment has ended."""
        for observed in self.observed.get(deployment, {}).values():
            observed.age()

    def forget_observed(self, deployment: str) -> None:
        """Forget what was seen of a deployment: it has left its device."""
        self.observed.pop(deployment, None)

    def forget_all_observed(self) -> None:
        """Forget what was seen of all deployments: it was compared with another table."""
        self.observed.clear()

    # --- operations that wait for others ---------------------------------------------------------

    def wait_for(self, operation: str, waiter: str) -> None:
        self.waiters.setdefault(operation, []).append(waiter)

    def pop_waiters(self, operation: str) -> list[str]:
        """Take the operations that wait for this one off the list, and return them."""
        return self.waiters.pop(operation, [])

    # --- moves, and nodes that are to be left ----------------------------------------------------

    def set_replan_due(self, is_due: bool = True) -> None:
        self.is_replan_due = is_due

    def add_move(self, deployment: str) -> None:
        if deployment not in self.moving:
            self.moving.append(deployment)

    def remove_move(self, deployment: str) -> None:
        self.moving.remove(deployment)

    def close_node(self, node: NodeId, leave: Leave) -> None:
        self.closing[node] = leave

    def reopen_node(self, node: NodeId) -> None:
        """Note that the node is not to be left any more."""
        del self.closing[node]

    def mark_crowded(self, node: NodeId) -> None:
        if node not in self.crowded:
            self.crowded.append(node)

    def unmark_crowded(self, node: NodeId) -> None:
        """Note that the host memory of the node holds the states of all that are placed there."""
        self.crowded.remove(node)

    # --- what nodes are to forget ----------------------------------------------------------------

    def request_forget(self, node: NodeId, deployment: str, incarnation: int) -> None:
        self.stopping.setdefault(node, {})[deployment] = incarnation

    def request_forget_again(self, node: NodeId, deployment: str) -> int:
        """Note that the node is told once more to forget a deployment; returns the incarnation to
        tell it, a new one, so that its confirmation is told apart."""
        self.stopping[node][deployment] += 1
        return self.stopping[node][deployment]

    def confirm_forgotten(self, node: NodeId, deployment: str) -> None:
        """Note the node's confirmation that it has nothing of the deployment any more."""
        del self.stopping[node][deployment]
        if not self.stopping[node]:
            del self.stopping[node]

    def withdraw_forget(self, node: NodeId, deployment: str) -> int:
        """Wait no longer for the node's confirmation that it has forgotten a deployment.

        Returns: the incarnation in which the node was told; 0: it was not.
        """
        return self.stopping.get(node, {}).pop(deployment, 0)


class SnapshotHead(msgspec.Struct, frozen=True):
    """The part of a snapshot that every core version can read."""

    core_version: int


class Snapshot(SnapshotHead, frozen=True):
    state: State
