"""Boxes of a part over a slow link: each byte to one peer, whatever each asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.statemgr.transfer import assignment
from phaseloom.statemgr.transfer.assignment import Assignment, Peer, Shares
from phaseloom.statemgr.transfer.tensorslices import Box, Fragment, contains

_SHAPES = {"a": (6, 5), "b": (4, 3, 3), "scalar": ()}
_PEERS = [Peer(f"node{i}:1", f"slices {i}") for i in range(3)]

Asked = tuple[Peer, list[Box], list[Peer]]


@st.composite
def _boxes(draw: st.DrawFn) -> Box:
    name = draw(st.sampled_from(sorted(_SHAPES)))
    shape = _SHAPES[name]
    start = [draw(st.integers(0, n - 1)) for n in shape]
    size = [draw(st.integers(1, n - at)) for n, at in zip(shape, start, strict=True)]
    return Box(name, start, size)


_ASKED = st.lists(
    st.tuples(
        st.sampled_from(_PEERS),
        st.lists(_boxes(), min_size=1, max_size=4),
        st.lists(st.sampled_from(_PEERS), max_size=1),
    ),
    max_size=12,
)


def _nothing() -> dict[str, np.ndarray[Any, Any]]:
    """By tensor, of each element the number of whoever was given it; −1: nobody."""
    return {name: np.full(shape, -1, np.int8) for name, shape in _SHAPES.items()}


def _at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))


def _ask(
    assigned: Assignment,
    boxes: Sequence[Box],
    failed: Sequence[Peer],
    peer: Peer,
    limit_bytes: int = 10**9,
) -> Shares:
    sized = [(box, math.prod(box.size)) for box in boxes]
    return assigned.assign(sized, limit_bytes, failed, peer)


def _everything(shares: Shares) -> list[tuple[Peer | None, Fragment]]:
    """Who is to bring which fragment; None: who is asked gives it."""
    told: list[tuple[Peer | None, Fragment]] = [(None, each) for each in shares.own_boxes]
    return told + [(who, each) for who, some in shares.peer_boxes.items() for each in some]


@given(_ASKED)
def test_each_byte_is_given_once_unless_who_has_it_failed(asked: list[Asked]) -> None:
    assigned, owners = Assignment(), _nothing()
    for peer, boxes, failed in asked:
        shares = _ask(assigned, boxes, failed, peer)
        assert shares.num_boxes == len(boxes)
        told = _everything(shares)
        for number, box in enumerate(boxes):
            mine = [(who, part) for who, (which, part) in told if which == number]
            seen = np.zeros_like(owners[box.name], np.int8)
            for who, part in mine:
                assert contains(box, part)
                seen[_at(part)] += 1
                had = {int(each) for each in np.unique(owners[box.name][_at(part)])}
                if who is None:
                    # Of nobody, its own, or of one that did not deliver.
                    allowed = {-1} | {_PEERS.index(each) for each in [peer, *failed]}
                    assert had <= allowed
                else:
                    assert had == {_PEERS.index(who)}
                    assert who != peer
                    assert who not in failed
            # All of the box, each byte one way.
            assert seen[_at(box)].min(initial=1) == seen[_at(box)].max(initial=1) == 1
            assert int(seen.sum()) == math.prod(box.size)
            for who, part in mine:
                if who is None:
                    owners[box.name][_at(part)] = _PEERS.index(peer)


@given(st.lists(_boxes(), min_size=1, max_size=6))
def test_who_asks_for_the_same_is_sent_to_who_has_it(boxes: list[Box]) -> None:
    first, second, third = _PEERS
    assigned = Assignment()
    _ask(assigned, boxes, [], first)
    assert not _ask(assigned, boxes, [], second).own_boxes
    assert not _ask(assigned, boxes, [], first).peer_boxes
    assert not _ask(assigned, boxes, [first], second).peer_boxes
    assert set(_ask(assigned, boxes, [], third).peer_boxes) == {second}


def test_a_box_that_nobody_has_some_of_stays_in_one() -> None:
    first, second, _ = _PEERS
    assigned = Assignment()
    half, whole = Box("a", [0, 0], [3, 5]), Box("a", [0, 0], [6, 5])
    assert _ask(assigned, [half, whole], [], first).own_boxes == [(0, half), (1, whole)]
    assert _ask(assigned, [half], [], second) == Shares(1, [], {first: [(0, half)]})


def test_box_of_more_fragments_than_anybody_should_be_sent_for_comes_at_once(
    monkeypatch: Any,
) -> None:
    first, second, third = _PEERS
    monkeypatch.setattr(assignment, "_MAX_FRAGMENTS", 2)
    rows = [Box("a", [row, 0], [1, 5]) for row in range(6)]
    assigned = Assignment()
    _ask(assigned, rows[:3], [], first)
    _ask(assigned, rows[3:], [], second)
    whole = Box("a", [0, 0], [6, 5])
    assert _ask(assigned, [whole], [], third) == Shares(1, [(0, whole)], {})


def test_so_much_is_given_at_once_and_told_of_all_that_others_have_before() -> None:
    first, second, _ = _PEERS
    rows = [Box("a", [row, 0], [1, 5]) for row in range(6)]
    assigned = Assignment()
    _ask(assigned, rows[:3], [], first)
    told = _ask(assigned, rows, [], second, 5)
    assert told == Shares(4, [(3, rows[3])], {first: list(enumerate(rows))[:3]})
    # One box comes, however large it is.
    assert _ask(assigned, rows[4:], [], second, 1) == Shares(1, [(0, rows[4])], {})
    assert _ask(assigned, rows[4:], [], first, 10) == Shares(
        2, [(1, rows[5])], {second: [(0, rows[4])]}
    )
