"""The emulated surroundings of a scheduler's shell: nodes, ranks, controllers, faults.

The world carries out the core's outputs and appends events. It does not know who folds the events:
the simulator's engine folds them at once, a live shell when its log contains them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from phaseloom.common.contract.events import Event, OperationFinished
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import SlowdownTable
from phaseloom.scheduler.core.state import outputs
from phaseloom.simulator.agenda import Agenda
from phaseloom.simulator.controllers import USUAL, Controller, Retries
from phaseloom.simulator.draws import Draws
from phaseloom.simulator.jobs import SimJob
from phaseloom.simulator.metering import Meter
from phaseloom.simulator.nodes import FREE, Costs, Nodes, PoolSpec


class NodeFault(msgspec.Struct, frozen=True, tag=True):
    """A node dies with all of its processes and returns empty."""

    node: str
    at_s: float
    down_s: float


class Crash(msgspec.Struct, frozen=True, tag=True):
    """A job's controller fails the job and submits it again from its checkpoint."""

    job: str
    at_s: float
    tenant: str = "sim"


class WorkersDie(msgspec.Struct, frozen=True, tag=True):
    """The workers of one deployment die while their nodes stay up."""

    deployment: DeploymentKey
    at_s: float


Fault = NodeFault | Crash | WorkersDie


class World:
    """The emulated surroundings of a scheduler.

    Args: append: called with each event for the decision log, in order.
          slowdowns: the slowdowns of operations that share a device of several units; None: there
                     are none.
    """

    def __init__(
        self,
        agenda: Agenda,
        append: Callable[[Event], None],
        meter: Meter,
        jobs: Sequence[SimJob],
        pools: Sequence[PoolSpec],
        *,
        seed: int = 0,
        costs: Costs = FREE,
        retries: Retries = USUAL,
        faults: Sequence[Fault] = (),
        slowdowns: SlowdownTable | None = None,
    ) -> None:
        self._agenda = agenda
        self._append = append
        self._meter = meter
        self._controllers: dict[tuple[str, str], Controller] = {}
        self._nodes = Nodes(
            agenda,
            append,
            meter,
            jobs={(job.tenant, job.name): job for job in jobs},
            duration_s=self._duration_s,
            ran=self._ran,
            costs=costs,
            slowdowns=slowdowns,
        )
        self._nodes.start_all(pools)
        for job in jobs:
            controller = Controller(
                job,
                Draws(job, seed),
                agenda=agenda,
                append=append,
                meter=meter,
                retries=retries,
            )
            self._controllers[job.tenant, job.name] = controller
            agenda.at(job.arrival_s, controller.submit)
        for fault in faults:
            agenda.at(fault.at_s, self._inject, fault)
        self._num_open = len(jobs)

    @property
    def is_over(self) -> bool:
        """Whether every job has ended."""
        return self._num_open == 0

    def _controller(self, key: OperationKey) -> Controller:
        return self._controllers[key.tenant, key.job]

    def _duration_s(self, key: OperationKey) -> float:
        return self._controller(key).duration_s(key)

    def _ran(self, key: OperationKey, start_s: float) -> None:
        self._controller(key).on_completed(key, start_s)

    # --- outputs --------------------------------------------------------------------------------

    def perform(self, output: outputs.Output) -> None:
        match output:
            case outputs.SendCommand():
                self._nodes.perform(output.command)
            case outputs.PutView(job, status):
                controller = self._controllers[job.tenant, job.job]
                had_ended = controller.has_ended
                controller.on_view(status)
                self._num_open -= controller.has_ended and not had_ended
            case outputs.Answer(request) if request.startswith("submit/"):
                tenant, name = request.split("/")[1].split(".")
                controller = self._controllers[tenant, name]
                had_ended = controller.has_ended
                controller.on_answer(output.status, output.error)
                self._num_open -= controller.has_ended and not had_ended
            case outputs.WriteCompletion(key):
                if key not in self._nodes.completed:
                    self._controller(key).on_lost()
            case outputs.SettleCompletion():
                self._agenda.after(0.0, self._settle, output)
            case outputs.PublishNotice(kind):
                self._meter.notices[kind] = self._meter.notices.get(kind, 0) + 1
            case _:
                pass

    def _settle(self, output: outputs.SettleCompletion) -> None:
        """Settle an operation by its stored outcome, or else by the given one."""
        is_stored = output.key in self._nodes.completed
        outcome = Outcome.COMPLETED if is_stored else output.completion.outcome
        error = None if is_stored else output.completion.error
        now_s = self._agenda.now_s
        self._append(
            OperationFinished(output.key, output.kind, outcome, 0, 0, now_s, 0.0, error=error)
        )

    # --- faults ---------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        match fault:
            case NodeFault():
                if self.is_over:
                    return
                self._agenda.after(fault.down_s, self._nodes.bring_back, NodeId(fault.node))
                self._nodes.lose(NodeId(fault.node), "the node failed")
            case Crash():
                self._controllers[fault.tenant, fault.job].crash()
            case WorkersDie():
                self._nodes.crash(fault.deployment, "the workers died")
