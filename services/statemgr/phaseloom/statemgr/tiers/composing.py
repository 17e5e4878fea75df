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
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from phaseloom.common.contract.state_rank import MAX_PIECE_SOURCES
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import contained
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, Source, checksum, combined
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
_LOOK_BYTES = 64 * 1024
"""What the shortest comparison counts for, whatever its length."""
_DEAD_SHARE = 4
"""So much of an extent may be of use to nobody: a quarter."""

T = TypeVar("T")
Views = dict[int, memoryview]


class Composing:
    def __init__(self, node: Node, stopped: threading.Event) -> None:
        self._node = node
        self._stopped = stopped

    async def compose(self, content: Content, only: Content | None = None) -> bool:
        """Let it refer to what others hold of it. Returns: whether it does now.

        Args:   only: the one that was not here when it was compared with the others.
        Raises: ResourceError: RESOURCE_EXHAUSTED: no memory for what is its own. InternalError:
                it stays as it is.
        """
        contents = self._node.contents
        while contents.may_compose(content) and not self._stopped.is_set():
            sources = contents.sources_of(content)
            if only is not None:
                sources = [each for each in sources if each is only]
            if not sources:
                return False
            is_composed = await self._compose(content, sources)
            if is_composed is not None:
                return is_composed
            # One that it would refer to has left meanwhile: the others may do.
        return False

    async def _compose(self, content: Content, sources: list[Content]) -> bool | None:
        """Returns: None: not all stayed what it was when it was looked at."""
        contents, memory = self._node.contents, self._node.memory
        places = [(each, each.pieces) for each in (content, *sources)]
        views = self._views(places)
        guarded = {each for each in sources if contents.must_have_all(content, each)}
        comparing = _Comparing(content.pieces, views, self._is_wanted(places[:1]), memory)
        plan = await _in_thread(partial(_plan, places, guarded, comparing))
        if plan is None:
            return False
        # Whatever has become of the others: of hundreds, some always come and go.
        used = {each.piece.extent for each in plan.found}
        places = [*places[:1], *(each for each in places[1:] if used & set(each[1].extents))]
        is_wanted = self._is_wanted(places)
        if not is_wanted():
            return None
        with self._filling(plan.own_bytes, f"what is {content.owner}'s own") as own:
            if own is not None:
                await _in_thread(
                    partial(_fill, memory[own], views, content.pieces, plan.own, is_wanted)
                )
                if not is_wanted():
                    return None
                if not memory[own].freeze():
                    return False
            is_composed = await self._refer(places, plan.pieces(own or 0), is_wanted)
            return is_composed if is_composed or is_wanted() else None

    async def lean(self, content: Content, whole: Content) -> bool:
        """Let a composed one refer to one that came later, where only composed ones hold what it
        refers to now. Returns: whether it does, for some of it. Raises: InternalError."""
        contents, memory = self._node.contents, self._node.memory
        if not contents.may_lean(content, whole):
            return False
        places = [(content, content.pieces), (whole, whole.pieces)]
        is_wanted = self._is_wanted(places)
        comparing = _Comparing(content.pieces, self._views(places), is_wanted, memory)
        left = frozenset(contents.left_to(content))
        is_guarded = contents.must_have_all(content, whole)
        pieces = await _in_thread(partial(_lean, places, left, comparing, is_guarded=is_guarded))
        if pieces is None or len(pieces.extents) > MAX_PIECE_SOURCES:
            return False
        return await self._refer(places, pieces, is_wanted)

    async def _refer(
        self,
        places: list[tuple[Content, Pieces]],
        pieces: Pieces,
        is_wanted: Callable[[], bool],
    ) -> bool:
        """Let the first of these lie there, where others of these do, if it is the same bytes."""
        node, (content, before) = self._node, places[0]
        if not is_wanted():
            return False
        # Only what the agent has may be in the books.
        await node.keeper.record()
        if not is_wanted():
            return False
        memory = node.memory.read(pieces)
        digest = await _in_thread(partial(digest_unless, memory, is_wanted))
        del memory
        if not is_wanted():
            return False
        if digest != content.digest:
            node.on_doubt([content])
            return False
        for extent in pieces.extents:
            node.memory.hold(extent)
        node.contents.compose(content, pieces, [source for source, _ in places[1:]])
        node.free_pieces(before)
        log.info("%s lies in %s from now on", content, list(pieces.extents))
        return True

    async def pack(self, extent: int) -> bool:
        """Give up what nobody refers to of an extent, where that is much. Returns: whether it was.

        Who refers to something in it refers to another extent then.

        Raises: ResourceError: RESOURCE_EXHAUSTED: no memory for the rest. InternalError.
        """
        contents, memory = self._node.contents, self._node.memory
        before = {content: content.pieces for content in contents.holders(extent)}
        # Where one alone has most of it, nobody looks at all the pieces.
        most = max((pieces.bytes_in(extent) for pieces in before.values()), default=0)
        if not before or not self._is_sparse(extent, most):
            return False
        live = await _in_thread(partial(planning.live, list(before.values()), extent))
        live_bytes = sum(end - start for start, end in live)

        def is_wanted() -> bool:
            return extent in memory and not self._stopped.is_set()

        if not is_wanted() or not self._is_sparse(extent, live_bytes):
            return False
        # Some may have left it meanwhile; nobody has come, now or later.
        if memory.arena.num_holders(extent) != len(contents.holders(extent)):
            return False
        size = memory.arena.size_of(extent)
        view = memory[extent].readable(size)
        with self._filling(live_bytes, "what several hold") as packed:
            assert packed is not None, "its holders refer to something"
            places = planning.packed(live, packed)
            is_packed = await _in_thread(partial(_pack, memory[packed], view, places, is_wanted))
            if not is_packed or not memory[packed].freeze():
                return False
            moved = await _in_thread(partial(_moved, before, extent, places))
            # Only what the agent has may be in the books.
            await self._node.keeper.record()
            for content in contents.holders(extent):
                memory.hold(packed)
                contents.move(content, moved[content], packed, extent)
                memory.free(extent)
        log.info("of extent %d %d of %d bytes are left", extent, live_bytes, size)
        return True

    def _is_sparse(self, extent: int, live_bytes: int) -> bool:
        """Whether much of it is of use to nobody."""
        size = self._node.memory.arena.size_of(extent)
        return (size - rounded(live_bytes)) * _DEAD_SHARE > size

    def _is_wanted(self, places: list[tuple[Content, Pieces]]) -> Callable[[], bool]:
        """Whether all is as it was when it was looked at; from any thread."""
        contents = self._node.contents

        def is_wanted() -> bool:
            is_there = all(contents.is_known(c) and c.pieces is pieces for c, pieces in places)
            is_above = all(content.state is State.HOST for content, _ in places)
            return is_there and is_above and not self._stopped.is_set()

        return is_wanted

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


async def _in_thread(work: Callable[[], T]) -> T:
    """Raises: InternalError: nobody foresaw that; nothing is done then."""
    with contained(metrics.UNFORESEEN, "comparison"):
        return await asyncio.to_thread(work)


def _plan(
    places: list[tuple[Content, Pieces]],
    guarded: Collection[Content],
    comparing: _Comparing,
) -> Plan | None:
    """Of the first of these, by what the others have. Blocking. None: it is not worth it, or not
    wanted any more.

    Args: guarded: those that it may refer to only if it has all of them.
    """
    (content, own), *others = places
    is_equal = comparing.is_equal
    allowed = [
        (each.table, pieces)
        for each, pieces in others
        if each not in guarded or planning.has_all(content.table, each.table, pieces, is_equal)
    ]
    found = planning.find(own, content.table, allowed, is_equal)
    return planning.plan(content.num_bytes, found) if comparing.is_wanted() else None


def _lean(
    places: list[tuple[Content, Pieces]],
    left: frozenset[int],
    comparing: _Comparing,
    *,
    is_guarded: bool,
) -> Pieces | None:
    """Where the first of these lies, if it refers to the second for what lies in extents that it
    may leave. Blocking. None: as `_plan`."""
    (content, own), (whole, pieces) = places
    is_equal = comparing.is_equal
    if is_guarded and not planning.has_all(content.table, whole.table, pieces, is_equal):
        return None
    runs = planning.overlaps(content.table, whole.table)
    found = planning.find_again(own, left, runs, pieces, is_equal)
    if not comparing.is_wanted() or not planning.is_worth(content.num_bytes, found):
        return None
    return planning.redirected(own, found)


class _Comparing:
    """What a host copy has, with what lies elsewhere; in one thread."""

    def __init__(
        self, own: Pieces, views: Views, is_wanted: Callable[[], bool], there: Container[int]
    ) -> None:
        """Args: there: the extents that nobody has given up meanwhile."""
        self._own = own
        self._views = views
        self.is_wanted = is_wanted
        self._there = there
        self._left_bytes = 0
        """Before the next look at whether it is wanted, which costs more than most comparisons."""

    def is_equal(self, at: int, piece: Piece) -> bool:
        """Whether the bytes from a place on are those of the piece. False, too: it is not wanted
        any more."""
        for start in range(0, piece.num_bytes, _STEP_BYTES):
            num_bytes = min(_STEP_BYTES, piece.num_bytes - start)
            if not self._may_go_on(num_bytes) or piece.extent not in self._views:
                return False
            done = start
            for mine in self._own.of(at + start, num_bytes):
                theirs = _part(piece, done, mine.num_bytes)
                if not is_same(_view(self._views, mine), _view(self._views, theirs)):
                    return False
                done += mine.num_bytes
        return True

    def _may_go_on(self, num_bytes: int) -> bool:
        if self._left_bytes <= 0:
            if not self.is_wanted():
                return False
            # A view keeps the memory: what others have given up is to be free.
            for extent in self._views.keys() - set(self._own.extents):
                if extent not in self._there:
                    del self._views[extent]
            self._left_bytes = _STEP_BYTES
        self._left_bytes -= max(num_bytes, _LOOK_BYTES)
        return True


def _moved(
    before: Mapping[Content, Pieces], extent: int, places: Sequence[Found]
) -> dict[Content, Pieces]:
    """Where each lies then."""
    return {content: pieces.moved(extent, places) for content, pieces in before.items()}


def _part(piece: Piece, start: int, num_bytes: int) -> Piece:
    return Piece(piece.extent, piece.start + start, num_bytes)


def _view(views: Views, piece: Piece) -> memoryview:
    return views[piece.extent][piece.start : piece.start + piece.num_bytes]


def digest_unless(memory: Source, is_wanted: Callable[[], bool]) -> str:
    """Its digest. Empty: it is not wanted any more. Blocking."""
    taken = []
    for start in range(0, len(memory), BLOCK_BYTES):
        if not is_wanted():
            return ""
        taken.append(checksum(memory[start : start + BLOCK_BYTES]))
    return combined(b"".join(taken))


def _fill(
    extent: Extent,
    views: Views,
    pieces: Pieces,
    own: list[tuple[int, int]],
    is_wanted: Callable[[], bool],
) -> None:
    """Ranges of the whole, one behind the other. No view on the memory outlives it, so that it can
    be frozen. Blocking."""
    target = extent.view(sum(end - start for start, end in own))
    at = 0
    for start, end in own:
        for begin in range(start, end, _STEP_BYTES):
            if not is_wanted():
                return
            for piece in pieces.of(begin, min(_STEP_BYTES, end - begin)):
                copy(target[at : at + piece.num_bytes], _view(views, piece))
                at += piece.num_bytes


def _pack(
    extent: Extent, before: memoryview, places: list[Found], is_wanted: Callable[[], bool]
) -> bool:
    """As `_fill`. False: it is not wanted any more, or memory does not keep what it is given."""
    target = extent.view(sum(place.piece.num_bytes for place in places))
    for at, piece in places:
        for start in range(0, piece.num_bytes, _STEP_BYTES):
            if not is_wanted():
                return False
            num_bytes = min(_STEP_BYTES, piece.num_bytes - start)
            to = piece.start + start
            there, here = target[to : to + num_bytes], before[at + start : at + start + num_bytes]
            copy(there, here)
            if not is_same(there, here):
                return False
    return is_wanted()
