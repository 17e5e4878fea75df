"""The group with the most jobs that has room for one more (PlexRL §6.3); free nodes last.

Uses the fewest nodes, at the price of the longest waits.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.sharing.choice import join_or_open
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placement


def _place(cluster: Cluster, member: Member) -> Decision:
    """Place the job in the fullest group with room.

    The limit on jobs per group protects cycle estimates. A best-effort job of unknown cycle has
    none, so the limit does not apply to it.
    """
    is_counted = member.cycle is not None or member.slo > 0
    return join_or_open(cluster, member, "pack", most_first=True, is_counted=is_counted)


pack = Placement(_place)
