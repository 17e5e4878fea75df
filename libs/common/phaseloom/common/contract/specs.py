"""The descriptions of jobs, deployments, devices and the scheduler, which many messages carry.

controller → router, scheduler (`JobSpec`, `DeploymentSpec`); agent → scheduler (`DeviceSpec`);
scheduler's shell → decision log (`SchedulerConfig`); profiler → scheduler (`Cycle`); operator → KV
→ job API (`RegisteredModel`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Any

import msgspec


class ModelFile(msgspec.Struct, frozen=True):
    """A file of a registered model."""

    name: str
    """The file's name in the model's directory."""
    num_bytes: int
    blake3: str
    """The BLAKE3 of the content, in hex."""


class ModelDirectory(msgspec.Struct, frozen=True):
    """A model's files in the Hugging Face layout: config, safetensors, tokenizer."""

    path: str
    """The absolute path, the same on every node that runs the model."""
    files: list[ModelFile]


class RegisteredModel(msgspec.Struct, frozen=True):
    """A model that an operator has registered. operator → KV `models`, by name → job API."""

    name: str
    directory: ModelDirectory
    config: dict[str, Any]
    """The content of `config.json`."""
    num_parameters: int
    """Elements of all tensors in the files."""
    dtypes: list[str]
    """The dtypes of the tensors in the files, sorted."""


class Adapter(msgspec.Struct, frozen=True, omit_defaults=True):
    """Low-rank matrices (LoRA) that are trained in place of a model's own weights, the base.

    The output of a linear layer with weights W becomes W·x + (alpha / rank)·B·A·x. A is drawn
    uniformly from ±1/√(size of x), and B is zero: it begins as the base.
    """

    rank: int = 32
    """The number of rows of A, and of columns of B."""
    alpha: float = 32.0
    seed: int = 0
    """The seed of A."""
    targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """The last names of the linear layers that have an adapter, in all of the model's layers."""


class ModelSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The model to build: a Hugging Face causal-LM config with weights drawn from a seed, or a
    registered model by name."""

    config: dict[str, Any] = {}
    """The config as `config.to_dict()` gives it; `model_type` picks the architecture, `dtype` that
    of the weights: `float32`, or `bfloat16`, which training keeps float32 masters of. With
    `registered` it may be empty: the job API fills in the model's own."""
    init_seed: int = 0
    """The seed of the weights; unused with `registered`."""
    token_texts: list[str] = []
    """The text of each token id, where operations give stop strings; else empty."""
    registered: str = ""
    """The name of a registered model, whose weights the deployment starts from; empty: the weights
    are drawn from `init_seed`."""
    adapter: Adapter | None = None
    """An adapter on the registered model, whose own weights stay as they are then: state, switches,
    versions and checkpoints are the adapter's. None: the model itself."""
    pinned: ModelDirectory | None = None
    """The files that `registered` named when the job was submitted. The job API sets it; it is
    refused from a controller."""


class Layout(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a deployment is spread over its ranks; their number is dp · tp · pp · cp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Experts are spread over the data-parallel ranks: divides dp · cp · tp."""

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


class Batching(StrEnum):
    OPERATION = "operation"
    """Each operation is a batch of its own: its result depends on nothing else that runs."""
    SHARED = "shared"
    """Operations that run at the same time are decoded together. That is faster, and the last bits
    of a result may depend on the others."""


class OptimizerOn(StrEnum):
    DEVICE = "device"
    """The optimizer's state comes and goes with the weights."""
    HOST = "host"
    """The optimizer's state lives in host memory, where `optim_step` runs too: half as many bytes
    on the device and in a switch. The numbers are the same; the step is slower where the device is
    faster than the host."""


class DeploymentSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One logical model of a job. controller → job API → scheduler → agent → ranks."""

    name: str
    pool: str
    """`rollout` or `train`, or any pool name that some node declares."""
    backend: str
    """`fsdp` or `megatron` (trains), `sampler` or `vllm` (generates), or `noop` (answers at once;
    for benches)."""
    model: ModelSpec
    trainable: bool = False
    """Whether it keeps gradients and optimizer state beside the weights."""
    seed: int = 0
    """The seed of the deployment: every operation draws from (this, its seq)."""
    batching: Batching = Batching.OPERATION
    layout: Layout = Layout()
    num_nodes: int = 1
    """The number of nodes of the pool over which the ranks are spread evenly."""
    host_bytes: int = 0
    """The working set in the host memory of each of its nodes, in bytes; 0: not declared."""
    optimizer_on: OptimizerOn = OptimizerOn.DEVICE
    scratch_bytes: int = 0
    """Bytes of each rank's device memory that its runtime needs and nobody moves: the KV cache of
    `vllm`, the prefix cache of `sampler`. They are given back when the deployment leaves the
    device. 0: the backend's choice."""
    prefix_cache: bool = False
    """Whether a `generate` starts from the keys and values that earlier ones have computed for the
    beginning of its prompts, with the same weights, instead of computing them again. The tokens are
    the same; the last bits of log-probabilities may depend on what ran before."""
    tail_share: float = 0.2
    """The share of a call's samples that is its long tail. Once no more than that are left on any
    replica, they may be gathered on fewer replicas, so that another job's work begins on the
    devices of the others. Only where batches are shared, on one node, by replicas of one rank. 0:
    never."""
    max_adapters: int = 0
    """The number of versions of other adapters on its base that each rank of a `sampler` with an
    adapter has room for on its device, beside its own. Each takes as much scratch memory as the
    deployment's own adapter, whose rank and targets are the most that they may have. On `vllm` any
    number is room for the one that a call reads with."""
    activation_checkpointing: bool = False
    """Whether training computes each layer's activations again in the backward pass, instead of
    keeping them: less memory, the time of one more forward pass, the same gradients to the
    bit."""


class KindSlowdown(msgspec.Struct, frozen=True, omit_defaults=True):
    """How much slower one kind of sub-stage is with a share of a device."""

    shares: dict[float, float]
    """The slowdown over the whole device, by the share of its compute units; 1.0 is the whole."""
    memory: float = 0.0
    """The share of the device's memory that the sub-stage needs."""
    spread: dict[float, tuple[float, float]] = {}
    """The least and the greatest slowdown that was measured, by the share; for people."""


class SlowdownTable(msgspec.Struct, frozen=True, omit_defaults=True):
    """How much slower a sub-stage is with a share of a device, and beside another sub-stage.

    A sub-stage is a run of steps of one kind. Between two measured shares the slowdown is
    interpolated. Source: JigsawRL §4.2.
    """

    source: str
    """The source of the numbers, for people."""
    kinds: dict[str, KindSlowdown]
    splits: tuple[float, ...] = (0.25, 0.5, 0.75)
    """The shares that the first of two sub-stages may have; the second has the rest."""
    beside: dict[str, dict[str, float]] = {}
    """The factor for a kind (outer) beside another (inner); 1 where there is none."""
    beside_spread: dict[str, dict[str, tuple[float, float]]] = {}
    """The least and the greatest factor that was measured; for people."""

    def alone(self, kind: str, share: float) -> float:
        """The slowdown with a share of the device and nothing beside it."""
        known = sorted(self.kinds[kind].shares.items())
        if share <= known[0][0]:
            return known[0][1]
        for (low, at_low), (high, at_high) in pairwise(known):
            if share <= high:
                return at_low + (at_high - at_low) * (share - low) / (high - low)
        return known[-1][1]

    def factor(self, kind: str, other: str) -> float:
        """The factor by which another sub-stage that runs beside slows this one down further."""
        return self.beside.get(kind, {}).get(other, 1.0)

    def at_worst(self) -> SlowdownTable:
        """The table with the greatest numbers that were measured in place of the usual ones."""
        kinds = {
            name: msgspec.structs.replace(
                kind,
                shares={
                    share: max([usual, *kind.spread.get(share, ())])
                    for share, usual in kind.shares.items()
                },
            )
            for name, kind in self.kinds.items()
        }
        beside = {
            name: {
                other: max([usual, *self.beside_spread.get(name, {}).get(other, ())])
                for other, usual in row.items()
            }
            for name, row in self.beside.items()
        }
        return msgspec.structs.replace(self, kinds=kinds, beside=beside)

    def slowdown(self, kind: str, share: float, other: str) -> float:
        """The slowdown with a share of the device beside another sub-stage, which has the rest."""
        return self.alone(kind, share) * self.factor(kind, other)

    def fits(self, kind: str, other: str) -> bool:
        """Whether the memory holds both."""
        return self.kinds[kind].memory + self.kinds[other].memory <= 1.0 + 1e-9

    def rates(self, kind: str, other: str) -> list[tuple[float, float]]:
        """The speeds of two sub-stages side by side, one pair for each split; none: no room."""
        if not self.fits(kind, other):
            return []
        return [
            (1 / self.slowdown(kind, share, other), 1 / self.slowdown(other, 1 - share, kind))
            for share in self.splits
        ]


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the scheduler's core decides by: `[scheduler]` of the configuration.

    Each setting has its type, default and documentation here alone. The scheduler's own
    configuration inherits them; the mesh file and the options of `phaseloom up` derive from them.
    """

    placement: str = "pack"
    """Policy that decides which nodes of each pool a job is pinned to, and which jobs share
    them."""
    ordering: str = "hrrs"
    """Policy that decides which ready operation a device runs next."""
    idle_grace_s: float = 0.03
    """How long a device waits for a job that has nothing ready while another job waits, in
    seconds."""
    quantum_s: float = 2.0
    """How long a job that holds a device goes first there, in seconds. Then the ready operations of
    other jobs go first. 0: the ordering policy alone decides."""
    seal_every: int = 60
    """Mutating operations between two seals of a trainable deployment; 0: never seal."""
    max_losses: int = 3
    """Consecutive WPG deaths to tolerate. The next one fails the running operation, or the job if
    none was running. A completed operation resets the count."""
    max_reading: int = 64
    """Reading operations that one activation runs at once, at most."""
    phase_hold_s: float = 1.0
    """How long a declared phase keeps a device that others wait for, after the phase's last
    operation there, in seconds; 0: not at all."""
    speculative_switch_in: bool = True
    """Whether an idle device is prepared for an operation that is predicted but not there yet."""
    seal_bytes: int = 128 * 2**20
    """Seal a deployment once its mutating operations have brought this many payload bytes since its
    last seal."""
    seal_age_s: float = 600.0
    """Seal a deployment again once its seal is this old and its state has changed, in seconds."""
    max_open_operations: int = 10_000
    """Operations of one deployment that may lack an outcome; further ones are refused."""
    outcome_retention_s: float = 86_400.0
    """How long outcomes that no rebuild needs, and the name of an ended job, are kept, in
    seconds."""
    max_group_jobs: int = 5
    """Jobs in one node group, at most."""
    duty_limit: float = 0.5
    """Largest share of its time that a job may be predicted to wait for the jobs on its nodes."""
    switch_s: float = 0.0
    """Seconds planned for a context switch before each phase on shared nodes, by placement policies
    that promise an SLO."""
    slo_percentile: float = 0.0
    """Percentage of a job's single iterations that `coexec_repack` keeps within its SLO, in
    addition to the mean over the job's life; 0: the mean only."""
    node_grace_s: float = 30.0
    """How long a node may be away before its deployments are rebuilt elsewhere if possible, in
    seconds."""
    node_gone_s: float = 1800.0
    """How long until a node that is away counts as permanently gone, in seconds. Jobs that need
    state which only that node had then fall back or fail. 0: only an operator can declare it
    (`phaseloom drain NODE --gone`)."""
    multiplexing: str = "off"
    """Policy that decides which operations run side by side on a device of several cores, and how
    many cores each of them gets."""
    slowdowns: SlowdownTable | None = None
    """Measured slowdown of operations that share a device, by which multiplexing decides what is
    worth running side by side. None: nothing was measured."""
    corrects_slowdowns: bool = True
    """Whether observed slowdowns that are worse than the table's replace them."""


class SchedulerConfig(SchedulerSettings, frozen=True, kw_only=True):
    """The scheduler's settings in the decision log: its first entry, and a new one at each
    change."""

    # An entry must name these: as messages they have no default.
    placement: str
    ordering: str
    idle_grace_s: float
    quantum_s: float
    seal_every: int
    max_losses: int
    max_reading: int
    phase_hold_s: float
    speculative_switch_in: bool

    @classmethod
    def of(cls, settings: SchedulerSettings) -> SchedulerConfig:
        return cls(**{name: getattr(settings, name) for name in cls.__struct_fields__})


SCHEDULER_BOUNDS: Mapping[str, tuple[float, float]] = {
    "idle_grace_s": (0, math.inf),
    "quantum_s": (0, math.inf),
    "seal_every": (0, math.inf),
    "seal_bytes": (1, math.inf),
    "seal_age_s": (0, math.inf),
    "max_losses": (0, math.inf),
    "max_reading": (1, math.inf),
    "phase_hold_s": (0, math.inf),
    "max_open_operations": (1, math.inf),
    "outcome_retention_s": (0, math.inf),
    "max_group_jobs": (1, math.inf),
    "duty_limit": (0, 1),
    "switch_s": (0, math.inf),
    "node_grace_s": (0, math.inf),
    "node_gone_s": (0, math.inf),
}
"""The least and the greatest value of each number of `SchedulerSettings`."""


class Capabilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """The abilities of a backend on a node. agent → scheduler."""

    kinds: tuple[str, ...]
    """The kinds of operations that it runs."""
    axes: tuple[str, ...] = ("dp",)
    """The axes of a layout over which it spreads a model."""
    model_types: tuple[str, ...] = ()
    """The values of `model_type` in a model's config; empty: any, or none at all."""
    dtypes: tuple[str, ...] = ()
    """The dtypes of weights; empty: any."""
    joins: bool = False
    """Whether requests join a `generate` that runs, where batches are shared."""
    prefix_cache: bool = False
    """Whether keys and values can be kept from one `generate` to the next."""
    adapters: bool = False
    """Whether it trains and samples adapters on a base."""
    divides: bool = False
    """Whether its results are the same bits with any share of a device's compute units."""
    most_units: int = 0
    """The most compute units of its device that a rank keeps busy; 0: all."""

    @property
    def trains(self) -> bool:
        return "forward_backward" in self.kinds


class DeviceSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    memory_bytes: int
    """The budget for managed state in bytes: weights, gradients, optimizer."""
    units: int = 1
    """The compute units that operations side by side may divide among them: the cores of an
    emulated device. 1: the device is not shared in space."""


class Residency(StrEnum):
    SHARED = "shared"
    """Working sets of several jobs stay side by side while they fit."""
    JOB = "job"
    """Opening an activation offloads whatever another job left on the device."""


class CommandId(msgspec.Struct, frozen=True, order=True):
    """The decision-log sequence of the event that caused a command, and its place in the answer."""

    sequence: int
    index: int

    def __str__(self) -> str:
        return f"{self.sequence}:{self.index}"


class Segment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run of operations of one job on one pool: seconds from the start of its cycle."""

    pool: str
    offset_s: float
    duration_s: float
    worst_s: float = 0.0
    """Duration where every sample reaches its token limit; 0: as `duration_s`."""


class Cycle(msgspec.Struct, frozen=True):
    """A job's repeated pattern of work while it runs alone, each pool's segments in order."""

    period_s: float
    segments: list[Segment]
    num_optim_steps: int = 1
    """`optim_step`s of all deployments in one period."""

    @property
    def worst_period_s(self) -> float:
        """The period if each segment takes its worst time, one after the other."""
        excess_s = sum(max(0.0, s.worst_s - s.duration_s) for s in self.segments if s.worst_s)
        return self.period_s + excess_s


class Durability(StrEnum):
    """The loss that a committed seal survives. Above it the operation stream is kept."""

    HOST = "host"
    """It survives the death of every process: it is kept in its node's memory."""
    NODE = "node"
    """It survives a restart of its node, too: it is on the node's disk, fsynced."""
    REMOTE = "remote"
    """It survives the loss of its node: it is on the disk of another one as well."""


class JobSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    slo: float = 0.0
    """The slowdown over running alone that the job tolerates, at least 1; 0: best effort."""
    deployments: list[DeploymentSpec] = []
    cycle: Cycle | None = None
    """The cycle as an earlier run measured it, or as the owner estimates it. None: the job is
    profiled first."""
    duration_s: float = 0.0
    """The time that the job would run alone, in seconds; 0: not known. Only reservations for other
    jobs depend on it."""
    may_wait: bool = True
    """Whether the job waits for a place; otherwise it is refused where there is none now."""
    durability: Durability = Durability.NODE
    """The durability of its deployments' seals."""
    exclusive: bool = False
    """Whether no operation of another job ever runs beside this job's on a device that is shared in
    space. Devices are shared in time all the same."""


class DeviceKind(StrEnum):
    EMULATED = "emulated"
    """Memory of this machine, with a budget, and its processors."""
    CUDA = "cuda"
    """Device i is GPU i."""
