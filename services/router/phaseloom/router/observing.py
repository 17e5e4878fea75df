"""The router's metrics."""

from __future__ import annotations

from nats.js.errors import NotFoundError

from phaseloom.common.contract import streams
from phaseloom.common.contract.events import QueuedOperation
from phaseloom.common.observability import metrics
from phaseloom.common.transport.bus import Bus


def routed(header: QueuedOperation) -> None:
    """Count an operation that is in the decision log, admitted or refused."""
    code = "OK" if header.error is None else header.error.code
    metrics.count(metrics.OPERATIONS_ROUTED, tenant=header.key.tenant, code=code)


class Lag:
    """The number of operations in each tenant's stream that no replica has taken yet."""

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
            except NotFoundError:  # not made yet
                continue
            self._pending[tenant] = consumer.num_pending or 0
