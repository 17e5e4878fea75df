"""Pieces of host copies: found by layouts, proved by bytes, and never another byte than before."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.contract.state_rank import MAX_PIECE_SOURCES
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.transport.framing import MAX_FDS
from phaseloom.statemgr.core import pieces as planning
from phaseloom.statemgr.core.pieces import Found, Piece, Pieces, Run

ROW = 2 * planning.MIN_PIECE_BYTES
NAMES = "abcd"


def slot(
    name: str, rows: range, offset: int, *, of: int = 4, row: int = ROW, dtype: str = "uint8"
) -> TensorSlot:
    shape = [len(rows), row]
    return TensorSlot(
        name, Role.WEIGHT, dtype, shape, offset, len(rows) * row, [of, row], [rows.start, 0]
    )


def test_messages_carry_as_many_descriptors_as_a_host_copy_may_need() -> None:
    assert MAX_PIECE_SOURCES == MAX_FDS


# --- where layouts overlap -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (range(4), range(4), Run(64, 128, 4 * ROW)),
        (range(1, 3), range(4), Run(64, 128 + ROW, 2 * ROW)),
        (range(4), range(1, 3), Run(64 + ROW, 128, 2 * ROW)),
        (range(3), range(2, 4), Run(64 + 2 * ROW, 128, ROW)),
        (range(2), range(2, 4), None),
    ],
)
def test_rows_that_both_have_lie_without_a_gap_in_both(
    mine: range, theirs: range, expected: Run | None
) -> None:
    one = TensorTable.of([slot("a", mine, 64), slot("z", range(4), 10 * ROW)])
    other = TensorTable.of([slot("a", theirs, 128), slot("b", range(4), 10 * ROW)])
    assert planning.overlaps(one, other) == ([expected] if expected else [])


def test_slices_beside_rows_are_no_run() -> None:
    whole = TensorSlot("a", Role.WEIGHT, "uint8", [4, 8], 0, 32)
    columns = TensorSlot("a", Role.WEIGHT, "uint8", [4, 4], 0, 16, [4, 8], [0, 4])
    others = TensorSlot("a", Role.WEIGHT, "uint8", [4, 4], 0, 16, [4, 8], [0, 0])
    for one, other in ((whole, columns), (columns, whole), (columns, others)):
        assert planning.overlaps(TensorTable.of([one]), TensorTable.of([other])) == []
    assert planning.overlaps(TensorTable.of([columns]), TensorTable.of([columns]))


def test_tensors_of_another_dtype_or_shape_and_empty_ones_are_no_run() -> None:
    table = TensorTable.of([slot("a", range(4), 0)])
    for other in (
        slot("a", range(4), 0, dtype="int8"),
        slot("a", range(4), 0, of=8),
        slot("b", range(4), 0),
        slot("a", range(0), 0),
    ):
        assert planning.overlaps(table, TensorTable.of([other])) == []
    scalar = TensorTable.of([TensorSlot("s", Role.WEIGHT, "float32", [], 64, 4)])
    assert planning.overlaps(scalar, scalar) == [Run(64, 64, 4)]


# --- pieces --------------------------------------------------------------------------------------

Memory = dict[int, bytes]


def read(memory: Memory, pieces: Pieces | Sequence[Piece]) -> bytes:
    return b"".join(memory[p.extent][p.start : p.start + p.num_bytes] for p in pieces)


runs_of_memory = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(1, 14)), min_size=1, max_size=8
)


@given(runs_of_memory, st.data())
def test_any_range_of_pieces_is_that_of_the_whole(
    runs: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    memory = {extent: bytes((extent * 70 + i) % 256 for i in range(64)) for extent in range(3)}
    listed = [Piece(*run) for run in runs]
    pieces = Pieces(listed)
    whole = read(memory, listed)
    assert read(memory, pieces) == whole
    assert pieces.num_bytes == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - start))
    assert read(memory, list(pieces.of(start, count))) == whole[start : start + count]
    ranges = planning.union((p.start, p.start + p.num_bytes) for p in pieces if p.extent == 1)
    places = planning.packed(ranges, 9)
    memory[9] = b"".join(memory[1][start:end] for start, end in ranges)
    moved = pieces.moved(1, places)
    assert read(memory, moved) == whole
    assert 1 not in moved.extents


@given(st.lists(runs_of_memory, min_size=1, max_size=5))
def test_what_is_shared_is_what_each_byte_says(many: list[list[tuple[int, int, int]]]) -> None:
    every = [(number, Pieces(Piece(*run) for run in runs)) for number, runs in enumerate(many)]
    users: dict[tuple[int, int], set[int]] = {}
    for number, pieces in every:
        for piece in pieces:
            for at in range(piece.start, piece.start + piece.num_bytes):
                users.setdefault((piece.extent, at), set()).add(number)
    saved_bytes, told = planning.account(every)
    for number, _ in every:
        mine = [who for who in users.values() if number in who and len(who) > 1]
        assert (told[number].num_bytes if number in told else 0) == len(mine)
        others = set().union(*mine) - {number} if mine else set()
        assert (told[number].numbers if number in told else set()) == others
    assert sum(pieces.num_bytes for _, pieces in every) - saved_bytes == len(users)


# --- plans ---------------------------------------------------------------------------------------


class Copies:
    """Host copies of ranks with slices of the same few tensors, some of them equal."""

    def __init__(self) -> None:
        self.memory: Memory = {}
        self.copies: list[tuple[TensorTable, Pieces, bytes]] = []

    def add(self, layout: list[tuple[str, range, int, int]]) -> None:
        """Args: layout: name, rows, which variant of the tensor, and what pads it."""
        slots, content = [], b""
        for name, rows, variant, padding in layout:
            slots.append(slot(name, rows, len(content)))
            for row in rows:
                content += bytes([NAMES.index(name) * 16 + variant * 4 + row]) * ROW
            content += bytes(padding)
        extent = len(self.memory)
        self.memory[extent] = content
        pieces = Pieces.whole(extent, len(content))
        self.copies.append((TensorTable.of(slots), pieces, content))

    def compose(self, index: int, others: list[int]) -> int:
        """As far as it is worth it. Returns: bytes of its own then."""
        table, own, content = self.copies[index]

        def is_equal(at: int, piece: Piece) -> bool:
            there = self.memory[piece.extent][piece.start : piece.start + piece.num_bytes]
            assert len(there) == piece.num_bytes
            return content[at : at + piece.num_bytes] == there

        sources = [self.copies[other][:2] for other in others]
        found = planning.find(own, table, sources, is_equal)
        assert found == sorted(found)
        plan = planning.plan(own.num_bytes, found)
        if plan is None:
            return own.num_bytes
        extent = len(self.memory)
        self.memory[extent] = b"".join(content[start:end] for start, end in plan.own)
        assert len(self.memory[extent]) == plan.own_bytes
        pieces = plan.pieces(extent)
        assert read(self.memory, pieces) == content
        assert len(pieces.extents) <= MAX_PIECE_SOURCES
        assert not set(pieces.extents) & set(own.extents)
        self.copies[index] = (table, pieces, content)
        return plan.own_bytes


layouts = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from([range(4), range(2), range(2, 4), range(1, 4), range(3)]),
        st.integers(0, 1),
        st.sampled_from([0, 64, planning.MIN_PIECE_BYTES]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda each: each[0],
)


@given(st.lists(layouts, min_size=2, max_size=12))
def test_composed_copy_has_the_bytes_that_it_had(
    many: list[list[tuple[str, range, int, int]]],
) -> None:
    copies = Copies()
    for index, layout in enumerate(many):
        copies.add(layout)
        copies.compose(index, list(range(index)))
    for _, pieces, content in copies.copies:
        assert read(copies.memory, pieces) == content


def test_equal_tensors_are_found_whatever_lies_between() -> None:
    copies = Copies()
    copies.add([("a", range(4), 0, 64), ("b", range(4), 0, 0), ("c", range(4), 0, 0)])
    copies.add([("c", range(4), 0, 0), ("a", range(4), 0, 64), ("b", range(4), 1, 0)])
    assert copies.compose(1, [0]) == 4 * ROW + 64
    copies.add([("a", range(2), 0, 64), ("c", range(2, 4), 0, 0)])
    assert copies.compose(2, [1]) == 64
    assert copies.copies[2][1].extents[0] == 0  # where the second has it: of nobody it is a base


def test_padding_that_is_alike_makes_one_piece_of_two() -> None:
    copies = Copies()
    layout = [(name, range(4), 0, 64) for name in NAMES]
    copies.add(layout)
    copies.add([*layout[:3], ("d", range(4), 1, 64)])
    assert copies.compose(1, [0]) == 4 * ROW + 2 * 64
    assert len(copies.copies[1][1]) == 2


def test_little_is_not_worth_pieces() -> None:
    found = [Found(0, Piece(1, 0, 24))]
    assert planning.plan(100, found) is None
    assert planning.plan(96, found) is not None
    large = [Found(0, Piece(1, 0, planning.WORTH_BYTES))]
    assert planning.plan(100 * planning.WORTH_BYTES, large) is not None
    assert planning.plan(0, []) is None


def test_more_memory_than_one_message_can_bring_is_left_out() -> None:
    copies = Copies()
    for row in range(4):
        for name in NAMES:
            copies.add([(name, range(row, row + 1), 0, 0)])
    copies.add([(name, range(4), 0, 0) for name in NAMES])
    assert copies.compose(16, list(range(16))) == (16 - MAX_PIECE_SOURCES + 1) * ROW


def test_composed_copy_leans_on_a_whole_one_for_what_it_may_leave() -> None:
    copies = Copies()
    layout = [(name, range(4), 0, 64) for name in NAMES]
    copies.add(layout)
    copies.add([*layout[:2], ("c", range(4), 1, 0), layout[3]])
    copies.compose(1, [0])
    copies.add(layout[:3])
    table, own, content = copies.copies[1]
    _, whole, _ = copies.copies[-1]

    def is_equal(at: int, piece: Piece) -> bool:
        there = copies.memory[piece.extent][piece.start : piece.start + piece.num_bytes]
        return content[at : at + piece.num_bytes] == there

    runs = planning.overlaps(table, copies.copies[-1][0])
    assert planning.find_again(own, [], runs, whole, is_equal) == []
    found = planning.find_again(own, own.extents, runs, whole, is_equal)
    moved = planning.redirected(own, found)
    assert read(copies.memory, moved) == content
    assert sum(p.num_bytes for p in moved if p.extent in whole.extents) >= 8 * ROW
