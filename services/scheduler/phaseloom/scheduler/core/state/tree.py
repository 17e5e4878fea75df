"""The state of the scheduler, as one serialisable tree.

The tree is the fold of the decision log and contains nothing from anywhere else. Mappings are keyed
by the text form of a key, for example `str(DeploymentKey)`, so that a snapshot is plain
MessagePack. A mapping is changed by the methods of `State`, or by the one module that owns it.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.events import PhaseTrace
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import SchedulerConfig
from phaseloom.scheduler.core.state.cluster import Cluster
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.node import Leave, Node
from phaseloom.scheduler.core.state.observed import MAX_SIZES, Observed, name_of
from phaseloom.scheduler.core.state.operation import Ending, Op

CORE_VERSION = 3
"""Raised whenever the same log would give other commands, or the state has another shape.
`upgrades` turns the snapshot of an older version into one of this version."""


MAX_LATENCY_S = 1.0
"""A longer latency is a pause of some process and would distort the average."""


class State(msgspec.Struct):
    sequence: int = 0
    now_s: float = 0.0
    config: SchedulerConfig | None = None
    nodes: dict[str, Node] = {}
    jobs: dict[str, Job] = {}
    deployments: dict[str, Deployment] = {}
    traces: dict[str, PhaseTrace] = {}
    switch_s: dict[str, tuple[float, float]] = {}
    """Deployment → seconds of its newest (offload, load)."""
    latency_s: float = 0.0
    """Usual seconds between the end of an operation, computed from its permit, switch and duration,
    and the log entry of that end: commands and outcomes in transit. Only predictions use it."""
    observed: dict[str, dict[str, Observed]] = {}
    """Deployment → kind and size of operations → how long these take next to others. Filled only
    while devices are shared in space by a table of slowdowns."""
    outcomes: dict[str, dict[int, int]] = {}
    """Tenant → minute of the log's clock → bytes of the outcomes stored then."""
    timers: dict[str, float] = {}
    """Timer → when it fires."""
    waiters: dict[str, list[str]] = {}
    """Operation → the operations that wait for it."""
    woken: list[str] = []
    """Operations to look at again, because a dependency has ended or their job drains; the last one
    is next."""
    endings: list[Ending] = []
    """Failed operations whose outcomes are not written yet; the first group is next."""
    is_continuing: bool = False
    """Whether a timer is set for the rest of `woken` and `endings`."""
    cluster: Cluster = msgspec.field(default_factory=Cluster)
    """Placement's view of the cluster: nodes, groups, and the jobs placed or waiting."""
    replanning: int = 0
    """Log sequence of the pending request for moves; 0: none is pending."""
    is_replan_due: bool = False
    """Whether a job has left or drifted since moves were last requested."""
    moving: list[str] = []
    """Deployments that are moving to other nodes, in the order in which that was decided."""
    closing: dict[NodeId, Leave] = {}
    """Nodes that are drained, or will not come back."""
    crowded: list[NodeId] = []
    """Nodes whose host memory may not hold the states of all deployments placed on them."""
    stopping: dict[NodeId, dict[str, int]] = {}
    """Node → deployments that it was told to forget and has not confirmed, each with the
    incarnation that the request named."""

    # --- the log ---------------------------------------------------------------------------------

    def advance(self, sequence: int, time_s: float) -> None:
        """Move on to the next log entry. If the log's clock steps back, the state's time stands
        still."""
        self.sequence = sequence
        self.now_s = self.cluster.now_s = max(self.now_s, time_s)

    def record_latency(self, latency_s: float) -> None:
        """Take a measured latency into the moving average, which mostly reflects the last ten."""
        latency_s = min(max(0.0, latency_s), MAX_LATENCY_S)
        self.latency_s += (latency_s - self.latency_s) / 10

    def add_outcome(self, tenant: str, num_bytes: int) -> None:
        """Count a stored outcome, and forget those that have expired."""
        minute = int(self.now_s // 60)
        minutes = self.outcomes.setdefault(tenant, {})
        if minute not in minutes:
            self.drop_outcomes(tenant, self._outcomes_expired_s(self.now_s))
            minutes = self.outcomes.setdefault(tenant, {})
        minutes[minute] = minutes.get(minute, 0) + num_bytes

    def drop_outcomes(self, tenant: str, before_s: float) -> None:
        """Forget the outcomes that were stored in whole minutes before a time."""
        minutes = self.outcomes.pop(tenant, {})
        kept = {m: size for m, size in minutes.items() if 60 * (m + 1) > before_s}
        if kept:
            self.outcomes[tenant] = kept

    def outcome_bytes(self, tenant: str, now_s: float) -> int:
        """Return the bytes of a tenant's stored outcomes that have not expired."""
        expired_s = self._outcomes_expired_s(now_s)
        minutes = self.outcomes.get(tenant, {})
        return sum(size for minute, size in minutes.items() if 60 * (minute + 1) > expired_s)

    def _outcomes_expired_s(self, now_s: float) -> float:
        return now_s - (self.config.outcome_retention_s if self.config else 0.0)

    def set_timer(self, timer: str, due_s: float) -> None:
        self.timers[timer] = due_s

    def pop_timer(self, timer: str) -> float | None:
        """Remove a timer and return when it was due; None if it is not set."""
        return self.timers.pop(timer, None)

    # --- jobs, deployments, nodes ----------------------------------------------------------------

    def add_deployment(self, deployment: Deployment) -> None:
        self.deployments[deployment.name] = deployment

    def drop_deployment(self, name: str) -> None:
        del self.deployments[name]

    def set_trace(self, job: str, trace: PhaseTrace) -> None:
        """Store the profiler's measurements of a job."""
        self.traces[job] = trace

    def drop_trace(self, job: str) -> None:
        self.traces.pop(job, None)

    def record_switch(self, deployment: str, offload_s: float, load_s: float) -> None:
        self.switch_s[deployment] = (offload_s, load_s)

    def drop_switch(self, deployment: str) -> None:
        self.switch_s.pop(deployment, None)

    def observe(self, deployment: str, kind: str, stage: str, num_tokens: int) -> Observed:
        """Return the record of a deployment's operations of a kind and about this size, created if
        missing.

        Args: stage: the kind of sub-stage under which the table of slowdowns has them.
        """
        records = self.observed.setdefault(deployment, {})
        name = name_of(kind, num_tokens)
        records[name] = observed = records.pop(name, None) or Observed(kind, stage)
        if len(records) > MAX_SIZES:
            del records[next(iter(records))]
        return observed

    def age_observed(self, deployment: str) -> None:
        """Record that an operation of a deployment has ended."""
        for observed in self.observed.get(deployment, {}).values():
            observed.age()

    def forget_observed(self, deployment: str) -> None:
        """Forget the observations of a deployment, because it has left its device."""
        self.observed.pop(deployment, None)

    def forget_all_observed(self) -> None:
        """Forget all observations, because they were compared with another table."""
        self.observed.clear()

    # --- operations that wait for others ---------------------------------------------------------

    def wait_for(self, operation: str, waiter: str) -> None:
        self.waiters.setdefault(operation, []).append(waiter)

    def pop_waiters(self, operation: str) -> list[str]:
        """Remove and return the operations that wait for this one."""
        return self.waiters.pop(operation, [])

    # --- operations that are handled by several steps --------------------------------------------

    def wake(self, operations: list[str]) -> None:
        self.woken += operations

    def pop_woken(self) -> str:
        return self.woken.pop()

    def add_ending(self, ending: Ending) -> None:
        self.endings.append(ending)

    def take_ending(self, count: int) -> tuple[list[Op], ErrorInfo]:
        """Remove some failed operations, and return them with their error. The other groups are
        next."""
        ending = self.endings.pop(0)
        ops = ending.take(count)
        if ending.ops:
            self.endings.append(ending)
        return ops, ending.error

    def set_continuing(self, is_continuing: bool) -> None:
        self.is_continuing = is_continuing

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
        """Record that the node no longer has to be vacated."""
        del self.closing[node]

    def mark_crowded(self, node: NodeId) -> None:
        if node not in self.crowded:
            self.crowded.append(node)

    def unmark_crowded(self, node: NodeId) -> None:
        """Record that the node's host memory holds the states of all deployments placed there."""
        self.crowded.remove(node)

    # --- what nodes are to forget ----------------------------------------------------------------

    def request_forget(self, node: NodeId, deployment: str, incarnation: int) -> None:
        self.stopping.setdefault(node, {})[deployment] = incarnation

    def request_forget_again(self, node: NodeId, deployment: str) -> int:
        """Record that a node is told again to forget a deployment.

        Returns: the incarnation to name in the request. It is new, to tell its confirmation apart.
        """
        self.stopping[node][deployment] += 1
        return self.stopping[node][deployment]

    def confirm_forgotten(self, node: NodeId, deployment: str) -> None:
        """Record that the node has confirmed having no data of the deployment."""
        del self.stopping[node][deployment]
        if not self.stopping[node]:
            del self.stopping[node]

    def withdraw_forget(self, node: NodeId, deployment: str) -> int:
        """Stop waiting for the node's confirmation that it has forgotten a deployment.

        Returns: the incarnation that the request named; 0: there was no request.
        """
        return self.stopping.get(node, {}).pop(deployment, 0)


class SnapshotHead(msgspec.Struct, frozen=True):
    """The part of a snapshot that every core version can read."""

    core_version: int


class Snapshot(SnapshotHead, frozen=True):
    state: State
