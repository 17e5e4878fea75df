"""Emulated nodes, which take the time of agents, ranks and state managers.

Unless its pool says otherwise, a node has one device, which stands for all of its accelerators. A
node answers a command in a later action, never within the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from phaseloom.common.contract import commands, events
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import DeviceSpec, Residency, SlowdownTable
from phaseloom.simulator.agenda import NEVER_S, Agenda
from phaseloom.simulator.jobs import SimJob
from phaseloom.simulator.metering import Meter, NodeMeter
from phaseloom.simulator.shareddevice import SharedDevice, Work, claim_of

_NOT_LIMITED = 2**60


class PoolSpec(msgspec.Struct, frozen=True):
    pool: str
    num_nodes: int
    price_per_hour: float = 1.0
    host_bytes: int = _NOT_LIMITED
    num_gpus: int = 8
    """GPUs of a node, for the number of GPUs in results."""
    num_devices: int = 1
    units: int = 1
    """Compute units of a device. A device with several holds states of several jobs, whose
    operations may run at the same time."""
    device_bytes: int = _NOT_LIMITED
    """Memory of a device."""


class Costs(msgspec.Struct, frozen=True):
    """Durations of work that is the same for all jobs."""

    stop_s: float = 0.0
    """Time to kill the workers of a deployment."""
    restart_s: float = 0.0
    """Time from the death of workers until new ones start on the same nodes."""
    seal_s: float = 0.0
    mirror_s: float = 0.0
    """Time to copy the state of a deployment to another node while it continues to run."""


FREE = Costs()


@dataclass(eq=False, slots=True)
class _Ranks:
    """The processes of one WPG."""

    key: DeploymentKey
    name: str
    job: SimJob
    label: str
    """The job's key as text."""
    incarnation: int
    nodes: list[NodeId]
    applied: int
    start_s: float
    """Time from the command until the processes are up."""
    num_ranks: int
    epoch: int = 0
    open_s: dict[NodeId, float] = field(default_factory=dict)
    """Node → when the activation is open there."""
    running: dict[OperationKey, float] = field(default_factory=dict)
    """Running operation → when it ends."""
    is_alive: bool = True


class Nodes:
    """All nodes of a cluster.

    Args: duration_s: returns the time that an operation, replayed or not, takes alone.
          ran: called with each operation that completes for the first time, and its start.
    """

    def __init__(
        self,
        agenda: Agenda,
        append: Callable[[events.Event], None],
        meter: Meter,
        *,
        jobs: dict[tuple[str, str], SimJob],
        duration_s: Callable[[OperationKey], float],
        ran: Callable[[OperationKey, float], None],
        costs: Costs,
        slowdowns: SlowdownTable | None = None,
    ) -> None:
        self._agenda = agenda
        self._append = append
        self._meter = meter
        self._jobs = jobs
        self._duration_s = duration_s
        self._ran = ran
        self._costs = costs
        self._slowdowns = slowdowns
        self._shared: dict[NodeId, SharedDevice] = {}
        """Node → the running operations of its device, for devices that are shared in space."""
        self._ranks: dict[DeploymentKey, _Ranks] = {}
        """The newest incarnation of each deployment, alive or not."""
        self._up: dict[NodeId, events.NodeUp] = {}
        self.completed: set[OperationKey] = set()
        """Operations with a stored outcome."""
        self._handlers: dict[type[commands.Command], Callable[..., None]] = {
            commands.StartWpg: self._start,
            commands.StopWpg: self._stop,
            commands.OpenActivation: self._open,
            commands.Permit: self._permit,
            commands.SealState: self._seal,
            commands.MirrorState: self._mirror,
            commands.CancelOperation: self._cancel,
            commands.AdjustClaims: self._adjust,
        }

    # --- nodes ----------------------------------------------------------------------------------

    def start_all(self, pools: Sequence[PoolSpec]) -> None:
        for pool in pools:
            width = len(str(pool.num_nodes - 1))
            for index in range(pool.num_nodes):
                name = f"{pool.pool}-{index:0{width}}"
                self._meter.nodes[name] = NodeMeter(pool.pool, pool.price_per_hour, pool.num_gpus)
                up = events.NodeUp(
                    node=NodeId(name),
                    pool=pool.pool,
                    devices=[DeviceSpec(pool.device_bytes, pool.units)] * pool.num_devices,
                    host_memory_bytes=pool.host_bytes,
                    revision=1,
                    state_endpoint=f"{name}:1",
                    exclusive_residency=Residency.SHARED if pool.units > 1 else Residency.JOB,
                    price_per_hour=pool.price_per_hour,
                )
                if pool.units > 1 and self._slowdowns is not None:
                    assert pool.num_devices == 1, f"{name}: one device stands for all"
                    shared_device = SharedDevice(self._agenda, pool.units, self._slowdowns)
                    self._shared[up.node] = shared_device
                self._up[up.node] = up
                self._agenda.after(0.0, self._append, up)

    def lose(self, node: NodeId, reason: str) -> None:
        """Kill every process on a node. A WPG that spans several nodes dies on all of them."""
        up = self._up[node]
        for ranks in self._ranks.values():
            if node in ranks.nodes:
                _kill(ranks)
        for name in sorted(self._meter.nodes[node].pinned):
            self._meter.unpin(node, name, self._agenda.now_s)
        self._append(events.NodeLost(node, up.revision, reason))

    def bring_back(self, node: NodeId) -> None:
        up = msgspec.structs.replace(self._up[node], revision=self._up[node].revision + 1)
        self._up[node] = up
        self._append(up)

    def crash(self, key: DeploymentKey, reason: str) -> None:
        """Kill the workers of a deployment, while their nodes stay up."""
        ranks = self._ranks.get(key)
        if ranks is None or not ranks.is_alive:
            return
        _kill(ranks)
        error = ErrorInfo(Code.UNAVAILABLE, reason)
        self._append(events.WpgLost(key, ranks.incarnation, ranks.nodes[0], error))

    # --- commands -------------------------------------------------------------------------------

    def perform(self, command: commands.Command) -> None:
        """Carry out a command. A command without a handler takes no time and has no answer."""
        perform = self._handlers.get(type(command))
        if perform is not None:
            perform(command)

    def _start(self, command: commands.StartWpg) -> None:
        """Start a WPG on one of its nodes. Each node receives and answers its own command."""
        ranks = self._ranks.get(command.deployment)
        if ranks is None or ranks.incarnation < command.incarnation:
            ranks = self._new_incarnation(command, ranks)
        self._meter.pin(command.node, ranks.label, ranks.name, self._agenda.now_s)
        self._agenda.after(ranks.start_s, self._started, ranks, command.node)

    def _new_incarnation(self, command: commands.StartWpg, last: _Ranks | None) -> _Ranks:
        key = command.deployment
        nodes = command.nodes or [command.node]
        job = self._jobs[key.tenant, key.job]
        label = str(job.key)
        start_s = job.start_s
        if last is not None and last.nodes == nodes:
            start_s += self._costs.restart_s
        elif last is not None:
            start_s = job.move_s
            self._meter.moved(label, key.deployment)
            for node in last.nodes:
                self._meter.unpin(node, last.name, self._agenda.now_s)
        applied = command.seal_seq or command.applied
        num_ranks = command.spec.layout.num_ranks
        ranks = _Ranks(
            key, str(key), job, label, command.incarnation, nodes, applied, start_s, num_ranks
        )
        self._ranks[key] = ranks
        return ranks

    def _started(self, ranks: _Ranks, node: NodeId) -> None:
        if ranks.is_alive:
            size = 1
            if self._up[node].exclusive_residency is Residency.SHARED:
                size = ranks.job.demand(self._meter.nodes[node].pool).host_bytes
            self._append(
                events.WpgStarted(ranks.key, ranks.incarnation, node, size, ranks.applied, [0])
            )

    def _stop(self, command: commands.StopWpg) -> None:
        key, node = command.deployment, command.node
        ranks = self._ranks.get(key)
        if ranks is not None and node in ranks.nodes and command.incarnation >= ranks.incarnation:
            _kill(ranks)
            if command.forget:
                self._ranks.pop(key)
        if command.forget and key not in self._ranks:
            self._meter.unpin(node, str(key), self._agenda.now_s)
        error = ErrorInfo(Code.UNAVAILABLE, "the WPG was stopped")
        lost = events.WpgLost(key, command.incarnation, node, error)
        self._agenda.after(self._costs.stop_s, self._append, lost)

    def _open(self, command: commands.OpenActivation) -> None:
        ranks = self._ranks[command.deployment]
        now_s, node = self._agenda.now_s, command.node
        if ranks.epoch != command.epoch:
            ranks.epoch = command.epoch
            ranks.open_s.clear()
        pool = self._meter.nodes[node].pool
        leaving = [self._jobs[victim.tenant, victim.job] for victim in command.displaces]
        offload_s = sum(job.demand(pool).offload_s for job in leaving)
        load_s = ranks.job.demand(pool).load_s
        ranks.open_s[node] = open_s = now_s + offload_s + load_s
        self._meter.switched(node, ranks.label, now_s, open_s, displaces=bool(leaving))
        opened = events.ActivationOpened(
            command.deployment,
            command.epoch,
            node,
            now_s,
            offload_s,
            load_s,
            0,
            0,
            displaced=command.displaces,
            is_speculative=command.is_speculative,
        )
        self._agenda.at(open_s, self._opened, ranks, opened)

    def _opened(self, ranks: _Ranks, opened: events.ActivationOpened) -> None:
        if ranks.is_alive:
            self._append(opened)

    def _permit(self, command: commands.Permit) -> None:
        ranks = self._ranks[command.operation.deployment_key]
        start_s = max(self._agenda.now_s, *ranks.open_s.values())
        tail_s, duration_s = 0.0, self._duration_s(command.operation)
        if command.ranks or command.tail_on:
            tail_s = duration_s * ranks.job.tail(command.operation.deployment)
        if len(ranks.nodes) == 1 and command.node in self._shared:
            ranks.running[command.operation] = NEVER_S
            self._agenda.at(start_s, self._run_shared, ranks, command)
            return
        bulk_s = duration_s - tail_s
        if command.ranks:
            # Fewer devices share the same samples, so each takes proportionally longer.
            bulk_s *= ranks.num_ranks / len(command.ranks)
        end_s = start_s + bulk_s + tail_s
        ranks.running[command.operation] = end_s
        if command.tail_on:
            self._agenda.at(start_s + bulk_s, self._gather, ranks, command)
        self._agenda.at(end_s, self._finish, ranks, command, start_s)

    def _run_shared(self, ranks: _Ranks, command: commands.Permit) -> None:
        if not ranks.is_alive or command.operation not in ranks.running:
            return
        shared_device = self._shared[command.node]
        shared_device.set_units(ranks.name, len(command.units))
        work = Work(
            claim_of(ranks.name, ranks.label, command.kind),
            self._duration_s(command.operation),
            partial(self._finish, ranks, command, self._agenda.now_s),
            partial(_is_running, ranks, command.operation),
        )
        shared_device.run(command.operation, work)

    def _adjust(self, command: commands.AdjustClaims) -> None:
        ranks = self._ranks.get(command.deployment)
        if ranks is None or not ranks.is_alive or ranks.incarnation != command.incarnation:
            return
        if command.node in self._shared:
            self._shared[command.node].set_units(ranks.name, len(command.units))
        if command.shrinks:
            adjusted = events.ClaimsAdjusted(
                command.deployment, command.incarnation, command.node, command.id
            )
            self._agenda.after(0.0, self._append, adjusted)

    def _gather(self, ranks: _Ranks, command: commands.Permit) -> None:
        if not ranks.is_alive or command.operation not in ranks.running:
            return
        freed = [rank for rank in range(ranks.num_ranks) if rank not in command.tail_on]
        self._append(
            events.TailGathered([command.operation], command.epoch, command.incarnation, freed)
        )

    def _finish(self, ranks: _Ranks, command: commands.Permit, start_s: float) -> None:
        key = command.operation
        if not ranks.is_alive or key not in ranks.running:
            return
        now_s = self._agenda.now_s
        del ranks.running[key]
        for node in ranks.nodes:
            self._meter.ran(node, ranks.label, command.kind, start_s, now_s)
        if key not in self.completed:
            self.completed.add(key)
            self._ran(key, start_s)
        self._append(
            events.OperationFinished(
                key=key,
                kind=command.kind,
                outcome=Outcome.COMPLETED,
                epoch=command.epoch,
                incarnation=command.incarnation,
                started_unix_s=start_s,
                duration_s=now_s - start_s,
                replay=command.replay,
            )
        )

    def _seal(self, command: commands.SealState) -> None:
        copies = list(command.replicas)
        sealed = events.SealCommitted(
            command.deployment, command.seq, command.node, command.versions, copies
        )
        self._agenda.after(self._costs.seal_s, self._append, sealed)

    def _mirror(self, command: commands.MirrorState) -> None:
        done = events.StateMirrored(command.deployment, command.seal_seq, command.node, command.id)
        self._agenda.after(self._costs.mirror_s, self._append, done)

    def _cancel(self, command: commands.CancelOperation) -> None:
        """Stop a reading operation at once if it is running."""
        ranks = self._ranks.get(command.operation.deployment_key)
        if ranks is None or ranks.running.pop(command.operation, None) is None:
            return
        self._agenda.after(
            0.0,
            self._append,
            events.OperationFinished(
                command.operation,
                "",
                Outcome.CANCELLED,
                ranks.epoch,
                ranks.incarnation,
                self._agenda.now_s,
                0.0,
            ),
        )


def _is_running(ranks: _Ranks, key: OperationKey) -> bool:
    return ranks.is_alive and key in ranks.running


def _kill(ranks: _Ranks) -> None:
    ranks.is_alive = False
    ranks.running.clear()
