"""One step in the making: the state, the event's place and time, the outputs so far.

Every mutation of an entity's state goes through here, so that an illegal one raises with its story.
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
"""The subjects of one follow-up, each with the error that is its reason, if it has one."""


class FollowUp(StrEnum):
    """A consequence of an event, done after it; `core.py` has the order, and who does it."""

    WAKE = "wake"
    """Operations: something that they wait for has ended."""
    FALL_BACK = "fall_back"
    """Jobs: a deployment of theirs cannot be rebuilt from what is stored."""
    FAIL_JOB = "fail_job"
    """Jobs that cannot go on."""
    END_DEPLOYMENT = "end_deployment"
    """Deployments that were added to a running job and cannot start."""
    RELEASE = "release"
    """Jobs some of whose weights versions may not be needed any more."""
    REVIEW_JOB = "review_job"
    """Jobs that may have become active, or may have drained."""
    PLACE = "place"
    """Jobs and moves that wait for room: a node came, or something left one."""
    REPLAN = "replan"
    """The cluster: a job has come or left, or the last plan was answered."""
    MOVE = "move"
    """Deployments on their way: every event may let them go on."""
    PREFETCH = "prefetch"
    """Operations that bring a weights version which exists by now."""
    HINT = "hint"
    """Jobs of which something else may be needed next on crowded nodes."""
    SHOW_JOB = "show_job"
    """Jobs whose status has changed."""


@dataclass(slots=True)
class Step:
    state: State
    sequence: int
    now_s: float
    outputs: list[Output] = field(default_factory=list)
    dirty: set[tuple[str, int]] = field(default_factory=set)
    """Devices whose ready operations may have changed: (node, device)."""
    touched: set[str] = field(default_factory=set)
    """Deployments of which something may be ready now, or not any more."""
    follow_ups: dict[FollowUp, Subjects] = field(default_factory=dict)
    """The follow-ups that are still to be done."""
    config: SchedulerConfig = field(init=False)
    """The configuration. The log starts with one: before it there is nothing to decide."""

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
        """The id of a command that is the next output."""
        return CommandId(self.sequence, len(self.outputs))

    def send(self, kind: type[C], node: Node, /, **fields: Any) -> CommandId:
        """Send a command to a node under its present lease. A node that is down gets none."""
        command_id = self.command_id
        if node.is_up:
            command = kind(id=command_id, node=node.node, revision=node.revision, **fields)
            self.emit(SendCommand(command))  # type: ignore[arg-type]
        return command_id

    def send_built(self, node: Node, command: Command) -> None:
        """Send a command with `command_id`, which is built already. A node that is down gets
        none."""
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
        """The job that an operation is run for: the one whose weights it names; its own where it
        names none, or the other is gone."""
        own = self.state.jobs[deployment.job_name]
        if op is None or not op.payer:
            return own
        return self.state.jobs.get(str(JobKey(own.key.tenant, op.payer)), own)

    def node(self, node: NodeId) -> Node:
        return self.state.nodes[node]

    def node_of(self, deployment: Deployment) -> Node:
        """The node of the leader."""
        assert deployment.wpg.assignments, deployment.name
        return self.state.nodes[deployment.wpg.assignments[0].node]

    def nodes_of(self, deployment: Deployment) -> list[Node]:
        """The nodes of a deployment, in the order of its ranks."""
        return [self.state.nodes[assigned.node] for assigned in deployment.wpg.assignments]

    def deployments_of(self, job: Job) -> list[Deployment]:
        prefix, deployments = f"{job.key}.", self.state.deployments
        names = [prefix + spec.name for spec in job.spec.deployments]
        return [deployments[name] for name in names if name in deployments]

    # --- changing -------------------------------------------------------------------------------

    def follow_up(self, kind: FollowUp, subject: str = "", error: ErrorInfo | None = None) -> None:
        """Ask for a follow-up; the last error that is given for a subject counts."""
        self.follow_ups.setdefault(kind, {})[subject] = error

    def job_changed(self, name: str) -> None:
        """Ask for the job's status to be published, and for a look at whether it has become active
        or drained."""
        self.follow_up(FollowUp.REVIEW_JOB, name)
        self.follow_up(FollowUp.SHOW_JOB, name)

    def touch(self, deployment: Deployment) -> None:
        """Have the devices of a deployment looked at again before this step ends."""
        self.touched.add(deployment.name)
        # Without the list that `places` makes: this is called several times a step.
        for assigned in deployment.wpg.assignments:
            for device in assigned.devices:
                self.dirty.add((assigned.node, device))

    def request_hints(self, deployment: Deployment) -> None:
        """Ask for hints: what the deployment's job needs next may have changed."""
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
