"""The step in progress: the state, the event's sequence number and time, and the outputs up to now.

Every change of an entity's state goes through `Step`, so an illegal one raises with its context.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from phaseloom.common.contract.commands import Command, NodeCommand
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey
from phaseloom.common.contract.specs import CommandId, SchedulerConfig
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.node import Node
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.outputs import Output, PublishNotice, SendCommand, SetTimer
from phaseloom.scheduler.core.state.transitions import (
    JOBS,
    MOVES,
    OPERATIONS,
    WPGS,
    JobEvent,
    MoveEvent,
    OpEvent,
    WpgEvent,
    next_state,
)
from phaseloom.scheduler.core.state.tree import State

C = TypeVar("C", bound=NodeCommand)


Subjects = dict[str, ErrorInfo | None]
"""Subjects of a follow-up → the error that caused it, if any."""


class FollowUp(StrEnum):
    """A consequence of an event, carried out after it. `core.py` defines the order and the
    handlers."""

    WAKE = "wake"
    """Operations: a dependency of theirs has ended."""
    WRITE_ENDINGS = "write_endings"
    """Operations that failed together: their outcomes are written."""
    FALL_BACK = "fall_back"
    """Jobs: one of their deployments cannot be rebuilt from stored data."""
    FAIL_JOB = "fail_job"
    """Jobs that cannot continue."""
    END_DEPLOYMENT = "end_deployment"
    """Deployments that were added to a running job and cannot start."""
    RELEASE = "release"
    """Jobs with weights versions that may no longer be needed."""
    REVIEW_JOB = "review_job"
    """Jobs that may have become active or finished draining."""
    PLACE = "place"
    """Waiting jobs and moves: a node has come, or something has left one."""
    REPLAN = "replan"
    """The cluster: a job has come or left, or the last plan has been answered."""
    MOVE = "move"
    """Moving deployments: any event may let them proceed."""
    PREFETCH = "prefetch"
    """Operations that load a weights version that now exists."""
    HINT = "hint"
    """Jobs whose next need on crowded nodes may have changed."""
    SHOW_JOB = "show_job"


MAX_AT_ONCE = 128
"""Operations that one step ends or looks at again as consequences of its event, at most. Later
steps, caused by a timer, handle the rest, so that events of other tenants come in between."""


@dataclass(slots=True)
class Step:
    state: State
    sequence: int
    now_s: float
    outputs: list[Output] = field(default_factory=list)
    dirty: set[tuple[str, int]] = field(default_factory=set)
    """Devices as (node, device) whose ready operations may have changed."""
    touched: set[str] = field(default_factory=set)
    """Deployments whose operations may have become ready, or stopped being ready."""
    follow_ups: dict[FollowUp, Subjects] = field(default_factory=dict)
    """Outstanding follow-ups."""
    room: int = MAX_AT_ONCE
    """Operations that this step may still end or look at again as consequences of its event."""
    config: SchedulerConfig = field(init=False)
    """The configuration. It is the first entry of the log, so it always exists when something is
    decided."""

    def __post_init__(self) -> None:
        if self.state.config is not None:
            self.config = self.state.config

    def configure(self, config: SchedulerConfig) -> None:
        self.state.config = self.config = config

    # --- outputs --------------------------------------------------------------------------------

    def emit(self, output: Output) -> None:
        self.outputs.append(output)

    def notify(self, title: str, reason: str, subject: str = "") -> None:
        self.emit(PublishNotice(title, reason, subject))

    @property
    def command_id(self) -> CommandId:
        """Id of the next output, if that is a command."""
        return CommandId(self.sequence, len(self.outputs))

    def send(self, kind: type[C], node: Node, /, **fields: Any) -> CommandId:
        """Send a command to a node under its present lease, unless the node is down."""
        command_id = self.command_id
        if node.is_up:
            command = kind(id=command_id, node=node.node, revision=node.revision, **fields)
            self.emit(SendCommand(command))  # type: ignore[arg-type]
        return command_id

    def send_built(self, node: Node, command: Command) -> None:
        """Send a prepared command, which has `command_id`, unless the node is down."""
        if node.is_up:
            self.outputs.append(SendCommand(command))

    def send_for(
        self, kind: type[C], node: Node, deployment: Deployment, /, **fields: Any
    ) -> CommandId:
        """Send a command about the present incarnation of a deployment."""
        incarnation = deployment.wpg.incarnation
        return self.send(kind, node, deployment=deployment.key, incarnation=incarnation, **fields)

    def set_timer(self, timer: str, due_s: float) -> None:
        self.state.set_timer(timer, due_s)
        self.emit(SetTimer(timer, due_s))

    # --- looking up -----------------------------------------------------------------------------

    def deployment(self, key: DeploymentKey) -> Deployment | None:
        return self.state.deployments.get(str(key))

    def deployment_of(self, operation: OperationKey) -> Deployment | None:
        return self.state.deployments.get(operation.deployment_name)

    def job(self, key: JobKey) -> Job:
        return self.state.jobs[str(key)]

    def job_of(self, deployment: Deployment) -> Job:
        return self.state.jobs[deployment.job_name]

    def payer_of(self, deployment: Deployment, op: Op | None) -> Job:
        """Job that is charged for an operation: the one whose weights it names. If it names none,
        or that job is gone, the operation's own job."""
        own_job = self.state.jobs[deployment.job_name]
        if op is None or not op.payer:
            return own_job
        return self.state.jobs.get(str(JobKey(own_job.key.tenant, op.payer)), own_job)

    def node(self, node: NodeId) -> Node:
        return self.state.nodes[node]

    def node_of(self, deployment: Deployment) -> Node:
        """Node of the leader."""
        assert deployment.wpg.assignments, deployment.name
        return self.state.nodes[deployment.wpg.assignments[0].node]

    def nodes_of(self, deployment: Deployment) -> list[Node]:
        """Nodes of a deployment, in the order of its ranks."""
        return [self.state.nodes[assigned.node] for assigned in deployment.wpg.assignments]

    def deployments_of(self, job: Job) -> list[Deployment]:
        prefix, deployments = f"{job.key}.", self.state.deployments
        names = [prefix + spec.name for spec in job.spec.deployments]
        return [deployments[name] for name in names if name in deployments]

    def limit_of(self, tenant: str, bound: str) -> int:
        """Return a tenant's bound; 0: it has none."""
        default: int = getattr(self.config, bound)
        return int(self.config.tenant_limits.get(tenant, {}).get(bound, default))

    # --- changing -------------------------------------------------------------------------------

    def follow_up(self, kind: FollowUp, subject: str = "", error: ErrorInfo | None = None) -> None:
        """Request a follow-up. The last error given for a subject counts."""
        self.follow_ups.setdefault(kind, {})[subject] = error

    def job_changed(self, name: str) -> None:
        """Request that the job's status is published, and that the job is checked for being active
        or drained."""
        self.follow_up(FollowUp.REVIEW_JOB, name)
        self.follow_up(FollowUp.SHOW_JOB, name)

    def touch(self, deployment: Deployment) -> None:
        """Request another look at the devices of a deployment before this step ends."""
        self.touched.add(deployment.name)
        # Avoids the list that `places` builds: this is called several times per step.
        for assigned in deployment.wpg.assignments:
            for device in assigned.devices:
                self.dirty.add((assigned.node, device))

    def request_hints(self, deployment: Deployment) -> None:
        """Request new hints, because the needs of the deployment's job may have changed."""
        if self.state.crowded:
            self.follow_up(FollowUp.HINT, deployment.job_name)

    def advance_op(self, op: Op, event: OpEvent) -> None:
        op.state = next_state(OPERATIONS, "operation", op.key, op.state, event, self.sequence)

    def advance_wpg(self, deployment: Deployment, event: WpgEvent) -> None:
        wpg, name = deployment.wpg, deployment.name
        wpg.state = next_state(WPGS, "WPG", name, wpg.state, event, self.sequence)
        self.job_changed(deployment.job_name)

    def advance_job(self, job: Job, event: JobEvent) -> None:
        job.state = next_state(JOBS, "job", job.key, job.state, event, self.sequence)
        self.job_changed(str(job.key))

    def advance_move(self, deployment: Deployment, event: MoveEvent) -> None:
        move, name = deployment.move.relocation, deployment.name
        assert move is not None, name
        before = move.stage
        move.stage = next_state(MOVES, "move of", name, before, event, self.sequence)
        if move.stage is not before:
            self.job_changed(deployment.job_name)
            self.touch(deployment)
