"""The router process: reads its configuration, wires the shell, exports its lag, and runs."""

from __future__ import annotations

import phaseloom.common.process.tcponly  # noqa: F401

# isort: split
import asyncio
import math

import msgspec
from nats.js.errors import NotFoundError

from phaseloom.common.contract import streams
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.ids import check_name
from phaseloom.common.contract.sizes import Size
from phaseloom.common.contract.tenantlimits import TenantLimits, check_bound, check_tenant_limits
from phaseloom.common.observability import metrics
from phaseloom.common.process import config, lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.retry import until_done
from phaseloom.common.transport.serving import service_bus
from phaseloom.router.core.limits import Limits
from phaseloom.router.shell import DEFAULT_SESSION_TTL_S, SOURCE, Router

_PROVISION_ATTEMPT_S = 10.0
"""Time limit of one attempt to create a stream. Slow disks need seconds."""


class RouterConfig(msgspec.Struct, frozen=True):
    """The router's settings, from the section `router` or PHASELOOM_ROUTER_<FIELD>."""

    tenants: list[str]
    """The tenants to serve. Each needs an account on the NATS server."""
    name: str = "router"
    """Name of this replica, shown in NATS's list of connections."""
    ops_max_bytes: Size = 1 << 30
    """Maximum size of a tenant's operation stream. The server refuses to publish beyond it."""
    max_operations: int = Limits().max_operations
    """Maximum open operations of a tenant. One more is refused with a retry time. 0: no limit."""
    max_bytes: Size = Limits().max_bytes
    """Maximum bytes of a tenant's stored operations; must be below `ops_max_bytes`. More is refused
    with a retry time. 0: no limit."""
    rate: float = Limits().rate
    """Maximum average operations of a tenant per second. 0: no limit."""
    burst: int = Limits().burst
    """Maximum operations of a tenant in one burst after a quiet period; at least 1."""
    api_rate: float = Limits().api_rate
    """Maximum average API calls of a tenant per second, at each replica. 0: no limit."""
    api_burst: int = Limits().api_burst
    """Maximum API calls of a tenant in one burst after a quiet period; at least 1."""
    tenant_limits: TenantLimits = {}
    """Per-tenant exceptions to the limits above. Bounds of the scheduler are ignored."""
    session_ttl_s: float = DEFAULT_SESSION_TTL_S
    """Time without a heartbeat after which a controller counts as lost, in whole seconds."""

    def check(self) -> None:
        """Raises: CallerError: a number is out of range, or `tenants` is empty or repeats one."""
        config.check_bounds(self, "router", _BOUNDS)
        check_tenant_limits(self.tenant_limits, "router.tenant_limits")
        for tenant in self.tenants:
            check_name(tenant, "router.tenants")
        if len(set(self.tenants)) != len(self.tenants) or not self.tenants:
            raise CallerError(
                f"tenants must be a non-empty list of distinct names, got {self.tenants}",
                field="router.tenants",
                remedy="name each tenant once",
            )

    def limits(self, tenant: str) -> Limits:
        """Return the limits of one tenant.

        Raises: CallerError: a limit is below 0, or the burst below 1.
        """
        names = Limits.__struct_fields__
        limits = {name: getattr(self, name) for name in names}
        for name, value in limits.items():
            check_bound(name, value, f"router.{name}")
        overrides = self.tenant_limits.get(tenant, {})
        limits |= {name: value for name, value in overrides.items() if name in names}
        return Limits(**limits)


_BOUNDS = {"ops_max_bytes": (streams.MAX_PAYLOAD_BYTES, math.inf), "session_ttl_s": (1, math.inf)}


class Lag:
    """Counts, per tenant, the operations that no replica has received yet."""

    def __init__(self, bus: Bus, tenants: list[str], durable: str) -> None:
        self._bus = bus
        self._durable = durable
        self._pending = dict.fromkeys(tenants, 0)

    def register(self) -> None:
        metrics.before_scrape(self._refresh)
        metrics.observe(
            metrics.ROUTER_LAG,
            lambda: [(pending, {"tenant": tenant}) for tenant, pending in self._pending.items()],
        )

    async def _refresh(self) -> None:
        for tenant in self._pending:
            try:
                consumer = await self._bus.js.consumer_info(
                    streams.ops_stream(tenant), self._durable
                )
            except NotFoundError:  # not created yet
                continue
            self._pending[tenant] = consumer.num_pending or 0


async def serve(stop: asyncio.Event) -> None:
    """Route operations until `stop` is set, then finish those already received."""
    settings = config.load(RouterConfig, "router")
    settings.check()
    limits = {tenant: settings.limits(tenant) for tenant in settings.tenants}
    async with service_bus(settings.name, stop) as bus:
        for tenant in settings.tenants:
            provisioning = _provision(bus, tenant, settings.ops_max_bytes)
            await lifecycle.unless_stopped(stop, provisioning)
        Lag(bus, settings.tenants, SOURCE).register()
        async with Router(bus, limits, settings.session_ttl_s).running(settings.tenants):
            await stop.wait()


async def _provision(bus: Bus, tenant: str, max_bytes: int) -> None:
    await until_done(
        lambda: bus.provision_tenant(tenant, max_bytes), "provision", attempt_s=_PROVISION_ATTEMPT_S
    )


def main() -> None:
    lifecycle.return_large_blocks()
    lifecycle.run("router", serve)


if __name__ == "__main__":
    main()
