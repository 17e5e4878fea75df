"""The vocabulary of placement policies; see `core/cluster.py`.

What policies build on imports it from there: importing anything of this package imports them all.
"""

from phaseloom.scheduler.core.cluster import (
    Cluster,
    Decision,
    Group,
    Host,
    Limits,
    Member,
    Move,
    Need,
    Placed,
    Placement,
    Pool,
    Refused,
    Waits,
)

__all__ = [
    "Cluster",
    "Decision",
    "Group",
    "Host",
    "Limits",
    "Member",
    "Move",
    "Need",
    "Placed",
    "Placement",
    "Pool",
    "Refused",
    "Waits",
]
