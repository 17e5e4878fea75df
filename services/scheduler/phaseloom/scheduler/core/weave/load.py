"""Whether a group that ran well still does: asked when a member's cycle has changed."""

from __future__ import annotations

from phaseloom.scheduler.core.cluster import Group
from phaseloom.scheduler.core.weave.period import cycle_s, load_s, period_s
from phaseloom.scheduler.core.weave.timing import group_phases, timing_of


def is_overloaded(group: Group, switch_s: float = 0.0) -> bool:
    """Whether drift has brought a group of several jobs past saturation, or breaks an SLO.

    The job that drifted is then stopped and placed anew, that one alone (WEAVE §5.3). Past
    saturation is T_load > T_cycle: a group is let in to exactly full (T_load = T_cycle).
    """
    if len(group.members) < 2:
        return False
    jobs = group_phases(group, switch_s)
    if load_s(jobs) > cycle_s(jobs):
        return True
    settled_s = period_s(jobs)
    return any(settled_s > timing_of(m).allowed_s for m in group.members.values())
