"""A mesh around the scheduler's core in virtual time: nodes that obey, die and answer late.

The rules that agents, ranks and state managers keep are asserted here: a permit names the open
epoch and the right `prev`, an operation's payload is still in its stream when it runs, a seal is
taken between operations. A deployment's state is modelled by what it was made from, so that two
runs can be compared.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from phaseloom.common.contract.commands import (
    AdjustClaims,
    CancelOperation,
    CloseActivation,
    Command,
    MirrorState,
    OpenActivation,
    Permit,
    PrefetchState,
    ReleaseVersions,
    SealState,
    StartWpg,
    StopWpg,
)
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import (
    ActivationOpened,
    ActivationRefused,
    CancelRequested,
    ClaimsAdjusted,
    Event,
    JobSubmitted,
    NodeUp,
    OperationFinished,
    PermitReturned,
    QueuedOperation,
    SchedulerConfigured,
    SealCommitted,
    StateMirrored,
    StateSnapshotTaken,
    TailGathered,
    TimerFired,
    WpgLost,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.kinds import MUTATING_KINDS
from phaseloom.common.contract.operations import After, Outcome
from phaseloom.common.contract.specs import (
    Batching,
    CommandId,
    DeploymentSpec,
    DeviceSpec,
    JobSpec,
    Layout,
    ModelSpec,
    Residency,
    SchedulerConfig,
)
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.placement import repack
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.state.outputs import Output
from phaseloom.scheduler.core.validate import validate

CONFIG = SchedulerConfig(
    placement="pack",
    ordering="hrrs",
    idle_grace_s=0.03,
    quantum_s=2.0,
    seal_every=0,
    max_losses=50,
    max_reading=64,
    phase_hold_s=1.0,
    speculative_switch_in=True,
    outcome_retention_s=1e12,
    node_grace_s=0.0,
    node_gone_s=0.0,
)
STATE_BYTES = 10
TENANT = "t"
_FB = "forward_backward"

State = tuple[object, ...]


def deployment(job: str, name: str) -> DeploymentKey:
    return DeploymentKey(TENANT, job, name)


@dataclass
class Ranks:
    """One WPG's processes."""

    incarnation: int
    state: State
    applied: int
    node: NodeId
    """The leader's."""
    devices: dict[NodeId, list[int]] = field(default_factory=dict)
    epochs: dict[NodeId, int] = field(default_factory=dict)
    opened: dict[NodeId, int] = field(default_factory=dict)
    """Epochs that nodes have said are open."""
    running: dict[str, str] = field(default_factory=dict)
    """Operation → kind."""
    freed: list[int] = field(default_factory=list)
    """Ranks with nothing to do while the tail of what runs goes on elsewhere."""
    units: list[int] = field(default_factory=list)
    """Compute units of its device that what runs may be using; none: all of them."""
    adjusted: CommandId | None = None
    """The newest command that told its units."""

    @property
    def all_places(self) -> list[tuple[NodeId, int]]:
        """Of each rank."""
        return [(node, index) for node, indices in self.devices.items() for index in indices]

    @property
    def places(self) -> set[tuple[NodeId, int]]:
        """Those of ranks that may have something to do."""
        return {place for rank, place in enumerate(self.all_places) if rank not in self.freed}


@dataclass
class World:
    config: SchedulerConfig = CONFIG
    seed: int = 0
    duration_s: float = 0.1
    boundary_s: float = 0.03
    """How long a rank takes to give up units."""
    units_asked: dict[CommandId, list[int]] = field(default_factory=dict)
    """By command: the units that a rank was asked to keep."""
    gathers: bool = False
    """Whether tails are gathered, half-way through an operation."""
    core: Core = field(default_factory=Core)
    now_s: float = 1000.0
    log: list[tuple[float, Event]] = field(default_factory=list)
    outputs: list[list[Output]] = field(default_factory=list)
    done: dict[str, Outcome] = field(default_factory=dict)
    payloads: dict[str, QueuedOperation] = field(default_factory=dict)
    ranks: dict[DeploymentKey, Ranks] = field(default_factory=dict)
    alive: dict[tuple[DeploymentKey, NodeId], int] = field(default_factory=dict)
    """Incarnation of which a node has ranks that it has not told are dead."""
    homes: dict[DeploymentKey, list[NodeId]] = field(default_factory=dict)
    """Nodes of the last life."""
    seals: dict[DeploymentKey, dict[int, State]] = field(default_factory=dict)
    parts: dict[tuple[DeploymentKey, int, int], set[int]] = field(default_factory=dict)
    """Of each seal of each life: which are written, by the rank that they begin with."""
    files: dict[NodeId, set[tuple[DeploymentKey, int, int]]] = field(default_factory=dict)
    """On each node's disk: seals, and which part of them."""
    mirror_error: ErrorInfo | None = None
    """Why no node can take a copy."""
    versions: dict[VersionKey, State] = field(default_factory=dict)
    """In the memory of the policies' node, or on its disk."""
    durable_versions: set[VersionKey] = field(default_factory=set)
    kept: dict[VersionKey, set[NodeId]] = field(default_factory=dict)
    """Of deleted policies' versions: other nodes that have fetched them."""
    on_device: dict[tuple[NodeId, int], set[DeploymentKey]] = field(default_factory=dict)
    """Whose state is where, as the state managers have it."""
    latency_s: float = 0.0
    """Of an activation, beside its copies."""
    hinted: dict[tuple[DeploymentKey, NodeId], int] = field(default_factory=dict)
    """Incarnation of what a node was told will be needed, and was neither opened nor withdrawn."""
    num_devices: int = 1
    """Of each node."""
    replan_s: float | None = None
    """How long it takes to compute what is worth moving; None: it is never answered."""
    was_refused: bool = False
    """An activation was: what it should have displaced may be on its devices, or not."""
    checkpoints: dict[tuple[DeploymentKey, str], State] = field(default_factory=dict)
    failing: dict[str, ErrorInfo] = field(default_factory=dict)
    """Operations that fail without an effect, and how."""
    write_s: float = 0.0
    """How long a `save_state` takes from its snapshot until it is durable; 0: it takes
    none, its deployment waits for it."""
    saved: dict[str, State] = field(default_factory=dict)
    """By each `save_state`."""
    saves: dict[str, dict[str, str]] = field(default_factory=dict)
    """`save_state`s with a controller's blob: the checkpoints that they name."""
    runs: list[tuple[float, float, str]] = field(default_factory=list)
    """(start, end, operation) as executed."""
    commands: list[Command] = field(default_factory=list)
    node_names: dict[str, str] = field(default_factory=lambda: {"r0": "rollout", "t0": "train"})
    """Nodes that are up from the start, and their pools."""
    revisions: dict[str, int] = field(default_factory=dict)
    """Of the nodes' leases."""
    _pending: list[tuple[float, int, Event]] = field(default_factory=list)
    kinds: dict[tuple[DeploymentKey, object], str] = field(default_factory=dict)
    """Of every operation that was queued, by its slot."""
    _counter: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.later(0, SchedulerConfigured(self.config))
        for name in self.node_names:
            self.later(0, self._node_up(name))

    # --- driving --------------------------------------------------------------------------------

    def later(self, delay_s: float, event: Event) -> None:
        self._counter += 1
        heapq.heappush(self._pending, (self.now_s + delay_s, self._counter, event))

    def run(self, until_s: float = 1e9, steps: int = 100_000) -> None:
        """Until nothing is pending, or for so many events."""
        while self._pending and self._pending[0][0] <= until_s and steps > 0:
            time_s, _, event = heapq.heappop(self._pending)
            self.now_s = max(self.now_s, time_s)
            if self._is_stillborn(event):
                continue
            steps -= 1
            self.feed(event)
        assert steps > 0, "the world does not come to rest"

    @property
    def next_s(self) -> float:
        """When the next event is due."""
        assert self._pending, "nothing is pending"
        return self._pending[0][0]

    def _is_stillborn(self, event: Event) -> bool:
        """What a process that has died meanwhile would have said."""
        if isinstance(event, OperationFinished) and event.incarnation == 0:
            return False
        if isinstance(event, OperationFinished | WpgStarted | StateSnapshotTaken):
            key = event.deployment if isinstance(event, WpgStarted) else event.key.deployment_key
            ranks = self.ranks.get(key)
            return ranks is None or ranks.incarnation != event.incarnation
        if isinstance(event, TailGathered):
            ranks = self.ranks.get(event.operations[0].deployment_key)
            return ranks is None or ranks.incarnation != event.incarnation
        if isinstance(event, ClaimsAdjusted):
            ranks = self.ranks.get(event.deployment)
            return ranks is None or ranks.incarnation != event.incarnation
        return False

    def feed(self, event: Event) -> list[Output]:
        self.log.append((self.now_s, event))
        if isinstance(event, OperationFinished) and event.incarnation:
            self._effect(event)
        if isinstance(event, StateSnapshotTaken):
            self._save(event.key)
        if isinstance(event, TailGathered):
            self._gather(event)
        if isinstance(event, ClaimsAdjusted):
            self._shrink(event)
        if isinstance(event, WpgLost):
            self._bury(event.deployment, event.incarnation, event.node)
        if isinstance(event, ActivationOpened) and event.deployment in self.ranks:
            self.ranks[event.deployment].opened[event.node] = event.epoch
        made = self.core.step(len(self.log), self.now_s, event)
        validate(self.core.state)
        self.outputs.append(made)
        for output in made:
            self._perform(output)
        return made

    # --- obeying --------------------------------------------------------------------------------

    def check_replay(self, snapshot_every: int = 50) -> None:
        """I7: the log alone gives every output again, also where snapshots are restored meanwhile.

        Args: snapshot_every: entries between two snapshots; 0: none is restored.
        """
        again = Core()
        for sequence, ((time_s, event), made) in enumerate(
            zip(self.log, self.outputs, strict=True), start=1
        ):
            assert again.step(sequence, time_s, event) == made
            if snapshot_every and sequence % snapshot_every == 0:
                again = Core.restore(again.snapshot())
        assert again.snapshot() == self.core.snapshot()

    def _perform(self, output: Output) -> None:
        match output:
            case outputs.SendCommand(command):
                self.commands.append(command)
                self._obey(command)
            case outputs.SetTimer(timer, due_s):
                self.later(max(0.0, due_s - self.now_s), TimerFired(timer))
            case outputs.WriteCompletion(key, completion, _):
                self.done.setdefault(str(key), completion.outcome)
            case outputs.SettleCompletion(key, kind, completion, _):
                outcome = self.done.setdefault(str(key), completion.outcome)
                error = None if outcome is Outcome.COMPLETED else completion.error
                settled = OperationFinished(key, kind, outcome, 0, 0, self.now_s, 0.0, error=error)
                self.later(0.01, settled)
            case outputs.ComputeReplan() if self.replan_s is not None:
                self.later(self.replan_s, repack.compute(output))
            case outputs.DeleteOperations(keys):
                for key in keys:
                    self.payloads.pop(str(key), None)
            case _:
                pass

    def _obey(self, command: Command) -> None:  # noqa: PLR0912 - one arm a command
        match command:
            case StartWpg():
                self._start(command)
            case OpenActivation():
                self._open(command)
            case Permit():
                self._permit(command)
            case SealState():
                self._seal(command)
            case MirrorState():
                self._mirror(command)
            case PrefetchState():
                self._hint(command)
            case CloseActivation():
                self._take_off(command.deployment, command.node)
            case CancelOperation():
                self._cancel(command)
            case AdjustClaims():
                self._adjust(command)
            case ReleaseVersions():
                for version in command.versions:
                    self.versions.pop(version, None)
                    self.durable_versions.discard(version)
            case StopWpg():
                ranks = self.ranks.get(command.deployment)
                if ranks is not None and command.node in ranks.devices:
                    self._die(command.deployment)
                if command.forget:
                    self._forget(command.deployment, command.node)
                self.later(0.05, lost(command.deployment, command.incarnation, command.node))
            case _:
                pass

    def _hint(self, command: PrefetchState) -> None:
        """Of a life's state that is not on all of its devices, once until it is needed no more."""
        key, node = command.deployment, command.node
        ranks = self.ranks[key]
        assert command.incarnation == ranks.incarnation, f"{key}: a hint for another life"
        is_told = self.hinted.pop((key, node), 0) == ranks.incarnation
        assert is_told == (command.in_s is None), f"{key}: told twice, or withdrawn untold"
        if command.in_s is not None:
            assert command.in_s >= 0, f"{key}: needed {command.in_s} s from now"
            here = [self.on_device.get(place, set()) for place in ranks.places]
            assert not all(key in keys for keys in here), f"{key}: a hint for what is there"
            self.hinted[key, node] = ranks.incarnation

    def _start(self, command: StartWpg) -> None:
        key = command.deployment
        seals = self.seals.get(key, {})
        state = seals.get(command.seal_seq, ())
        applied = command.seal_seq or command.applied
        if command.seal_seq:
            assert command.seal_seq in seals, "started from a seal that was never taken"
            self._fetch(command, command.rank_offset)
        elif command.checkpoint:
            state = self.checkpoints[key, command.checkpoint]
        nodes = command.nodes or [command.node]
        for (other, node), incarnation in self.alive.items():
            # A node by itself does one thing after the other.
            is_dead = other != key or node == command.node or incarnation == command.incarnation
            assert is_dead, f"{key}: started while {incarnation} lives on {node}"
        self.alive[key, command.node] = command.incarnation
        ranks = self.ranks.get(key)
        if ranks is None or ranks.incarnation != command.incarnation:
            assert command.node == nodes[0], "started by another than the leader's node"
            if self.homes.setdefault(key, nodes) != nodes:
                self._leave(key)
                self.homes[key] = nodes
            ranks = self.ranks[key] = Ranks(command.incarnation, state, applied, command.node)
        assert command.rank_offset == sum(len(indices) for indices in ranks.devices.values())
        ranks.devices[command.node] = command.devices
        started = WpgStarted(key, command.incarnation, command.node, STATE_BYTES, applied)
        jitter_s = self.random.uniform(0.0, 0.5) if command.nodes else 0.0
        self.later(0.5 + jitter_s, started)

    def _fetch(self, command: StartWpg | MirrorState, offset: int) -> None:
        """It has, or gets from the first source that has it, the part of the seal that begins with
        this rank. All parts have one name: it must have no other that counts."""
        file = (command.deployment, command.seal_seq, offset)
        deployment = self.core.state.deployments[str(command.deployment)]
        for index, holders in enumerate(deployment.durability.replicas):
            if command.node in holders and command.seal_seq == deployment.durability.seal_seq:
                begin = sum(
                    len(assigned.devices) for assigned in deployment.wpg.assignments[:index]
                )
                assert begin == offset, f"{file}: {command.node} has another part of it"
        up = {f"{name}:1": NodeId(name) for name, n in self.core.state.nodes.items() if n.is_up}
        sources = [up[source] for source in command.sources if source in up]
        if any(file in self.files.get(node, set()) for node in [command.node, *sources]):
            self._write(command.node, file)
            return
        raise AssertionError(f"{file}: nobody has it of {sources}")

    def _write(self, node: NodeId, file: tuple[DeploymentKey, int, int]) -> None:
        """In place of another part of the seal, as an earlier life may have left."""
        others = {other for other in self.files.get(node, set()) if other[:2] != file[:2]}
        self.files[node] = {*others, file}

    def _mirror(self, command: MirrorState) -> None:
        error = self.mirror_error
        if command.seal_seq and error is None:
            layout = self.core.state.deployments[str(command.deployment)].spec.layout
            assert command.num_ranks == layout.num_ranks, "any part would do"
            self._fetch(command, command.rank_offset)
        if command.keeps is not None and error is None:
            assert command.keeps.version in self.versions, f"{command.keeps.version} is gone"
            self.kept.setdefault(command.keeps.version, set()).add(command.node)
        key = command.deployment
        done = StateMirrored(key, command.seal_seq, command.node, command.id, error)
        self.later(self.random.uniform(0.01, 0.3), done)

    def _leave(self, key: DeploymentKey) -> None:
        """Versions in the memory of the nodes that it was on are not on those where it goes."""
        for version in [v for v in self.versions if v.policy == key]:
            if version not in self.durable_versions:
                del self.versions[version]

    def _seal(self, command: SealState) -> None:
        key = command.deployment
        ranks = self.ranks[key]
        assert ranks.applied == command.seq, "sealed at another seq than the state's"
        offset = next(
            sum(len(ranks.devices[n]) for n in list(ranks.devices)[:index])
            for index, node in enumerate(ranks.devices)
            if node == command.node
        )
        for node in (command.node, *command.replicas):
            self._write(node, (key, command.seq, offset))
        parts = self.parts.setdefault((key, command.seq, command.incarnation), set())
        parts.add(offset)
        if len(parts) == len(ranks.devices):
            self.seals.setdefault(key, {})[command.seq] = ranks.state
            self.durable_versions |= {VersionKey(key, seq) for seq in command.versions}
        copies = list(command.replicas)
        sealed = SealCommitted(key, command.seq, command.node, command.versions, copies)
        self.later(self.random.uniform(0.01, 0.2), sealed)

    def _open(self, command: OpenActivation) -> None:
        ranks = self.ranks[command.deployment]
        assert ranks.incarnation == command.incarnation
        epoch = ranks.epochs.get(command.node, 0)
        assert command.epoch > epoch, "an epoch that is not newer"
        ranks.epochs[command.node] = command.epoch
        self.hinted.pop((command.deployment, command.node), None)
        places = [ranks.all_places[rank] for rank in command.ranks] or ranks.all_places
        own = [device for node, device in places if node == command.node]
        for key in command.displaces:
            on_node = [on for (node, _), on in self.on_device.items() if node == command.node]
            is_there = any(key in on for on in on_node)
            assert is_there or self.was_refused, f"{key} displaced, and is on no device"
            self._take_off(key, command.node, own)
        for device in own:
            here = self.on_device.setdefault((command.node, device), set())
            here.add(command.deployment)
            memory_bytes = self.core.state.nodes[command.node].devices[device].memory_bytes
            used_bytes = len(here) * STATE_BYTES
            assert used_bytes <= memory_bytes, f"I3: {here} on device {device}"
        opened = ActivationOpened(
            deployment=command.deployment,
            epoch=command.epoch,
            node=command.node,
            started_unix_s=self.now_s,
            offload_s=0.01,
            load_s=0.01,
            bytes_out=1,
            bytes_in=1,
            is_speculative=command.is_speculative,
        )
        takes_s = 0.02 if len(ranks.devices) == 1 else self.random.uniform(0.01, 0.2)
        self.later(self.latency_s + takes_s, opened)

    def _take_off(
        self, key: DeploymentKey, on: NodeId | None = None, devices: list[int] | None = None
    ) -> None:
        """Args: on: this node only. devices: these only."""
        for (node, device), here in self.on_device.items():
            if on in (None, node) and (devices is None or device in devices):
                here.discard(key)

    def _check_alone(self, key: OperationKey, kind: str) -> None:
        """Mutating operations run alone, and one deployment at a time uses a device."""
        ranks = self.ranks[key.deployment_key]
        others = {*ranks.running.values()}
        is_alone = not others if kind in MUTATING_KINDS else not others & MUTATING_KINDS
        assert is_alone, f"I1 {key}: permitted beside {ranks.running}"
        assert len(ranks.running) < self.config.max_reading
        for place in ranks.places:
            assert key.deployment_key in self.on_device[place], f"{key}: it is not on {place}"
        self._check_shares(key.deployment_key)

    def _check_shares(self, key: DeploymentKey) -> None:
        """What it runs with, no other on its device may be using."""
        ranks = self.ranks[key]
        for name, other in self.ranks.items():
            if name != key and other.places & ranks.places and other.running:
                is_divided = ranks.units and other.units and not {*ranks.units} & {*other.units}
                assert is_divided, f"I3 {key}: {ranks.units} beside {name}: {other.units}"

    def _adjust(self, command: AdjustClaims) -> None:
        """The rank gives up units at its next boundary, and says so; it takes others at once."""
        ranks = self.ranks[command.deployment]
        assert ranks.incarnation == command.incarnation
        assert command.units, f"{command.deployment}: less than a unit"
        assert ranks.running, f"{command.deployment}: adjusted, and runs nothing"
        ranks.adjusted = command.id
        if not command.shrinks:
            ranks.units = command.units
            self._check_shares(command.deployment)
            return
        self.units_asked[command.id] = command.units
        self.later(
            self.boundary_s * self.random.uniform(0.1, 2),
            ClaimsAdjusted(command.deployment, command.incarnation, command.node, command.id),
        )

    def _shrink(self, event: ClaimsAdjusted) -> None:
        ranks = self.ranks[event.deployment]
        if ranks.adjusted == event.command:
            ranks.units = self.units_asked[event.command]

    def _permit(self, command: Permit) -> None:
        key = command.operation
        ranks = self.ranks[key.deployment_key]
        absent = set(range(len(ranks.all_places))) - set(command.ranks)
        freed = sorted(absent) if command.ranks else []
        is_alike = ranks.freed == freed or not ranks.running
        assert is_alike, f"{key}: permitted on {command.ranks}, another runs without {ranks.freed}"
        ranks.freed = freed
        if not ranks.running:
            ranks.units, ranks.adjusted = command.units, command.id
        self._check_alone(key, command.kind)
        assert command.incarnation == ranks.incarnation
        assert command.node == ranks.node, f"{key}: permitted elsewhere than at its leader"
        for node in ranks.devices:
            assert command.epoch == ranks.epochs[node], f"{key}: permitted in another epoch"
            is_ready = len(ranks.devices) == 1 or ranks.opened.get(node) == command.epoch
            assert is_ready, f"{key}: permitted before it was open on {node}"
        assert str(key) in self.payloads, f"{key}: its payload is gone"
        if command.kind in MUTATING_KINDS:
            assert command.prev == ranks.applied, f"{key}: prev {command.prev}"
        version = self.payloads[str(key)].version
        if version is not None:
            assert version in self.versions, f"{key}: version {version} is not there"
        error = self.failing.get(str(key))
        if command.partial:
            assert command.kind == "optim_step"
            error = ErrorInfo(Code.FAILED_PRECONDITION, "a part of the batch is missing")
        ranks.running[str(key)] = command.kind
        duration_s = self.duration_s * self.random.uniform(0.5, 1.5)
        self.runs.append((self.now_s, self.now_s + duration_s, str(key)))
        finished = OperationFinished(
            key=key,
            kind=command.kind,
            outcome=Outcome.FAILED if error else Outcome.COMPLETED,
            epoch=command.epoch,
            incarnation=command.incarnation,
            started_unix_s=self.now_s,
            duration_s=duration_s,
            replay=command.replay,
            error=error,
            checkpoints=self.saves.get(str(key), {}),
        )
        if command.kind == "save_state" and self.write_s and not command.replay:
            self.later(duration_s, StateSnapshotTaken(key, command.epoch, command.incarnation))
            duration_s += self.write_s * self.random.uniform(0.5, 1.5)
        if command.tail_on and self.gathers:
            num_ranks = len(ranks.all_places)
            freed = [rank for rank in range(num_ranks) if rank not in command.tail_on]
            gathered = TailGathered([key], command.epoch, command.incarnation, freed)
            self.later(duration_s / 2, gathered)
        self.later(duration_s, finished)

    def _gather(self, event: TailGathered) -> None:
        """The freed ranks have nothing to do, unless others began meanwhile."""
        ranks = self.ranks[event.operations[0].deployment_key]
        if list(ranks.running) == [str(key) for key in event.operations]:
            ranks.freed = event.freed

    def _save(self, key: OperationKey) -> None:
        """Its snapshot is taken; if it was before, then of the same state."""
        ranks = self.ranks[key.deployment_key]
        ranks.running.pop(str(key), None)
        state = self.saved.setdefault(str(key), ranks.state)
        assert key.seq is None or state == ranks.state, f"{key}: saved again with another content"

    def _cancel(self, command: CancelOperation) -> None:
        """A reading operation that runs is stopped at once."""
        for index, (_, _, event) in enumerate(self._pending):
            if isinstance(event, OperationFinished) and event.key == command.operation:
                del self._pending[index]
                heapq.heapify(self._pending)
                error = ErrorInfo(Code.ABORTED, "cancelled")
                self.later(0, replace(event, outcome=Outcome.CANCELLED, error=error))
                return

    def _effect(self, event: OperationFinished) -> None:
        ranks = self.ranks[event.key.deployment_key]
        if event.kind == "save_state" and str(event.key) in ranks.running:
            self._save(event.key)
        ranks.running.pop(str(event.key), None)
        if not ranks.running:
            ranks.freed = []
        self.done.setdefault(str(event.key), event.outcome)
        for name, checkpoint in event.checkpoints.items():
            key = DeploymentKey(event.key.tenant, event.key.job, name)
            own = key == event.key.deployment_key
            state = self.saved[str(event.key)] if own else self.ranks[key].state
            self.checkpoints[key, checkpoint] = state
        if event.kind == "optim_step" and event.outcome is Outcome.FAILED:
            # Refused: the gradients are zeroed.
            while ranks.state and self._kind(event.key, ranks.state[-1]) == _FB:
                ranks.state = ranks.state[:-1]
        if event.kind in MUTATING_KINDS and event.outcome is Outcome.COMPLETED:
            seq = event.key.seq
            assert seq is not None
            assert seq > ranks.applied
            ranks.applied = seq
            if event.kind == "sync_weights":
                ranks.state = (str(self.payloads[str(event.key)].version),)
            elif event.kind == "publish_weights":
                version = VersionKey(event.key.deployment_key, seq)
                state = self.versions.setdefault(version, ranks.state)
                assert state == ranks.state, f"{version} was made again with another content"
            elif event.kind == "load_state":
                ranks.state = (f"loaded by {seq}",)
            else:
                ranks.state = (*ranks.state, seq)

    def _kind(self, key: OperationKey, slot: object) -> str:
        return self.kinds.get((key.deployment_key, slot), "")

    # --- disturbing -----------------------------------------------------------------------------

    def kill(
        self,
        key: DeploymentKey,
        *,
        after_done: bool = False,
        on: NodeId | None = None,
        culprits: Sequence[DeploymentKey] = (),
    ) -> None:
        """kill -9 of the ranks; with `after_done`, just after DONE was stored, before its word.

        Args: on: the node that they are killed on, of several.
              culprits: the deployments at work in the process, where several share it.
        """
        ranks = self._die(key)
        if ranks is None:
            return
        for operation in list(ranks.running)[:1]:
            if after_done:
                self.done.setdefault(operation, Outcome.COMPLETED)
        self.feed(lost(key, ranks.incarnation, on or ranks.node, culprits))

    def _forget(self, key: DeploymentKey, node: NodeId) -> None:
        """The node drops all that it has of it, in memory and on disk."""
        ranks = self.ranks.get(key)
        if ranks is not None and node in ranks.devices:
            return  # of the same name, and newer
        self.files[node] = {file for file in self.files.get(node, set()) if file[0] != key}
        every = {file for files in self.files.values() for file in files}
        for (other, seq, _), parts in self.parts.items():
            left = {file[2] for file in every if file[:2] == (key, seq)}
            if other == key and not parts <= left:
                self.seals.get(key, {}).pop(seq, None)
        if ranks is not None or node not in self.homes.get(key, [node]):
            return  # it has moved away
        self.seals.pop(key, None)
        for version in [v for v in self.versions if v.policy == key]:
            del self.versions[version]
            self.durable_versions.discard(version)

    def _bury(self, key: DeploymentKey, incarnation: int, node: NodeId) -> None:
        if self.alive.get((key, node)) == incarnation:
            del self.alive[key, node]

    def _die(self, key: DeploymentKey) -> Ranks | None:
        self._take_off(key)
        return self.ranks.pop(key, None)

    def return_permit(self, key: DeploymentKey) -> None:
        """What this deployment's operation needs cannot be reached: it is not run."""
        (_, _, finished) = next(
            entry
            for entry in self._pending
            if isinstance(entry[2], OperationFinished) and entry[2].key.deployment_key == key
        )
        assert isinstance(finished, OperationFinished)
        self._pending = [entry for entry in self._pending if entry[2] is not finished]
        heapq.heapify(self._pending)
        del self.ranks[key].running[str(finished.key)]
        away = ErrorInfo(Code.UNAVAILABLE, "no source answers")
        self.feed(PermitReturned(finished.key, finished.epoch, finished.incarnation, away))

    def refuse(self, command: OpenActivation) -> None:
        """The switch-in was rolled back: what it was opened for has not run."""
        self.was_refused = True
        key = command.deployment
        self.ranks[key].running.clear()
        self._take_off(key, command.node)
        self.drop(
            lambda event: (
                (isinstance(event, OperationFinished) and event.key.deployment_key == key)
                or (
                    isinstance(event, ActivationOpened)
                    and (event.deployment, event.epoch, event.node)
                    == (key, command.epoch, command.node)
                )
            )
        )
        error = ErrorInfo(Code.UNAVAILABLE, "rolled back")
        self.feed(ActivationRefused(key, command.epoch, command.node, error))

    def pending(self) -> list[Event]:
        """What will be said, if nothing comes between."""
        return [event for _, _, event in self._pending]

    def drop(self, is_dropped: Callable[[Event], bool]) -> None:
        """What would have been said is not."""
        self._pending = [entry for entry in self._pending if not is_dropped(entry[2])]
        heapq.heapify(self._pending)

    def lose_train_node(self) -> None:
        """kill -9 of its state manager: ranks and memory go, the disk stays; it comes back."""
        self.lose_node("t0")
        self.bring_back("t0")

    def lose_node(self, name: str) -> None:
        """What is on its disk comes back with it, if it does."""
        node = NodeId(name)
        for key in [key for key, ranks in self.ranks.items() if node in ranks.devices]:
            self._die(key)
        for key, home in [place for place in self.alive if place[1] == node]:
            del self.alive[key, home]
        for version in [v for v in self.versions if node in self.homes.get(v.policy, [])]:
            if version not in self.durable_versions and not self.kept.get(version, set()) - {node}:
                del self.versions[version]

    def bring_back(self, name: str) -> None:
        self.revisions[name] = self.revisions.get(name, 1) + 1
        self.feed(self._node_up(name))

    def _node_up(self, name: str) -> NodeUp:
        revision = self.revisions.setdefault(name, 1)
        pool = self.node_names[name]
        return node_up(name, pool, revision=revision, num_devices=self.num_devices)

    # --- what controllers do --------------------------------------------------------------------

    def submit(
        self, job: str, policy: bool = True, *, num_ranks: int = 1, num_nodes: int = 1
    ) -> None:
        """Args: num_ranks: of the sampler and of the policy; num_nodes: that they are on."""
        spread = partial(spec, num_ranks=num_ranks, num_nodes=num_nodes)
        specs = [spread("sampler", "rollout"), spec("reference", "rollout")]
        if policy:
            specs.append(spread("policy", "train", trainable=True))
        self.later(
            0, JobSubmitted(JobKey(TENANT, job), JobSpec(deployments=specs), f"submit-{job}")
        )

    def queue(
        self,
        job: str,
        name: str,
        slot: int | str,
        kind: str,
        after: tuple[tuple[str, int], ...] = (),
        version: int | None = None,
        error: ErrorInfo | None = None,
        delay_s: float = 0.0,
    ) -> QueuedOperation:
        key = OperationKey(TENANT, job, name, str(slot))
        self.kinds[key.deployment_key, slot] = kind
        event = QueuedOperation(
            key=key,
            id=f"id-{key}",
            kind=kind,
            after=[After(d, s) for d, s in after],
            version=VersionKey(deployment(job, "policy"), version) if version else None,
            error=error,
        )
        self.payloads[str(key)] = event
        self.later(delay_s, event)
        return event

    def cancel(self, job: str, name: str, slot: int | str) -> None:
        key = OperationKey(TENANT, job, name, str(slot))
        self.feed(CancelRequested(key, f"cancel-{key}"))

    def states(self) -> dict[DeploymentKey, State]:
        return {key: ranks.state for key, ranks in self.ranks.items()}


def spec(
    name: str, pool: str, *, trainable: bool = False, num_ranks: int = 1, num_nodes: int = 1
) -> DeploymentSpec:
    return DeploymentSpec(
        name,
        pool,
        "fsdp" if trainable else "sampler",
        ModelSpec({}),
        trainable=trainable,
        batching=Batching.SHARED,
        layout=Layout(dp=num_ranks),
        num_nodes=num_nodes,
    )


def node_up(
    name: str,
    pool: str,
    *,
    revision: int = 1,
    memory_bytes: int = 2 * STATE_BYTES,
    residency: Residency = Residency.JOB,
    num_devices: int = 1,
    host_memory_bytes: int = 1000,
    units: int = 1,
) -> NodeUp:
    devices = [DeviceSpec(memory_bytes, units)] * num_devices
    return NodeUp(
        NodeId(name),
        pool,
        devices,
        host_memory_bytes,
        revision,
        f"{name}:1",
        residency,
    )


def lost(
    key: DeploymentKey, incarnation: int, node: NodeId, culprits: Sequence[DeploymentKey] = ()
) -> WpgLost:
    killed = ErrorInfo(Code.UNAVAILABLE, "killed")
    return WpgLost(key, incarnation, node, killed, list(culprits))
