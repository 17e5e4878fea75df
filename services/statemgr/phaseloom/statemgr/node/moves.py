"""The moves between host memory and NVMe that are under way.

Invariant: at most one move of a host copy is under way. Who needs the copy in host memory cancels
its move down, and joins its move up. A move goes on where who asked for it is gone, and tells its
failure to all who wait. `Tiering` begins the moves, `Node` cancels those of what is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from phaseloom.common.contract.errors import InternalError, PhaseloomError
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import contained
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.residency.incarnations import InvalidTransition, Rank, SharedCopy

log = logging.getLogger(__name__)

HostCopy = Rank | SharedCopy
"""What moves: a rank's own host copy, or one that ranks share."""


class Direction(StrEnum):
    PROMOTE = "lift"
    DEMOTE = "spill"
    WRITE_BACK = "drain"
    """Down, and in host memory all the same."""


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class Move:
    what: HostCopy
    direction: Direction
    is_hint: bool = False
    """Nobody waits for it: a withdrawn hint, or need of its memory, cancels it."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: asyncio.Future[None] = field(default_factory=_future)

    @property
    def is_up(self) -> bool:
        return self.direction is Direction.PROMOTE


Work = Callable[[Move], Awaitable[None]]
"""Moves the bytes and records where they are. Raises: PhaseloomError: the copy is where it was, or
is lost."""


class Moves:
    """`start` it in a task group; `stop` lets what is under way end."""

    def __init__(
        self,
        name: NodeId,
        directory: StateDirectory,
        left_behind: Callable[[HostCopy], Path | None],
        announce: Callable[[], None],
    ) -> None:
        """Args: left_behind: asked after a move: the file of what nobody needs any more; None: it
        is needed. announce: called as a move has ended."""
        self._name = name
        self._directory = directory
        self._left_behind = left_behind
        self._announce = announce
        self._moves: dict[HostCopy, Move] = {}
        self._tasks: asyncio.TaskGroup

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def stop(self) -> None:
        for move in self._moves.values():
            move.cancelled.set()

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._moves)

    def __contains__(self, what: object) -> bool:
        """Whether a move of it is under way."""
        return what in self._moves

    def making_room(self, demotable: Iterable[HostCopy]) -> dict[HostCopy, asyncio.Future[None]]:
        """What is on its way down, and when it is there; and of those that may go down, what has
        come up a moment ago, and when it can."""
        moves = self._moves
        going = {what: move.done for what, move in moves.items() if not move.is_up}
        return going | {what: moves[what].done for what in demotable if what in moves}

    async def do(self, what: HostCopy, direction: Direction, work: Work) -> None:
        """Begin a move and wait for its end. Raises: PhaseloomError: what it failed by."""
        await asyncio.shield(self._begin(Move(what, direction), work).done)

    async def settled(self, what: HostCopy) -> None:
        """Nothing moves it any more: a move up is joined, one down cancelled."""
        while (move := self._moves.get(what)) is not None:
            if move.is_up:
                move.is_hint = False
            else:
                move.cancelled.set()
            with contextlib.suppress(PhaseloomError):
                await asyncio.shield(move.done)

    def hint(self, what: HostCopy, work: Work) -> None:
        """It will be needed above: it begins to come up, unless it is on its way somewhere."""
        if what not in self._moves:
            self._begin(Move(what, Direction.PROMOTE, is_hint=True), work)

    def withdraw(self, what: HostCopy) -> None:
        """The hint was wrong: who waits for it by now gets it all the same."""
        move = self._moves.get(what)
        if move is not None and move.is_hint:
            move.cancelled.set()

    def give_up(self, what: HostCopy, file: Path) -> None:
        """Nobody needs it any more: its move ends now, or its file goes where it is not moving."""
        move = self._moves.get(what)
        if move is not None:
            move.cancelled.set()
        else:
            self._directory.discard(file)

    async def discard(self, file: Path) -> None:
        """Remove what nobody needs any more. Raises nothing: a file that stays is swept later."""
        with contextlib.suppress(InternalError), contained(metrics.UNFORESEEN, "move"):
            await asyncio.to_thread(self._directory.discard, file)

    def _begin(self, move: Move, work: Work) -> Move:
        assert move.what not in self._moves
        self._moves[move.what] = move
        self._tasks.create_task(self._run(move, work))
        return move

    async def _run(self, move: Move, work: Work) -> None:
        """A step that the table of transitions does not have ends this process: nobody knows where
        the copy is, and the next daemon verifies both places."""
        labels = {"node": self._name, "direction": move.direction}
        failure: PhaseloomError | None = None
        try:
            with metrics.timed(metrics.TRANSFER_DURATION, **labels):
                await work(move)
            metrics.count(metrics.TRANSFER_MOVED, move.what.extent_bytes, **labels)
        except InvalidTransition:
            raise
        except PhaseloomError as error:
            log.info("the %s of %s ended: %s", move.direction, move.what, error)
            failure = error
        file = self._left_behind(move.what)
        if file is not None:
            await self.discard(file)
        # Only now: whoever waits for its end finds the next move free to begin.
        del self._moves[move.what]
        if failure is None:
            move.done.set_result(None)
        else:
            move.done.set_exception(failure)
            # Of a hint nobody waits for it.
            move.done.exception()
        self._announce()
