"""Descriptions of jobs, deployments, devices and the scheduler's settings, which many messages
carry.

controller → router, scheduler (`JobSpec`, `DeploymentSpec`); agent → scheduler (`DeviceSpec`);
scheduler's shell → decision log (`SchedulerConfig`); profiler → scheduler (`Cycle`); operator → KV
→ job API (`RegisteredModel`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal

import msgspec

from phaseloom.common.contract.sizes import Size
from phaseloom.common.contract.tenantlimits import TenantLimits


class ModelFile(msgspec.Struct, frozen=True):
    """A file of a registered model."""

    name: str
    """Name of the file in the model's directory."""
    num_bytes: int
    blake3: str
    """BLAKE3 of the content, in hex."""


class ModelDirectory(msgspec.Struct, frozen=True):
    """A model's files in the Hugging Face layout: config, safetensors, tokenizer."""

    path: str
    """Absolute path, the same on every node that runs the model."""
    files: list[ModelFile]


class RegisteredModel(msgspec.Struct, frozen=True):
    """A model that an operator has registered. operator → KV `models`, by name → job API."""

    name: str
    directory: ModelDirectory
    config: dict[str, Any]
    """The content of `config.json`."""
    num_parameters: int
    """Number of elements of all tensors in the files."""
    dtypes: list[str]
    """Dtypes of the tensors in the files, sorted."""


ALL_ATTENTION, ALL_MLP, UNEMBED = "all-attention", "all-mlp", "unembed"
ALL_LINEAR = "all-linear"
TARGET_GROUPS = frozenset((ALL_ATTENTION, ALL_MLP, UNEMBED, ALL_LINEAR))
"""Targets of an adapter that stand for groups of linear layers, under any names."""


class Adapter(msgspec.Struct, frozen=True, omit_defaults=True):
    """Low-rank matrices (LoRA), trained instead of the weights of a model, the base.

    The output of a linear layer with weights W becomes W·x + (alpha / rank)·B·A·x. A is drawn
    uniformly from ±1/√(size of x) and B starts at zero, so an untrained adapter does not change the
    base.
    """

    rank: int = 32
    """Number of rows of A and of columns of B."""
    alpha: float = 32.0
    seed: int = 0
    """Seed of A."""
    targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Names of the linear layers that get an adapter, in every layer of the model: the last
    components of their names (`q_proj`, `attn.c_proj`), or the groups `all-attention`, `all-mlp`,
    `all-linear` (both of them) and `unembed` (the output head)."""


class ModelSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The model to build: a Hugging Face causal-LM config with weights drawn from a seed, or a
    registered model."""

    config: dict[str, Any] = {}
    """The config as returned by `config.to_dict()`. `model_type` selects the architecture. `dtype`
    is that of the weights: `float32`, or `bfloat16`, for which training keeps float32 masters. May
    be empty if `registered` is set: the job API then fills in the registered model's config."""
    init_seed: int = 0
    """Seed of the weights; unused with `registered`."""
    token_texts: list[str] = []
    """The text of each token id. Needed only if operations use stop strings; otherwise empty."""
    registered: str = ""
    """Name of a registered model whose weights the deployment starts from; empty: draw the weights
    from `init_seed`."""
    adapter: Adapter | None = None
    """An adapter on the registered model. State, switches, versions and checkpoints then contain
    only the adapter, and the model's own weights never change. None: use the model itself."""
    pinned: ModelDirectory | None = None
    """The files that `registered` named when the job was submitted. Set by the job API; rejected if
    a controller sets it."""


class Layout(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a deployment is spread over its ranks. Their number is dp · tp · pp · cp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Experts are spread over the data-parallel ranks. Must divide dp · cp · tp."""

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


class Batching(StrEnum):
    OPERATION = "operation"
    """Each operation is its own batch, so its result does not depend on concurrent operations."""
    SHARED = "shared"
    """Concurrent operations are decoded together. This is faster, but the last bits of a result may
    depend on the other operations."""


class OptimizerOn(StrEnum):
    DEVICE = "device"
    """The optimizer state moves to and from the device with the weights."""
    HOST = "host"
    """The optimizer state stays in host memory, and `optim_step` runs there. This halves the bytes
    on the device and in a switch. The results are identical; the step is slower if the device is
    faster than the host."""


class DeploymentSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One logical model of a job. controller → job API → scheduler → agent → ranks."""

    name: str
    pool: str
    """`rollout`, `train`, or another pool name that a node declares."""
    backend: str
    """`fsdp` or `megatron` (train), `sampler` or `vllm` (generate), or `noop` (answers at once, for
    benchmarks)."""
    model: ModelSpec
    trainable: bool = False
    """Whether it has gradients and optimizer state in addition to weights."""
    seed: int = 0
    """Seed of the deployment: every operation draws from (this seed, its seq)."""
    batching: Batching = Batching.OPERATION
    layout: Layout = Layout()
    num_nodes: int = 1
    """Number of nodes of the pool over which the ranks are spread evenly."""
    host_bytes: int = 0
    """Working set in the host memory of each of its nodes, in bytes; 0: not declared."""
    optimizer_on: OptimizerOn = OptimizerOn.DEVICE
    scratch_bytes: int = 0
    """Bytes of each rank's device memory for runtime data that is never moved: the KV cache of
    `vllm`, the prefix cache of `sampler`. They are released when the deployment leaves the device.
    0: the backend chooses."""
    prefix_cache: bool = False
    """Whether a `generate` reuses the keys and values that earlier ones computed for the beginning
    of its prompts with the same weights. The tokens are the same; the last bits of
    log-probabilities may depend on earlier operations."""
    tail_share: float = 0.2
    """Fraction of a call's samples that counts as its long tail. Once every replica has at most
    this fraction left, the tail may be gathered on fewer replicas, so that other jobs can use the
    freed devices. This needs shared batches and one-rank replicas on one node. 0: never."""
    max_adapters: int = 0
    """For a `sampler` with an adapter: number of versions of other adapters on the same base that
    fit on each rank's device, in addition to its own. Each takes as much scratch memory as the
    deployment's own adapter, whose rank and targets they must not exceed. On `vllm`, any positive
    number makes room for the adapter that a call names."""
    activation_checkpointing: bool = False
    """Whether training recomputes each layer's activations in the backward pass instead of keeping
    them. This saves memory, costs one more forward pass, and gives bitwise identical gradients."""


class KindSlowdown(msgspec.Struct, frozen=True, omit_defaults=True):
    """How much slower one kind of sub-stage runs on a share of a device."""

    shares: dict[float, float]
    """Share of the device's compute units → slowdown relative to the whole device, whose share is
    1.0."""
    memory: float = 0.0
    """Fraction of the device's memory that the sub-stage needs."""
    spread: dict[float, tuple[float, float]] = {}
    """Share → the smallest and the largest slowdown measured; for people."""


class SlowdownTable(msgspec.Struct, frozen=True, omit_defaults=True):
    """How much slower a sub-stage runs on a share of a device, and next to another sub-stage.

    A sub-stage is a series of steps of one kind. Slowdowns between two measured shares are
    interpolated. Source: JigsawRL §4.2.
    """

    source: str
    """Origin of the numbers; for people."""
    kinds: dict[str, KindSlowdown]
    splits: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Shares that the first of two sub-stages may get; the second one gets the remainder."""
    beside: dict[str, dict[str, float]] = {}
    """Additional slowdown of a kind (outer key) next to another kind (inner key); 1 if missing."""
    beside_spread: dict[str, dict[str, tuple[float, float]]] = {}
    """The smallest and the largest factor measured; for people."""

    def alone(self, kind: str, share: float) -> float:
        """Slowdown on a share of the device with no neighbour."""
        measured = sorted(self.kinds[kind].shares.items())
        if share <= measured[0][0]:
            return measured[0][1]
        for (low, slowdown_low), (high, slowdown_high) in pairwise(measured):
            if share <= high:
                return slowdown_low + (slowdown_high - slowdown_low) * (share - low) / (high - low)
        return measured[-1][1]

    def factor(self, kind: str, neighbour: str) -> float:
        """Additional slowdown of a sub-stage next to another one."""
        return self.beside.get(kind, {}).get(neighbour, 1.0)

    def at_worst(self) -> SlowdownTable:
        """Return a table with the largest measured values instead of the usual ones."""
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
        worst_beside = {
            name: {
                neighbour: max([usual, *self.beside_spread.get(name, {}).get(neighbour, ())])
                for neighbour, usual in row.items()
            }
            for name, row in self.beside.items()
        }
        return msgspec.structs.replace(self, kinds=kinds, beside=worst_beside)

    def slowdown(self, kind: str, share: float, neighbour: str) -> float:
        """Slowdown on a share of the device next to another sub-stage, which has the remainder."""
        return self.alone(kind, share) * self.factor(kind, neighbour)

    def fits(self, kind: str, neighbour: str) -> bool:
        """Whether the device's memory can hold both sub-stages."""
        return self.kinds[kind].memory + self.kinds[neighbour].memory <= 1.0 + 1e-9

    def rates(self, kind: str, neighbour: str) -> list[tuple[float, float]]:
        """Return the speeds of two concurrent sub-stages for each split; empty if their memory does
        not fit."""
        if not self.fits(kind, neighbour):
            return []
        return [
            (
                1 / self.slowdown(kind, share, neighbour),
                1 / self.slowdown(neighbour, 1 - share, kind),
            )
            for share in self.splits
        ]


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the scheduler's core: `[scheduler]` of the configuration.

    The type, default and documentation of each setting are only here. The scheduler's own
    configuration inherits them; the mesh file and the options of `phaseloom up` derive from them.
    """

    placement: str = "pack"
    """Policy that decides which nodes of each pool a job is pinned to, and which jobs share
    them."""
    ordering: str = "hold"
    """Policy that decides which ready operation a device runs next."""
    idle_grace_s: float = 0.03
    """How long a device waits for a job that has nothing ready while another job waits, in
    seconds."""
    quantum_s: float = 2.0
    """How long a job that holds a device goes first there, in seconds. Then the ready operations of
    other jobs go first. 0: only the ordering policy decides."""
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
    seal_bytes: Size = 128 * 2**20
    """Seal a deployment once its mutating operations have brought this many payload bytes since its
    last seal."""
    seal_age_s: float = 600.0
    """Seal a deployment again once its seal is this old and its state has changed, in seconds."""
    max_open_operations: int = 10_000
    """Operations of one deployment that may lack an outcome; further ones are refused."""
    outcome_retention_s: float = 86_400.0
    """How long outcomes that no rebuild needs, and the name of an ended job, are kept, in
    seconds."""
    max_jobs: int = 64
    """Jobs of a tenant that have not ended, at most; 0: no limit."""
    max_deployments: int = 128
    """Deployments of a tenant's jobs that have not ended, at most; 0: no limit."""
    max_ranks: int = 256
    """Ranks of a tenant's deployments, each of them a process, at most; 0: no limit."""
    max_names: int = 10_000
    """Names of a tenant's jobs, including ended ones that are still kept, at most; and names that
    one job's deployments have ever had. 0: no limit."""
    max_versions: int = 1_000
    """Weights versions of one job that are published with a `ttl_s`, at most, as long as they may
    be named; 0: no limit."""
    tenant_limits: TenantLimits = {}
    """Limits of single tenants that replace those above."""
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


REPLACED_ORDERINGS: Mapping[str, str] = {"hrrs_anticipatory": "hold"}
"""Ordering policy of an older version → the policy that has replaced it."""


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
    # Entries of older versions lack these: replaying them must not refuse what was accepted.
    max_jobs: int = 0
    max_deployments: int = 0
    max_ranks: int = 0
    max_names: int = 0
    max_versions: int = 0

    def __post_init__(self) -> None:
        # Entries and snapshots of older versions may name a policy that has been replaced.
        ordering = REPLACED_ORDERINGS.get(self.ordering, self.ordering)
        msgspec.structs.force_setattr(self, "ordering", ordering)

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
    "max_jobs": (0, math.inf),
    "max_deployments": (0, math.inf),
    "max_ranks": (0, math.inf),
    "max_names": (0, math.inf),
    "max_versions": (0, math.inf),
    "max_group_jobs": (1, math.inf),
    "duty_limit": (0, 1),
    "switch_s": (0, math.inf),
    "node_grace_s": (0, math.inf),
    "node_gone_s": (0, math.inf),
}
"""The least and the greatest value of each number of `SchedulerSettings`."""


class Capabilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """The features that a backend on a node supports. agent → scheduler."""

    kinds: tuple[str, ...]
    """Kinds of operations."""
    axes: tuple[str, ...] = ("dp",)
    """Layout axes over which it can spread a model."""
    model_types: tuple[str, ...] = ()
    """Values of `model_type` in a model's config; empty: any, or none."""
    dtypes: tuple[str, ...] = ()
    """Dtypes of weights; empty: any."""
    joins: bool = False
    """Whether requests can join a running `generate` if batches are shared."""
    prefix_cache: bool = False
    """Whether the KV cache can be kept from one `generate` to the next."""
    adapters: bool = False
    """Whether it can train and sample adapters on a base."""
    divides: bool = False
    """Whether its results are bitwise identical with any share of a device's compute units."""
    most_units: int = 0
    """Maximum number of its device's compute units that a rank can use; 0: all."""

    @property
    def trains(self) -> bool:
        return "forward_backward" in self.kinds


class DeviceSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    memory_bytes: int
    """Budget in bytes for managed state: weights, gradients, optimizer."""
    units: int = 1
    """Number of compute units that concurrent operations can divide among them: the cores of an
    emulated device. 1: the device is not shared in space."""


class Residency(StrEnum):
    SHARED = "shared"
    """Working sets of several jobs stay on the device as long as they fit."""
    JOB = "job"
    """Opening an activation offloads everything that other jobs left on the device."""


class CommandId(msgspec.Struct, frozen=True, order=True):
    """The decision-log sequence of the event that caused a command, and the command's index among
    those that the event caused."""

    sequence: int
    index: int

    def __str__(self) -> str:
        return f"{self.sequence}:{self.index}"


class Segment(msgspec.Struct, frozen=True, omit_defaults=True):
    """Consecutive operations of one job on one pool, in seconds from the start of its cycle."""

    pool: str
    offset_s: float
    duration_s: float
    worst_s: float = 0.0
    """Duration if every sample reaches its token limit; 0: the same as `duration_s`."""


class Cycle(msgspec.Struct, frozen=True):
    """A job's repeating pattern of work when it runs alone. The segments of each pool are in
    order."""

    period_s: float
    segments: list[Segment]
    num_optim_steps: int = 1
    """Number of `optim_step`s of all deployments in one period."""

    @property
    def worst_period_s(self) -> float:
        """The period if each segment takes its worst time, one after the other."""
        excess_s = sum(max(0.0, s.worst_s - s.duration_s) for s in self.segments if s.worst_s)
        return self.period_s + excess_s


class Durability(StrEnum):
    """The worst loss that a committed seal survives. Operations after the newest seal stay in the
    operation stream."""

    HOST = "host"
    """Survives the death of every process: the seal is in its node's memory."""
    NODE = "node"
    """Also survives a restart of its node: the seal is fsynced to the node's disk."""
    REMOTE = "remote"
    """Also survives the loss of its node: the seal is on the disk of another node too."""


class JobSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    slo: float = 0.0
    """Slowdown, relative to running alone, that the job tolerates; at least 1. 0: best effort."""
    deployments: list[DeploymentSpec] = []
    cycle: Cycle | None = None
    """The cycle, measured in an earlier run or estimated by the owner. None: profile the job
    first."""
    duration_s: float = 0.0
    """How long the job would run alone, in seconds; 0: unknown. Only reservations for other jobs
    depend on it."""
    may_wait: bool | Literal["pool"] = True
    """Whether the job waits until it can be placed. Otherwise it is rejected if it cannot be placed
    now. A pool in which no node has ever been up, while other pools exist, is taken for a mistake,
    and the job is rejected. `pool`: wait for the first node of such a pool too."""
    durability: Durability = Durability.NODE
    """Durability of its deployments' seals."""
    exclusive: bool = False
    """Whether to keep operations of other jobs off a space-shared device while one of this job's
    operations runs there. Devices are still shared in time."""
    config: dict = {}  # type: ignore[type-arg]  # JSON
    """The program's own settings, for people: at most 16 KiB as JSON. The mesh does not use
    them."""
    tags: list[str] = []
    """Words by which people find the run: at most 16, each of 1 to 64 characters."""


class DeviceKind(StrEnum):
    EMULATED = "emulated"
    """A budget of this machine's memory, and its processors."""
    CUDA = "cuda"
    """Device i is GPU i."""
