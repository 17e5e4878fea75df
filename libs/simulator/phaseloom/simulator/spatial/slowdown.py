"""How much slower a sub-stage is with a share of a device, and beside another sub-stage.

A table has, for each kind of sub-stage, its slowdown alone at some shares, and for each pair a
factor that comes on top when both run. Between two measured shares the slowdown is interpolated.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import msgspec

from phaseloom.common.contract.errors import CallerError

WAIT = "wait"
"""The kind of a stage that needs no device: a tool call, or waiting for the slowest worker."""


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shares: dict[float, float]
    """The slowdown over the whole device, by the share of its compute units; 1.0 is the whole."""
    memory: float = 0.0
    """The share of the device's memory that the sub-stage needs."""


class SlowdownTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    """The source of the numbers, for people."""
    kinds: dict[str, Kind]
    splits: tuple[float, ...] = (0.25, 0.5, 0.75)
    """The shares that the first of two sub-stages may have; the second has the rest."""
    beside: dict[str, dict[str, float]] = {}
    """The factor for a kind (outer) beside another (inner); 1 where there is none."""

    def alone(self, kind: str, share: float) -> float:
        """The slowdown with a share of the device and nothing beside it."""
        known = sorted(self.kinds[kind].shares.items())
        if share <= known[0][0]:
            return known[0][1]
        for (low, at_low), (high, at_high) in pairwise(known):
            if share <= high:
                return at_low + (at_high - at_low) * (share - low) / (high - low)
        return known[-1][1]

    def slowdown(self, kind: str, share: float, other: str) -> float:
        """The slowdown with a share of the device beside another sub-stage, which has the rest."""
        return self.alone(kind, share) * self.beside.get(kind, {}).get(other, 1.0)

    def fits(self, kind: str, other: str) -> bool:
        """Whether the memory holds both."""
        return self.kinds[kind].memory + self.kinds[other].memory <= 1.0 + 1e-9

    def rates(self, kind: str, other: str) -> list[tuple[float, float]]:
        """The speeds of two sub-stages side by side, one pair for each split; none: no room."""
        if not self.fits(kind, other):
            return []
        return [
            (1 / self.slowdown(kind, share, other), 1 / self.slowdown(other, 1 - share, kind))
            for share in self.splits
        ]


def read(path: Path, needed: Iterable[str] = ()) -> SlowdownTable:
    """Read a table of slowdowns from a file.

    Args:   needed: the kinds that the table must have.
    Raises: CallerError: the file cannot be read, or holds no such table.
    """
    try:
        table = msgspec.json.decode(path.read_bytes(), type=SlowdownTable)
    except (OSError, msgspec.DecodeError) as error:
        raise _refused(path, str(error)) from None
    for name, kind in table.kinds.items():
        if not kind.shares or min(*kind.shares, *kind.shares.values()) <= 0:
            raise _refused(path, f"kinds.{name}.shares: shares and slowdowns are positive")
    if any(name not in table.kinds for name in table.beside):
        raise _refused(path, "beside: a kind that is not among the kinds")
    lacking = [kind for kind in needed if kind not in table.kinds]
    if lacking:
        raise _refused(path, f"kinds: it lacks {', '.join(lacking)}")
    return table


def _refused(path: Path, why: str) -> CallerError:
    return CallerError(
        f"{path.name} is no table of slowdowns: {why}",
        field="slowdowns",
        remedy="compare it with libs/simulator/phaseloom/simulator/data/slowdowns_paper.json",
    )
