"""Who brings which boxes of a part over a slow link: each byte once, whatever each node needs.

As blocks are dealt (`dealing.py`), but who asks says what it needs, and that may overlap what
others need in whatever way. It is given what of it nobody was given yet; the rest it is to have
from whoever was. Given again is only what somebody did not deliver.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from phaseloom.statemgr.core.dealing import Fetcher
from phaseloom.statemgr.core.slices import Box, Fragment, left_of, overlap

MAX_RECORDS = 1 << 18
_MAX_FRAGMENTS = 1024
"""Of one box."""


@dataclass
class Shares:
    """How boxes that are asked for come, each byte one way."""

    num_boxes: int = 0
    """So many of them, the first ones; of the others nothing is said."""
    here: list[Fragment] = field(default_factory=list)
    """From who is asked."""
    elsewhere: dict[Fetcher, list[Fragment]] = field(default_factory=dict)
    """From who was given them."""


@dataclass
class BoxDeal:
    """What of one part was given to whom of one group.

    What is beyond the limits is given without a record, which costs at worst another copy of it.
    """

    num_records: int = 0
    _given: dict[str, _Given] = field(default_factory=dict)
    """By tensor."""

    def ask(
        self,
        boxes: Sequence[tuple[Box, int]],
        limit_bytes: int,
        failed: Collection[Fetcher],
        fetcher: Fetcher,
    ) -> Shares:
        """Of as many boxes as it takes to give about so much, and of those that others have before.

        Args: boxes: inside their tensors, and how many bytes each has. failed: who did not deliver.
        """
        shares = Shares()
        given_bytes = 0
        for number, (box, num_bytes) in enumerate(boxes):
            given = self._given.setdefault(box.name, _Given())
            mine, others = _shared(given.near(box), box, failed, fetcher)
            if len(mine) + len(others) > _MAX_FRAGMENTS:
                mine, others = [box], []
            given_bytes += num_bytes if mine else 0
            if given_bytes > limit_bytes and shares.here:
                break
            if not others:
                mine = [box]  # stays in one
            shares.num_boxes += 1
            shares.here += [(number, each) for each in mine]
            for each, holder in others:
                shares.elsewhere.setdefault(holder, []).append((number, each))
            for each in mine:
                if self.num_records < MAX_RECORDS:
                    self.num_records += given.give(each, fetcher)
        return shares


@dataclass
class _Given:
    """Boxes of one tensor: disjoint, by where they begin along its first dim."""

    _starts: list[int] = field(default_factory=list)
    _boxes: list[tuple[Box, Fetcher]] = field(default_factory=list)
    _longest: int = 0
    """Of all of them along the first dim."""

    def near(self, box: Box) -> list[tuple[Box, Fetcher]]:
        """Those that may overlap it, and few others."""
        return self._boxes[self._places(box)]

    def give(self, box: Box, fetcher: Fetcher) -> int:
        """Whoever had it. Returns: how many boxes there are more."""
        places = self._places(box)
        near = self._boxes[places]
        kept = [(each, holder) for had, holder in near for each in left_of([had], box)]
        kept = sorted([*kept, (box, fetcher)], key=_start)
        self._boxes[places] = kept
        self._starts[places] = map(_start, kept)
        self._longest = max(self._longest, _length(box))
        return len(kept) - len(near)

    def _places(self, box: Box) -> slice:
        start = _start((box, None))
        first = bisect_right(self._starts, start - self._longest)
        return slice(first, bisect_left(self._starts, start + _length(box)))


def _shared(
    given: Iterable[tuple[Box, Fetcher]], box: Box, failed: Collection[Fetcher], fetcher: Fetcher
) -> tuple[list[Box], list[tuple[Box, Fetcher]]]:
    """(what this one is to bring, what others have)."""
    rest = [box]
    mine: list[Box] = []
    others: list[tuple[Box, Fetcher]] = []
    for taken, holder in given:
        common = overlap(box, taken)
        if common is None:
            continue
        rest = left_of(rest, taken)
        if holder == fetcher or holder in failed:
            mine.append(common)
        else:
            others.append((common, holder))
    return mine + rest, others


def _start(given: tuple[Box, object]) -> int:
    return given[0].start[0] if given[0].start else 0


def _length(box: Box) -> int:
    return box.size[0] if box.size else 1
