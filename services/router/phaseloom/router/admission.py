"""Keeps every tenant's usage meter current with readings that cover all router replicas.

Operations never wait for a reading. If the scheduler or the server does not answer, the last
reading stays and this replica adds what it admits, so the limits hold even while nothing runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import nats.errors
from nats.js.errors import Error as JetStreamError

from phaseloom.common.contract import streams
from phaseloom.common.contract.api import Usage, UsageRequest
from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.services import call_api
from phaseloom.router.core.limits import Limits, Meter, Reading

log = logging.getLogger(__name__)

READ_EVERY_S = 0.25
"""Interval of readings for a tenant that sends operations. Each costs two small requests."""
_READ_TIMEOUT_S = 2.0


class Admission:
    """The meters of one replica. `watch` must run as long as they are used."""

    def __init__(self, bus: Bus, limits: Mapping[str, Limits]) -> None:
        self._bus = bus
        self._limits = limits
        self._meters: dict[str, Meter] = {}
        self._busy: set[str] = set()
        self._is_busy = asyncio.Event()

    def call_rate(self, tenant: str) -> tuple[float, float]:
        """Return a tenant's limit of API calls: (calls per second, burst)."""
        limits = self._limits.get(tenant, Limits())
        return limits.api_rate, limits.api_burst

    def meter(self, tenant: str) -> Meter:
        """Return a tenant's meter and schedule a reading of it."""
        self._busy.add(tenant)
        self._is_busy.set()
        if tenant not in self._meters:
            self._meters[tenant] = Meter(self._limits.get(tenant, Limits()))
        return self._meters[tenant]

    async def watch(self) -> None:
        """Keep reading the usage of tenants that sent operations, until cancelled."""
        while True:
            await self._is_busy.wait()
            self._is_busy.clear()
            busy, self._busy = self._busy, set()
            for tenant in sorted(busy):
                await self._read(tenant)
            await asyncio.sleep(READ_EVERY_S)

    async def _read(self, tenant: str) -> None:
        try:
            stored = (await self._bus.js.stream_info(streams.ops_stream(tenant))).state
            usage: Usage = await call_api(
                self._bus.client,
                tenant,
                "tenant.usage",
                UsageRequest(),
                Usage,
                timeout_s=_READ_TIMEOUT_S,
            )
        except (PhaseloomError, nats.errors.Error, JetStreamError) as error:
            log.debug("could not read the usage of %s: %r", tenant, error)
            return
        self._meters[tenant].read(
            Reading(
                usage.open_operations,
                usage.sequence,
                stored.bytes,
                stored.last_seq,
                usage.outcome_bytes,
            )
        )
