"""Where bytes lie that several may refer to: runs of extents, and how two layouts overlap.

Pure. A host copy is a sequence of *pieces*, whose bytes one after another are the heap. Layouts
say where two host copies may be equal: the same parameter, of the same whole tensor, and rows of it
that both have, which lie without a gap in either. Whether they are equal only their bytes tell.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import msgspec

from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.contract.state_rank import MAX_PIECE_SOURCES
from phaseloom.common.tensors.tensortable import TensorTable

MIN_PIECE_BYTES = 4096
"""What is shorter is held by each: a piece costs a copy of its own at every load."""
WORTH_BYTES = 16 * 1024 * 1024
"""So much less memory is worth some pieces, however large the whole is;"""
WORTH_SHARE = 4
"""or so much of the whole: a quarter."""


class Piece(NamedTuple):
    extent: int
    start: int
    num_bytes: int


_DECODER = msgspec.msgpack.Decoder(list[Piece])


class Run(NamedTuple):
    """Bytes of one heap, and where another one may have the same."""

    at: int
    there: int
    num_bytes: int


class Found(NamedTuple):
    """Bytes of a heap that lie somewhere else, too."""

    at: int
    piece: Piece

    @property
    def end(self) -> int:
        return self.at + self.piece.num_bytes


class Pieces:
    """Immutable; equal where they are the same pieces."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self._pieces = tuple(joined(pieces))
        self._ends = list(accumulate(piece.num_bytes for piece in self._pieces))
        self._bytes_in: Counter[int] = Counter()
        for piece in self._pieces:
            self._bytes_in[piece.extent] += piece.num_bytes
        self.extents = tuple(self._bytes_in)
        """Each once."""

    @classmethod
    def whole(cls, extent: int, num_bytes: int) -> Pieces:
        """The beginning of one extent."""
        return cls([Piece(extent, 0, num_bytes)])

    @classmethod
    def decoded(cls, encoded: bytes | msgspec.Raw) -> Pieces:
        """Raises: msgspec.DecodeError."""
        return cls(_DECODER.decode(encoded))

    @cached_property
    def encoded(self) -> bytes:
        """MessagePack: an array of arrays."""
        return msgspec.msgpack.encode(self._pieces)

    @property
    def num_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def extent(self) -> int | None:
        """Whose beginning it is; None: it is no such, or nowhere."""
        if len(self._pieces) != 1 or self._pieces[0].start:
            return None
        return self._pieces[0].extent

    def bytes_in(self, extent: int) -> int:
        """How many lie there."""
        return self._bytes_in[extent]

    def of(self, start: int, num_bytes: int) -> Iterator[Piece]:
        """Where these bytes lie."""
        end = start + num_bytes
        assert 0 <= start <= end <= self.num_bytes
        index = bisect_right(self._ends, start)
        while start < end:
            piece, until = self._pieces[index], min(self._ends[index], end)
            skipped = start - (self._ends[index] - piece.num_bytes)
            yield Piece(piece.extent, piece.start + skipped, until - start)
            start, index = until, index + 1

    def moved(self, extent: int, places: Sequence[Found]) -> Pieces:
        """The same bytes, where those of one extent lie elsewhere now.

        Args: places: sorted; `at` is where in the old extent they began. They cover what is here.
        """
        starts = [place.at for place in places]

        def moved(piece: Piece) -> Piece:
            if piece.extent != extent:
                return piece
            place = places[bisect_right(starts, piece.start) - 1]
            assert piece.start + piece.num_bytes <= place.end
            start = place.piece.start + piece.start - place.at
            return Piece(place.piece.extent, start, piece.num_bytes)

        return Pieces(map(moved, self._pieces))

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pieces) and self._pieces == other._pieces

    def __hash__(self) -> int:
        return hash(self._pieces)

    def __repr__(self) -> str:
        return f"Pieces({list(self._pieces)})"


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same bytes in as few pieces as can be."""
    last: Piece | None = None
    for piece in pieces:
        if not piece.num_bytes and last is not None:
            continue
        if last is None or (last.extent, last.start + last.num_bytes) != piece[:2]:
            if last is not None:
                yield last
            last = piece
        else:
            last = Piece(last.extent, last.start, last.num_bytes + piece.num_bytes)
    if last is not None:
        yield last


NOWHERE = Pieces()


def overlaps(mine: TensorTable, theirs: TensorTable) -> list[Run]:
    """What both layouts have of the same tensors, in the order of the first.

    Cost: O(n log n) in tensors.
    """
    if mine == theirs:
        return sorted(Run(s.offset, s.offset, s.num_bytes) for s in mine.tensors if s.num_bytes)
    by_name = {slot.name: slot for slot in theirs.tensors}
    found = []
    for slot in mine.tensors:
        other = by_name.get(slot.name)
        run = None if other is None else _overlap(slot, other)
        if run is not None:
            found.append(run)
    return sorted(found)


def _overlap(mine: TensorSlot, theirs: TensorSlot) -> Run | None:
    """The rows that both have of one tensor, where these lie in both without a gap."""
    if mine.dtype != theirs.dtype or _whole_shape(mine) != _whole_shape(theirs):
        return None
    (my_first, my_rows), (first, rows) = _rows(mine), _rows(theirs)
    if _beside_rows(mine) != _beside_rows(theirs) or not my_rows or not rows:
        return None
    row_bytes = mine.num_bytes // my_rows
    if (my_rows * row_bytes, rows * row_bytes) != (mine.num_bytes, theirs.num_bytes):
        return None
    begin, end = max(my_first, first), min(my_first + my_rows, first + rows)
    if begin >= end or not row_bytes:
        return None
    at, there = (begin - my_first) * row_bytes, (begin - first) * row_bytes
    return Run(mine.offset + at, theirs.offset + there, (end - begin) * row_bytes)


def _whole_shape(slot: TensorSlot) -> list[int]:
    return slot.global_shape or slot.shape


def _rows(slot: TensorSlot) -> tuple[int, int]:
    """The first row, and how many; a scalar is one."""
    return (slot.start[0] if slot.start else 0), (slot.shape[0] if slot.shape else 1)


def _beside_rows(slot: TensorSlot) -> tuple[list[int], list[int]]:
    """What the slice is in the dims behind the first."""
    return slot.shape[1:], slot.start[1:] or [0] * len(slot.shape[1:])


def find(
    own: Pieces,
    mine: TensorTable,
    others: Sequence[tuple[TensorTable, Pieces]],
    is_equal: Callable[[int, Piece], bool],
) -> list[Found]:
    """Which bytes of a host copy lie in those of others, too, sorted; what overlaps most is asked
    first.

    Args: own: where it lies now; what lies there is nobody else's find.
          is_equal: whether its bytes from this place on are those of the piece.
    """
    # Many have one layout, and may have many tensors.
    runs_of = {table: overlaps(mine, table) for table in {table for table, _ in others}}
    candidates = [(runs_of[table], pieces) for table, pieces in others]
    candidates.sort(key=lambda each: -sum(run.num_bytes for run in each[0]))
    found: list[Found] = []
    extents, mine_alone = set[int](), set(own.extents)
    for runs, pieces in candidates:
        for run in _not_found(runs, found):
            parts = list(_placed(run, pieces))
            wanted = {part.piece.extent for part in parts}
            # One descriptor is for what is its own.
            if wanted & mine_alone or len(extents | wanted) >= MAX_PIECE_SOURCES:
                continue
            if all(is_equal(*part) for part in parts):
                found += parts
                extents |= wanted
        found.sort()
    return _with_gaps(found, is_equal)


def has_all(
    mine: TensorTable,
    theirs: TensorTable,
    pieces: Pieces,
    is_equal: Callable[[int, Piece], bool],
) -> bool:
    """Whether a host copy has every tensor of another one, which lies in these pieces.

    Args: is_equal: as of `find`.
    """
    runs = overlaps(mine, theirs)
    if sum(run.num_bytes for run in runs) != sum(slot.num_bytes for slot in theirs.tensors):
        return False
    return all(is_equal(*part) for run in runs for part in _placed(run, pieces))


def _placed(run: Run, pieces: Pieces) -> Iterator[Found]:
    at = run.at
    for piece in pieces.of(run.there, run.num_bytes):
        yield Found(at, piece)
        at += piece.num_bytes


def _not_found(runs: Sequence[Run], found: Sequence[Found]) -> list[Run]:
    """What of these is not found yet; both sorted."""
    rest = []
    index = 0
    for run in runs:
        at, end = run.at, run.at + run.num_bytes
        while index < len(found) and found[index].end <= at:
            index += 1
        ahead = index
        while at < end:
            begin = found[ahead].at if ahead < len(found) else end
            if begin > at:
                until = min(begin, end)
                rest.append(Run(at, run.there + at - run.at, until - at))
            if begin >= end:
                break
            at, ahead = found[ahead].end, ahead + 1
    return rest


def _with_gaps(found: Sequence[Found], is_equal: Callable[[int, Piece], bool]) -> list[Found]:
    """With what pads neighbours alike; without what is too short then."""
    grown: list[Found] = []
    for each in found:
        last = grown[-1] if grown else None
        if last is not None and last.piece.extent == each.piece.extent:
            gap = each.at - last.end
            start = last.piece.start + last.piece.num_bytes
            padding = Piece(last.piece.extent, start, gap)
            if each.piece.start - start == gap and (not gap or is_equal(last.end, padding)):
                num_bytes = last.piece.num_bytes + gap + each.piece.num_bytes
                grown[-1] = Found(last.at, last.piece._replace(num_bytes=num_bytes))
                continue
        grown.append(each)
    return [each for each in grown if each.piece.num_bytes >= MIN_PIECE_BYTES]


def find_again(
    own: Pieces,
    left: Collection[int],
    runs: Iterable[Run],
    whole: Pieces,
    is_equal: Callable[[int, Piece], bool],
) -> list[Found]:
    """Which bytes of a composed host copy lie in a whole one, too, sorted.

    Args: left: extents that it may leave: what lies in others stays there.
          runs: where the layouts of both overlap.
    """
    found = []
    for run in runs:
        at = run.at
        for mine in own.of(run.at, run.num_bytes):
            if mine.extent in left:
                parts = list(_placed(Run(at, run.there + at - run.at, mine.num_bytes), whole))
                if all(is_equal(*part) for part in parts):
                    found += parts
            at += mine.num_bytes
    return _with_gaps(found, is_equal)


def redirected(own: Pieces, found: Sequence[Found]) -> Pieces:
    """With what was found there; the rest stays where it is."""

    def every() -> Iterator[Piece]:
        at = 0
        for each in found:
            yield from own.of(at, each.at - at)
            yield each.piece
            at = each.end
        yield from own.of(at, own.num_bytes - at)

    return Pieces(every())


class Plan(NamedTuple):
    """How a host copy lies once it refers to what others hold."""

    found: list[Found]
    own: list[tuple[int, int]]
    """What it alone has, as ranges [start, end) of the heap, which lie packed in one extent."""

    @property
    def own_bytes(self) -> int:
        return sum(end - start for start, end in self.own)

    def pieces(self, extent: int) -> Pieces:
        """Args: extent: of what is its own."""
        placed = dict(self.found)
        start = 0
        for at, end in self.own:
            placed[at] = Piece(extent, start, end - at)
            start += end - at
        return Pieces(placed[at] for at in sorted(placed))


def plan(num_bytes: int, found: list[Found]) -> Plan | None:
    """None: it is not worth it."""
    own = []
    at = 0
    for each in [*found, Found(num_bytes, Piece(0, 0, 0))]:
        if each.at > at:
            own.append((at, each.at))
        at = each.end
    return Plan(found, own) if is_worth(num_bytes, found) else None


def is_worth(num_bytes: int, found: Iterable[Found]) -> bool:
    """Whether a host copy of so many bytes is to refer to these instead."""
    saved = sum(each.piece.num_bytes for each in found)
    return saved >= WORTH_BYTES or 0 < num_bytes <= saved * WORTH_SHARE


def union(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes as disjoint ranges [start, end), sorted."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def live(every: Iterable[Pieces], extent: int) -> list[tuple[int, int]]:
    """What these refer to of an extent: disjoint ranges [start, end), sorted."""
    return union(each for pieces in every for each in _ranges(pieces).get(extent, ()))


def packed(ranges: Iterable[tuple[int, int]], extent: int) -> list[Found]:
    """Where these ranges of one extent lie once they are one behind the other in another."""
    places = []
    at = 0
    for start, end in ranges:
        places.append(Found(start, Piece(extent, at, end - start)))
        at += end - start
    return places


class Shared(NamedTuple):
    """What of a host copy others hold, too."""

    num_bytes: int
    numbers: set[int]
    """Of those others."""


class Account(NamedTuple):
    """What host copies come to."""

    saved_bytes: int
    """How much less they take, because several refer to the same."""
    shared: dict[int, Shared]
    """Of each number that refers to bytes to which others refer."""


def account(contents: Sequence[tuple[int, Pieces]]) -> Account:
    """Args: contents: each with its number.
    Cost: O(n log n) in pieces.
    """
    numbers = [number for number, _ in contents]
    shared_bytes, beside = [0] * len(numbers), [0] * len(numbers)
    held_bytes = 0
    for holders, num_bytes in _by_holders([pieces for _, pieces in contents]).items():
        held_bytes += num_bytes
        several = list(_bits(holders))
        if len(several) > 1:
            for index in several:
                shared_bytes[index] += num_bytes
                beside[index] |= holders
    shared = {
        number: Shared(num_bytes, {numbers[other] for other in _bits(others)} - {number})
        for number, num_bytes, others in zip(numbers, shared_bytes, beside, strict=True)
        if others
    }
    return Account(sum(pieces.num_bytes for _, pieces in contents) - held_bytes, shared)


def _by_holders(every: Sequence[Pieces]) -> dict[int, int]:
    """How many bytes each set of these refers to that nobody else does; a set is a number, of which
    each of these is a bit."""
    changes: dict[int, defaultdict[int, int]] = {}
    for index, pieces in enumerate(every):
        for extent, ranges in _ranges(pieces).items():
            of_extent = changes.setdefault(extent, defaultdict(int))
            for start, end in union(ranges):
                of_extent[start] += 1 << index
                of_extent[end] -= 1 << index
    found: defaultdict[int, int] = defaultdict(int)
    for of_extent in changes.values():
        holders = at = 0
        for place in sorted(of_extent):
            if holders:
                found[holders] += place - at
            holders, at = holders + of_extent[place], place
    return found


def _ranges(pieces: Pieces) -> dict[int, list[tuple[int, int]]]:
    """[start, end) by extent."""
    ranges: dict[int, list[tuple[int, int]]] = {extent: [] for extent in pieces.extents}
    for extent, start, num_bytes in pieces:
        ranges[extent].append((start, start + num_bytes))
    return ranges


def _bits(number: int) -> Iterator[int]:
    """Of which ones it is the sum."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
