"""The tier below host memory: host copies that are not needed go to NVMe, and come back.

A host copy goes down when something else needs its memory: its file is written, verified and
fsynced, the books say so, and only then its memory is given back. It comes up before it is loaded
or sealed, or on a hint. At each moment the file or the memory is whole, so a kill of the daemon
finds one of them. What is on a device, being switched, sealed or moved stays where it is.

Invariant: at most one move of a host copy is under way. Who needs it elsewhere cancels a spill, and
joins a move upward.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from phaseloom.common import metrics
from phaseloom.common.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.statewire import Prefetch
from phaseloom.statemgr.core.arena import rounded
from phaseloom.statemgr.core.residency import ON_NVME, Rank, State, Step, Wpg
from phaseloom.statemgr.core.statefile import Place, StateHeader, data_loss
from phaseloom.statemgr.files import StateDirectory, find_parts
from phaseloom.statemgr.node import Node

log = logging.getLogger(__name__)

T = TypeVar("T")


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class Move:
    """A host copy on its way down, or up."""

    rank: Rank
    is_up: bool
    is_hint: bool = False
    """Nobody waits for it: a withdrawn hint, or need of its memory, cancels it."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: asyncio.Future[None] = field(default_factory=_future)


class Hierarchy:
    """`start` it in a task group; `stop` lets what is under way end."""

    def __init__(self, node: Node, directory: StateDirectory, nvme_budget_bytes: int) -> None:
        self.nvme_budget_bytes = nvme_budget_bytes
        self._node = node
        self._directory = directory
        self._moves: dict[Rank, Move] = {}
        self._tasks: asyncio.TaskGroup
        node.on_retired = self._give_up

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def stop(self) -> None:
        for move in self._moves.values():
            move.cancelled.set()

    @property
    def num_moves(self) -> int:
        """Under way."""
        return len(self._moves)

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
            await self._lift_all(wpg)
            yield

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

    async def _lift_all(self, wpg: Wpg) -> None:
        for rank in wpg.ranks:
            while (move := self._moves.get(rank)) is not None:
                if move.is_up:
                    move.is_hint = False
                else:
                    move.cancelled.set()
                with contextlib.suppress(PhaseloomError):
                    await asyncio.shield(move.done)
            if rank.state is State.SPILLED:
                await self._move(Move(rank, is_up=True))

    def hint(self, wpg: Wpg, hint: Prefetch) -> None:
        """Take a prediction; moves begin in the background."""
        wpg.next_use_s = None if hint.in_s is None else time.monotonic() + hint.in_s
        for rank in wpg.ranks:
            move = self._moves.get(rank)
            if hint.in_s is not None and move is None and rank.state is State.SPILLED:
                self._begin(Move(rank, is_up=True, is_hint=True))
            elif hint.in_s is None and move is not None and move.is_hint:
                move.cancelled.set()

    def sweep(self) -> None:
        """Remove the spilled files that belong to no host copy, once what was is taken over."""
        ranks = [rank for wpg in self._node.residency.alive() for rank in wpg.ranks]
        kept = {self._path(rank) for rank in ranks if rank.state in ON_NVME}
        stale = self._directory.spilled() - kept
        self._tasks.create_task(asyncio.to_thread(self._remove, stale))

    def _remove(self, paths: set[Path]) -> None:
        for path in paths:
            self._directory.remove(path)

    def is_spilled(self, rank: Rank, digest: str) -> bool:
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
            and (header.num_bytes, header.tensors) == (rank.heap_bytes, rank.tensors)
        )

    # --- moves ---

    async def _with_room(self, take: Callable[[], T], after_s: float | None = None) -> T:
        failed: set[Rank] = set()
        while True:
            try:
                return take()
            except ResourceError as error:
                if error.info.code is not Code.RESOURCE_EXHAUSTED:
                    raise
                refusal = error
            below = [r for r in self._node.residency.spillable(after_s) if r not in failed]
            spills = [move for move in self._moves.values() if not move.is_up]
            going = [*below, *(move.rank for move in spills)]
            room_bytes = sum(rounded(rank.heap_bytes) for rank in going)
            if not (below or spills) or room_bytes < _shortage_bytes(refusal):
                raise self._with_numbers(refusal)
            if not below:
                # Others have asked for these; what they free may be enough for both.
                ends = [move.done for move in spills]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                continue
            victim = below[0]
            try:
                self._check_nvme(victim)
                await self._move(Move(victim, is_up=False))
            except PhaseloomError as error:
                log.warning("%s stays in host memory: %s", victim, error)
                failed.add(victim)

    def _with_numbers(self, refusal: ResourceError) -> ResourceError:
        info = refusal.info
        used, budget = self._node.residency.nvme_used_bytes(), self.nvme_budget_bytes
        return ResourceError(
            f"{info.message}; nothing more can go to NVMe, where {used} of {budget} are in use",
            code=info.code,
            remedy=info.remedy,
            details=info.details | {"nvme_used_bytes": str(used), "nvme_budget_bytes": str(budget)},
        )

    def _check_nvme(self, rank: Rank) -> None:
        used = self._node.residency.nvme_used_bytes()
        if used + rank.heap_bytes > self.nvme_budget_bytes:
            raise ResourceError(
                f"{rank} needs {rank.heap_bytes} bytes of NVMe: {used} of "
                f"{self.nvme_budget_bytes} are in use",
                code=Code.RESOURCE_EXHAUSTED,
            )

    async def _move(self, move: Move) -> None:
        """Begin it and wait; the move goes on where the caller is cancelled."""
        self._begin(move)
        await asyncio.shield(move.done)

    def _begin(self, move: Move) -> None:
        assert move.rank not in self._moves
        self._moves[move.rank] = move
        # Before the first await: no two that look for room choose the same one.
        if not move.is_up:
            self._node.residency.step(move.rank, Step.SPILL_BEGUN)
        self._tasks.create_task(self._run(move))

    async def _run(self, move: Move) -> None:
        node = self._node
        labels = {"node": node.name, "direction": "lift" if move.is_up else "spill"}
        failure: PhaseloomError | None = None
        try:
            with metrics.timed(metrics.TRANSFER_DURATION, **labels):
                await (self._lift(move) if move.is_up else self._spill(move))
            metrics.count(metrics.TRANSFER_MOVED, move.rank.heap_bytes, **labels)
        except PhaseloomError as error:
            log.info("the %s of %s ended: %s", labels["direction"], move.rank, error)
            failure = error
        if move.rank.state is State.LOST:
            await asyncio.to_thread(self._directory.remove, self._path(move.rank))
        # Only now: whoever waits for its end finds the next move free to begin.
        del self._moves[move.rank]
        if failure is None:
            move.done.set_result(None)
        else:
            move.done.set_exception(failure)
            # Of a hint nobody waits for it.
            move.done.exception()
        node.announce()

    async def _spill(self, move: Move) -> None:
        node, rank = self._node, move.rank
        assert rank.extent is not None
        header = StateHeader(
            "spill", rank.wpg.key, rank.applied, rank.heap_bytes, rank.tensors, rank.digest
        )
        memory = node.memory[rank.extent].view(rank.heap_bytes)
        try:
            await asyncio.to_thread(
                self._directory.write, self._path(rank), header, [memory], move.cancelled
            )
        except PhaseloomError as error:
            if error.info.code is Code.DATA_LOSS:
                node.retire(rank.wpg, "its host copy is bad")
            elif rank.state is not State.LOST:
                node.residency.step(rank, Step.SPILL_FAILED)
            raise
        node.residency.step(rank, Step.SPILL_VERIFIED)
        await node.keeper.record()
        if rank.state is State.LOST or rank.extent is None:
            raise ResourceError(f"{rank} was lost meanwhile")
        node.memory.vacate(rank.extent)

    async def _lift(self, move: Move) -> None:
        node, rank = self._node, move.rank
        after_s = rank.wpg.next_use_s if move.is_hint else None
        await self._with_room(lambda: self._occupy(move), after_s)
        node.residency.step(rank, Step.LIFT_BEGUN)
        assert rank.extent is not None
        memory = node.memory[rank.extent].view(rank.heap_bytes)
        try:
            await asyncio.to_thread(self._read, rank, memory, move.cancelled)
        except PhaseloomError as error:
            if error.info.code is Code.DATA_LOSS:
                node.retire(rank.wpg, f"its state on NVMe is bad: {error}")
            elif rank.state is not State.LOST:
                node.residency.step(rank, Step.LIFT_FAILED)
                node.memory.vacate(rank.extent)
            raise
        node.residency.step(rank, Step.LIFT_VERIFIED)
        await node.keeper.record()
        await asyncio.to_thread(self._directory.remove, self._path(rank))

    def _occupy(self, move: Move) -> None:
        if move.rank.state is not State.SPILLED or move.rank.extent is None:
            raise ResourceError(f"{move.rank} was lost meanwhile")
        if move.cancelled.is_set():
            raise ResourceError("the hint was withdrawn", code=Code.ABORTED)
        self._node.memory.occupy(move.rank.extent, f"the host copy of {move.rank.owner}")

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
            move = self._moves.get(rank)
            if move is not None:
                move.cancelled.set()
            else:
                self._directory.remove(self._path(rank))

    def _path(self, rank: Rank) -> Path:
        return self._directory.spill(rank.wpg.key, rank.wpg.incarnation, rank.index)


def _shortage_bytes(refusal: ResourceError) -> int:
    """What has to go for it; nothing where the refusal is not the arena's."""
    details = refusal.info.details
    if "needed_bytes" not in details:
        return 0
    free = int(details["budget_bytes"]) - int(details["used_bytes"])
    return int(details["needed_bytes"]) - free
