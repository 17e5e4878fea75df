"""The settings of a mesh on this machine: nodes, tenants, policies, servers, gateway and
console."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from phaseloom.cli.hanging import HUNG_AFTER_S
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import check_model_name, check_name
from phaseloom.common.contract.sizes import Size
from phaseloom.common.contract.specs import (
    SCHEDULER_BOUNDS,
    DeviceKind,
    Residency,
    SchedulerSettings,
)
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES
from phaseloom.common.contract.tenantlimits import TenantLimits, check_tenant_limits
from phaseloom.common.process import config, machine, slowdowns
from phaseloom.common.process.files import read_json
from phaseloom.common.tensors.modelfiles import check_directory
from phaseloom.common.transport.natsserver import (
    ENSEMBLE_SIZE,
    EmbeddedEnsemble,
    EmbeddedServer,
    check_tenant,
)
from phaseloom.statemgr.records.hostcopies import bases_of
from phaseloom.worker.backends import BACKENDS

SETTINGS = "settings.json"
"""Name of the file in a run directory that holds the settings of its mesh."""
_SCHEDULER = SchedulerSettings()


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node of a mesh on this machine: an agent and a state manager."""

    name: str
    pool: str
    """Kind of the node: `rollout`, `train`, or any other name."""
    devices: list[Size]
    """Memory budget of each device for managed state, in bytes."""
    device_kind: DeviceKind = DeviceKind.EMULATED
    """`emulated` uses memory and processors of this machine; `cuda` uses GPU i as device i."""
    cores_per_device: int = 1
    """Cores of each emulated device. With several cores and a `multiplexing` policy, jobs run on
    one device at the same time, each on some of its cores."""
    host_memory_bytes: Size = 2 * 2**30
    """Memory budget of the state manager for state in host memory."""
    exclusive_residency: Residency = Residency.JOB
    """`job`: opening an activation offloads all state of other jobs from the device."""
    price_per_hour: float = 0.0
    """Price of the node; placement prefers cheaper nodes. 0: the usual price of its pool."""
    interpreters: dict[str, str] = {}
    """Backend → the Python for its ranks, if it differs from this one: `vllm` and `megatron` need
    separate environments. A path may begin with `~`."""
    site: str = ""
    """Name shared by nodes that fast links connect. A weights version crosses the slow link to each
    other site only once. Empty: the node belongs to no site."""

    def check(self) -> None:
        """Check that this machine can run the node.

        Raises: CallerError: a name, device, memory size, number of cores or interpreter is invalid,
                    or this machine has fewer devices or less memory.
        """
        check_name(self.pool, "mesh.nodes.pool")
        if not self.devices or min(self.devices) < 1:
            raise CallerError(
                f"expected the bytes of one or more devices of {self.name}, got {self.devices}",
                field="mesh.nodes.devices",
                remedy='list the memory of each device, such as ["8GiB"], each at least 1 byte',
            )
        section = f"mesh.nodes.{self.name}"
        config.check_bounds(self, section, _NODE_BOUNDS)
        machine.check_memory(self.host_memory_bytes, f"{section}.host_memory_bytes")
        is_divided = self.cores_per_device > 1
        if self.cores_per_device < 1 or (is_divided and self.device_kind is DeviceKind.CUDA):
            raise CallerError(
                f"cores_per_device of {self.name} must be at least 1, and 1 on GPUs; got "
                f"{self.cores_per_device}",
                field="mesh.nodes.cores_per_device",
                remedy="use 1 or more on emulated devices, and omit it on GPUs",
            )
        machine.check_devices(self.device_kind, self.devices, section)
        for backend, python in self.interpreters.items():
            if backend not in BACKENDS:
                raise CallerError(
                    f"{self.name} names an interpreter for {backend!r}, which is not a backend",
                    field="mesh.nodes.interpreters",
                    remedy=f"name one of {', '.join(sorted(BACKENDS))}",
                )
            file = Path(python).expanduser()
            if not (file.is_file() and os.access(file, os.X_OK)):
                raise CallerError(
                    f"the interpreter of {self.name} for {backend} is not executable: {python}",
                    code=Code.NOT_FOUND,
                    field="mesh.nodes.interpreters",
                    remedy="name the Python of an environment that has the backend installed",
                )


_BOUNDS = {
    "schedulers": (1, math.inf),
    "routers": (1, math.inf),
    "gateways": (1, math.inf),
    "ops_max_bytes": (MAX_PAYLOAD_BYTES, math.inf),
    "gateway_session_s": (0, math.inf),
    "replace_hung_s": (HUNG_AFTER_S, math.inf),
    "gateway_port": (0, config.LAST_PORT),
    "console_port": (0, config.LAST_PORT),
}
"""Minimum and maximum of each number that is not a setting of the scheduler."""
_NODE_BOUNDS = {"host_memory_bytes": (1, math.inf), "price_per_hour": (0, math.inf)}


def _demo_nodes() -> list[NodeConfig]:
    return [
        NodeConfig("rollout-0", "rollout", [8 * 2**20]),
        NodeConfig("train-0", "train", [16 * 2**20]),
    ]


class MeshConfig(msgspec.Struct, frozen=True):
    """The settings of a whole mesh: the section `mesh`, or PHASELOOM_MESH_<FIELD>.

    Settings without a docstring are the scheduler's: `SchedulerSettings` documents them.
    """

    nodes: list[NodeConfig] = msgspec.field(default_factory=_demo_nodes)
    """The nodes of the mesh. Default: one rollout and one train device, which the two jobs of the
    demo share."""
    tenants: list[str] = msgspec.field(default_factory=lambda: ["demo"])
    """The tenants. Each gets its own account and password."""
    routers: int = 2
    """Number of router replicas."""
    schedulers: int = 1
    """Number of schedulers. One leads; the others stand by."""
    placement: str = _SCHEDULER.placement
    ordering: str = _SCHEDULER.ordering
    multiplexing: str = _SCHEDULER.multiplexing
    slowdowns: str = ""
    """File that `phaseloom measure-slowdown` has written on a machine like this one, by which
    `multiplexing` decides; empty: nothing was measured."""
    max_group_jobs: int = _SCHEDULER.max_group_jobs
    duty_limit: float = _SCHEDULER.duty_limit
    switch_s: float = _SCHEDULER.switch_s
    slo_percentile: float = _SCHEDULER.slo_percentile
    idle_grace_s: float = _SCHEDULER.idle_grace_s
    frozen_bases: dict[str, list[str]] = {}
    """Models that never change and that tenants may share: name → the BLAKE3 of each rank's
    content, as `phaseloom state --json` shows it."""
    models: dict[str, str] = {}
    """Models to register at the start, as with `phaseloom model add`: name → directory."""
    seal_every: int = _SCHEDULER.seal_every
    max_losses: int = _SCHEDULER.max_losses
    node_grace_s: float = _SCHEDULER.node_grace_s
    node_gone_s: float = _SCHEDULER.node_gone_s
    nats_servers: int = 1
    """Number of NATS servers: 1, or 3 that replicate everything, so that the mesh survives the loss
    of any one."""
    fsync: bool = True
    """Whether NATS writes a message to disk before acknowledging it. Without this, acknowledged
    messages survive a killed process, but not a power cut."""
    ops_max_bytes: Size = 2**30
    """Size limit of a tenant's operation stream; a full stream refuses operations."""
    tenant_limits: TenantLimits = msgspec.field(default_factory=dict)
    """Limits of single tenants, by name: `max_operations`, `max_bytes`, `rate`, `burst`,
    `api_rate`, `api_burst`, `max_jobs`, `max_deployments`, `max_ranks`, `max_names`,
    `max_versions`, `max_checkpoint_bytes`."""
    checkpoint_root: str = ""
    """Directory of checkpoints, which later runs can also load. Empty: a directory of this run."""
    gateway_port: int = 0
    """Port of this machine at which a gateway serves the Tinker and OpenAI APIs; 0: no gateway. A
    tenant's API key is `tml-` followed by its password."""
    gateways: int = 1
    """Number of replicas of the gateway, which share its port."""
    gateway_session_s: float = 600.0
    """How long a session of the Tinker SDK may be silent before the gateway ends its models."""
    replace_hung_s: float = 20.0
    """Time after which a service that hangs is killed and started again. It must then have been
    silent for this long although it could run."""
    console_port: int = 0
    """Port of this machine for the console, a web page that shows the mesh; 0: `phaseloom up`
    chooses one (8900 if it is free)."""
    metrics: bool = False
    """Whether each service serves metrics to Prometheus, at a free port of this machine."""

    def check(self) -> None:
        """Check that this machine can run a mesh with these settings.

        Raises: CallerError: a name is invalid or not unique, a directory is not a model directory
                    or not writable, a number is out of bounds, this machine lacks the devices, or
                    there are no nodes or tenants.
        """
        for node in self.nodes:
            node.check()
        for field, names in (
            ("mesh.nodes", [node.name for node in self.nodes]),
            ("mesh.tenants", self.tenants),
        ):
            for name in names:
                check_name(name, field)
            if not names or len(set(names)) != len(names):
                raise CallerError(
                    f"expected one or more different names, got {names}",
                    field=field,
                    remedy="give at least one name, and no name twice",
                )
        for tenant in self.tenants:
            check_tenant(tenant, "mesh.tenants")
        for name, directory in self.models.items():
            check_model_name(name, "mesh.models")
            check_directory(Path(directory), f"mesh.models.{name}")
        shared = {n: bounds for n, bounds in SCHEDULER_BOUNDS.items() if n in SCHEDULER_SETTINGS}
        config.check_bounds(self, "mesh", {**_BOUNDS, **shared})
        if self.gateway_port and self.gateway_port == self.console_port:
            raise CallerError(
                f"gateway and console cannot share port {self.gateway_port}",
                field="mesh.console_port",
                remedy="give each its own port, or 0 to run without it",
            )
        bases_of(self.frozen_bases, "mesh.")
        if self.checkpoint_root:
            machine.check_writable(Path(self.checkpoint_root), "mesh.checkpoint_root")
        self._check_limits()
        if self.slowdowns:
            slowdowns.read(Path(self.slowdowns), needed=slowdowns.SUB_STAGES)
        if self.nats_servers not in (1, ENSEMBLE_SIZE):
            raise CallerError(
                f"nats_servers must be 1 or 3, got {self.nats_servers}",
                field="mesh.nats_servers",
                remedy="use 1, or 3 to survive the loss of any one server",
            )

    def _check_limits(self) -> None:
        """Raises: CallerError: a limit has an unknown tenant or name, or an invalid value."""
        for tenant in self.tenant_limits:
            if tenant not in self.tenants:
                raise CallerError(
                    f"tenant_limits names an unknown tenant {tenant!r}",
                    field=f"mesh.tenant_limits.{tenant}",
                    remedy=f"name one of {', '.join(self.tenants)}, or add it to `tenants`",
                )
        check_tenant_limits(self.tenant_limits, "mesh.tenant_limits")

    def check_resumes(self, run_dir: Path) -> None:
        """Check that these settings can resume the run in a directory.

        Nodes and tenants may be added, but not removed. The checkpoint directory and the number of
        NATS servers must stay the same. All other settings may change.

        Raises: CallerError: FAILED_PRECONDITION: a setting must stay the same; `field` names it.
        """
        earlier = settings_of(run_dir)
        if earlier is None:
            return
        identities = [_identity(node) for node in self.nodes]
        nodes = [node.name for node in earlier.nodes if _identity(node) not in identities]
        tenants = [tenant for tenant in earlier.tenants if tenant not in self.tenants]
        root, servers = earlier.checkpoint_root, earlier.nats_servers
        for setting, is_unchanged, requirement in (
            ("mesh.nodes", not nodes, f"nodes {', '.join(nodes)} as they were"),
            ("mesh.tenants", not tenants, f"tenants {', '.join(tenants)}"),
            ("mesh.checkpoint_root", root == self.checkpoint_root, f"checkpoints in {root!r}"),
            ("mesh.nats_servers", servers == self.nats_servers, f"{servers} NATS servers"),
        ):
            if not is_unchanged:
                raise CallerError(
                    f"these settings lack {requirement}, which the run in {run_dir} depends on",
                    code=Code.FAILED_PRECONDITION,
                    field=setting,
                    remedy=f"keep this setting as it is in {run_dir / SETTINGS}",
                )


# `slowdowns` differs: a mesh file has the path of the table, the scheduler has its content.
SCHEDULER_SETTINGS = [
    name
    for name in SchedulerSettings.__struct_fields__
    if name in MeshConfig.__struct_fields__ and name != "slowdowns"
]
"""Settings that a mesh passes to its schedulers unchanged."""


def _identity(node: NodeConfig) -> tuple[object, ...]:
    """Return the settings of a node that must not change when a run is resumed."""
    return node.name, node.pool, node.devices, node.device_kind


def servers_of(
    config: MeshConfig,
    directory: Path,
    tenants: Sequence[str],
    *,
    credentials_file: Path | None = None,
) -> EmbeddedServer | EmbeddedEnsemble:
    """Return the NATS server of a mesh, or its three replicated servers.

    Args: directory: the directory with the servers' stores.
    """
    kind = EmbeddedServer if config.nats_servers == 1 else EmbeddedEnsemble
    return kind(directory, tenants, credentials_file=credentials_file, fsync=config.fsync)


def settings_of(run_dir: Path) -> MeshConfig | None:
    """Return the settings of the run in a directory, or None if there is no run.

    Raises: CallerError: FAILED_PRECONDITION: the file is damaged.
    """
    remedy = "restore the file from a backup, or remove it: the next `phaseloom up` writes it"
    with suppress(FileNotFoundError):
        settings: MeshConfig = read_json(run_dir / SETTINGS, MeshConfig, remedy)
        return settings
    return None
