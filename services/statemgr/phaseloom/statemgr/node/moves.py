"""The moves between host memory and NVMe that are under way.

Invariant: at most one move of a host copy is under way. A caller that needs the copy in host memory
cancels a demotion and joins a promotion. A move goes on where the caller that asked for it is gone,
and tells its failure to all who wait. `Tiering` begins the moves; `Node` cancels the moves of lost
copies.
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
from phaseloom.common.process.error_boundary import error_boundary
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.residency.incarnations import InvalidTransition, Rank, SharedCopy

log = logging.getLogger(__name__)

HostCopy = Rank | SharedCopy
"""A host copy that can move: a rank's own (named by the rank), or a shared copy."""


class Direction(StrEnum):
    """The direction of a move; the value is its label in metrics and logs."""

    PROMOTE = "promote"
    DEMOTE = "demote"
    WRITE_BACK = "write_back"
    """Down to NVMe, while the copy stays in host memory too."""


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class Move:
    """One move of a host copy that is under way."""

    what: HostCopy
    direction: Direction
    is_hint: bool = False
    """Whether the move follows a hint, and nobody waits for it; withdrawing the hint cancels it."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set to end the move early; read by the thread that moves the bytes."""
    done: asyncio.Future[None] = field(default_factory=_future)
    """The end of the move, with its failure."""

    @property
    def is_up(self) -> bool:
        return self.direction is Direction.PROMOTE


Work = Callable[[Move], Awaitable[None]]
"""Moves the bytes and records where they are.

Raises: PhaseloomError: the copy is where it was, or is lost.
"""


class Moves:
    """The moves under way, by host copy: call `start` with a task group, `stop` to cancel them."""

    def __init__(
        self,
        name: NodeId,
        directory: StateDirectory,
        stale_file: Callable[[HostCopy], Path | None],
        announce: Callable[[], None],
    ) -> None:
        """Args: stale_file: asked after a move for the copy's file, to be removed; None: the copy
        is needed.
        announce: called when a move has ended.
        """
        self._name = name
        self._directory = directory
        self._stale_file = stale_file
        self._announce = announce
        self._moves: dict[HostCopy, Move] = {}
        self._tasks: asyncio.TaskGroup

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def stop(self) -> None:
        for move in self._moves.values():
            move.cancelled.set()

    def __len__(self) -> int:
        """The number of moves under way."""
        return len(self._moves)

    def __contains__(self, what: object) -> bool:
        """Whether a move of the host copy is under way."""
        return what in self._moves

    def making_room(self, demotable: Iterable[HostCopy]) -> dict[HostCopy, asyncio.Future[None]]:
        """The host copies that will make room by themselves, each with its move's end.

        These are the copies on their way down, and those of `demotable` whose move has not ended
        yet, so that they can be demoted only then.
        """
        moves = self._moves
        going = {what: move.done for what, move in moves.items() if not move.is_up}
        return going | {what: moves[what].done for what in demotable if what in moves}

    async def do(self, what: HostCopy, direction: Direction, work: Work) -> None:
        """Begin a move and wait for its end; it goes on where the caller is cancelled."""
        await asyncio.shield(self._begin(Move(what, direction), work).done)

    async def settled(self, what: HostCopy) -> None:
        """Wait until no move of the host copy is under way: a promotion is joined, a demotion or
        write-back cancelled."""
        while (move := self._moves.get(what)) is not None:
            if move.is_up:
                move.is_hint = False
            else:
                move.cancelled.set()
            with contextlib.suppress(PhaseloomError):
                await asyncio.shield(move.done)

    def hint(self, what: HostCopy, work: Work) -> None:
        """Begin to promote a host copy that will be needed, unless a move of it is under way."""
        if what not in self._moves:
            self._begin(Move(what, Direction.PROMOTE, is_hint=True), work)

    def withdraw(self, what: HostCopy) -> None:
        """Cancel the promotion that a hint began, unless somebody waits for it by now."""
        move = self._moves.get(what)
        if move is not None and move.is_hint:
            move.cancelled.set()

    def give_up(self, what: HostCopy, file: Path) -> None:
        """Give up a host copy that nobody needs: cancel its move, or else remove its file.

        A cancelled move removes the file as it ends.
        """
        move = self._moves.get(what)
        if move is not None:
            move.cancelled.set()
        else:
            self._directory.discard(file)

    async def discard(self, file: Path) -> None:
        """Remove a file that nobody needs. Raises nothing: a file that stays is swept later."""
        with contextlib.suppress(InternalError), error_boundary(metrics.UNFORESEEN, "move"):
            await asyncio.to_thread(self._directory.discard, file)

    def _begin(self, move: Move, work: Work) -> Move:
        assert move.what not in self._moves
        self._moves[move.what] = move
        self._tasks.create_task(self._run(move, work))
        return move

    async def _run(self, move: Move, work: Work) -> None:
        """Do the work of a move, and tell its end to all who wait.

        A step that the transition table does not have ends this process: nobody knows where the
        copy is, and the next daemon verifies both places.
        """
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
        file = self._stale_file(move.what)
        if file is not None:
            await self.discard(file)
        # Only now: whoever waits for its end finds the next move free to begin.
        del self._moves[move.what]
        if failure is None:
            move.done.set_result(None)
        else:
            move.done.set_exception(failure)
            # Marks the failure as seen: nobody may be waiting for a hint's move.
            move.done.exception()
        self._announce()
