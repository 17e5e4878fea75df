"""One step in the making: the state, the event's place and time, the outputs so far.

Every mutation of an entity's state goes through here, so that an illegal one raises with its story.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from phaseloom.common.contract.commands import NodeCommand
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey
from phaseloom.common.contract.specs import CommandId, SchedulerConfig
from phaseloom.scheduler.core.state.activation import NOT_TOLD_S
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.node import Device, Node
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.outputs import Output, SendCommand, SetTimer, Tell
from phaseloom.scheduler.core.state.transitions import (
    JOB_TRANSITIONS,
    OP_TRANSITIONS,
    WPG_TRANSITIONS,
    InvalidTransition,
    JobState,
    OpState,
    WpgState,
)
from phaseloom.scheduler.core.state.tree import State

C = TypeVar("C", bound=NodeCommand)


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
    foreseen: set[str] = field(default_factory=set)
    """Jobs of which something else may be needed next on crowded nodes."""
    doomed: dict[str, ErrorInfo] = field(default_factory=dict)
    """Jobs that cannot go on, and why."""
    stillborn: dict[str, ErrorInfo] = field(default_factory=dict)
    """Deployments added to a running job that cannot start, and why."""
    unrecoverable: dict[str, ErrorInfo] = field(default_factory=dict)
    """Jobs of which a deployment cannot be rebuilt from what is stored, and why."""
    woken: list[str] = field(default_factory=list)
    """Operations of which something that they wait for has ended."""
    has_new_room: bool = False
    """A node came, or a job left one: what waits for a place may have one now."""
    changed_jobs: set[str] = field(default_factory=set)
    """Jobs whose view is stale."""

    @property
    def config(self) -> SchedulerConfig:
        assert self.state.config, "the log starts with SchedulerConfigured"
        return self.state.config

    # --- outputs --------------------------------------------------------------------------------

    def emit(self, output: Output) -> None:
        self.outputs.append(output)

    def tell(self, what: str, reason: str, subject: str = "") -> None:
        self.emit(Tell(what, reason, subject))

    def send(self, kind: type[C], node: Node, /, **fields: Any) -> CommandId:
        """Send a command to a node, in its present life; none to a node that is down."""
        command_id = CommandId(self.sequence, len(self.outputs))
        if not node.is_up:
            return command_id
        command = kind(
            id=command_id,
            node=node.node,
            revision=node.revision,
            **fields,
        )
        self.emit(SendCommand(command))  # type: ignore[arg-type]
        return command_id

    def set_timer(self, timer: str, due_s: float) -> None:
        self.state.timers[timer] = due_s
        self.emit(SetTimer(timer, due_s))

    # --- looking up -----------------------------------------------------------------------------

    def deployment(self, key: DeploymentKey) -> Deployment | None:
        return self.state.deployments.get(str(key))

    def job(self, key: JobKey) -> Job:
        return self.state.jobs[str(key)]

    def job_of(self, deployment: Deployment) -> Job:
        return self.state.jobs[deployment.job_name]

    def node(self, node: NodeId) -> Node:
        return self.state.nodes[node]

    def node_of(self, deployment: Deployment) -> Node:
        """Its leader's."""
        assert deployment.wpg.spans, deployment.name
        return self.state.nodes[deployment.wpg.spans[0].node]

    def nodes_of(self, deployment: Deployment) -> list[Node]:
        """By rank."""
        return [self.state.nodes[span.node] for span in deployment.wpg.spans]

    def places_of(self, deployment: Deployment) -> list[tuple[Node, int]]:
        """The node and device of each rank."""
        nodes = self.state.nodes
        return [(nodes[span.node], i) for span in deployment.wpg.spans for i in span.devices]

    def devices_of(self, deployment: Deployment) -> list[Device]:
        """Of each rank."""
        nodes = self.state.nodes
        return [nodes[span.node].devices[i] for span in deployment.wpg.spans for i in span.devices]

    def deployments_of(self, job: JobKey) -> list[Deployment]:
        specs = self.state.jobs[str(job)].spec.deployments
        keys = [str(DeploymentKey(job.tenant, job.job, spec.name)) for spec in specs]
        return [self.state.deployments[key] for key in keys if key in self.state.deployments]

    # --- changing -------------------------------------------------------------------------------

    def touch(self, deployment: Deployment) -> None:
        """Its devices must be looked at again before this step ends."""
        self.touched.add(deployment.name)
        self.dirty.update(deployment.places)

    def foresee(self, deployment: Deployment) -> None:
        """What its job needs next, where that is not on its devices, may have changed."""
        if self.state.crowded:
            self.foreseen.add(deployment.job_name)

    def move_op(self, op: Op, to: OpState) -> None:
        if to not in OP_TRANSITIONS[op.state]:
            raise InvalidTransition(f"operation {op.key}", op.state, to, self.sequence)
        op.enter(to)

    def move_wpg(self, deployment: Deployment, to: WpgState) -> None:
        if to not in WPG_TRANSITIONS[deployment.wpg.state]:
            raise InvalidTransition(
                f"WPG {deployment.name}", deployment.wpg.state, to, self.sequence
            )
        deployment.wpg.enter(to)
        self.changed_jobs.add(deployment.job_name)

    def move_job(self, job: Job, to: JobState) -> None:
        if to not in JOB_TRANSITIONS[job.state]:
            raise InvalidTransition(f"job {job.key}", job.state, to, self.sequence)
        job.enter(to)
        self.changed_jobs.add(str(job.key))

    def vacate(self, deployment: Deployment) -> None:
        """Its processes are gone: nothing of it is on a device, nothing of it runs."""
        name = deployment.name
        deployment.activation.close()
        for key in list(deployment.activation.running):
            self.free(deployment, key, "")
        for device in self.devices_of(deployment):
            if name in device.resident:
                device.resident.remove(name)
            if device.running == name:
                device.running = ""
            if device.early == name:
                device.early = ""
            device.expected.pop(deployment.job_name, None)
        for node in self.nodes_of(deployment):
            if name in node.claims:
                node.claims.remove(name)
        deployment.activation.hint(NOT_TOLD_S)
        self.touch(deployment)

    def free(self, deployment: Deployment, key: OperationKey, kind: str) -> None:
        """A running operation has ended; with the last one its devices are idle."""
        deployment.activation.ended(key, self.now_s)
        for device in self.devices_of(deployment):
            if not deployment.activation.running:
                device.running = ""
            device.last = f"{key.deployment}.{kind}"
            device.idle_since_s = self.now_s
