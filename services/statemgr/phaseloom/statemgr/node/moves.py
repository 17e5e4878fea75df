"""The moves of host copies between host memory and NVMe that are under way.

Invariant: at most one move of a host copy is under way. A caller that needs the copy in host memory
cancels a demotion and joins a promotion. A move continues if its caller is cancelled, and reports
its failure to everyone who waits. `Tiering` starts the moves; `HostCopyStore` cancels the moves of
lost copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from phaseloom.common.contract.errors import InternalError, PhaseloomError
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import error_boundary
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.node.background import Background
from phaseloom.statemgr.records.incarnations import HostCopy, InvalidTransition

log = logging.getLogger(__name__)


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class Move:
    """One move of a host copy."""

    copy: HostCopy
    is_up: bool
    """True: a promotion; False: a demotion."""
    is_hint: bool
    """Whether a hint started the move, so that only copies that are needed later make room for
    it."""
    cancelled: threading.Event
    """Set to end the move early; read by the thread that moves the bytes."""
    done: asyncio.Future[None] = field(default_factory=_future)
    """The end of the move, with its failure if any."""

    @property
    def name(self) -> str:
        """The name of the move in metrics and logs."""
        return "promote" if self.is_up else "demote"


Work = Callable[[Move], Awaitable[None]]
"""Moves the bytes and records where they are.

Raises: PhaseloomError: the copy is where it was, or is lost.
"""


class Moves:
    """The moves under way, by host copy."""

    def __init__(
        self,
        background: Background,
        name: NodeId,
        directory: StateDirectory,
        stale_file: Callable[[HostCopy], Path | None],
        announce: Callable[[], None],
    ) -> None:
        """Args: stale_file: called after a move; returns the copy's file if it must be removed.
        announce: called when a move has ended."""
        self._background = background
        self._name = name
        self._directory = directory
        self._stale_file = stale_file
        self._announce = announce
        self._moves: dict[HostCopy, Move] = {}

    def __len__(self) -> int:
        """The number of moves under way."""
        return len(self._moves)

    def __contains__(self, copy: object) -> bool:
        """Whether a move of the host copy is under way."""
        return copy in self._moves

    def under_way(self) -> list[Move]:
        return list(self._moves.values())

    async def move(self, copy: HostCopy, work: Work, *, is_up: bool) -> None:
        """Move a host copy and wait. The move continues if the caller is cancelled."""
        await asyncio.shield(self._begin(copy, work, is_up=is_up).done)

    async def until_settled(self, copy: HostCopy) -> None:
        """Wait until no move of the host copy is under way: join a promotion, cancel a demotion."""
        while (move := self._moves.get(copy)) is not None:
            if not move.is_up:
                move.cancelled.set()
            with contextlib.suppress(PhaseloomError):
                await asyncio.shield(move.done)

    def hint(self, copy: HostCopy, work: Work) -> None:
        """Start to promote a host copy that will be needed, unless a move of it is under way."""
        if copy not in self._moves:
            self._begin(copy, work, is_up=True, is_hint=True)

    def give_up(self, copy: HostCopy, file: Path) -> None:
        """Give up a host copy that nobody needs: cancel its move, which then removes its file, or
        remove the file at once."""
        move = self._moves.get(copy)
        if move is not None:
            move.cancelled.set()
        else:
            self._directory.discard(file)

    async def discard(self, file: Path) -> None:
        """Remove a file that nobody needs. Raises nothing: the next start removes leftover
        files."""
        with contextlib.suppress(InternalError), error_boundary(metrics.UNFORESEEN, "move"):
            await asyncio.to_thread(self._directory.discard, file)

    def _begin(self, copy: HostCopy, work: Work, *, is_up: bool, is_hint: bool = False) -> Move:
        assert copy not in self._moves
        move = self._moves[copy] = Move(copy, is_up, is_hint, self._background.event())
        self._background.start(self._run(move, work))
        return move

    async def _run(self, move: Move, work: Work) -> None:
        """Do the work of a move and report its end to everyone who waits.

        An invalid transition ends this process: nobody knows where the copy is, and the next daemon
        verifies both places.
        """
        labels = {"node": self._name, "direction": move.name}
        failure: PhaseloomError | None = None
        try:
            with metrics.timed(metrics.TRANSFER_DURATION, **labels):
                await work(move)
            metrics.count(metrics.TRANSFER_MOVED, move.copy.num_bytes, **labels)
        except InvalidTransition:
            raise
        except PhaseloomError as error:
            log.info("the %s of %s ended: %s", move.name, move.copy, error)
            failure = error
        file = self._stale_file(move.copy)
        if file is not None:
            await self.discard(file)
        # Before `done`: those who wait may start the next move at once.
        del self._moves[move.copy]
        if failure is None:
            move.done.set_result(None)
        else:
            move.done.set_exception(failure)
            # Marks the failure as seen: nobody may be waiting for a hint's move.
            move.done.exception()
        self._announce()
