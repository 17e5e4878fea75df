"""Contents that are equal in part hold that part once.

What a content has in common with others is found by the layouts, proved by comparing the bytes,
and given up: what is its own goes to a small extent, for the rest it refers to the others' memory.
All of it is immutable, so nobody notices; the digest of the whole is what it was, and is taken once
more before the old memory goes. Layouts with no tensor in common cost a look at their names,
tensors that differ a comparison up to where they do.

An extent that those have left who used most of it is packed anew, so that what nobody refers to
never takes more than a quarter of it. Called by `Sharing`, one thing at a time; every wait may find
that what was looked at is there no more, and then nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from phaseloom.common.blockhash import digest_of
from phaseloom.statemgr.core import pieces as planning
from phaseloom.statemgr.core.arena import rounded
from phaseloom.statemgr.core.contents import Content
from phaseloom.statemgr.core.pieces import Found, Piece, Pieces, Plan
from phaseloom.statemgr.core.residency import State
from phaseloom.statemgr.node.memory import Extent, copy, is_same
from phaseloom.statemgr.node.node import Node

log = logging.getLogger(__name__)

_STEP_BYTES = 16 * 1024 * 1024
"""Between looks at whether to stop."""
_DEAD_SHARE = 4
"""So much of an extent may be of use to nobody: a quarter."""

Views = Mapping[int, memoryview]


class Composing:
    def __init__(self, node: Node, stopped: threading.Event) -> None:
        self._node = node
        self._stopped = stopped

    async def compose(self, content: Content) -> bool:
        """Let it refer to what others hold of it. Returns: whether it does now.

        Raises: ResourceError: RESOURCE_EXHAUSTED: no memory for what is its own.
        """
        contents, memory = self._node.contents, self._node.memory
        if not contents.may_compose(content):
            return False
        sources = contents.sources_of(content)
        places = [(each, each.pieces) for each in (content, *sources)]

        def is_wanted() -> bool:
            is_there = all(contents.is_known(c) and c.pieces is pieces for c, pieces in places)
            return is_there and content.state is State.HOST and not self._stopped.is_set()

        plan = await asyncio.to_thread(_plan, places, self._views(places), is_wanted)
        if plan is None or not is_wanted():
            return False
        before = content.pieces
        with self._filling(plan.own_bytes, f"what is {content.owner}'s own") as own:
            pieces = plan.pieces(own or 0)
            if own is not None:
                await asyncio.to_thread(_fill, memory[own], self._views(places), before, plan.own)
            if not is_wanted() or (own is not None and not memory[own].freeze()):
                return False
            # Nothing but the books changes from here on, unless that is proved.
            composed = memory.read(pieces)
            if await asyncio.to_thread(digest_of, composed) != content.digest or not is_wanted():
                return False
            for extent in pieces.extents:
                memory.hold(extent)
            contents.compose(content, pieces, sources)
            self._node.free_pieces(before)
        log.info("%s refers to others for all but %d bytes", content, plan.own_bytes)
        return True

    async def pack(self, extent: int) -> bool:
        """Give up what nobody refers to of an extent, where that is much. Returns: whether it was.

        Who refers to something in it refers to another extent then.

        Raises: ResourceError: RESOURCE_EXHAUSTED: no memory for the rest.
        """
        contents, memory = self._node.contents, self._node.memory
        holders, live = contents.holders(extent), contents.live(extent)
        live_bytes = sum(end - start for start, end in live)
        if not holders or memory.arena.num_holders(extent) != len(holders):
            return False
        size = memory.arena.size_of(extent)
        if (size - rounded(live_bytes)) * _DEAD_SHARE <= size:
            return False

        def is_wanted() -> bool:
            is_there = extent in memory.arena.extents_in_use()
            return is_there and not self._stopped.is_set()

        view = memory[extent].readable(size)
        with self._filling(live_bytes, "what several hold") as packed:
            assert packed is not None, "its holders refer to something"
            places = planning.packed(live, packed)
            await asyncio.to_thread(_pack, memory[packed], view, places, is_wanted)
            if not is_wanted() or not memory[packed].freeze():
                return False
            # Some may have left it meanwhile; nobody has come.
            for content in contents.holders(extent):
                memory.hold(packed)
                contents.move(content, content.pieces.moved(extent, places), packed, extent)
                memory.free(extent)
        log.info("of extent %d %d of %d bytes are left", extent, live_bytes, size)
        return True

    def _views(self, places: list[tuple[Content, Pieces]]) -> Views:
        """They keep the memory, though it may be given up meanwhile."""
        memory = self._node.memory
        extents = {extent for _, pieces in places for extent in pieces.extents}
        return {e: memory[e].readable(memory.arena.size_of(e)) for e in extents}

    @contextmanager
    def _filling(self, num_bytes: int, what: str) -> Iterator[int | None]:
        """Memory to fill and to hold; what nobody holds at the end is freed. None: none is needed.

        Raises: ResourceError: nobody has to make room for what is done to save some.
        """
        if not num_bytes:
            yield None
            return
        node = self._node
        extent = node.memory.reserve(num_bytes, f"the host copy: {what}", may_freeze=True)
        node.contents.lend(extent)
        try:
            yield extent
        finally:
            node.contents.give_back(extent)
            node.memory.free(extent)


def _plan(
    places: list[tuple[Content, Pieces]], views: Views, is_wanted: Callable[[], bool]
) -> Plan | None:
    """Of the first of these, by what the others have. Blocking. None: it is not worth it, or not
    wanted any more."""
    (content, own), *others = places

    def is_equal(at: int, piece: Piece) -> bool:
        for start in range(0, piece.num_bytes, _STEP_BYTES):
            if not is_wanted():
                return False
            num_bytes = min(_STEP_BYTES, piece.num_bytes - start)
            if not _is_equal(own, at + start, _part(piece, start, num_bytes), views):
                return False
        return True

    found = planning.find(own, content.table, [(c.table, p) for c, p in others], is_equal)
    return planning.plan(content.num_bytes, found) if is_wanted() else None


def _is_equal(own: Pieces, at: int, piece: Piece, views: Views) -> bool:
    """Both in one piece: what may be composed lies whole."""
    (mine,) = own.of(at, piece.num_bytes)
    return is_same(_view(views, mine), _view(views, piece))


def _part(piece: Piece, start: int, num_bytes: int) -> Piece:
    return Piece(piece.extent, piece.start + start, num_bytes)


def _view(views: Views, piece: Piece) -> memoryview:
    return views[piece.extent][piece.start : piece.start + piece.num_bytes]


def _fill(extent: Extent, views: Views, pieces: Pieces, own: list[tuple[int, int]]) -> None:
    """Ranges of the whole, one behind the other. No view on the memory outlives it, so that it can
    be frozen. Blocking."""
    target = extent.view(sum(end - start for start, end in own))
    at = 0
    for start, end in own:
        for piece in pieces.of(start, end - start):
            copy(target[at : at + piece.num_bytes], _view(views, piece))
            at += piece.num_bytes


def _pack(
    extent: Extent, before: memoryview, places: list[Found], is_wanted: Callable[[], bool]
) -> None:
    """As `_fill`. Every load verifies what comes of it."""
    target = extent.view(sum(place.piece.num_bytes for place in places))
    for at, piece in places:
        for start in range(0, piece.num_bytes, _STEP_BYTES):
            if not is_wanted():
                return
            num_bytes = min(_STEP_BYTES, piece.num_bytes - start)
            to = piece.start + start
            copy(target[to : to + num_bytes], before[at + start : at + start + num_bytes])
