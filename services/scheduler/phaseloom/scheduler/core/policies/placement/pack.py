"""The group with the most jobs that can take one more (PlexRL §6.3); free nodes last.

Fewest nodes in use, most waiting.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.sharing.choice import join_or_open
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placement


def _place(cluster: Cluster, member: Member) -> Decision:
    """A place in the fullest group.

    A best-effort job of unknown cycle may share a group of any number of jobs: there is no estimate
    that the limit could protect.
    """
    is_counted = member.cycle is not None or member.slo > 0
    return join_or_open(cluster, member, "pack", most_first=True, is_counted=is_counted)


pack = Placement(_place)
