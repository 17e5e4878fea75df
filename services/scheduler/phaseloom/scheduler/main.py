"""The scheduler service: restore, fold, serve the job API, watch the node leases."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import msgspec

from phaseloom.common import config, lifecycle
from phaseloom.common.api import serve_api
from phaseloom.common.bus import Bus, BusConfig
from phaseloom.common.errors import CallerError
from phaseloom.common.leases import node_lease_key
from phaseloom.common.messages import NodeLost, SchedulerConfig
from phaseloom.common.streams import Bucket
from phaseloom.scheduler.api import job_api
from phaseloom.scheduler.core import ordering, placement
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.shell import Shell
from phaseloom.scheduler.sink import SNAPSHOT_KEY, BusSink, unpack_snapshot

log = logging.getLogger(__name__)


class Config(msgspec.Struct, frozen=True):
    placement: str = "pack"
    """Policy: which node of each pool a job is pinned to."""
    ordering: str = "hrrs"
    """Policy: which ready operation a device runs next."""
    idle_grace_s: float = 0.03
    """How long a device is kept for a job that has nothing ready while another waits."""
    quantum_s: float = 2.0
    """For how long a job's ready operations go before another's on the device that it holds; then
    the others' go first. 0: the ordering policy alone decides."""
    seal_every: int = 60
    """Mutating operations between two seals of a trainable deployment; 0: never."""
    max_losses: int = 3
    """A WPG that dies more often than this at one operation fails it."""
    max_reading: int = 64
    """Reading operations of one activation that run at once."""
    phase_hold_s: float = 1.0
    """For how long at most a phase that the controller declared keeps a device that others wait
    for, after its last operation there; 0: not at all."""
    early_switch: bool = True
    """Open activations on idle devices before the operation that is predicted."""
    snapshot_every: int = 2000
    """Log entries between two snapshots."""
    lease_margin_s: float = 3.0
    """After a node lease ran out, how much longer until its processes count as dead: more than the
    agent takes to kill its ranks."""


def _check_policy(name: str, known: Iterable[str], field: str) -> None:
    if name not in known:
        raise CallerError(
            f"{name!r} is no {field} policy",
            field=f"scheduler.{field}",
            remedy=f"choose one of: {', '.join(sorted(known))}",
        )


async def serve(stop: asyncio.Event) -> None:
    settings = config.load(Config, "scheduler")
    _check_policy(settings.placement, placement.POLICIES, "placement")
    _check_policy(settings.ordering, ordering.POLICIES, "ordering")
    bus = await Bus.open(config.load(BusConfig, "bus"), "scheduler")
    try:
        stored = await bus.kv_get(Bucket.SNAPSHOTS, SNAPSHOT_KEY)
        core = Core.restore(unpack_snapshot(stored.payload)) if stored else Core()
        sink = BusSink(bus)
        policy = SchedulerConfig(
            placement=settings.placement,
            ordering=settings.ordering,
            idle_grace_s=settings.idle_grace_s,
            quantum_s=settings.quantum_s,
            seal_every=settings.seal_every,
            max_losses=settings.max_losses,
            max_reading=settings.max_reading,
            phase_hold_s=settings.phase_hold_s,
            early_switch=settings.early_switch,
        )
        shell = Shell(core, bus, sink, policy, settings.snapshot_every)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(sink.run()),
                tasks.create_task(shell.run()),
                tasks.create_task(_watch_leases(bus, shell, settings.lease_margin_s)),
                tasks.create_task(_serve_api(bus, shell)),
            ]
            await stop.wait()
            await lifecycle.end(running)
    finally:
        await bus.close()


async def _serve_api(bus: Bus, shell: Shell) -> None:
    await shell.caught_up.wait()
    await serve_api(bus, "scheduler", job_api(shell))
    log.info("scheduling from log sequence %d on", shell.core.state.sequence)


async def _watch_leases(bus: Bus, shell: Shell, margin_s: float) -> None:
    """Report a node whose lease ran out, once its agent must have killed its ranks."""
    await shell.caught_up.wait()
    loop = asyncio.get_running_loop()
    gone_since: dict[tuple[str, int], float] = {}
    while True:
        nodes = [n for n in shell.core.state.nodes.values() if n.is_up]
        for node in nodes:
            life = (node.node, node.revision)
            if await bus.kv_get(Bucket.LEASES, node_lease_key(node.node)) is not None:
                gone_since.pop(life, None)
                continue
            if loop.time() - gone_since.setdefault(life, loop.time()) > margin_s:
                event = NodeLost(node.node, node.revision, "its lease ran out")
                await bus.append(event, msg_id=f"node-lost:{node.node}:{node.revision}")
        await asyncio.sleep(margin_s / 3)


def main() -> None:
    lifecycle.run("scheduler", serve)


if __name__ == "__main__":
    main()
