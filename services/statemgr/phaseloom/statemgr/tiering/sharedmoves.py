"""Contents between host memory and NVMe: once for all who refer to them.

An immutable extent cannot be emptied: as its content goes down, the extent goes, and as it comes
up, it is another one. Ranks notice nothing, for each order to copy brings the extent to use.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import contained
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.disk.statefile import Section, StateHeader, data_loss
from phaseloom.statemgr.memory.extents import Extent
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.residency.incarnations import SharedCopy
from phaseloom.statemgr.residency.residency import ON_NVME, State, Step
from phaseloom.statemgr.sharing import sharing
from phaseloom.statemgr.tiering.moves import Direction, Move, Moves

log = logging.getLogger(__name__)

Reserve = Callable[[int, str], Awaitable[int]]


class SharedMoves:
    def __init__(self, node: Node, directory: StateDirectory) -> None:
        self._node = node
        self._directory = directory
        self.moves: Moves[SharedCopy] = Moves(node, directory, self._left_behind)
        node.on_content_gone = self._give_up

    def demotable(self, after_s: float | None) -> list[SharedCopy]:
        """Those that nothing needs now, in memory that is nobody else's: a version's goes with it.

        Args: after_s: as of `Residency.demotable`.
        """
        num_holders = self._node.memory.arena.num_holders
        return [
            content
            for content in self._node.contents.demotable(after_s)
            if self.moves.end_of(content) is None
            and content.extent is not None
            and num_holders(content.extent) == 1
        ]

    async def demote(self, content: SharedCopy) -> None:
        """Raises: ResourceError: it stays in host memory."""
        self._node.contents.step(content, Step.DEMOTE_BEGUN)
        await self.moves.do(content, Direction.DEMOTE, self._demote)

    async def promote(self, content: SharedCopy, reserve: Reserve) -> None:
        """Bring it up, unless it is there.

        Args:   reserve: memory for it.
        Raises: ResourceError: no room; DATA_LOSS: it is bad, the lives of its users are over.
        """
        await self.moves.settled(content)
        if content.state is State.DEMOTED and self._node.contents.is_known(content):
            await self.moves.do(content, Direction.PROMOTE, partial(self._promote, reserve))

    def hint(self, content: SharedCopy, reserve: Reserve, *, is_wanted: bool) -> None:
        """Somebody will use it, or will not after all."""
        if not is_wanted:
            self.moves.withdraw(content)
        elif content.state is State.DEMOTED:
            self.moves.hint(content, partial(self._promote, reserve))

    def _left_behind(self, content: SharedCopy) -> Path | None:
        return None if self._node.contents.is_known(content) else self._path(content)

    async def _demote(self, move: Move[SharedCopy]) -> None:
        node, content = self._node, move.what
        if content.extent is None:
            raise ResourceError(f"{content} is not needed any more")
        section = Section(content.num_bytes, content.tensors, content.digest)
        header = StateHeader("content", content.owner, content.applied, [section])
        memory = node.content_memory(content)
        try:
            with contained(metrics.UNFORESEEN, "move"):
                await asyncio.to_thread(
                    self._directory.write, self._path(content), header, [memory], move.cancelled
                )
        except PhaseloomError as error:
            if error.info.code is Code.DATA_LOSS:
                node.lose_content(content, "its host copy is bad")
            elif node.contents.is_known(content):
                node.contents.step(content, Step.DEMOTE_FAILED)
                node.on_content(content)
            raise
        finally:
            del memory
        if not node.contents.is_known(content):
            raise ResourceError(f"{content} is not needed any more")
        node.contents.step(content, Step.DEMOTE_VERIFIED)
        content.version = None
        # Its descriptor, which the agent has too, goes only after the books say where it is.
        await node.handles.record()
        await sharing.unmap(node, list(content.users))
        node.vacate_content(content)
        await node.handles.record()

    async def _promote(self, reserve: Reserve, move: Move[SharedCopy]) -> None:
        node, content = self._node, move.what
        extent = await reserve(content.num_bytes, f"the host copy of {content.owner}")
        if move.cancelled.is_set() or not node.contents.is_known(content):
            node.memory.free(extent)
            raise ResourceError(f"{content} is not wanted any more", code=Code.ABORTED)
        content.extent = extent
        node.contents.step(content, Step.PROMOTE_BEGUN)
        try:
            with contained(metrics.UNFORESEEN, "move"):
                await asyncio.to_thread(self._read, content, node.memory[extent], move.cancelled)
        except PhaseloomError as error:
            if error.info.code is Code.DATA_LOSS:
                node.lose_content(content, f"its state on NVMe is bad: {error}")
            elif node.contents.is_known(content):
                node.contents.step(content, Step.PROMOTE_FAILED)
                node.vacate_content(content)
            raise
        if not node.contents.is_known(content):
            raise ResourceError(f"{content} is not needed any more")
        is_frozen = node.memory[extent].freeze()
        assert is_frozen, "nobody else has ever seen it"
        node.contents.step(content, Step.PROMOTE_VERIFIED)
        await node.handles.record()
        await self.moves.discard(self._path(content))
        if node.contents.is_known(content):
            node.on_content(content)

    def _read(self, content: SharedCopy, extent: Extent, cancelled: threading.Event) -> None:
        """From its file, or from a seal of the same bytes. No view on the memory outlives it, so
        that it can be frozen. Raises: the first refusal."""
        memory = extent.view(content.num_bytes)
        paths = [(self._path(content), 0)]
        paths += [
            (self._directory.seal(rank.wpg.key, rank.applied), rank.index) for rank in content.users
        ]
        refusal: ResourceError | None = None
        for path, index in paths:
            try:
                places = find_parts(path)
                if index >= len(places) or places[index].part.digest != content.digest:
                    raise data_loss(str(path), f"it does not hold {content}")
                self._directory.read(places[index], memory, cancelled)
            except ResourceError as error:
                if error.info.code is not Code.DATA_LOSS:
                    raise
                log.error("%s", error)
                # Its frames have views on the memory.
                refusal = refusal or error.with_traceback(None)
            else:
                return
        assert refusal is not None
        raise refusal

    def _give_up(self, content: SharedCopy) -> None:
        """Its last user has left."""
        if not self.moves.cancel(content) and content.state in ON_NVME:
            self._directory.discard(self._path(content))

    def is_demoted(self, content: SharedCopy) -> bool:
        """Whether a whole file of it is there; its blocks are verified when it is read.

        Blocking: call it in a thread.
        """
        try:
            header = find_parts(self._path(content))[0].header
        except PhaseloomError:
            return False
        return (header.digest, header.num_bytes) == (content.digest, content.num_bytes)

    def sweep(self) -> set[Path]:
        """The files that belong to no content that is below."""
        below = [c for c in self._node.contents.all() if c.state in ON_NVME]
        return self._directory.contents() - {self._path(content) for content in below}

    def _path(self, content: SharedCopy) -> Path:
        return self._directory.content(content.number)
