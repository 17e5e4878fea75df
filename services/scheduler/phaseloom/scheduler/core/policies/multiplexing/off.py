"""Never run operations side by side: devices are shared in time only."""

from __future__ import annotations

from phaseloom.scheduler.core.policies.sharing_view import Multiplexing, SharingView


def _share(view: SharingView) -> list[int] | None:
    return None if view.newcomer is not None else [view.units] * len(view.running)


off = Multiplexing(_share, is_on=False)
