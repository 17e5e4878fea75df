"""The tier below host memory: host copies that are not needed go to NVMe, and come back.

A host copy goes down when something else needs its memory: its file is written, verified and
fsynced, the index says so, and only then its memory is given back. It comes up before it is loaded
or sealed, or on a hint. At each moment the file or the memory is whole, so a kill of the daemon
finds one of them. What is on a device, being switched, sealed or moved stays where it is.

So that nobody has to wait for a disk, what is needed last is written ahead in the background while
less than the configured share of host memory is free or can be had at once (*write-back*): the
copy stays, and its memory is given back when something needs it.

`node.moves` says how moves meet one another.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TypeVar

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.state_agent import Prefetch
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import contained
from phaseloom.statemgr.disk.files import find_parts
from phaseloom.statemgr.disk.statefile import Place, Section, StateHeader, data_loss
from phaseloom.statemgr.memory.arena import rounded
from phaseloom.statemgr.memory.extents import Extent
from phaseloom.statemgr.node.moves import Direction, HostCopy, Move, Work
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.residency.incarnations import SharedCopy
from phaseloom.statemgr.residency.residency import ON_DEVICE, ON_NVME, Rank, State, Step, Wpg
from phaseloom.statemgr.tiering.prefault import Prefault
from phaseloom.statemgr.tiering.versionmoves import VersionMoves
from phaseloom.statemgr.versions.versions import Version

log = logging.getLogger(__name__)

T = TypeVar("T")
Victim = HostCopy | Version
"""What may make room."""


class Tiering:
    """`start` it in a task group; `stop` lets what is under way end."""

    def __init__(
        self,
        node: Node,
        nvme_budget_bytes: int,
        spare_bytes: int = 0,
    ) -> None:
        """Args: spare_bytes: of host memory, to be free or to be had at once."""
        self.nvme_budget_bytes = nvme_budget_bytes
        self._spare_bytes = spare_bytes
        self._used = asyncio.Event()
        """Host memory was taken, or what had to stay there need not any more."""
        self._write_back: asyncio.Task[None] | None = None
        self.node = node
        self._directory = node.directory
        self._moves = node.moves
        self._tasks: asyncio.TaskGroup
        self.versions = VersionMoves(node)
        self.touching = Prefault(node, self._is_moving)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._moves.start(tasks)
        self.touching.start(tasks)
        if self._spare_bytes:
            self._write_back = tasks.create_task(self._keep_writing_back())

    def stop(self) -> None:
        if self._write_back is not None:
            self._write_back.cancel()
        self.touching.stop()
        self._moves.stop()

    def _is_moving(self) -> bool:
        return bool(self._moves) or any(lock.locked() for lock in self.node.device_locks)

    # --- what the other parts ask for ---

    async def reserve(
        self,
        num_bytes: int,
        what: str,
        pool: str = "",
        *,
        may_freeze: bool = False,
        after_s: float | None = None,
    ) -> int:
        """An extent, for which what is not needed goes down a tier.

        Args:   may_freeze: it can be made immutable.
                after_s: only what is predicted to be used after this time goes down for it.
        Raises: ResourceError: RESOURCE_EXHAUSTED, with the numbers of both tiers.
        """
        memory = self.node.memory
        return await self._with_room(
            lambda: memory.reserve(num_bytes, what, pool, may_freeze=may_freeze), after_s
        )

    async def reserve_frozen(self, num_bytes: int, what: str) -> int:
        """As `reserve`; what can be made immutable."""
        return await self.reserve(num_bytes, what, may_freeze=True)

    @asynccontextmanager
    async def in_host(self, wpg: Wpg, *others: Wpg) -> AsyncIterator[None]:
        """Its host copies are in host memory, or newer on a device; none of these go down within.

        Raises: ResourceError: RESOURCE_EXHAUSTED: no room for them; DATA_LOSS: what was on NVMe is
                bad and nowhere else, its incarnation is over.
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
            self.node.residency.begin_use(wpg)
        try:
            yield
        finally:
            for wpg in wpgs:
                self.node.residency.end_use(wpg)
            self._used.set()

    async def _forget_written_back(self, wpg: Wpg) -> None:
        """Of what is on a device now, the host copy grows old, and what NVMe has of it."""
        for rank in wpg.ranks:
            if rank.is_written_back and rank.state in ON_DEVICE:
                rank.is_written_back = False
                await self._moves.discard(self.node.file_of(rank))

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
                log.info("nothing more is written back: %s", error)

    def _to_write_back(self) -> Rank | None:
        """What to write ahead: what is needed last; None: enough can be had at once."""
        arena, residency = self.node.memory.arena, self.node.residency
        if arena.free_bytes + residency.written_back_bytes() >= self._spare_bytes:
            return None
        ranks = (copy for copy in self._demotable() if isinstance(copy, Rank))
        return next((rank for rank in ranks if not rank.is_written_back), None)

    async def _promote_all(self, wpg: Wpg) -> None:
        for rank in wpg.ranks:
            if rank.content is not None:
                await self._promote(rank.content)
            await self._promote(rank)

    def hint(self, wpg: Wpg, hint: Prefetch) -> None:
        """Take a prediction; moves begin in the background."""
        wpg.next_use_s = None if hint.in_s is None else time.monotonic() + hint.in_s
        shared = {rank.content for rank in wpg.ranks if rank.content is not None}
        copies: list[HostCopy] = [*shared, *wpg.ranks]
        for copy in copies:
            if hint.in_s is None:
                self._moves.withdraw(copy)
            elif copy.state is State.DEMOTED:
                self._moves.hint(copy, self._work_up(copy, wpg.next_use_s))

    def sweep(self) -> asyncio.Task[None]:
        """Remove the files of host copies that nobody has any more, once the handover is done."""
        node, directory = self.node, self._directory
        copies: list[HostCopy] = [*node.contents.all()]
        copies += [rank for wpg in node.residency.alive() for rank in wpg.ranks]
        kept = {node.file_of(c) for c in copies if c.state in ON_NVME}
        stale = (directory.spilled() | directory.contents()) - kept
        return self._tasks.create_task(asyncio.to_thread(directory.discard, *stale))

    def is_demoted(self, copy: HostCopy, digest: str) -> bool:
        """Whether a whole file of it is there; its blocks are verified when it is read.

        Blocking: call it in a thread.
        """
        try:
            header = find_parts(self.node.file_of(copy))[0].header
        except PhaseloomError:
            return False
        is_same = (header.digest, header.num_bytes) == (digest, copy.extent_bytes)
        if isinstance(copy, Rank):
            is_same &= (header.deployment, header.tensors) == (copy.wpg.key, copy.tensors)
        return bool(digest) and is_same

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
        copies = sorted(self._demotable(after_s), key=_need)
        last = self.versions.unread(at_once=False) if after_s is None else []
        return [*self.versions.unread(at_once=True), *copies, *last]

    def _going_down(self) -> dict[Victim, asyncio.Future[None]]:
        """What is on its way down, or has come up a moment ago and can go again; its end."""
        residency, shared = self.node.residency, self.node.contents
        copies = self._moves.making_room([*residency.demotable(), *shared.demotable()])
        going: dict[Victim, asyncio.Future[None]] = {}
        going.update({each: end for each, end in self.versions.under_way.items()})
        going.update({each: end for each, end in copies.items()})
        return going

    def _demotable(self, after_s: float | None = None) -> list[HostCopy]:
        """What can go: not before its last move has ended, and not from memory that is
        somebody else's too: a version's goes with the version."""
        node = self.node
        num_holders = node.memory.arena.num_holders
        shared = node.contents.demotable(after_s)
        copies: list[HostCopy] = [*node.residency.demotable(after_s)]
        copies += [c for c in shared if c.extent is not None and num_holders(c.extent) == 1]
        return [copy for copy in copies if copy not in self._moves]

    async def _send_down(self, victim: Victim) -> None:
        """Raises: PhaseloomError: it stays."""
        if isinstance(victim, Version):
            await self.versions.leave(victim)
            return
        self._check_nvme(victim)
        await self._down(victim, Direction.DEMOTE)

    def _with_numbers(self, refusal: ResourceError) -> ResourceError:
        info = refusal.info
        used, budget = self.node.nvme_used_bytes(), self.nvme_budget_bytes
        return ResourceError(
            f"{info.message}; nothing more can go to NVMe, where {used} of {budget} are in use",
            code=info.code,
            remedy=info.remedy,
            details=info.details | {"nvme_used_bytes": str(used), "nvme_budget_bytes": str(budget)},
        )

    def _check_nvme(self, copy: HostCopy) -> None:
        used = self.node.nvme_used_bytes()
        if isinstance(copy, Rank) and copy.is_written_back:
            return  # it is there, and counted
        if used + copy.extent_bytes > self.nvme_budget_bytes:
            raise ResourceError(
                f"{copy} needs {copy.extent_bytes} bytes of NVMe: {used} of "
                f"{self.nvme_budget_bytes} are in use",
                code=Code.RESOURCE_EXHAUSTED,
            )

    async def _down(self, copy: HostCopy, direction: Direction) -> None:
        """Raises: PhaseloomError: it stays."""
        # Before the first await: no two that look for room choose the same one.
        self.node.step(copy, Step.DEMOTE_BEGUN)
        work = self._demote_shared if isinstance(copy, SharedCopy) else self._demote_own
        await self._moves.do(copy, direction, work)

    async def _demote_own(self, move: Move) -> None:
        node, rank = self.node, move.what
        assert isinstance(rank, Rank)
        is_write_back = move.direction is Direction.WRITE_BACK
        if rank.extent is None:
            raise ResourceError(f"{rank} was lost meanwhile")
        section = Section(rank.extent_bytes, rank.tensors, rank.digest)
        header = StateHeader("spill", rank.wpg.key, rank.applied, [section])
        memory = node.memory[rank.extent].view(rank.extent_bytes)
        with self._failing(rank, Step.DEMOTE_FAILED, "its host copy is bad"):
            if not rank.is_written_back:
                header = await self._write(move, header, memory)
            if not is_write_back:
                await node.unpin(rank)
        async with node.change() as afterwards:
            node.residency.step(rank, Step.WRITTEN_BACK if is_write_back else Step.DEMOTE_VERIFIED)
            rank.copied(rank.applied, header.digest)
            rank.is_written_back = is_write_back
            if not is_write_back:
                afterwards.push_async_callback(self._vacate, rank)

    async def _vacate(self, rank: Rank) -> None:
        await self.node.digests.ended(rank)
        if rank.state is State.LOST or rank.extent is None:
            raise ResourceError(f"{rank} was lost meanwhile")
        self.node.memory.vacate(rank.extent)

    async def _demote_shared(self, move: Move) -> None:
        """An immutable extent cannot be emptied: as its bytes go down, the extent goes."""
        node, copy = self.node, move.what
        assert isinstance(copy, SharedCopy)
        if copy.extent is None:
            raise ResourceError(f"{copy} is not needed any more")
        section = Section(copy.num_bytes, copy.tensors, copy.digest)
        header = StateHeader("content", copy.owner, copy.applied, [section])
        with self._failing(copy, Step.DEMOTE_FAILED, "its host copy is bad"):
            await self._write(move, header, node.shared_memory(copy))
        self._check_needed(copy)
        async with node.change():
            node.contents.step(copy, Step.DEMOTE_VERIFIED)
            copy.version = None
        # Its descriptor, which the agent has too, goes only after the index says where it is.
        async with node.change():
            for rank in [*copy.users]:
                await node.unmap(rank)
            node.vacate_shared(copy)

    async def _write(self, move: Move, header: StateHeader, memory: memoryview) -> StateHeader:
        path = self.node.file_of(move.what)
        return await asyncio.to_thread(
            self._directory.write, path, header, [memory], move.cancelled
        )

    async def _promote(self, copy: HostCopy) -> None:
        """Raises: as `in_host`."""
        await self._moves.settled(copy)
        if copy.state is State.DEMOTED and self.node.is_needed(copy):
            await self._moves.do(copy, Direction.PROMOTE, self._work_up(copy))

    def _work_up(self, copy: HostCopy, after_s: float | None = None) -> Work:
        if isinstance(copy, SharedCopy):
            return partial(self._promote_shared, after_s)
        return self._promote_own

    async def _promote_own(self, move: Move) -> None:
        node, rank = self.node, move.what
        assert isinstance(rank, Rank)
        after_s = rank.wpg.next_use_s if move.is_hint else None
        await self._with_room(lambda: self._occupy(move, rank), after_s)
        node.residency.step(rank, Step.PROMOTE_BEGUN)
        assert rank.extent is not None
        memory = node.memory[rank.extent]
        try:
            with self._failing(rank, Step.PROMOTE_FAILED, "its state on NVMe is bad"):
                await asyncio.to_thread(self._read, rank, memory, move.cancelled)
        except PhaseloomError:
            if rank.state is State.DEMOTED:
                node.memory.vacate(rank.extent)
            raise
        await self._arrived(rank)

    def _occupy(self, move: Move, rank: Rank) -> None:
        if rank.state is not State.DEMOTED or rank.extent is None:
            raise ResourceError(f"{rank} was lost meanwhile")
        if move.cancelled.is_set():
            raise ResourceError("the hint was withdrawn", code=Code.ABORTED)
        self.node.memory.occupy(rank.extent, f"the host copy of {rank.owner}")

    async def _promote_shared(self, after_s: float | None, move: Move) -> None:
        """It comes up in another extent than it had. Ranks notice nothing, for each order to copy
        brings the extent to use."""
        node, copy = self.node, move.what
        assert isinstance(copy, SharedCopy)
        what = f"the host copy of {copy.owner}"
        extent = await self.reserve(copy.num_bytes, what, may_freeze=True, after_s=after_s)
        if move.cancelled.is_set() or not node.is_needed(copy):
            node.memory.free(extent)
            raise ResourceError(f"{copy} is not wanted any more", code=Code.ABORTED)
        copy.extent = extent
        node.contents.step(copy, Step.PROMOTE_BEGUN)
        memory = node.memory[extent]
        try:
            with self._failing(copy, Step.PROMOTE_FAILED, "its state on NVMe is bad"):
                await asyncio.to_thread(self._read, copy, memory, move.cancelled)
        except PhaseloomError:
            if copy.state is State.DEMOTED and node.is_needed(copy):
                node.vacate_shared(copy)
            raise
        self._check_needed(copy)
        is_frozen = memory.freeze()
        assert is_frozen, "nobody else has ever seen it"
        await self._arrived(copy)
        node.compare_later(copy)

    async def _arrived(self, copy: HostCopy) -> None:
        async with self.node.change() as afterwards:
            self.node.step(copy, Step.PROMOTE_VERIFIED)
            afterwards.push_async_callback(self._moves.discard, self.node.file_of(copy))

    def _check_needed(self, copy: SharedCopy) -> None:
        if not self.node.is_needed(copy):
            raise ResourceError(f"{copy} is not needed any more")

    @contextmanager
    def _failing(self, copy: HostCopy, back: Step, why: str) -> Iterator[None]:
        """Where a move fails within, the copy is where it was; or, bad in all places, lost."""
        try:
            with contained(metrics.UNFORESEEN, "move"):
                yield
        except PhaseloomError as error:
            if error.info.code is Code.DATA_LOSS:
                self.node.lose(copy, f"{why}: {error}")
            elif self.node.is_needed(copy):
                self.node.step(copy, back)
                self.node.compare_later(copy)
            raise

    def _read(self, copy: HostCopy, extent: Extent, cancelled: threading.Event) -> None:
        """From its file, or from a seal of the same bytes. No view on the memory outlives it, so
        that it can be frozen. Raises: the first refusal."""
        memory = extent.view(copy.extent_bytes)
        users = copy.users if isinstance(copy, SharedCopy) else [copy]
        sources = [(self.node.file_of(copy), 0)]
        sources += [(self._directory.seal(r.wpg.key, r.applied), r.index) for r in users]
        refusal: ResourceError | None = None
        for path, index in sources:
            try:
                places: list[Place] = find_parts(path)
                if index >= len(places) or places[index].part.digest != copy.digest:
                    raise data_loss(str(path), f"it does not hold the newest state of {copy}")
                self._directory.read(places[index], memory, cancelled)
            except ResourceError as error:
                if error.info.code is not Code.DATA_LOSS:
                    raise
                more = path != sources[-1][0]
                log.error("%s%s", error, f"; trying its seal at {copy.applied}" if more else "")
                # Its frames have views on the memory.
                refusal = refusal or error.with_traceback(None)
            else:
                return
        assert refusal is not None
        raise refusal


def _num_bytes(victim: Victim) -> int:
    return victim.num_bytes if isinstance(victim, Version) else victim.extent_bytes


def _need(copy: HostCopy) -> tuple[float, int]:
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
