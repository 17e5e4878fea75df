"""Contents between host memory and NVMe: once for all who refer to them.

An immutable extent cannot be emptied: as its content goes down, the extent goes, and as it comes
up, it is another one. Ranks notice nothing, for each order to copy brings the extent to use.

Invariant: at most one move of a content is under way; it ends before the next one begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from phaseloom.common import metrics
from phaseloom.common.errors import Code, PhaseloomError, ResourceError
from phaseloom.statemgr.core.contents import Content
from phaseloom.statemgr.core.residency import ON_NVME, State, Step
from phaseloom.statemgr.core.statefile import StateHeader, data_loss
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.tiers import sharing

log = logging.getLogger(__name__)

Reserve = Callable[[int, str], Awaitable[int]]


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class ContentMove:
    content: Content
    is_up: bool
    reserve: Reserve | None = None
    """Memory for what comes up."""
    is_hint: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: asyncio.Future[None] = field(default_factory=_future)


class ContentMoves:
    """`start` it in a task group; `stop` lets what is under way end."""

    def __init__(self, node: Node, directory: StateDirectory) -> None:
        self._node = node
        self._directory = directory
        self._moves: dict[Content, ContentMove] = {}
        self._tasks: asyncio.TaskGroup
        node.on_content_gone = self._give_up

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def stop(self) -> None:
        for move in self._moves.values():
            move.cancelled.set()

    @property
    def under_way(self) -> list[ContentMove]:
        return list(self._moves.values())

    def spillable(self, after_s: float | None) -> list[Content]:
        """Those that nothing needs now, in memory that is nobody else's: a version's goes with it.

        Args: after_s: as of `Residency.spillable`.
        """
        arena = self._node.memory.arena
        return [
            content
            for content in self._node.contents.spillable(after_s)
            if content.extent is not None and arena.num_holders(content.extent) == 1
        ]

    async def spill(self, content: Content) -> None:
        """Raises: ResourceError: it stays in host memory."""
        await self._move(ContentMove(content, is_up=False))

    async def lift(self, content: Content, reserve: Reserve) -> None:
        """Bring it up, unless it is there; joins a move upward, cancels one downward.

        Raises: ResourceError: no room; DATA_LOSS: it is bad, the lives of its users are over.
        """
        while (move := self._moves.get(content)) is not None:
            if move.is_up:
                move.is_hint = False
            else:
                move.cancelled.set()
            with contextlib.suppress(PhaseloomError):
                await asyncio.shield(move.done)
        if content.state is State.SPILLED and self._node.contents.is_known(content):
            await self._move(ContentMove(content, is_up=True, reserve=reserve))

    def hint(self, content: Content, reserve: Reserve, *, is_wanted: bool) -> None:
        """Somebody will use it, or will not after all."""
        move = self._moves.get(content)
        if is_wanted and move is None and content.state is State.SPILLED:
            self._begin(ContentMove(content, is_up=True, reserve=reserve, is_hint=True))
        elif not is_wanted and move is not None and move.is_hint:
            move.cancelled.set()

    async def _move(self, move: ContentMove) -> None:
        self._begin(move)
        await asyncio.shield(move.done)

    def _begin(self, move: ContentMove) -> None:
        assert move.content not in self._moves
        self._moves[move.content] = move
        if not move.is_up:
            self._node.contents.step(move.content, Step.SPILL_BEGUN)
        self._tasks.create_task(self._run(move))

    async def _run(self, move: ContentMove) -> None:
        node, content = self._node, move.content
        labels = {"node": node.name, "direction": "lift" if move.is_up else "spill"}
        failure: PhaseloomError | None = None
        try:
            with metrics.timed(metrics.TRANSFER_DURATION, **labels):
                await (self._lift(move) if move.is_up else self._spill(move))
            metrics.count(metrics.TRANSFER_MOVED, content.num_bytes, **labels)
        except PhaseloomError as error:
            log.info("the %s of %s ended: %s", labels["direction"], content, error)
            failure = error
        if not node.contents.is_known(content):
            await asyncio.to_thread(self._directory.remove, self._path(content))
        del self._moves[content]
        if failure is None:
            move.done.set_result(None)
        else:
            move.done.set_exception(failure)
            # Of a hint nobody waits for it.
            move.done.exception()
        node.announce()

    async def _spill(self, move: ContentMove) -> None:
        node, content = self._node, move.content
        if content.extent is None:
            raise ResourceError(f"{content} is not needed any more")
        header = StateHeader(
            *("content", content.owner, content.applied, content.num_bytes),
            *(content.tensors, content.digest),
        )
        memory = node.memory[content.extent].readable(content.num_bytes)
        try:
            await asyncio.to_thread(
                self._directory.write, self._path(content), header, [memory], move.cancelled
            )
        except PhaseloomError as error:
            if error.info.code is Code.DATA_LOSS:
                self._lose(content, "its host copy is bad")
            elif node.contents.is_known(content):
                node.contents.step(content, Step.SPILL_FAILED)
            raise
        finally:
            del memory
        if not node.contents.is_known(content):
            raise ResourceError(f"{content} is not needed any more")
        node.contents.step(content, Step.SPILL_VERIFIED)
        content.version = None
        # Its descriptor, which the agent has too, goes only after the books say where it is.
        await node.keeper.record()
        await sharing.let_go(node, list(content.users))
        if content.extent is not None:
            node.memory.free(content.extent)
            content.extent = None
        await node.keeper.record()

    async def _lift(self, move: ContentMove) -> None:
        node, content = self._node, move.content
        assert move.reserve is not None
        extent = await move.reserve(content.num_bytes, f"the host copy of {content.owner}")
        if move.cancelled.is_set() or not node.contents.is_known(content):
            node.memory.free(extent)
            raise ResourceError(f"{content} is not wanted any more", code=Code.ABORTED)
        content.extent = extent
        node.contents.step(content, Step.LIFT_BEGUN)
        memory = node.memory[extent].view(content.num_bytes)
        try:
            await asyncio.to_thread(self._read, content, memory, move.cancelled)
        except PhaseloomError as error:
            if error.info.code is Code.DATA_LOSS:
                self._lose(content, f"its state on NVMe is bad: {error}")
            elif node.contents.is_known(content):
                node.contents.step(content, Step.LIFT_FAILED)
                content.extent = None
                node.memory.free(extent)
            raise
        finally:
            del memory
        if not node.contents.is_known(content):
            raise ResourceError(f"{content} is not needed any more")
        assert node.memory[extent].freeze(), "nobody else has ever seen it"
        node.contents.step(content, Step.LIFT_VERIFIED)
        await node.keeper.record()
        await asyncio.to_thread(self._directory.remove, self._path(content))
        if node.contents.is_known(content):
            node.on_content(content)

    def _read(self, content: Content, memory: memoryview, cancelled: threading.Event) -> None:
        """From its file, or from a seal of the same bytes. Raises: the first refusal."""
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
                refusal = refusal or error
            else:
                return
        assert refusal is not None
        raise refusal

    def _lose(self, content: Content, why: str) -> None:
        """What nobody has whole any more takes all who refer to it with it."""
        for wpg in content.wpgs:
            self._node.retire(wpg, why)

    def _give_up(self, content: Content) -> None:
        """Its last user has left."""
        move = self._moves.get(content)
        if move is not None:
            move.cancelled.set()
        elif content.state in ON_NVME:
            self._directory.remove(self._path(content))

    def is_spilled(self, content: Content) -> bool:
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

    def _path(self, content: Content) -> Path:
        return self._directory.content(content.number)
