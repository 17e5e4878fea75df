"""The rate of a tenant's API calls at one service."""

from __future__ import annotations

import pytest

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.transport.callrates import CallRates

RATES = {"a": (10.0, 5), "b": (10.0, 5), "free": (0.0, 1)}


def test_burst_then_rate_for_each_tenant_alone() -> None:
    now_s = 100.0
    rates = CallRates(lambda tenant: RATES[tenant], lambda: now_s)
    for _ in range(5):
        rates.admit("a")
    for _ in range(3):  # refused calls do not lengthen the wait
        with pytest.raises(ResourceError) as refused:
            rates.admit("a")
        assert refused.value.info.code is Code.RESOURCE_EXHAUSTED
        assert refused.value.info.details["bound"] == "api_rate"
        assert refused.value.retry_after_s == pytest.approx(0.1)
    for tenant in ("b", "free", "free"):
        rates.admit(tenant)
    now_s += 0.101
    rates.admit("a")
    with pytest.raises(ResourceError):
        rates.admit("a")
