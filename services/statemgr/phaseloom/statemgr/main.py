"""The state manager of one node: its configuration, wiring, start and end."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import resource
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.sizes import Size
from phaseloom.common.contract.state_agent import DiskMethod
from phaseloom.common.contract.state_rank import StateMessage
from phaseloom.common.contract.tenantlimits import TenantLimits, check_tenant_limits
from phaseloom.common.observability import metrics
from phaseloom.common.observability.metrics import Reading
from phaseloom.common.process import lifecycle, machine
from phaseloom.common.process.config import LAST_PORT, check_bounds, load
from phaseloom.common.process.files import locked
from phaseloom.common.transport import framing
from phaseloom.statemgr.checkpoints.catalogue import Archives, Catalogue
from phaseloom.statemgr.checkpoints.exporting import Exporter
from phaseloom.statemgr.checkpoints.files import Checkpoints
from phaseloom.statemgr.checkpoints.loading import Loader
from phaseloom.statemgr.checkpoints.staging import Staging
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.handover.handover import Handover
from phaseloom.statemgr.node.background import Background
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.records.hostcopies import bases_of
from phaseloom.statemgr.seals.replicating import Replicator
from phaseloom.statemgr.seals.sealing import Sealer
from phaseloom.statemgr.serving import Server
from phaseloom.statemgr.shell import Parts, StateManager
from phaseloom.statemgr.tiering.heapfiles import HeapFiles
from phaseloom.statemgr.tiering.rankmemory import RankMemory
from phaseloom.statemgr.tiering.sharing import FrozenCopies, Sharing
from phaseloom.statemgr.tiering.switching import Switcher
from phaseloom.statemgr.tiering.tiering import Tiering, VersionMoves
from phaseloom.statemgr.transfer import tls
from phaseloom.statemgr.transfer.fetching import Home
from phaseloom.statemgr.transfer.permission import Gate
from phaseloom.statemgr.transfer.tls import Identity
from phaseloom.statemgr.versions.fetch import Suspects, VersionFetcher
from phaseloom.statemgr.versions.weights import Publishing, Weights

log = logging.getLogger(__name__)

_LOCK = ".lock"
_GC_THRESHOLD = 200_000
"""New objects between two runs of the garbage collector."""
_LISTEN_AGAIN_S = 1.0
"""Pause between two attempts to listen at a port that is in use."""


class StateManagerConfig(msgspec.Struct, frozen=True):
    """`[statemgr]` in the TOML file, or `PHASELOOM_STATEMGR_*` in the environment."""

    node: NodeId
    """The node whose memory this daemon keeps; for logs and spans."""
    socket: str
    """Path of the Unix socket for the node's agent and ranks."""
    secret: str
    """The mesh's secret: the agent proves that it knows it, and it signs the tickets of weights
    versions."""
    certificates: str
    """The directory of this node's certificate, key and authority (`phaseloom certs`), by which the
    state managers of different nodes know one another."""
    directory: str
    """Directory of the state files: seals, persisted weights versions, host copies on NVMe."""
    devices: list[Size]
    """The bytes of managed state that each device may hold."""
    host_memory_bytes: Size
    """The budget of host memory in bytes: host copies, weights versions, seals and checkpoints'
    snapshots."""
    checkpoint_root: str = ""
    """The directory that holds `<tenant>/<job>/<deployment>/<checkpoint>`. It must be the same on
    all nodes if deployments that move are to find their checkpoints. Empty: no checkpoint can be
    saved or loaded."""
    max_checkpoint_bytes: Annotated[Size, msgspec.Meta(ge=0)] | None = None
    """The most bytes of a tenant's checkpoints under `checkpoint_root`, including those being
    written and those that a deployment has loaded. 0: no limit; None: half of the file system."""
    tenant_limits: TenantLimits = msgspec.field(default_factory=dict)
    """Limits of single tenants that replace `max_checkpoint_bytes`."""
    checkpoint_file_bytes: Size = 5_000_000_000
    """The largest size of a checkpoint's files in bytes; a tensor that alone is larger has a larger
    file."""
    disk_method: DiskMethod = DiskMethod.DIRECT
    """How state files are written and read: `kvikio`, `direct` or `buffered`. If a test at start
    fails, the next simpler method is used, and the log and `phaseloom doctor` say why."""
    nvme_bytes: Size | None = None
    """The budget of host copies on NVMe in bytes. 0: host copies stay in memory; None: as much as
    the disk takes. Seals and versions are not counted."""
    host: str = "127.0.0.1"
    """The address at which weights versions are served to other nodes' daemons."""
    port: int = 0
    """The TCP port at which weights versions are served; 0: any free port. `StatusReport.endpoint`
    has the port in use."""
    site: str = ""
    """The name of the group of nodes that fast links join. A weights version crosses to each other
    site once, and the nodes there pass it on among themselves. Empty: every node fetches for
    itself."""
    delta_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.25
    """A batch of a weights version is sent as a delta of an earlier version if the delta has at
    most this share of the batch's bytes. 0: versions are always sent whole."""
    frozen_bases: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """Models that never change, whose bytes tenants may share: a name → the BLAKE3 of each rank's
    content, in hex as `phaseloom state --json` shows it. All other bytes are shared within a tenant
    only."""
    transfer_timeout_s: float = 120.0
    """Seconds after which a rank that has not copied its heap out or in counts as lost."""
    resume_timeout_s: float = 10.0
    """Seconds after a kill of the daemon within which ranks must come back, or are lost."""
    peer_timeout_s: float = 10.0
    """Seconds of silence of another node's daemon after which the next source is tried."""

    def check(self) -> None:
        """Raises: CallerError: a number is out of its bounds, or the machine has less memory."""
        check_bounds(self, "statemgr", _BOUNDS)
        machine.check_memory(self.host_memory_bytes, "statemgr.host_memory_bytes")
        check_tenant_limits(self.tenant_limits, "statemgr.tenant_limits")

    def checkpoint_bytes_of(self, tenant: str) -> int:
        """Return the limit of a tenant's checkpoints; 0: there is none."""
        limit = self.tenant_limits.get(tenant, {}).get(
            "max_checkpoint_bytes", self.max_checkpoint_bytes
        )
        if limit is None:
            return shutil.disk_usage(self.checkpoint_root).total // 2
        return int(limit)


_BOUNDS = {
    "host_memory_bytes": (1, math.inf),
    "checkpoint_file_bytes": (1, math.inf),
    "port": (0, LAST_PORT),
    "transfer_timeout_s": (0.001, math.inf),
    "resume_timeout_s": (0, math.inf),
    "peer_timeout_s": (0.001, math.inf),
}


async def serve(stop: asyncio.Event) -> None:
    await run(load(StateManagerConfig, "statemgr"), stop)


async def run(config: StateManagerConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. The socket file stays: the next daemon replaces it."""
    # The layout of a large model is tens of thousands of objects, none of which is garbage.
    gc.set_threshold(_GC_THRESHOLD)
    # Every extent has up to two descriptors, and each fetch four streams.
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    config.check()
    root = Path(config.directory)
    await asyncio.to_thread(root.mkdir, parents=True, exist_ok=True)
    in_use = CallerError(
        f"another state manager uses {root}",
        code=Code.FAILED_PRECONDITION,
        field="statemgr.directory",
        remedy="stop the other one, or give this one its own directory and socket",
    )
    with locked(root / _LOCK, in_use):
        await _serve(config, stop)


async def _serve(config: StateManagerConfig, stop: asyncio.Event) -> None:
    identity = Identity.load(config.certificates)
    home = Home(identity, "", config.site, config.peer_timeout_s)
    directory = await asyncio.to_thread(StateDirectory, Path(config.directory), config.disk_method)
    log.info(
        "%s uses %s I/O: %s",
        *(config.directory, directory.disk.path.method, directory.disk.path.why),
    )
    node = Node(
        config.node,
        directory,
        config.devices,
        config.host_memory_bytes,
        config.transfer_timeout_s,
        frozen_bases=bases_of(config.frozen_bases),
        endpoint=lambda: home.endpoint,
    )
    _observe(node)
    root = Path(config.checkpoint_root) if config.checkpoint_root else None
    checkpoints = Checkpoints(root, config.node)
    await asyncio.to_thread(checkpoints.sweep)
    parts = wire(
        node,
        home,
        checkpoints,
        directory if root is None else await asyncio.to_thread(StateDirectory, root),
        checkpoint_file_bytes=config.checkpoint_file_bytes,
        checkpoint_bytes_of=config.checkpoint_bytes_of,
        nvme_budget_bytes=_nvme_budget(Path(config.directory), config.nvme_bytes),
    )
    for path, header in await asyncio.to_thread(lambda: list(directory.scan())):
        if header.kind == "version":
            parts.weights.add_from_disk(header)
        else:
            parts.sealer.add_from_disk(header, str(path))
    nodes = Server(
        *(Gate(config.secret), node.ledger, node.versions, parts.weights, parts.replicator),
        home=home,
        delta_share=config.delta_share,
    )
    server = tls.Server(identity, config.peer_timeout_s, nodes.session)
    addresses = _Addresses(home, node.background, server, config.host, config.port)
    local = framing.LocalListener(config.socket)
    try:
        async with node.background.running():
            sharing = Sharing(node.ledger, node.memory, node.copies, node.ranks, node.background)
            node.background.start(sharing.run(), is_endless=True)
            addresses.serve()
            manager = StateManager(
                parts,
                secret=config.secret,
                resume_timeout_s=config.resume_timeout_s,
                serve_versions_at=addresses.add,
            )
            serving = framing.serve(local, StateMessage, manager.session, max_fds=0)
            node.background.start(serving, is_endless=True)
            log.info("%s serves at %s and %s", config.node, config.socket, home.endpoint)
            await stop.wait()
    finally:
        local.close()
        addresses.close()
        parts.archives.close()
        node.close()


def _observe(node: Node) -> None:
    """Have every scrape of the metrics read memory use and budgets."""
    labels = {"node": node.ledger.node}
    memory, residency = node.memory, node.records.residency
    devices = range(len(residency.device_budget_bytes))

    def by_device(values: list[int]) -> list[Reading]:
        return [(value, {**labels, "device": str(d)}) for d, value in enumerate(values)]

    metrics.observe(metrics.ARENA_USED, lambda: [(memory.used_bytes, labels)])
    metrics.observe(metrics.ARENA_BUDGET, lambda: [(memory.budget_bytes, labels)])
    metrics.observe(
        metrics.DEVICE_USED,
        lambda: by_device([residency.device_used_bytes(d) for d in devices]),
    )
    metrics.observe(metrics.DEVICE_BUDGET, lambda: by_device(residency.device_budget_bytes))


def wire(
    node: Node,
    home: Home,
    checkpoints: Checkpoints,
    checkpoint_files: StateDirectory,
    *,
    checkpoint_file_bytes: int,
    checkpoint_bytes_of: Callable[[str], int],
    nvme_budget_bytes: int,
) -> Parts:
    """Build the features on a node, each from the parts that it uses.

    Args: checkpoint_files: the state directory at the checkpoint root.
    """
    ledger, records, memory, ranks = node.ledger, node.records, node.memory, node.ranks
    directory, residency, digests = node.directory, records.residency, node.digests
    moves = VersionMoves(ledger, node.versions, ranks, directory)
    tiering = Tiering(
        *(ledger, memory, node.copies, moves, ranks, residency, digests),
        nvme_budget_bytes=nvme_budget_bytes,
    )
    heap_files = HeapFiles(ledger, residency, memory, node.copies, ranks, tiering)
    frozen = FrozenCopies(records, memory, node.copies, ranks, tiering.reserve_frozen, heap_files)
    suspects = Suspects(records, node.versions, ranks, directory)
    fetcher = VersionFetcher(node.versions, suspects, tiering, directory, home)
    weights = Weights(ledger, records, node.versions, moves, fetcher)
    stores = node.copies, frozen, node.seals
    sealing = *stores, heap_files
    sealer = Sealer(
        ledger, records, memory, ranks, tiering, *sealing, verify_version=weights.verify
    )
    replicator = Replicator(records, node.seals, directory, sealer, weights, home)
    staging = Staging(
        *(ledger, records, memory, ranks, tiering, node.copies, frozen, node.background)
    )
    return Parts(
        ledger=ledger,
        records=records,
        memory=memory,
        background=node.background,
        ranks=ranks,
        versions=node.versions,
        device_copies=node.device_copies,
        tiering=tiering,
        frozen=frozen,
        switcher=Switcher(
            *(ledger, residency, ranks, tiering, frozen, heap_files, digests),
            *(node.device_copies, node.copies),
        ),
        rank_memory=RankMemory(
            *(ledger, records, memory, node.copies, ranks, tiering, heap_files),
            restore=replicator.restore,
        ),
        publishing=Publishing(records.layouts, memory, node.versions, tiering, fetcher),
        weights=weights,
        sealer=sealer,
        replicator=replicator,
        exporter=Exporter(
            *(checkpoint_files, checkpoints, staging, records.snapshots),
            ledger=ledger,
            background=node.background,
            file_bytes=checkpoint_file_bytes,
            limit_of=checkpoint_bytes_of,
        ),
        loader=Loader(checkpoint_files.disk, checkpoints, staging, ranks, frozen, memory),
        catalogue=Catalogue(checkpoints),
        archives=Archives(checkpoints),
        begin_handover=partial(
            Handover, *(ledger, records, memory, ranks, tiering, *stores), digests
        ),
        home=home,
        disk=directory.disk.path,
    )


class _Addresses:
    """The addresses at which other nodes reach this one: its own and, after a kill, the previous
    daemon's, which they know."""

    def __init__(
        self, home: Home, background: Background, server: tls.Server, host: str, port: int
    ) -> None:
        """Raises: OSError: the port is in use."""
        self._home = home
        self._background = background
        self._server = server
        self._listeners = [_listen(host, port)]
        home.endpoint = f"{host}:{self._listeners[0].getsockname()[1]}"

    def serve(self) -> None:
        self._serve(self._listeners[0])

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    def add(self, endpoint: str) -> None:
        """Serve at another endpoint too, at once or as soon as its port is free. `Home.endpoint` is
        this one from then on, because other nodes know it."""
        if not self._try_to_add(endpoint):
            self._background.start(self._keep_trying(endpoint), is_endless=True)

    async def _keep_trying(self, endpoint: str) -> None:
        while True:
            await asyncio.sleep(_LISTEN_AGAIN_S)
            if self._try_to_add(endpoint):
                return

    def _try_to_add(self, endpoint: str) -> bool:
        host, _, port = endpoint.rpartition(":")
        try:
            listener = _listen(host, int(port))
        except OSError as error:
            log.warning("cannot serve versions at %s yet: %s", endpoint, error)
            return False
        self._listeners.append(listener)
        self._serve(listener)
        self._home.endpoint = endpoint
        return True

    def _serve(self, listener: socket.socket) -> None:
        self._background.start(self._server.serve(listener), is_endless=True)


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.create_server((host, port))
    listener.setblocking(False)
    return listener


def _nvme_budget(directory: Path, budget_bytes: int | None) -> int:
    """The budget of host copies on NVMe; if none is configured, the size of the disk.

    Args:    directory: the state directory, which exists unless it could not be made.
    Returns: 0: the directory cannot be read.
    Raises:  CallerError: RESOURCE_EXHAUSTED: the budget is larger than the disk.
    """
    try:
        disk = shutil.disk_usage(directory)
    except OSError:
        # Each write there will fail with its own error.
        return 0
    if budget_bytes is None:
        return disk.total
    if budget_bytes > disk.total:
        raise CallerError(
            f"nvme_bytes must be at most {disk.total}, the size of the disk of {directory}, got "
            f"{budget_bytes}",
            code=Code.RESOURCE_EXHAUSTED,
            field="statemgr.nvme_bytes",
            remedy=f"set it to {disk.total} or less",
            details={"configured_bytes": budget_bytes, "there_bytes": disk.total},
        )
    return budget_bytes


def main() -> None:
    lifecycle.run("statemgr", serve)


if __name__ == "__main__":
    main()
