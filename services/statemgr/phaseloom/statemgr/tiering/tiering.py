"""The tier below host memory: host copies that are not needed go to NVMe, and come back.

A host copy goes down when something else needs its memory: its file is written, verified and
fsynced, the books say so, and only then its memory is given back. It comes up before it is loaded
or sealed, or on a hint. At each moment the file or the memory is whole, so a kill of the daemon
finds one of them. What is on a device, being switched, sealed or moved stays where it is.

So that nobody has to wait for a disk, what is needed last is written ahead in the background while
less than the configured share of host memory is free or can be had at once (*draining*): the copy
stays, and its memory is given back when something needs it.

How moves meet one another: `moves.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.state_agent import Prefetch
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import contained
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.disk.statefile import Place, Section, StateHeader, data_loss
from phaseloom.statemgr.memory.arena import rounded
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.residency.incarnations import SharedCopy
from phaseloom.statemgr.residency.residency import ON_DEVICE, ON_NVME, Rank, State, Step, Wpg
from phaseloom.statemgr.tiering.moves import Direction, Move, Moves
from phaseloom.statemgr.tiering.prefault import Prefault
from phaseloom.statemgr.tiering.sharedmoves import SharedMoves
from phaseloom.statemgr.tiering.versionmoves import VersionMoves
from phaseloom.statemgr.versions.versions import Version

log = logging.getLogger(__name__)

T = TypeVar("T")
Victim = Rank | SharedCopy | Version
"""What may make room."""


class Tiering:
    """`start` it in a task group; `stop` lets what is under way end."""

    def __init__(
        self,
        node: Node,
        directory: StateDirectory,
        nvme_budget_bytes: int,
        spare_bytes: int = 0,
    ) -> None:
        """Args: spare_bytes: of host memory, to be free or to be had at once."""
        self.nvme_budget_bytes = nvme_budget_bytes
        self._spare_bytes = spare_bytes
        self._used = asyncio.Event()
        """Host memory was taken, or what had to stay there need not any more."""
        self._write_back: asyncio.Task[None] | None = None
        self._node = node
        self._directory = directory
        self._moves: Moves[Rank] = Moves(node, directory, self._left_behind)
        self._tasks: asyncio.TaskGroup
        node.on_retired = self._give_up
        node.reserve_frozen = self._reserve_frozen
        self.contents = SharedMoves(node, directory)
        self.versions = VersionMoves(node, directory)
        self.touching = Prefault(node, self._is_moving)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._moves.start(tasks)
        self.contents.moves.start(tasks)
        self.touching.start(tasks)
        if self._spare_bytes:
            self._write_back = tasks.create_task(self._keep_writing_back())

    def stop(self) -> None:
        if self._write_back is not None:
            self._write_back.cancel()
        self.touching.stop()
        self.contents.moves.stop()
        self._moves.stop()

    @property
    def num_moves(self) -> int:
        """Under way."""
        return len(self._moves) + len(self.contents.moves)

    def _is_moving(self) -> bool:
        return bool(self.num_moves) or any(lock.locked() for lock in self._node.device_locks)

    # --- what the other parts ask for ---

    async def reserve(self, num_bytes: int, what: str, pool: str = "") -> int:
        """An extent, for which what is not needed goes down a tier.

        Raises: ResourceError: RESOURCE_EXHAUSTED, with the numbers of both tiers.
        """
        return await self._with_room(lambda: self._node.memory.reserve(num_bytes, what, pool))

    @asynccontextmanager
    async def in_host(self, wpg: Wpg, *others: Wpg) -> AsyncIterator[None]:
        """Its host copies are in host memory, or newer on a device; none of these go down within.

        Raises: ResourceError: RESOURCE_EXHAUSTED: no room for them; DATA_LOSS: what was on NVMe is
                bad and nowhere else, its life is over.
        """
        with self.using(wpg, *others):
            await self._promote_all(wpg)
            try:
                yield
            finally:
                await self._forget_written_back(wpg)

    @contextmanager
    def using(self, *wpgs: Wpg) -> Iterator[None]:
        """What of them is in host memory stays there within."""
        for wpg in wpgs:
            self._node.residency.begin_use(wpg)
        try:
            yield
        finally:
            for wpg in wpgs:
                self._node.residency.end_use(wpg)
            self._used.set()

    async def _forget_written_back(self, wpg: Wpg) -> None:
        """Of what is on a device now, the host copy grows old, and what NVMe has of it."""
        for rank in wpg.ranks:
            if rank.is_written_back and rank.state in ON_DEVICE:
                rank.is_written_back = False
                await self._moves.discard(self._path(rank))

    # --- ahead of need ---

    async def _keep_writing_back(self) -> None:
        while True:
            await self._used.wait()
            self._used.clear()
            try:
                while (rank := self._to_write_back()) is not None:
                    self._check_nvme(rank)
                    await self._down(rank, Direction.WRITE_BACK)
            except PhaseloomError as error:
                # Tried again when somebody uses host memory next.
                log.info("nothing more is drained: %s", error)

    def _to_write_back(self) -> Rank | None:
        """What to write ahead: what is needed last; None: enough can be had at once."""
        arena, residency = self._node.memory.arena, self._node.residency
        if arena.free_bytes + residency.written_back_bytes() >= self._spare_bytes:
            return None
        return next((rank for rank in self._demotable() if not rank.is_written_back), None)

    async def _reserve_frozen(self, num_bytes: int, what: str, after_s: float | None = None) -> int:
        """Memory that can be made immutable."""
        reserve = self._node.memory.reserve
        return await self._with_room(lambda: reserve(num_bytes, what, may_freeze=True), after_s)

    async def _promote_all(self, wpg: Wpg) -> None:
        for rank in wpg.ranks:
            if rank.content is not None:
                await self.contents.promote(rank.content, self._reserve_frozen)
            await self._moves.settled(rank)
            if rank.state is State.DEMOTED:
                await self._moves.do(rank, Direction.PROMOTE, self._promote)

    def hint(self, wpg: Wpg, hint: Prefetch) -> None:
        """Take a prediction; moves begin in the background."""
        wpg.next_use_s = None if hint.in_s is None else time.monotonic() + hint.in_s
        after_s = wpg.next_use_s

        async def reserve(num_bytes: int, what: str) -> int:
            return await self._reserve_frozen(num_bytes, what, after_s)

        for content in {rank.content for rank in wpg.ranks if rank.content is not None}:
            self.contents.hint(content, reserve, is_wanted=hint.in_s is not None)
        for rank in wpg.ranks:
            if hint.in_s is None:
                self._moves.withdraw(rank)
            elif rank.state is State.DEMOTED:
                self._moves.hint(rank, self._promote)

    def sweep(self) -> asyncio.Task[None]:
        """Remove the spilled files that belong to no host copy, once what was is taken over."""
        ranks = [rank for wpg in self._node.residency.alive() for rank in wpg.ranks]
        kept = {self._path(rank) for rank in ranks if rank.state in ON_NVME}
        stale = (self._directory.spilled() - kept) | self.contents.sweep()
        return self._tasks.create_task(asyncio.to_thread(self._directory.discard, *stale))

    def is_demoted(self, rank: Rank, digest: str) -> bool:
        """Whether a whole file of this content is there; its blocks are verified when it is read.

        Blocking: call it in a thread.
        """
        try:
            place = find_parts(self._path(rank))[0]
        except PhaseloomError:
            return False
        header = place.header
        return (
            bool(digest)
            and header.digest == digest
            and header.deployment == rank.wpg.key
            and (header.num_bytes, header.tensors) == (rank.extent_bytes, rank.tensors)
        )

    # --- moves ---

    async def _with_room(self, take: Callable[[], T], after_s: float | None = None) -> T:
        failed: set[Victim] = set()
        while True:
            try:
                taken = take()
                self._used.set()
                return taken
            except ResourceError as error:
                if error.info.code is not Code.RESOURCE_EXHAUSTED:
                    raise
                refusal = error
            below = [victim for victim in self._victims(after_s) if victim not in failed]
            going = self._going_down()
            room_bytes = sum(rounded(_num_bytes(each)) for each in [*below, *going])
            if not (below or going) or room_bytes < _shortage_bytes(refusal):
                raise self._with_numbers(refusal)
            if not below:
                # Others have asked for these; what they free may be enough for both.
                await asyncio.wait(going.values(), return_when=asyncio.FIRST_COMPLETED)
                continue
            victim = below[0]
            try:
                await self._send_down(victim)
            except PhaseloomError as error:
                log.warning("%s stays in host memory: %s", victim, error)
                failed.add(victim)

    def _victims(self, after_s: float | None) -> list[Victim]:
        """What may go: first what goes at once, then what is needed last.

        Versions for which ranks or a disk must be waited for go last, and for no hint.
        """
        copies: list[Rank | SharedCopy] = []
        copies += self._demotable(after_s)
        copies += self.contents.demotable(after_s)
        last = self.versions.unread(at_once=False) if after_s is None else []
        return [*self.versions.unread(at_once=True), *sorted(copies, key=_need), *last]

    def _going_down(self) -> dict[Victim, asyncio.Future[None]]:
        """What is on its way down, or has come up a moment ago and can go again; its end."""
        ranks = self._moves.making_room(self._node.residency.demotable())
        contents = self.contents.moves.making_room(self._node.contents.demotable())
        going: dict[Victim, asyncio.Future[None]] = {}
        going.update({each: end for each, end in self.versions.under_way.items()})
        going.update({each: end for each, end in ranks.items()})
        going.update({each: end for each, end in contents.items()})
        return going

    def _demotable(self, after_s: float | None = None) -> list[Rank]:
        """What can go: not before the end of its last move is booked."""
        ranks = self._node.residency.demotable(after_s)
        return [rank for rank in ranks if self._moves.end_of(rank) is None]

    async def _send_down(self, victim: Victim) -> None:
        """Raises: PhaseloomError: it stays."""
        if isinstance(victim, Version):
            await self.versions.leave(victim)
            return
        self._check_nvme(victim)
        if isinstance(victim, SharedCopy):
            await self.contents.demote(victim)
        else:
            await self._down(victim, Direction.DEMOTE)

    def _with_numbers(self, refusal: ResourceError) -> ResourceError:
        info = refusal.info
        used, budget = self._node.nvme_used_bytes(), self.nvme_budget_bytes
        return ResourceError(
            f"{info.message}; nothing more can go to NVMe, where {used} of {budget} are in use",
            code=info.code,
            remedy=info.remedy,
            details=info.details | {"nvme_used_bytes": str(used), "nvme_budget_bytes": str(budget)},
        )

    def _check_nvme(self, copy: Rank | SharedCopy) -> None:
        used = self._node.nvme_used_bytes()
        if isinstance(copy, Rank) and copy.is_written_back:
            return  # it is there, and counted
        if used + copy.extent_bytes > self.nvme_budget_bytes:
            raise ResourceError(
                f"{copy} needs {copy.extent_bytes} bytes of NVMe: {used} of "
                f"{self.nvme_budget_bytes} are in use",
                code=Code.RESOURCE_EXHAUSTED,
            )

    async def _down(self, rank: Rank, direction: Direction) -> None:
        # Before the first await: no two that look for room choose the same one.
        self._node.residency.step(rank, Step.DEMOTE_BEGUN)
        await self._moves.do(rank, direction, self._demote)

    def _left_behind(self, rank: Rank) -> Path | None:
        return self._path(rank) if rank.state is State.LOST else None

    async def _demote(self, move: Move[Rank]) -> None:
        node, rank = self._node, move.what
        is_write_back = move.direction is Direction.WRITE_BACK
        if rank.extent is None:
            raise ResourceError(f"{rank} was lost meanwhile")
        section = Section(rank.extent_bytes, rank.tensors, rank.digest)
        header = StateHeader("spill", rank.wpg.key, rank.applied, [section])
        memory = node.memory[rank.extent].view(rank.extent_bytes)
        try:
            with contained(metrics.UNFORESEEN, "move"):
                if not rank.is_written_back:
                    header = await asyncio.to_thread(
                        self._directory.write, self._path(rank), header, [memory], move.cancelled
                    )
                if not is_write_back:
                    await node.unpin(rank)
        except PhaseloomError as error:
            if error.info.code is Code.DATA_LOSS:
                node.retire(rank.wpg, "its host copy is bad")
            elif rank.state is not State.LOST:
                node.residency.step(rank, Step.DEMOTE_FAILED)
            raise
        node.residency.step(rank, Step.WRITTEN_BACK if is_write_back else Step.DEMOTE_VERIFIED)
        rank.copied(rank.applied, header.digest)
        rank.is_written_back = is_write_back
        await node.handles.record()
        if is_write_back:
            return
        await node.digests.ended(rank)
        if rank.state is State.LOST or rank.extent is None:
            raise ResourceError(f"{rank} was lost meanwhile")
        node.memory.vacate(rank.extent)

    async def _promote(self, move: Move[Rank]) -> None:
        node, rank = self._node, move.what
        after_s = rank.wpg.next_use_s if move.is_hint else None
        await self._with_room(lambda: self._occupy(move), after_s)
        node.residency.step(rank, Step.PROMOTE_BEGUN)
        assert rank.extent is not None
        memory = node.memory[rank.extent].view(rank.extent_bytes)
        try:
            with contained(metrics.UNFORESEEN, "move"):
                await asyncio.to_thread(self._read, rank, memory, move.cancelled)
        except PhaseloomError as error:
            if error.info.code is Code.DATA_LOSS:
                node.retire(rank.wpg, f"its state on NVMe is bad: {error}")
            elif rank.state is not State.LOST:
                node.residency.step(rank, Step.PROMOTE_FAILED)
                node.memory.vacate(rank.extent)
            raise
        node.residency.step(rank, Step.PROMOTE_VERIFIED)
        await node.handles.record()
        await self._moves.discard(self._path(rank))

    def _occupy(self, move: Move[Rank]) -> None:
        rank = move.what
        if rank.state is not State.DEMOTED or rank.extent is None:
            raise ResourceError(f"{rank} was lost meanwhile")
        if move.cancelled.is_set():
            raise ResourceError("the hint was withdrawn", code=Code.ABORTED)
        self._node.memory.occupy(rank.extent, f"the host copy of {rank.owner}")

    def _read(self, rank: Rank, memory: memoryview, cancelled: threading.Event) -> None:
        """From its file, or from a seal of the same content. Raises: the first refusal."""
        try:
            self._read_from(self._path(rank), rank, 0, memory, cancelled)
        except ResourceError as error:
            seal = self._directory.seal(rank.wpg.key, rank.applied)
            if error.info.code is not Code.DATA_LOSS or not seal.exists():
                raise
            log.error("%s; trying its seal at %d", error, rank.applied)
            try:
                self._read_from(seal, rank, rank.index, memory, cancelled)
            except ResourceError as second:
                log.error("%s", second)
                raise error from second

    def _read_from(
        self, path: Path, rank: Rank, index: int, memory: memoryview, cancelled: threading.Event
    ) -> None:
        places: list[Place] = find_parts(path)
        if index >= len(places) or places[index].part.digest != rank.digest:
            raise data_loss(str(path), f"it does not hold the newest state of {rank}")
        self._directory.read(places[index], memory, cancelled)

    def _give_up(self, wpg: Wpg) -> None:
        """Its life is over: what is moving ends, what is on NVMe goes."""
        for rank in wpg.ranks:
            if not self._moves.cancel(rank):
                self._directory.discard(self._path(rank))

    def _path(self, rank: Rank) -> Path:
        return self._directory.spill(rank.wpg.key, rank.wpg.incarnation, rank.index)


def _num_bytes(victim: Victim) -> int:
    return victim.num_bytes if isinstance(victim, Version) else victim.extent_bytes


def _need(copy: Rank | SharedCopy) -> tuple[float, int]:
    """Sorts what nobody said anything of before what is used latest, then the least recent."""
    user = copy if isinstance(copy, SharedCopy) else copy.wpg
    next_use_s = math.inf if user.next_use_s is None else user.next_use_s
    return -next_use_s, user.last_used


def _shortage_bytes(refusal: ResourceError) -> int:
    """What has to go for it; nothing where the refusal is not the arena's."""
    details = refusal.info.details
    if "needed_bytes" not in details:
        return 0
    free = int(details["budget_bytes"]) - int(details["used_bytes"])
    return int(details["needed_bytes"]) - free
