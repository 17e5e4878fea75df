"""A whole mesh on this machine: nats-server and every service as child processes, kept running.

    async with Mesh(MeshConfig(), Path("runs/mine")) as mesh:
        await mesh.ready()

A child that ends is started again, with exponential back-off, a warning and an event. Leaving the
block stops everything in bounded time: the agents first, while the services that they report to
still run, and the server last. If this process is killed instead, the kernel kills its children
(see `diewithparent`), and ranks end with their agent.

The run directory gets `logs/<service>.log`, `spans/`, `nats/` (the server's store),
`credentials.json` and `certificates/` (readable to their owner only), `settings.json`, `mesh.json`
(url, pids, metrics), and the nodes' disks.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from socket import create_server

import msgspec
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from phaseloom.cli.certs import make_certificates
from phaseloom.cli.models import register
from phaseloom.cli.storecheck import (
    MARKS,
    StoreMarks,
    check_store,
    check_when_up,
    end_sessions,
    newest_mark,
    set_aside,
)
from phaseloom.common.contract import streams
from phaseloom.common.contract.api import JobRequest, ResultRequest
from phaseloom.common.contract.codec import CONTENT_TYPE, MSGPACK, encode
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.events import NodeLost, NodeUp
from phaseloom.common.contract.ids import check_name
from phaseloom.common.contract.specs import DeviceKind, Residency
from phaseloom.common.process import config as configuration
from phaseloom.common.process import slowdowns
from phaseloom.common.process.files import replace_file
from phaseloom.common.process.lifecycle import DIE_WITH_PARENT
from phaseloom.common.tensors.modelfiles import read_model
from phaseloom.common.transport import framing
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.certificates import directory_of
from phaseloom.common.transport.leases import end_of_dead, node_lease_key
from phaseloom.common.transport.natsserver import (
    ENSEMBLE_SIZE,
    Credentials,
    EmbeddedEnsemble,
    EmbeddedServer,
)
from phaseloom.common.transport.retry import until_done

log = logging.getLogger(__name__)

NATS = "nats"
_SETTINGS = "settings.json"
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_STABLE_AFTER_S = 10.0
_LAST_BYTES = 64 * 1024
"""How much of the end of a log is read for its last line."""
_STOP_TIMEOUT_S = 12.0
"""Seconds for a child to stop: more than a service's own bound, after which the service exits
hard."""
_READY_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 1.0
_ANSWER_PAUSE_S = 0.02
_HEAD_BYTES = 64
_LONG_LEASE_S = 12.0
"""A node's lease where NATS servers replicate one another: for as long as it may take them to agree
on another leader (9 s) no lease is renewed, and no agent should end for that."""
_ROOM_PAUSE_S = 0.5
_FULL_BYTES = 2**20
"""The disk of a NATS server's store counts as full with less than this left."""
_ROOM_BYTES = 2**26
"""A disk that was full counts as one with room with at least this left."""
_ANY_CALL = "/api/v1/get_server_capabilities"
"""A call of the gateway that every tenant may make."""


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node of a mesh on this machine: an agent and a state manager."""

    name: str
    pool: str
    """`rollout`, `train`, or any other kind."""
    devices: list[int]
    """The memory budget of each device for managed state, bytes."""
    device_kind: DeviceKind = DeviceKind.EMULATED
    """`emulated` takes memory and processors of this machine; `cuda` takes GPU i as device i."""
    cores_per_device: int = 1
    """The cores of each emulated device. With several, and a `multiplexing` policy, jobs run on one
    device at the same time, each on a part of its cores."""
    host_memory_bytes: int = 2 * 2**30
    """The budget of the state manager's host arena."""
    exclusive_residency: Residency = Residency.JOB
    """`job`: opening an activation offloads whatever another job left on the device."""
    price_per_hour: float = 0.0
    """The node's price: placement prefers cheaper nodes. 0: the usual price of its pool."""
    interpreters: dict[str, str] = {}
    """Backend → the Python that its ranks run in, where that is not this one: `vllm` and
    `megatron` have environments of their own. A path may begin with `~`."""
    site: str = ""
    """The name that the nodes joined by fast links share. A weights version crosses the slow link
    to each other site once. Empty: the node belongs to no site."""


def _demo_nodes() -> list[NodeConfig]:
    return [
        NodeConfig("rollout-0", "rollout", [8 * 2**20]),
        NodeConfig("train-0", "train", [16 * 2**20]),
    ]


class MeshConfig(msgspec.Struct, frozen=True):
    """The settings of a whole mesh: the section `mesh`, or PHASELOOM_MESH_<FIELD>."""

    nodes: list[NodeConfig] = msgspec.field(default_factory=_demo_nodes)
    """The nodes of the mesh. The default is one rollout and one train device, which the two jobs of
    the demo must share."""
    tenants: list[str] = msgspec.field(default_factory=lambda: ["demo"])
    """The tenants, each with an account and a password of its own."""
    routers: int = 2
    """The number of router replicas."""
    schedulers: int = 1
    """The number of schedulers, of which one leads and the others stand by."""
    placement: str = "pack"
    """The policy that decides which nodes of each pool a job is pinned to, and with whom."""
    ordering: str = "hrrs"
    """The policy that decides which ready operation a device runs next."""
    multiplexing: str = "off"
    """The policy that decides which operations run side by side on a device of several cores."""
    slowdowns: str = ""
    """The file that `phaseloom measure-slowdown` has written on such a machine, by which that
    policy decides; empty: nothing is known."""
    max_group_jobs: int = 5
    """The most jobs that one node group takes."""
    duty_limit: float = 0.5
    """The largest share of its time that a job may be predicted to wait for the jobs on its
    nodes."""
    switch_s: float = 0.0
    """Seconds planned for a context switch in each phase on shared nodes, by placement policies
    that promise an SLO."""
    slo_percentile: float = 0.0
    """The percentage of a job's single iterations that `coexec_repack` keeps within its SLO, beside
    the mean over its life; 0: the mean alone."""
    idle_grace_s: float = 0.03
    """How long a device is kept for a job that has nothing ready while another waits."""
    frozen_bases: dict[str, list[str]] = {}
    """Models that never change, and that tenants may share: for each name the BLAKE3 of each rank's
    content. `phaseloom state --json` shows the hashes."""
    models: dict[str, str] = {}
    """Models to register, as `phaseloom model add` does: for each name a directory."""
    seal_every: int = 60
    """The number of mutating operations between two seals of a trainable deployment; 0: never."""
    max_losses: int = 3
    """An operation fails once more WPGs than this have died while they ran it."""
    node_grace_s: float = 30.0
    """Seconds for which a node may be away before its deployments are rebuilt elsewhere, where they
    can."""
    node_gone_s: float = 1800.0
    """Seconds after which a node that is away counts as gone for good; 0: only an operator says
    so."""
    nats_servers: int = 1
    """The number of NATS servers: 1, or 3 that replicate everything, so that any one of them may be
    lost."""
    fsync: bool = True
    """Whether NATS has a message on disk before it acknowledges it. Otherwise what it has
    acknowledged survives a killed process, but not a power cut."""
    ops_max_bytes: int = 2**30
    """The most bytes in a tenant's operation stream; publishing into a full one is refused."""
    tenant_limits: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    """The bounds that routers set to a tenant: `max_operations`, `max_bytes`, `rate`, `burst`."""
    checkpoint_root: str = ""
    """The directory of checkpoints, which later runs can load too. Empty: one in the run's own
    directory."""
    gateway_port: int = 0
    """The port of this machine at which a gateway serves the Tinker API and OpenAI's; 0: none. A
    tenant's API key is `tml-` and its password."""
    gateways: int = 1
    """The number of replicas of the gateway, which share its port."""
    gateway_session_s: float = 600.0
    """How long a session of the Tinker SDK may be silent before its models are ended."""
    console_port: int = 0
    """The port of this machine at which the console, a web page, shows the mesh; 0: none."""
    metrics: bool = False
    """Whether each service serves metrics to Prometheus, at a free port of this machine."""

    def check(self) -> None:
        """Refuse settings that cannot be run.

        Raises: CallerError: a name is not valid or not unique, or there is nothing to run.
        """
        for node in self.nodes:
            is_divided = node.cores_per_device > 1
            if node.cores_per_device < 1 or (is_divided and node.device_kind is DeviceKind.CUDA):
                raise CallerError(
                    f"{node.name} has {node.cores_per_device} cores a device",
                    field="mesh.nodes.cores_per_device",
                    remedy="use 1 or more on emulated devices, and leave it out on GPUs",
                )
            for backend, python in node.interpreters.items():
                if not Path(python).expanduser().exists():
                    raise CallerError(
                        f"{node.name} has no {python} for {backend}",
                        code=Code.NOT_FOUND,
                        field="mesh.nodes.interpreters",
                        remedy="name the Python of an environment that has the backend",
                    )
        for where, names in (
            ("mesh.nodes", [node.name for node in self.nodes]),
            ("mesh.tenants", self.tenants),
        ):
            for name in names:
                check_name(name, where)
            if not names or len(set(names)) != len(names):
                raise CallerError(
                    f"{names} are not one or more different names",
                    field=where,
                    remedy="name at least one, each once",
                )
        if self.slowdowns:
            slowdowns.read(Path(self.slowdowns), needed=slowdowns.SUB_STAGES)
        if self.schedulers < 1:
            raise CallerError(
                "a mesh without a scheduler runs nothing",
                field="mesh.schedulers",
                remedy="use 1, or 2 for a standby",
            )
        if self.nats_servers not in (1, ENSEMBLE_SIZE):
            raise CallerError(
                f"{self.nats_servers} NATS servers are neither 1 nor 3",
                field="mesh.nats_servers",
                remedy="use 1, or 3 to lose any one of them: with an even number no more may be "
                "lost than with one less",
            )
        if self.gateways < 1:
            raise CallerError(
                "a gateway without a replica answers nobody",
                field="mesh.gateways",
                remedy="use 1 or more, and gateway_port=0 for no gateway",
            )
        if self.routers < 1:
            raise CallerError(
                "a mesh without a router answers nobody", field="mesh.routers", remedy="use 1 or 2"
            )

    def check_resumes(self, run_dir: Path) -> None:
        """Check that the settings still have all that the run in a directory depends on.

        Nodes and tenants may be added, and all other settings may change.

        Raises: CallerError: FAILED_PRECONDITION: names the setting that must be as it was.
        """
        earlier = settings_of(run_dir)
        if earlier is None:
            return
        kept = [_identity(node) for node in self.nodes]
        nodes = [node.name for node in earlier.nodes if _identity(node) not in kept]
        tenants = [tenant for tenant in earlier.tenants if tenant not in self.tenants]
        root, servers = earlier.checkpoint_root, earlier.nats_servers
        for setting, is_kept, what in (
            ("mesh.nodes", not nodes, f"nodes {', '.join(nodes)}, each in its pool"),
            ("mesh.tenants", not tenants, f"tenants {', '.join(tenants)}"),
            ("mesh.checkpoint_root", root == self.checkpoint_root, f"checkpoints in {root!r}"),
            ("mesh.nats_servers", servers == self.nats_servers, f"{servers} NATS servers"),
        ):
            if not is_kept:
                raise CallerError(
                    f"the run in {run_dir} has {what}, and these settings have not",
                    code=Code.FAILED_PRECONDITION,
                    field=setting,
                    remedy=f"give the settings that are in {run_dir / _SETTINGS}",
                )


def _identity(node: NodeConfig) -> tuple[object, ...]:
    """The settings of a node that must not change when a run is resumed: jobs and state depend on
    them."""
    return node.name, node.pool, node.devices, node.device_kind


def servers_of(
    config: MeshConfig,
    directory: Path,
    tenants: Sequence[str],
    *,
    credentials_file: Path | None = None,
) -> EmbeddedServer | EmbeddedEnsemble:
    """The NATS server of a mesh, or its three.

    Args: directory: holds their stores.
    """
    kind = EmbeddedServer if config.nats_servers == 1 else EmbeddedEnsemble
    return kind(directory, tenants, credentials_file=credentials_file, fsync=config.fsync)


def settings_of(run_dir: Path) -> MeshConfig | None:
    """The settings of an earlier run in the directory; None: there was none."""
    file = run_dir / _SETTINGS
    return msgspec.json.decode(file.read_bytes(), type=MeshConfig) if file.is_file() else None


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process: `python -m <module>`, with variables beside the inherited ones."""

    name: str
    module: str
    environment: dict[str, str]


def child_specs(
    config: MeshConfig, run_dir: Path, sockets: Path, credentials: Credentials, secret: str
) -> list[ChildSpec]:
    """The processes of a mesh. The variables of a section go only to the service that reads it.

    Args: sockets: a directory whose path is short enough for Unix sockets.
          secret: the mesh's secret, by which agents and state managers know one another, and with
              which the scheduler signs tickets.
    """
    bus = {
        "URL": credentials.url,
        "USER": credentials.user,
        "PASSWORD": credentials.password,
        "REPLICAS": config.nats_servers,
    }
    shared = {
        **_section("BUS", bus),
        **_section("TELEMETRY", {"SPANS_DIR": run_dir / "spans"}),
        # An inherited port would be the same for all services.
        **_section("METRICS", {"PORT": 0}),
        "OMP_NUM_THREADS": "1",
    }
    specs = [*_schedulers(config, secret), *_routers(config)]
    specs.append(ChildSpec("profiler", "phaseloom.profiler.main", {}))
    if config.gateway_port:
        specs += _gateways(config, credentials)
    if config.console_port:
        specs.append(_console(config, credentials))
    for node in config.nodes:
        specs += _node(node, config, run_dir, sockets, secret)
    return [ChildSpec(s.name, s.module, {**shared, **s.environment}) for s in specs]


def _schedulers(config: MeshConfig, secret: str) -> list[ChildSpec]:
    specs = []
    for number in range(config.schedulers):
        name = f"scheduler-{number}" if number else "scheduler"
        settings = {
            "NAME": name,
            "PLACEMENT": config.placement,
            "ORDERING": config.ordering,
            "MULTIPLEXING": config.multiplexing,
            "SLOWDOWNS_FILE": Path(config.slowdowns).absolute() if config.slowdowns else "",
            "MAX_GROUP_JOBS": config.max_group_jobs,
            "DUTY_LIMIT": config.duty_limit,
            "SWITCH_S": config.switch_s,
            "SLO_PERCENTILE": config.slo_percentile,
            "IDLE_GRACE_S": config.idle_grace_s,
            "SEAL_EVERY": config.seal_every,
            "MAX_LOSSES": config.max_losses,
            "NODE_GRACE_S": config.node_grace_s,
            "NODE_GONE_S": config.node_gone_s,
            "STATE_SECRET": secret,
        }
        specs.append(ChildSpec(name, "phaseloom.scheduler.main", _section("SCHEDULER", settings)))
    return specs


def _routers(config: MeshConfig) -> list[ChildSpec]:
    specs = []
    for number in range(config.routers):
        name = f"router-{number}"
        settings = {
            "NAME": name,
            "TENANTS": config.tenants,
            "OPS_MAX_BYTES": config.ops_max_bytes,
            "TENANT_LIMITS": config.tenant_limits,
        }
        specs.append(ChildSpec(name, "phaseloom.router.main", _section("ROUTER", settings)))
    return specs


def api_key(password: str) -> str:
    """The API key of a tenant at the gateway."""
    return f"tml-{password}"


def _gateways(config: MeshConfig, credentials: Credentials) -> list[ChildSpec]:
    specs = []
    for number in range(config.gateways):
        name = f"gateway-{number}"
        settings = {
            "NAME": name,
            "PORT": config.gateway_port,
            "SHARES_PORT": config.gateways > 1,
            "KEYS": {api_key(password): name for name, password in credentials.tenants.items()},
            "PASSWORDS": credentials.tenants,
            "SESSION_S": config.gateway_session_s,
        }
        specs.append(ChildSpec(name, "phaseloom.gateway.main", _section("GATEWAY", settings)))
    return specs


def console_key(password: str) -> str:
    """The key of a tenant, or of the mesh's operator, at the console.

    It follows from the password and is the same for as long as the password is. It is not the
    password itself, because it stands in addresses.
    """
    return hashlib.blake2b(password.encode(), digest_size=18, person=b"console").hexdigest()


def _console(config: MeshConfig, credentials: Credentials) -> ChildSpec:
    settings = {
        "PORT": config.console_port,
        "OPERATOR_KEY": console_key(credentials.password),
        "KEYS": {console_key(password): name for name, password in credentials.tenants.items()},
    }
    return ChildSpec("console", "phaseloom.console.main", _section("CONSOLE", settings))


def _node(
    node: NodeConfig, config: MeshConfig, run_dir: Path, sockets: Path, secret: str
) -> list[ChildSpec]:
    socket = sockets / f"{node.name}.sock"
    checkpoints = Path(config.checkpoint_root or run_dir / "checkpoints").absolute()
    state = {
        "NODE": node.name,
        "SOCKET": socket,
        "SECRET": secret,
        "DIRECTORY": run_dir / "nodes" / node.name,
        "CERTIFICATES": directory_of(run_dir / "certificates", node.name),
        "SITE": node.site,
        "FROZEN_BASES": config.frozen_bases,
        "DEVICES": node.devices,
        "HOST_MEMORY_BYTES": node.host_memory_bytes,
        "CHECKPOINT_ROOT": checkpoints,
    }
    worker = {
        "NODE": node.name,
        "POOL": node.pool,
        "DEVICES": node.devices,
        "DEVICE_KIND": node.device_kind,
        "CORES_PER_DEVICE": node.cores_per_device,
        "HOST_MEMORY_BYTES": node.host_memory_bytes,
        "EXCLUSIVE_RESIDENCY": node.exclusive_residency,
        "INTERPRETERS": {
            backend: str(Path(python).expanduser().absolute())
            for backend, python in node.interpreters.items()
        },
        "PRICE_PER_HOUR": node.price_per_hour,
        "STATE_SOCKET": socket,
        "STATE_SECRET": secret,
        "RUNTIME_DIRECTORY": sockets,
        **({} if config.nats_servers == 1 else {"LEASE_TTL_S": _LONG_LEASE_S}),
        "DIRECTORY": run_dir / "nodes" / node.name,
    }
    return [
        ChildSpec(f"statemgr-{node.name}", "phaseloom.statemgr.main", _section("STATEMGR", state)),
        ChildSpec(f"worker-{node.name}", "phaseloom.worker.main", _section("WORKER", worker)),
    ]


def with_metrics(specs: Sequence[ChildSpec]) -> tuple[list[ChildSpec], dict[str, int]]:
    """The specs, each with a free loopback port for its metrics, and these ports by name."""
    with ExitStack() as stack:
        # All listeners stay open until the last port is chosen, so that the ports differ.
        held = {s.name: stack.enter_context(create_server(("127.0.0.1", 0))) for s in specs}
        ports = {name: int(listener.getsockname()[1]) for name, listener in held.items()}
    settings = {name: _section("METRICS", {"PORT": port}) for name, port in ports.items()}
    return [replace(s, environment={**s.environment, **settings[s.name]}) for s in specs], ports


def _section(name: str, values: Mapping[str, object]) -> dict[str, str]:
    return {f"{configuration.PREFIX}{name}_{key}": _text(value) for key, value in values.items()}


def _text(value: object) -> str:
    if isinstance(value, str | Path):
        return str(value)
    return msgspec.json.encode(value).decode()


def pause_s(failures: int) -> float:
    """The pause before a child is started again, in seconds. Args: failures: its failures in a
    row."""
    return float(min(_FIRST_PAUSE_S * 2 ** (failures - 1), _LONGEST_PAUSE_S))


@dataclass(slots=True)
class Ended:
    """How a child ended."""

    exit_code: int
    after_s: float

    def __str__(self) -> str:
        how = f"exit code {self.exit_code}"
        if self.exit_code < 0:
            how = signal.Signals(-self.exit_code).name
        return f"{how} after {self.after_s:.1f} s"


def last_words(log_file: Path) -> str:
    """The reason that a service has logged as its last line, to go on a sentence with; or empty.

    A service that was killed has logged none.
    """
    with suppress(OSError, msgspec.DecodeError, IndexError), log_file.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        line = msgspec.json.decode(file.read().splitlines()[-1], type=_LogLine)
        return f": {line.message}" if line.level == "CRITICAL" else ""
    return ""


class _LogLine(msgspec.Struct):
    level: str
    message: str


Report = Callable[[str, str], Awaitable[None]]
"""The type of the callback for a child that has ended and will be started again: (name, reason)."""


@dataclass(slots=True)
class Child:
    """One process, kept running until it is told to stop."""

    spec: ChildSpec
    log_file: Path
    on_start: Callable[[], None]
    report: Report
    process: asyncio.subprocess.Process | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Run the process until `stop`, and start it again whenever it ends before."""
        failures, before = 0, ""
        try:
            while not self._stopping.is_set():
                ended = await self._run_once()
                if self._stopping.is_set():
                    return
                failures = 1 if ended.after_s >= _STABLE_AFTER_S else failures + 1
                wait_s = pause_s(failures)
                said = await asyncio.to_thread(last_words, self.log_file)
                told = ": as before" if said and said == before else said
                before = said
                why = f"{ended}{told}; starts again after {wait_s:.1f} s; see {self.log_file}"
                await self.report(self.spec.name, why)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._stopping.wait()
        finally:
            self.send(signal.SIGKILL)
            self._stopped.set()

    async def stop(self, timeout_s: float) -> None:
        """End the process with SIGTERM, and with SIGKILL where that takes too long."""
        self._stopping.set()
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self._stopped.wait()
        except TimeoutError:
            log.warning("%s did not stop within %.0f s: killed", self.spec.name, timeout_s)
            self.send(signal.SIGKILL)
            await self._stopped.wait()

    def kill(self) -> None:
        """End the process at once, for good."""
        self._stopping.set()
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def _run_once(self) -> Ended:
        started_s = time.monotonic()
        with self.log_file.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self.spec.module,
                env={
                    **configuration.inherited(),
                    **self.spec.environment,
                    DIE_WITH_PARENT: str(os.getpid()),
                },
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A terminal's Ctrl-C is for the supervisor, which stops things in order.
                start_new_session=True,
            )
        self.on_start()
        if self._stopping.is_set():  # it was told to stop while it was being started
            self.send(signal.SIGTERM)
        exit_code = await self.process.wait()
        # The child leads a process group: what it left behind must not meet its successor.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process = None
        return Ended(exit_code, time.monotonic() - started_s)


class Mesh:
    """A mesh that runs between entering and leaving this context manager, once."""

    def __init__(
        self,
        config: MeshConfig,
        run_dir: Path,
        *,
        accepts_loss: bool = False,
        servers: EmbeddedServer | EmbeddedEnsemble | None = None,
    ) -> None:
        """A mesh in this run directory.

        Args: accepts_loss: whether to go on with a store that has lost its newest messages; jobs
                  then fall back to their checkpoints.
              servers: the NATS servers, which this mesh starts and stops; None: as `servers_of`
                  makes them.
        """
        config.check()
        self.config = config
        self.run_dir = run_dir.absolute()
        self._accepts_loss = accepts_loss
        self.servers = servers or servers_of(
            config,
            self.run_dir / NATS,
            config.tenants,
            credentials_file=self.run_dir / "credentials.json",
        )
        self.metrics_ports: dict[str, int] = {}
        """The port of each service's `http://127.0.0.1:<port>/metrics`; empty without
        `config.metrics`."""
        self._agents = {f"worker-{node.name}": node.name for node in config.nodes}
        """By agent its node."""
        self._children: list[Child] = []
        self._stack = AsyncExitStack()
        self._supervising: asyncio.Task[None] | None = None
        self._bus: Bus | None = None
        self._marks: StoreMarks | None = None
        self._begins_at = 1
        """The sequence of the decision log at which this mesh begins."""

    @property
    def url(self) -> str:
        return self.servers.credentials.url

    @property
    def credentials(self) -> Credentials:
        return self.servers.credentials

    def console_url(self, tenant: str = "") -> str:
        """The address of the console, with the key of a tenant or, without one, an operator's."""
        credentials = self.credentials
        password = credentials.tenants[tenant] if tenant else credentials.password
        return f"http://127.0.0.1:{self.config.console_port}/?key={console_key(password)}"

    async def __aenter__(self) -> Mesh:
        async with AsyncExitStack() as stack:
            for name in ("logs", "spans", "nodes"):
                (self.run_dir / name).mkdir(parents=True, exist_ok=True)
            settings = msgspec.json.format(msgspec.json.encode(self.config))
            replace_file(self.run_dir / _SETTINGS, settings)
            sockets = socket_directory(self.run_dir, [node.name for node in self.config.nodes])
            stack.callback(shutil.rmtree, sockets, ignore_errors=True)
            names = [node.name for node in self.config.nodes]
            await asyncio.to_thread(make_certificates, self.run_dir / "certificates", names)
            await stack.enter_async_context(self.servers)
            self._bus = await Bus.open(self.credentials.bus, "supervisor")
            stack.push_async_callback(self._bus.close)
            self._marks = await self._checked(self._bus)
            # An earlier run in this directory has told of its nodes, too.
            self._begins_at = await until_done(self._bus.log_end, "the log's end") + 1
            await self._register_models(self._bus)
            specs = child_specs(
                self.config, self.run_dir, sockets, self.credentials, secrets.token_urlsafe(24)
            )
            if self.config.metrics:
                specs, self.metrics_ports = with_metrics(specs)
            self._children = [
                Child(
                    spec, self.run_dir / "logs" / f"{spec.name}.log", self._write_state, self._tell
                )
                for spec in specs
            ]
            self._supervising = asyncio.create_task(self._supervise())
            stack.push_async_callback(self._stop)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _checked(self, bus: Bus) -> StoreMarks:
        """Check the store before anything is decided on it. Returns: its marks.

        Raises: ResourceError: DATA_LOSS: the store has lost something, and may not or cannot be
                used.
        """
        try:
            marks = StoreMarks(self.run_dir / MARKS)
            await check_when_up(bus, marks, newest_mark(self.run_dir / "nodes"))
        except ResourceError as error:
            if not self._accepts_loss:
                raise
            log.warning("accepted: %s", error)
            await until_done(partial(check_store, bus), "check the store")
            set_aside(self.run_dir)
            await end_sessions(bus)
            marks = StoreMarks(self.run_dir / MARKS)
            await marks.check(bus)
        return marks

    async def _register_models(self, bus: Bus) -> None:
        """Register the models of the configuration. Raises: CallerError: a directory is no
        model's."""
        for name, directory in self.config.models.items():
            model = await asyncio.to_thread(read_model, name, Path(directory))
            await register(bus, model, replaces=True)

    async def wait(self) -> None:
        """Wait for as long as the mesh runs. Raises: the error that made supervising it
        impossible."""
        assert self._supervising is not None
        await asyncio.shield(self._supervising)

    async def ready(self, timeout_s: float = _READY_TIMEOUT_S) -> None:
        """Wait until every node is in the decision log, and the scheduler, a router, the gateway
        and the console answer.

        Raises: ResourceError: that took longer than the timeout; the message says what is missing.
        """
        missing = {f"node {node.name}" for node in self.config.nodes} | {"scheduler", "router"}
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                group.create_task(self._nodes_up(missing))
                for service, call, request in (
                    ("scheduler", "job.status", JobRequest("none")),
                    ("router", "result.get", ResultRequest("none", "none", "1")),
                ):
                    group.create_task(self._answers(call, encode(request), service, missing))
                if self.config.gateway_port:
                    missing.add("gateway")
                    group.create_task(self._gateway_serves(missing))
                if self.config.console_port:
                    missing.add("console")
                    group.create_task(self._console_serves(missing))
        except TimeoutError:
            raise ResourceError(
                f"the mesh is not up after {timeout_s:.0f} s: no {', '.join(sorted(missing))}",
                code=Code.DEADLINE_EXCEEDED,
                remedy=f"see {self.run_dir / 'logs'}",
            ) from None

    def pids(self, service: str = "") -> list[int]:
        """The process ids of a service (`router`), of one replica (`router-0`), or of the server
        (`nats`; of three: `nats-1` and so on). Without a name: all."""
        found = [
            child.process.pid
            for child in self._children
            if child.process is not None and _is_named(child.spec.name, service)
        ]
        return found + [
            server.pid
            for name, server in self.servers.members.items()
            if server.is_running and _is_named(name, service)
        ]

    def kill(self, service: str, number: int = signal.SIGKILL) -> list[int]:
        """Send a signal to a service's processes, as a crash or an operator would."""
        pids = self.pids(service)
        for pid in pids:
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(pid, number)
        return pids

    def lose(self, node: str) -> None:
        """Kill a node's processes for good, as when a machine fails."""
        for child in self._children:
            if child.spec.name in (f"worker-{node}", f"statemgr-{node}"):
                child.kill()

    async def _supervise(self) -> None:
        async with asyncio.TaskGroup() as group:
            servers = [
                group.create_task(self._keep_server(name, server), name=name)
                for name, server in self.servers.members.items()
            ]
            marks = group.create_task(self._keep_marks(), name="marks")
            rooms = [
                group.create_task(self._keep_room(name, server), name=f"room of {name}")
                for name, server in self.servers.members.items()
            ]
            async with asyncio.TaskGroup() as children:
                for child in self._children:
                    children.create_task(child.run(), name=child.spec.name)
            for keeping in (*servers, *rooms):
                keeping.cancel()
            marks.cancel()

    async def _keep_marks(self) -> None:
        """Keep the marks of streams up to date, and end the mesh where a restarted server has lost
        messages."""
        assert self._bus is not None
        assert self._marks is not None
        await self._marks.keep(self._bus)

    async def _keep_server(self, name: str, server: EmbeddedServer) -> None:
        """Keep a server running until the task is cancelled; clients reconnect by themselves."""
        failures = 0
        while True:
            started_s = time.monotonic()
            ended = Ended(await server.wait(), time.monotonic() - started_s)
            await server.stop()
            failures = 1 if ended.after_s >= _STABLE_AFTER_S else failures + 1
            log.warning("%s ended: %s; starts again", name, ended)
            while True:
                await asyncio.sleep(pause_s(failures))
                try:
                    await server.start()
                    break
                except ResourceError as error:
                    failures += 1
                    log.warning("%s does not start: %s", name, error)
            self._write_state()
            await self._tell(name, str(ended))

    async def _keep_room(self, name: str, server: EmbeddedServer) -> None:
        """Tell when the disk of a server's store is full, and restart the server once it is not.

        A server that could not write takes nothing more, also when there is room again.
        """
        is_full = False
        while True:
            await asyncio.sleep(_ROOM_PAUSE_S)
            try:
                free = shutil.disk_usage(server.store).free
            except OSError:
                continue  # the server says itself what it lacks; the mesh must not end for this
            if not is_full and free < _FULL_BYTES:
                is_full = True
                full = ResourceError(
                    f"the disk of {name}'s store is full: {free} bytes are left",
                    code=Code.RESOURCE_EXHAUSTED,
                    remedy=f"make room for {server.store}; {name} goes on by itself then",
                )
                log.error("%s", full)
                await self._notice("disk_full", str(full), name)
            elif is_full and free >= _ROOM_BYTES:
                is_full = False
                log.warning("%s has room again, and is restarted", name)
                if server.is_running:
                    os.kill(server.pid, signal.SIGTERM)

    async def _stop(self) -> None:
        """Stop the agents first, so that ranks end and permits are handed back, then the rest."""
        assert self._supervising is not None
        agents = [c for c in self._children if _is_named(c.spec.name, "worker")]
        others = [c for c in self._children if c not in agents]
        for stage in (agents, others):
            if not self._supervising.done():
                await asyncio.gather(*(child.stop(_STOP_TIMEOUT_S) for child in stage))
        if self._bus is not None and self._marks is not None:
            with suppress(NatsError, NatsTimeoutError):
                await self._marks.check(self._bus)
        await self._supervising

    async def _nodes_up(self, missing: set[str]) -> None:
        assert self._bus is not None
        wanted = {f"node {node.name}" for node in self.config.nodes}
        async with aclosing(self._bus.read_log(self._begins_at)) as entries:
            async for entry in entries:
                if isinstance(entry.event, NodeUp):
                    missing.discard(f"node {entry.event.node}")
                elif isinstance(entry.event, NodeLost):
                    missing.update(wanted & {f"node {entry.event.node}"})
                if not missing & wanted:
                    return

    async def _gateway_serves(self, missing: set[str]) -> None:
        """Wait until the gateway serves a tenant.

        Something else may listen at the port, and a killed gateway of this run may have the
        tenant's lease for a while.
        """
        key = api_key(self.credentials.tenants[self.config.tenants[0]])
        await self._serves("gateway", self.config.gateway_port, _ANY_CALL, f"X-API-Key: {key}")
        missing.discard("gateway")

    async def _console_serves(self, missing: set[str]) -> None:
        """Wait until the console knows its keys. Something else may listen at the port."""
        bearer = f"Authorization: Bearer {console_key(self.credentials.password)}"
        await self._serves("console", self.config.console_port, "/api/me", bearer)
        missing.discard("console")

    async def _serves(self, service: str, port: int, path: str, header: str) -> None:
        while True:
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    if await _status_of(port, path, header) == "200":
                        return
            except (OSError, TimeoutError) as error:
                log.debug("%s does not answer yet: %r", service, error)
            await asyncio.sleep(_ANSWER_PAUSE_S)

    async def _answers(self, call: str, request: bytes, service: str, missing: set[str]) -> None:
        """Wait for any answer of a service. An error counts as an answer: the named thing does not
        exist."""
        assert self._bus is not None
        subject = streams.api_subject(self.config.tenants[0], call)
        while True:
            try:
                await self._bus.client.request(
                    subject, request, timeout=_ANSWER_TIMEOUT_S, headers={CONTENT_TYPE: MSGPACK}
                )
            except (NoRespondersError, NatsTimeoutError):
                await asyncio.sleep(_ANSWER_PAUSE_S)
            else:
                missing.discard(service)
                return

    async def _tell(self, name: str, reason: str) -> None:
        log.warning("%s ended: %s", name, reason)
        await self._notice("restarted", reason, name)
        if name in self._agents:
            assert self._bus is not None
            try:
                # Its ranks have ended with it: the next one need not wait for its lease.
                await end_of_dead(self._bus, node_lease_key(self._agents[name]))
            except (NatsError, NatsTimeoutError) as error:
                log.warning("the lease of %s is left to run out: %r", name, error)

    async def _notice(self, what: str, why: str, about: str) -> None:
        assert self._bus is not None
        try:
            await self._bus.notice("supervisor", what, why, about)
        except (NatsError, NatsTimeoutError) as error:  # the server is what the notice is about
            log.warning("no event for that: %r", error)

    def _write_state(self) -> None:
        pids = {c.spec.name: c.process.pid for c in self._children if c.process}
        for name, server in self.servers.members.items():
            if server.is_running:  # a child may start again while the server is away
                pids[name] = server.pid
        state = {
            "url": self.url,
            "pid": os.getpid(),
            "pids": pids,
            "metrics": {
                name: f"http://127.0.0.1:{port}/metrics"
                for name, port in self.metrics_ports.items()
            },
        }
        content = msgspec.json.format(msgspec.json.encode(state)) + b"\n"
        replace_file(self.run_dir / "mesh.json", content, 0o644)


async def _status_of(port: int, path: str, header: str) -> str:
    """The HTTP status of a GET on this machine; a value that is no status where it is not HTTP.

    Raises: OSError: nothing listens at the port, or it hangs up.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\n{header}\r\n\r\n".encode())
        head = await reader.read(_HEAD_BYTES)
    finally:
        writer.close()
    return head.decode(errors="replace").partition(" ")[2][:3]


def socket_directory(run_dir: Path, nodes: Iterable[str]) -> Path:
    """A new directory for the nodes' Unix sockets.

    It is in the run directory, so that nothing stays behind elsewhere even after SIGKILL. Where
    that path is too long (a socket's path has at most 107 bytes), it is in the system's temporary
    directory.
    """
    longest = max(len(f"agent-{node}.sock".encode()) for node in nodes)
    own = run_dir / "s"
    if len(os.fsencode(own)) + 1 + longest <= framing.MAX_PATH_BYTES:
        own.mkdir(parents=True, exist_ok=True)
        return own
    return Path(tempfile.mkdtemp(prefix="phaseloom-"))


def _is_named(name: str, service: str) -> bool:
    return not service or name == service or name.startswith(f"{service}-")
