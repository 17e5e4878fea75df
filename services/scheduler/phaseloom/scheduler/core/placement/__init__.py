"""Placement policies: which nodes of each pool a job is pinned to, and with whom it shares them.

To add one: a module with a `Placement` called like it, and a line in `POLICIES`.
"""

from __future__ import annotations

from phaseloom.scheduler.core.placement.backfill_greedy import backfill_greedy
from phaseloom.scheduler.core.placement.coexec import coexec
from phaseloom.scheduler.core.placement.coexec_repack import coexec_repack
from phaseloom.scheduler.core.placement.colocated import colocated
from phaseloom.scheduler.core.placement.gavel import gavel
from phaseloom.scheduler.core.placement.isolated import isolated
from phaseloom.scheduler.core.placement.most_idle import most_idle
from phaseloom.scheduler.core.placement.pack import pack
from phaseloom.scheduler.core.placement.random import random
from phaseloom.scheduler.core.placement.solo import solo
from phaseloom.scheduler.core.placement.spread import spread
from phaseloom.scheduler.core.placement.spread_backfill import spread_backfill
from phaseloom.scheduler.core.placement.view import Placement

POLICIES: dict[str, Placement] = {
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

__all__ = ["POLICIES", "Placement"]
