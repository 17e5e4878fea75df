"""The policies by their configuration names: one file and one line each."""

from __future__ import annotations

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import REPLACED_ORDERINGS
from phaseloom.scheduler.core.policies.baselines.ordering.fifo_lock import fifo_lock
from phaseloom.scheduler.core.policies.baselines.ordering.hrrn import hrrn
from phaseloom.scheduler.core.policies.baselines.ordering.hrrs_literal import hrrs_literal
from phaseloom.scheduler.core.policies.baselines.ordering.lrs import lrs
from phaseloom.scheduler.core.policies.baselines.ordering.sjf import sjf
from phaseloom.scheduler.core.policies.baselines.placement.backfill_greedy import backfill_greedy
from phaseloom.scheduler.core.policies.baselines.placement.colocated import colocated
from phaseloom.scheduler.core.policies.baselines.placement.gavel import gavel
from phaseloom.scheduler.core.policies.baselines.placement.most_idle import most_idle
from phaseloom.scheduler.core.policies.baselines.placement.random import random
from phaseloom.scheduler.core.policies.baselines.placement.solo import solo
from phaseloom.scheduler.core.policies.baselines.placement.spread import spread
from phaseloom.scheduler.core.policies.device_view import Ordering
from phaseloom.scheduler.core.policies.multiplexing.fair import fair
from phaseloom.scheduler.core.policies.multiplexing.greedy import greedy
from phaseloom.scheduler.core.policies.multiplexing.lookahead import lookahead
from phaseloom.scheduler.core.policies.multiplexing.off import off
from phaseloom.scheduler.core.policies.multiplexing.static import static
from phaseloom.scheduler.core.policies.ordering.fcfs import fcfs
from phaseloom.scheduler.core.policies.ordering.hold import hold
from phaseloom.scheduler.core.policies.ordering.hrrs import hrrs
from phaseloom.scheduler.core.policies.ordering.round_robin import round_robin
from phaseloom.scheduler.core.policies.placement.coexec import coexec
from phaseloom.scheduler.core.policies.placement.coexec_repack import coexec_repack
from phaseloom.scheduler.core.policies.placement.isolated import isolated
from phaseloom.scheduler.core.policies.placement.pack import pack
from phaseloom.scheduler.core.policies.placement.spread_backfill import spread_backfill
from phaseloom.scheduler.core.policies.sharing_view import Multiplexing
from phaseloom.scheduler.core.state.cluster import Placement

ORDERING: dict[str, Ordering] = {
    "fcfs": fcfs,
    "sjf": sjf,
    "hrrn": hrrn,
    "hrrs": hrrs,
    "hrrs_literal": hrrs_literal,
    "hold": hold,
    "round_robin": round_robin,
    "lrs": lrs,
    "fifo_lock": fifo_lock,
}

PLACEMENT: dict[str, Placement] = {
    "isolated": isolated,
    "pack": pack,
    "backfill_greedy": backfill_greedy,
    "spread": spread,
    "spread_backfill": spread_backfill,
    "coexec": coexec,
    "coexec_repack": coexec_repack,
    "gavel": gavel,
    "most_idle": most_idle,
    "random": random,
    "colocated": colocated,
    "solo": solo,
}


MULTIPLEXING: dict[str, Multiplexing] = {
    "off": off,
    "static": static,
    "greedy": greedy,
    "lookahead": lookahead,
    "fair": fair,
}


def check_policies(
    placement: str,
    ordering: str,
    multiplexing: str,
    slo_percentile: float,
    *,
    section: str = "",
) -> None:
    """Check the names of the policies and the percentile.

    Args: section: prefix of the field name in errors.
    Raises: CallerError: a policy is unknown (the remedy lists the known ones), or the percentile is
        not between 0 and 100.
    """
    if not 0 <= slo_percentile <= 100:
        raise CallerError(
            f"slo_percentile must be from 0 to 100, got {slo_percentile:g}",
            field=f"{section}slo_percentile",
            remedy="use 95, for example, or 0 if only the mean iteration must meet the SLO",
        )
    if ordering in REPLACED_ORDERINGS:
        replacement = REPLACED_ORDERINGS[ordering]
        raise CallerError(
            f"the ordering policy {ordering!r} has been replaced by {replacement!r}",
            field=f"{section}ordering",
            remedy=f"use {replacement!r}; add --ordering {replacement} to resume a run",
        )
    for kind, name, registered in (
        ("placement", placement, [*PLACEMENT]),
        ("ordering", ordering, [*ORDERING]),
        ("multiplexing", multiplexing, [*MULTIPLEXING]),
    ):
        if name not in registered:
            raise CallerError(
                f"unknown {kind} policy {name!r}",
                field=f"{section}{kind}",
                remedy=f"choose one of: {', '.join(sorted(registered))}",
            )
