"""The scheduler service: waits as a standby for the leader's lease, then leads.

The leader restores the core, folds the log, serves the job API and watches leases. Any number of
processes may run; the lease lets one of them work. If two lead for a moment, they send the same
commands with the same ids, so nothing is done twice.
"""

from __future__ import annotations

import phaseloom.common.process.tcponly  # noqa: F401

# isort: split
import asyncio
import logging
import math
import os
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError

from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import content_type_of
from phaseloom.common.contract.completions import decode_outcome
from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.operations import Completion
from phaseloom.common.contract.sizes import Size
from phaseloom.common.contract.specs import SCHEDULER_BOUNDS, SchedulerConfig, SchedulerSettings
from phaseloom.common.contract.tenantlimits import check_tenant_limits
from phaseloom.common.process import collector, config, lifecycle, slowdowns
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.callrates import CallRates
from phaseloom.common.transport.decisionlog import log_end_lost
from phaseloom.common.transport.leases import Lease, LeaseLost, scheduler_lease_key
from phaseloom.common.transport.retry import ATTEMPT_S, RetryingLog, until_done
from phaseloom.common.transport.services import serve_api
from phaseloom.common.transport.serving import service_bus
from phaseloom.scheduler.api import MAX_REQUEST_BYTES, OutcomeOf, job_api, node_api
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.policies.registry import check_policies
from phaseloom.scheduler.core.state.tree import CORE_VERSION
from phaseloom.scheduler.housekeeping import Housekeeping
from phaseloom.scheduler.observing import Gauges
from phaseloom.scheduler.registered import models_on
from phaseloom.scheduler.shell import Shell
from phaseloom.scheduler.sink import BusSink
from phaseloom.scheduler.snapshots import Snapshots

log = logging.getLogger(__name__)

_SHUTDOWN_STEP_S = 3.0
"""Time limit for each step of the shutdown. The process must stop within 10 s."""


class Config(SchedulerSettings, frozen=True, kw_only=True):
    """The core's settings, which enter the decision log, and those of the process itself."""

    snapshot_every: int = 2000
    """Events of the log between two snapshots."""
    lease_margin_s: float = 3.0
    """Time from the end of a node's lease until its processes count as dead. It must be more than
    the agent takes to kill its ranks."""
    lease_ttl_s: float = 3.0
    """How long after its last sign a leader counts as gone; in whole seconds."""
    state_secret: str = ""
    """The mesh's secret, which state managers know too. It signs the tickets by which they give
    weights versions to other nodes. Without it a version stays on the nodes of its policy."""
    max_bytes: Size = 960 * 2**20
    """The routers' bound on a tenant's stored bytes. From half of it on, outcomes older than 10
    minutes that no rebuild needs are deleted before `outcome_retention_s`. 0: no limit."""
    api_rate: float = 500.0
    """Average API calls of a tenant per second, at most; 0: no limit."""
    api_burst: int = 2_000
    """API calls of a tenant in one burst after a quiet period, at most; at least 1."""
    slowdowns_file: str = ""
    """JSON file with the table of slowdowns, `phaseloom measure-slowdown`'s; empty: none."""
    name: str = "scheduler"
    """This process's name, for people: in the lease, and in NATS's list of connections."""

    def check(self) -> None:
        """Raises: CallerError: a number is out of its bounds, or there is no such policy."""
        config.check_bounds(self, "scheduler", _BOUNDS)
        check_tenant_limits(self.tenant_limits, "scheduler.tenant_limits")
        check_policies(
            self.placement,
            self.ordering,
            self.multiplexing,
            self.slo_percentile,
            section="scheduler.",
        )

    def max_bytes_of(self, tenant: str) -> float:
        """Return the bound on a tenant's stored bytes."""
        return self.tenant_limits.get(tenant, {}).get("max_bytes", self.max_bytes)

    def call_rate(self, tenant: str) -> tuple[float, float]:
        """Return a tenant's limit of API calls: (calls per second, burst)."""
        bounds = self.tenant_limits.get(tenant, {})
        return bounds.get("api_rate", self.api_rate), bounds.get("api_burst", self.api_burst)


_BOUNDS = {
    **SCHEDULER_BOUNDS,
    "snapshot_every": (1, math.inf),
    "lease_margin_s": (0, math.inf),
    "lease_ttl_s": (1, math.inf),
    "max_bytes": (0, math.inf),
    "api_rate": (0, math.inf),
    "api_burst": (1, math.inf),
}


async def serve(stop: asyncio.Event) -> None:
    """Stand by, then lead. After losing the lease, stand by again.

    Losing the lease does not end the process: a machine or server that is slow for a moment can
    cause it.
    """
    # Garbage collections delay the core's steps.
    collector.collect_rarely()
    settings = config.load(Config, "scheduler")
    settings.check()
    if settings.slowdowns_file:
        table = slowdowns.read(Path(settings.slowdowns_file), needed=slowdowns.SUB_STAGES)
        settings = replace(settings, slowdowns=table)
    gauges = Gauges()
    gauges.register()
    while not stop.is_set():
        try:
            with suppress(lifecycle.Stopped):
                await _serve_once(settings, gauges, stop)
        except* LeaseLost as losses:
            log.warning("this process no longer leads: %s", _first_error(losses))


def _first_error(group: BaseExceptionGroup[LeaseLost]) -> LeaseLost:
    first = group.exceptions[0]
    return _first_error(first) if isinstance(first, BaseExceptionGroup) else first


async def _serve_once(settings: Config, gauges: Gauges, stop: asyncio.Event) -> None:
    """Stand by, then lead, until a stop is requested.

    Each term uses its own connection, so its requests and answers end with it.

    Raises: LeaseLost: the lease could not be renewed; may be inside an exception group.
          Stopped: a stop was requested while connecting or restoring.
    """
    async with service_bus(settings.name, stop) as bus:
        lease = await _acquire_lease(bus, settings, stop)
        if lease is None:
            return
        try:
            await _hold_while(lease, _lead(bus, settings, gauges, stop))
        finally:
            await _release(lease)


async def _acquire_lease(bus: Bus, settings: Config, stop: asyncio.Event) -> Lease | None:
    """Wait for the leader's lease. None if a stop is requested first."""
    holder = f"{settings.name}, pid {os.getpid()}".encode()
    acquiring = asyncio.create_task(
        Lease.acquire(bus, scheduler_lease_key(), holder, settings.lease_ttl_s)
    )
    stopping = asyncio.create_task(stop.wait())
    log.info("waiting for the leader's lease")
    await asyncio.wait((acquiring, stopping), return_when=asyncio.FIRST_COMPLETED)
    await lifecycle.end([stopping])
    if not stop.is_set():
        return await acquiring
    await lifecycle.end([acquiring])
    if not acquiring.cancelled() and acquiring.exception() is None:
        await _release(acquiring.result())
    return None


async def _release(lease: Lease) -> None:
    """Release the lease, so that a standby does not have to wait until it expires."""
    try:
        async with asyncio.timeout(_SHUTDOWN_STEP_S):
            await lease.release()
    except (TimeoutError, NatsError, NatsTimeoutError) as error:
        log.warning("the lease could not be released and will expire: %r", error)


async def _lead(bus: Bus, settings: Config, gauges: Gauges, stop: asyncio.Event) -> None:
    """Fold the log and perform outputs until a stop is requested."""
    snapshots = Snapshots(bus)
    core = await lifecycle.unless_stopped(stop, restore_core(bus, snapshots))
    sink = BusSink(bus, snapshots, secret=settings.state_secret)
    decisions = RetryingLog(bus, "scheduler")
    policy = SchedulerConfig.of(settings)
    shell = Shell(core, decisions, sink, policy, settings.snapshot_every)
    housekeeping = Housekeeping(bus, decisions, shell)
    with gauges.of(core, bus):
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(sink.run()),
                tasks.create_task(shell.run()),
                tasks.create_task(housekeeping.watch_nodes(settings.lease_margin_s)),
                tasks.create_task(housekeeping.watch_sessions()),
                tasks.create_task(
                    housekeeping.sweep_outcomes(settings.outcome_retention_s, settings.max_bytes_of)
                ),
                tasks.create_task(_serve_api(bus, shell, CallRates(settings.call_rate))),
            ]
            try:
                await stop.wait()
                await _store_final_snapshot(shell, sink)
            finally:
                await lifecycle.end(running)


async def _hold_while(lease: Lease, leading: Coroutine[Any, Any, None]) -> None:
    """Lead while the lease is renewed. Renewal starts at once, because restoring takes time.

    Raises: LeaseLost: another process may lead, so this one no longer acts.
    """
    tasks = [asyncio.create_task(lease.keep()), asyncio.create_task(leading)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await lifecycle.end(tasks)


async def restore_core(bus: Bus, snapshots: Snapshots) -> Core:
    """Restore the core from the newest snapshot.

    Raises: ResourceError: the snapshot is damaged. Or a core of another version wrote it and cannot
        be taken over, or has continued from it. With code DATA_LOSS: the log after the snapshot is
        missing, has a hole, or ends before the snapshot.
    """
    stored = await snapshots.load()
    core = Core()
    if stored is not None:
        core = Core.restore(stored.payload, led_since=stored.manifest.led_since)
    sequence = core.state.sequence
    extent = await until_done(bus.log.extent, "the log's extent", attempt_s=ATTEMPT_S)
    extent.check_whole()
    if extent.first > sequence + 1:
        raise ResourceError(
            f"the decision log starts at {extent.first}, but the newest snapshot is at {sequence}",
            code=Code.DATA_LOSS,
            remedy="restore the matching store, or restore a backup (`phaseloom restore`)",
        )
    if extent.last < sequence:
        raise log_end_lost(sequence, extent.last)
    if stored is None:
        # Otherwise a later core would not know which version made the first decisions.
        await snapshots.save(0, core.snapshot())
    else:
        await snapshots.claim(CORE_VERSION)
    return core


async def _store_final_snapshot(shell: Shell, sink: BusSink) -> None:
    """Store a final snapshot, so that the next process starts quickly, with any core version."""
    if not shell.caught_up.is_set():
        return
    try:
        async with asyncio.timeout(_SHUTDOWN_STEP_S):
            await shell.quiesce()
            await sink.save(shell.core.state.sequence, shell.core.snapshot(), is_last=True)
    except (TimeoutError, PhaseloomError, NatsError, NatsTimeoutError) as error:
        log.warning("the final snapshot could not be stored: %r", error)


async def _serve_api(bus: Bus, shell: Shell, rates: CallRates) -> None:
    await shell.caught_up.wait()
    calls = job_api(shell, _outcomes(bus), models_on(bus))
    service = await serve_api(
        bus,
        "scheduler",
        calls,
        operators=node_api(shell),
        rates=rates,
        max_bytes=MAX_REQUEST_BYTES,
    )
    log.info("scheduling starts after log sequence number %d", shell.core.state.sequence)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        service.cancel()


def _outcomes(bus: Bus) -> OutcomeOf:
    async def outcome_of(key: OperationKey) -> Completion | None:
        stored = await bus.stored.get(streams.DONE, streams.done_subject(key))
        if stored is None:
            return None
        return decode_outcome(stored.payload, content_type_of(stored.headers))

    return outcome_of


def main() -> None:
    lifecycle.run("scheduler", serve)


if __name__ == "__main__":
    main()
