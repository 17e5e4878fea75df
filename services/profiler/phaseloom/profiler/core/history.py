"""A compact history of a job's newest operations: a thousand of them, at thirty bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

WINDOW = 1024
"""Number of a job's newest operations that are searched for its cycle."""
_MAX_LENGTH = WINDOW + WINDOW // 4
"""Length at which the history is cut back to `WINDOW`. The slack makes cuts rare."""


class Ran(NamedTuple):
    """An executed operation, with the time at which it became ready."""

    deployment: str
    kind: str
    ready_s: float
    start_s: float
    end_s: float


class History:
    """At least the newest `WINDOW` executed operations, in the order of their ends."""

    __slots__ = ("_name_indices", "_names", "_numbers", "_times_s")

    def __init__(self) -> None:
        self._names: list[tuple[str, str]] = []
        self._numbers: dict[tuple[str, str], int] = {}
        """Index of each (deployment, kind) in `_names`."""
        self._name_indices = array("I")
        self._times_s = array("d")
        """Three times for each operation: ready, start, end."""

    def __len__(self) -> int:
        return len(self._name_indices)

    def append(self, name: tuple[str, str], ready_s: float, start_s: float, end_s: float) -> None:
        """Add the newest operation.

        Args: name: (deployment, kind).
        """
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
        self._name_indices.append(number)
        self._times_s.extend((ready_s, start_s, end_s))
        if len(self._name_indices) > _MAX_LENGTH:
            del self._name_indices[:-WINDOW]
            del self._times_s[: -3 * WINDOW]

    def newest(self, count: int) -> list[Ran]:
        """Return the newest `count` operations (or fewer), oldest first."""
        return list(islice(self._from(max(0, len(self) - count)), count))

    def _from(self, first: int) -> Iterator[Ran]:
        times_s = iter(self._times_s[3 * first :])
        names = (self._names[number] for number in self._name_indices[first:])
        for (deployment, kind), ready_s, start_s, end_s in zip(
            names, times_s, times_s, times_s, strict=True
        ):
            yield Ran(deployment, kind, ready_s, start_s, end_s)
