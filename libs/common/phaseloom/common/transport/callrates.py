"""The rate of API calls that one service accepts from each tenant."""

from __future__ import annotations

import time
from collections.abc import Callable

from phaseloom.common.contract.tenantlimits import limit_exceeded


class CallRates:
    """A leaky bucket for each tenant. Every replica of a service has its own.

    Args: rate_of: tenant → its (`api_rate` in calls per second, `api_burst`); a rate of 0 means no
                   limit.
    """

    def __init__(
        self,
        rate_of: Callable[[str], tuple[float, float]],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate_of = rate_of
        self._now_s = now_s
        self._levels: dict[str, tuple[float, float]] = {}
        """Tenant → (calls in the bucket, when that was). Only known tenants reach a service."""

    def admit(self, tenant: str) -> None:
        """Count a call. Raises: ResourceError: RESOURCE_EXHAUSTED, with `retry_after_s`."""
        rate, burst = self._rate_of(tenant)
        if not rate:
            return
        now_s = self._now_s()
        level, last_s = self._levels.get(tenant, (0.0, now_s))
        level = max(0.0, level - rate * (now_s - last_s))
        if level + 1 > burst:
            self._levels[tenant] = level, now_s  # refused calls add nothing
            raise limit_exceeded(
                "api_rate",
                "API calls arrived in a burst",
                int(level) + 1,
                int(burst),
                "make fewer calls",
                retry_after_s=(level + 1 - burst) / rate,
            )
        self._levels[tenant] = level + 1, now_s
