"""The bounds of a tenant: their names, and the error that names one. Used by the mesh file,
routers and the scheduler.

A service has a default for each bound that it enforces. `tenant_limits` replaces defaults for one
tenant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.sizes import Size

TenantLimits = dict[str, dict[str, Size | float]]
"""Tenant → name of a bound → its value."""

_RATES = ("rate", "api_rate")
_BURSTS = ("burst", "api_burst")
_TOTALS = (
    *("max_operations", "max_bytes", "max_jobs", "max_deployments", "max_ranks", "max_names"),
    *("max_versions", "max_checkpoint_bytes"),
)
NAMES = (*_TOTALS, *_RATES, *_BURSTS)


def check_bound(name: str, value: float, field: str) -> None:
    """Raises: CallerError: the name is not that of a bound, or the value is out of range."""
    is_whole = isinstance(value, int) or name in _RATES
    if name not in NAMES or not is_whole or not (name in _BURSTS) <= value < math.inf:
        raise CallerError(
            f"{name} = {value} is not a valid limit",
            field=field,
            remedy=f"use {', '.join(NAMES)}: only rates may be fractions, 0 means no limit, and "
            "bursts must be at least 1",
        )


def check_tenant_limits(limits: Mapping[str, Mapping[str, float]], field: str) -> None:
    """Check the limits of every tenant. Raises: see `check_bound`."""
    for tenant, bounds in limits.items():
        for name, value in bounds.items():
            check_bound(name, value, f"{field}.{tenant}.{name}")


def limit_exceeded(
    bound: str,
    label: str,
    used: int,
    limit: int,
    remedy: str,
    *,
    field: str = "",
    retry_after_s: float | None = None,
) -> ResourceError:
    """Return the refusal of a request beyond a tenant's bound.

    Args:   retry_after_s: when the same request may succeed; None: waiting alone does not help.
    """
    details = {"bound": bound, "limit": str(limit), "used": str(used)}
    if retry_after_s is not None:
        retry_after_s = max(retry_after_s, 0.001)
        details["retry_after_s"] = f"{retry_after_s:.3f}"
        remedy += f" and send it again after {retry_after_s:.3g} s"
    return ResourceError(
        f"{used} {label}; the tenant's limit is {limit}",
        code=Code.RESOURCE_EXHAUSTED,
        field=field,
        remedy=f"{remedy}, or ask the operator to raise `{bound}`",
        details=details,
    )
