"""The view that a multiplexing policy gets of a device that several operations may divide.

Ordering says who is next; multiplexing says beside whom, and with how many of the device's compute
units. A policy is a pure function on a `SharingView`. It is asked about a newcomer whose memory
fits beside what runs, and again about those that run whenever one of them has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from phaseloom.common.contract.kinds import KINDS


class Claim(msgspec.Struct, frozen=True):
    """A deployment that runs on the device, or is about to."""

    deployment: str
    job: str
    kinds: tuple[str, ...]
    """The kinds of its operations that run, or would begin."""
    most_units: int = 0
    """The units that it keeps busy at most; 0: all that there are."""

    @property
    def fills(self) -> bool:
        """Whether it keeps every unit of the device busy, given the chance.

        Decoding does not: a step reads the weights for a few rows. Neither does an operation whose
        work is to move state, nor a runtime that works on one unit.
        """
        return self.most_units != 1 and not all(
            KINDS[kind].shares_calls or KINDS[kind].moves_state for kind in self.kinds
        )


class SharingView(msgspec.Struct, frozen=True):
    units: int
    """The compute units of the device."""
    num_jobs: int
    """How many jobs are placed on the device."""
    running: list[Claim]
    """Those that run, in the order in which they came."""
    newcomer: Claim | None = None
    """The one that would begin beside them; None: only those that run divide the device."""

    @property
    def claims(self) -> list[Claim]:
        return [*self.running, *([] if self.newcomer is None else [self.newcomer])]


class Multiplexing(NamedTuple):
    share: Callable[[SharingView], list[int] | None]
    """How many units each of `claims` gets, in their order: at least one each, and no more than
    there are together. None: the newcomer does not begin beside those that run."""
    is_on: bool = True
    """Whether anything ever runs beside anything."""
