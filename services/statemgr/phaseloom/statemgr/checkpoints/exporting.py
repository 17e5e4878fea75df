"""Checkpoints made while work goes on: a cut of the state first, then its files in the background.

A cut is a copy of every rank's state in memory of its own, made between two operations. Whatever
happens to the ranks afterwards does not change it, and neither their death nor a kill of this
daemon loses it: it is in the books. The operation that asked for it is told once its files are on
disk; if it comes again, it joins what is under way, or finds it done.

Reading goes the other way: all ranks' parts are read and verified into memory of their own before
the first rank is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from phaseloom.common import metrics
from phaseloom.common.blockhash import Source, digest_of
from phaseloom.common.contained import contained
from phaseloom.common.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.ids import DeploymentKey
from phaseloom.common.messages import SaveStateResult
from phaseloom.common.statewire import (
    CheckpointRead,
    CheckpointWritten,
    CopyAside,
    CopyFrom,
    CutState,
    CutTaken,
    LoadedFrom,
    PruneCheckpoints,
    ReadCheckpoint,
    WriteCheckpoint,
)
from phaseloom.statemgr.checkpoints.files import Checkpoints, name_taken, writing
from phaseloom.statemgr.checkpoints.held import CutSums, Held, check
from phaseloom.statemgr.checkpoints.nodeparts import NodeParts
from phaseloom.statemgr.checkpoints.savedstate import SavedState
from phaseloom.statemgr.checkpoints.shards import write_state
from phaseloom.statemgr.core.cuts import Cut, CutPart
from phaseloom.statemgr.core.marker import Marker
from phaseloom.statemgr.core.residency import Rank, State, Wpg
from phaseloom.statemgr.disk.files import NEVER, StateDirectory
from phaseloom.statemgr.node.node import Node, pool_of
from phaseloom.statemgr.seals.sealedcopies import SealedCopies, SealedCopy
from phaseloom.statemgr.tiers import sharing
from phaseloom.statemgr.tiers.hierarchy import Hierarchy
from phaseloom.statemgr.tiers.switching import on_each_device

log = logging.getLogger(__name__)

MAX_OPERATION_CHARS = 200
"""Of an id: it stands in the books, and in a file."""
_STEP_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class _Write:
    """A cut on its way to disk."""

    cut: Cut
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: asyncio.Future[CheckpointWritten] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(slots=True)
class _Kept:
    """What was written last, in memory that is idle, until somebody needs that."""

    cut: Cut
    digests: list[str]
    parkings: list[int]


class Exporter:
    """`start` it in a task group; `stop` ends what is under way."""

    def __init__(
        self,
        node: Node,
        hierarchy: Hierarchy,
        directory: StateDirectory,
        checkpoints: Checkpoints,
        *,
        sealed: SealedCopies,
        file_bytes: int,
    ) -> None:
        """Args: directory: the checkpoint root's. file_bytes: no file of a checkpoint is larger,
        unless one tensor is."""
        self._node = node
        self._hierarchy = hierarchy
        self._disk = directory.disk
        self._node_parts = NodeParts(checkpoints, directory)
        self._sums = CutSums(node)
        self._checkpoints = checkpoints
        self._sealed = sealed
        self._file_bytes = file_bytes
        self._writes: dict[tuple[DeploymentKey, str], _Write] = {}
        self._kept: dict[DeploymentKey, _Kept] = {}
        self._locks: defaultdict[DeploymentKey, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One cut, or one begin of a write, at a time."""
        self._tasks: asyncio.TaskGroup

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._sums.start(tasks)

    def stop(self) -> None:
        self._sums.stop()
        for write in self._writes.values():
            write.cancelled.set()

    @property
    def num_writes(self) -> int:
        """Under way."""
        return len(self._writes)

    # --- saving ---

    async def cut(self, rank: Rank, request: CutState) -> CutTaken:
        """Copy every rank's state aside. Nothing to do where it was cut, or is written.

        Raises: CallerError: ALREADY_EXISTS, another operation's; FAILED_PRECONDITION: another seq
                was applied last. ResourceError: no host memory, with the numbers; a rank is lost.
        """
        key, operation = rank.wpg.key, request.operation
        if not 0 < len(operation) <= MAX_OPERATION_CHARS:
            raise CallerError(
                f"an operation's id of {len(operation)} characters",
                field="operation",
                remedy=f"name it in at most {MAX_OPERATION_CHARS}",
            )
        async with self._locks[key]:
            written = await asyncio.to_thread(
                self._checkpoints.written_by, operation, key, request.name
            )
            if written is not None or self._node.cuts.find(key, operation) is not None:
                return CutTaken()
            if any(w.cut.key == key and w.cut.name == request.name for w in self._writes.values()):
                raise name_taken(request.name)
            for old in self._node.cuts.of(key):
                if (key, old.operation) not in self._writes:
                    self._free(old)
            async with self._aside(rank.wpg) as extents:
                await self._copy_aside(rank.wpg, extents, request.seq)
                if rank.wpg.is_lost:
                    raise ResourceError(f"{rank.wpg} is over", code=Code.ABORTED)
                parts = [
                    CutPart(extent, each.extent_bytes, each.table)
                    for each, extent in zip(rank.wpg.ranks, extents, strict=True)
                ]
                extents.clear()  # from here on they are the cut's
                cut = _cut(rank.wpg, request, parts)
                self._node.cuts.add(cut)
                self._sums.begin(cut)
                for part in parts:
                    self._node.cuts.give_back(part.extent)
        return CutTaken()

    async def _copy_aside(self, wpg: Wpg, extents: list[int], seq: int) -> None:
        node = self._node
        targets = dict(zip(wpg.ranks, extents, strict=True))

        async def copy(rank: Rank) -> None:
            extent = node.memory[targets[rank]]
            if rank.state is State.RESIDENT:
                applied = (await node.ask(rank, CopyAside(), [extent.fd])).applied
            else:
                applied = rank.applied
                source, target = node.copy_of(rank), extent.view(rank.extent_bytes)
                await asyncio.to_thread(_copy, source, target)
                await self._check_copied(rank, target)
            if applied != seq:
                raise CallerError(
                    f"{rank} has applied {applied}, not {seq}",
                    code=Code.FAILED_PRECONDITION,
                    field="seq",
                    remedy="cut between operations, at the seq that was applied last",
                )

        async with self._hierarchy.in_host(wpg), node.holding(lambda: set(wpg.devices)):
            node.residency.check_sealable(wpg)
            await on_each_device(wpg.ranks, copy)

    async def _check_copied(self, rank: Rank, target: memoryview) -> None:
        """Raises: ResourceError: DATA_LOSS: what was copied is not what its digest says."""
        if rank.digest and await asyncio.to_thread(digest_of, target) != rank.digest:
            raise ResourceError(
                f"the host copy of {rank} is bad: it is not what its digest says",
                code=Code.DATA_LOSS,
                remedy="start a new incarnation, from its last seal",
                details={"deployment": str(rank.wpg.key), "rank": str(rank.index)},
            )

    @asynccontextmanager
    async def _aside(self, wpg: Wpg) -> AsyncIterator[list[int]]:
        """An extent for each rank's state; those that are in the list at the end are freed."""
        extents: list[int] = []
        try:
            for rank in wpg.ranks:
                what = f"a copy of {rank.owner} for a checkpoint"
                extent = await self._hierarchy.reserve(rank.extent_bytes, what, pool_of(wpg))
                self._node.cuts.lend(extent)
                extents.append(extent)
            yield extents
        finally:
            for extent in extents:
                self._node.cuts.give_back(extent)
                self._give_up(extent, wpg)
            self._node.announce()

    def _give_up(self, extent: int, wpg: Wpg | None) -> None:
        """Its next cut finds the memory touched already, while its life lasts."""
        if wpg is None or wpg.is_lost:
            self._node.memory.free(extent)
        else:
            self._node.memory.park(extent, pool_of(wpg))

    def _free(self, cut: Cut, digests: list[str] | None = None) -> None:
        """Args: digests: of its parts, where it is on disk: to find it in idle memory again."""
        wpg = self._node.residency.find(cut.key)
        is_same = wpg is not None and wpg.incarnation == cut.incarnation
        self._node.cuts.remove(cut)
        for extent in cut.extents:
            self._give_up(extent, wpg if is_same else None)
        if digests is not None:
            parkings = [self._node.memory.arena.parking(extent) for extent in cut.extents]
            self._kept[cut.key] = _Kept(cut, digests, parkings)
        self._node.announce()

    async def write(self, rank: Rank, request: WriteCheckpoint) -> CheckpointWritten:
        """Put the cut on disk; goes on where the caller is gone. Idempotent.

        Raises: CallerError: FAILED_PRECONDITION: there is no such cut; ALREADY_EXISTS.
                ResourceError: RESOURCE_EXHAUSTED, the disk is full; nothing is left behind then.
        """
        key, operation = rank.wpg.key, request.operation
        async with self._locks[key]:
            write = self._writes.get((key, operation))
            if write is None:
                marker = await asyncio.to_thread(
                    self._checkpoints.written_by, operation, key, request.name
                )
                if marker is not None:
                    return CheckpointWritten(marker.result.weights_sha256)
                if await self._has_left_part(rank.wpg, request):
                    return CheckpointWritten("")
                write = self._begin(key, request)
        return await asyncio.shield(write.done)

    async def _has_left_part(self, wpg: Wpg, request: WriteCheckpoint) -> bool:
        """Whether this node's part of another's checkpoint is on disk already."""
        if not wpg.rank_offset or self._node.cuts.find(wpg.key, request.operation) is not None:
            return False
        cut = _cut(wpg, CutState(request.operation, request.name, 0), [])
        return await asyncio.to_thread(self._node_parts.is_written, cut)

    def _begin(self, key: DeploymentKey, request: WriteCheckpoint) -> _Write:
        cut = self._node.cuts.find(key, request.operation)
        if cut is None or cut.name != request.name:
            raise CallerError(
                f"nothing of {key} is cut for {request.name!r}",
                code=Code.FAILED_PRECONDITION,
                field="operation",
                remedy="send CutState first",
            )
        write = _Write(cut)
        self._writes[(key, request.operation)] = write
        self._tasks.create_task(self._run(write, request))
        return write

    async def _run(self, write: _Write, request: WriteCheckpoint) -> None:
        cut = write.cut
        failure: Exception | None = None
        sha256, digests = "", None
        try:
            with (
                contained(metrics.UNFORESEEN, "checkpoint"),
                metrics.timed(metrics.CHECKPOINT_DURATION, node=self._node.name),
            ):
                async with self._of_other_nodes(cut) as others:
                    await self._sums.taken(cut)
                    sha256, digests = await asyncio.to_thread(self._write, write, request, others)
        except PhaseloomError as error:
            log.warning("%s is not written: %s", cut, error)
            failure = error
        del self._writes[(cut.key, cut.operation)]
        self._free(cut, digests)
        await self._node.keeper.record()
        if failure is None:
            log.info("checkpoint %r of %s at %d is written", cut.name, cut.key, cut.seq)
            write.done.set_result(CheckpointWritten(sha256))
        else:
            write.done.set_exception(failure)
            # Whoever asked for it may be gone.
            write.done.exception()

    @asynccontextmanager
    async def _of_other_nodes(self, cut: Cut) -> AsyncIterator[list[Held]]:
        """What rank 0's node needs of the others to make whole tensors.

        Raises: PhaseloomError: it is not there, or there is no host memory for it.
        """
        extents: list[int] = []
        held: list[Held] = []
        try:
            if not cut.is_whole and not cut.rank_offset:
                for place in await asyncio.to_thread(self._node_parts.find, cut):
                    num_bytes = place.part.num_bytes
                    extent = await self._hierarchy.reserve(num_bytes, f"other ranks' part of {cut}")
                    self._node.cuts.lend(extent)
                    extents.append(extent)
                    memory = self._node.memory[extent].view(num_bytes)
                    await asyncio.to_thread(self._node_parts.read, place, memory)
                    index = place.header.rank_offset + place.index
                    held.append(Held(index, place.part.tensors, memory, place.part.blocks))
            yield held
        finally:
            held.clear()
            for extent in extents:
                self._node.cuts.give_back(extent)
                self._node.memory.free(extent)
            self._node.announce()

    def _write(
        self, write: _Write, request: WriteCheckpoint, others: list[Held]
    ) -> tuple[str, list[str]]:
        """Returns the SHA-256 of the weights, and the digest of each part. In a thread."""
        cut, checkpoints = write.cut, self._checkpoints
        ranks = self._held(cut)
        digests = [each.digest for each in ranks]
        if cut.rank_offset:
            check(cut.key, ranks)
            self._node_parts.write(cut, ranks, write.cancelled)
            return "", digests
        draft = checkpoints.begin(cut.key, cut.name)
        try:
            written = write_state(
                self._disk,
                draft,
                [(each.tensors, each.memory) for each in (*ranks, *others)],
                request.config,
                file_bytes=self._file_bytes,
                cancelled=write.cancelled,
            )
            # All that was written was read by now: what is still whole was whole then.
            check(cut.key, [*ranks, *others])
            with writing():
                number = checkpoints.next_number(cut.key, cut.name)
            path = f"{cut.key.job}/{cut.key.deployment}/{cut.name}"
            marker = Marker(
                operation_id=cut.operation,
                result=SaveStateResult(path, written.weights_sha256),
                seq=cut.seq,
                number=number,
                keep=request.keep,
                files=written.files,
                digests=digests if cut.is_whole else [],
            )
            checkpoints.commit(cut.key, cut.name, marker)
        except BaseException:
            checkpoints.drop(cut.key, cut.name)
            raise
        self._node_parts.discard(cut)
        return written.weights_sha256, digests

    def _held(self, cut: Cut) -> list[Held]:
        """Its checksums are in."""
        held = []
        for index, part in enumerate(cut.parts, cut.rank_offset):
            assert part.checksums is not None
            memory = self._node.memory[part.extent].view(part.num_bytes)
            held.append(Held(index, part.tensors, memory, part.checksums))
        return held

    async def prune(self, rank: Rank, request: PruneCheckpoints) -> None:
        """Raises: CallerError, ResourceError: the disk fails."""
        key = rank.wpg.key
        if request.keep < 1:
            raise CallerError(
                f"{request.keep} are to stay", field="keep", remedy="keep one or more"
            )
        needed = set(request.needed)
        try:
            gone = await asyncio.to_thread(self._checkpoints.prune, key, request.keep, needed)
        except OSError as error:
            raise ResourceError(f"old checkpoints of {key} stay: {error}") from error
        if gone:
            log.info("checkpoints of %s that nobody needs are gone: %s", key, ", ".join(gone))

    def abandon(self) -> None:
        """The agent is gone: nobody will ask for what is cut and not being written."""
        for cut in self._node.cuts.every():
            if (cut.key, cut.operation) not in self._writes:
                self._free(cut)

    async def forget(self, key: DeploymentKey) -> None:
        """Its job has ended: what is not durable is dropped. Returns when nothing is written."""
        for write in [write for write in self._writes.values() if write.cut.key == key]:
            write.cancelled.set()
            with contextlib.suppress(PhaseloomError):
                await asyncio.shield(write.done)
        for cut in self._node.cuts.of(key):
            self._free(cut)
        self._locks.pop(key, None)
        self._kept.pop(key, None)
        await asyncio.to_thread(self._node_parts.forget, key)

    # --- loading ---

    async def read(self, rank: Rank, request: ReadCheckpoint) -> CheckpointRead:
        """Raises: as `ReadCheckpoint` says."""
        wpg = rank.wpg
        saved = await asyncio.to_thread(self._open, wpg.key, request.name)
        sha256 = saved.marker.result.weights_sha256 if saved.marker is not None else ""
        if rank.state is State.FILLING:
            source, digest = await self._fill(rank, saved)
            return CheckpointRead(sha256, digest, source)
        if rank.index:
            raise CallerError(
                f"{rank} is not the leader, which alone loads", code=Code.PERMISSION_DENIED
            )
        saved.check_fits(slot for each in wpg.ranks for slot in each.tensors)
        if await self._load_kept(wpg, saved):
            return CheckpointRead(sha256, source=LoadedFrom.CUT)
        async with self._aside(wpg) as extents:
            memories = {r: self._view(r, e) for r, e in zip(wpg.ranks, extents, strict=True)}
            source, digests = await self._filled(saved, memories)
            memories.clear()
            await self._load(wpg, extents, digests)
        log.info("checkpoint %r of %s is loaded from %s", request.name, wpg.key, source)
        return CheckpointRead(sha256, source=source)

    async def _filled(
        self, saved: SavedState, memories: dict[Rank, memoryview]
    ) -> tuple[LoadedFrom, list[str]]:
        """Fill ranks' memories from the nearest whole copy. Returns that, and their digests.

        Raises: ResourceError: DATA_LOSS: the files are bad, and there is no other.
        """
        (wpg, *_), marker = [rank.wpg for rank in memories], saved.marker
        digests = [] if marker is None else marker.digests
        seq = 0 if marker is None else marker.seq
        for copy in await self._sealed.find(wpg, seq, digests):
            reads = [
                asyncio.to_thread(_read, copy, digests[rank.index], rank.index, memory)
                for rank, memory in memories.items()
            ]
            try:
                return copy.source, await _all(reads)
            except ResourceError as error:
                log.warning("%s; there may be another copy", error)
        fills = [asyncio.to_thread(_fill, saved, rank, m) for rank, m in memories.items()]
        return LoadedFrom.FILES, await _all(fills)

    async def _load_kept(self, wpg: Wpg, saved: SavedState) -> bool:
        """From memory, where this is what was written last, by this life, and nobody needed it."""
        kept = self._kept.get(wpg.key)
        if kept is None or saved.marker is None or not _is_of(kept.cut, wpg, saved.marker):
            return False
        arena, extents = self._node.memory.arena, kept.cut.extents
        both = zip(extents, kept.parkings, strict=True)
        taken = [extent for extent, parking in both if arena.take_back(extent, parking)]
        for extent in taken:
            self._node.cuts.lend(extent)
        is_sound = False
        try:
            if taken != extents:
                return False
            views = [self._view(*each) for each in zip(wpg.ranks, extents, strict=True)]
            is_sound = await asyncio.to_thread(lambda: [*map(digest_of, views)]) == kept.digests
            if is_sound:
                await self._load(wpg, extents, kept.digests)
            return is_sound
        finally:
            for extent in taken:
                self._node.cuts.give_back(extent)
                self._give_up(extent, wpg if is_sound else None)
            kept.parkings = [arena.parking(extent) for extent in extents]
            self._node.announce()

    def _open(self, key: DeploymentKey, name: str) -> SavedState:
        return SavedState(self._disk, self._checkpoints.existing(key, name))

    def _view(self, rank: Rank, extent: int) -> memoryview:
        return self._node.memory[extent].view(rank.extent_bytes)

    async def _fill(self, rank: Rank, saved: SavedState) -> tuple[LoadedFrom, str]:
        if rank.wpg.seal_seq or rank.extent is None:
            raise CallerError(f"{rank} awaits no initial state", code=Code.FAILED_PRECONDITION)
        saved.check_fits(rank.tensors)
        source, (digest,) = await self._filled(saved, {rank: self._view(rank, rank.extent)})
        return source, digest

    async def _load(self, wpg: Wpg, extents: list[int], digests: list[str]) -> None:
        """All ranks or none: where one fails, nobody knows what the others hold."""
        node = self._node
        sources = dict(zip(wpg.ranks, zip(extents, digests, strict=True), strict=True))

        async def load(rank: Rank) -> None:
            extent, digest = sources[rank]
            await node.ask(rank, CopyFrom(digest), [node.memory[extent].fd])

        async with node.holding(lambda: set(wpg.devices)):
            for rank in wpg.ranks:
                if rank.state is not State.RESIDENT:
                    raise CallerError(f"{rank} is {rank.state}", code=Code.FAILED_PRECONDITION)
                await sharing.make_room(node, rank)
            try:
                await on_each_device(wpg.ranks, load)
            except PhaseloomError:
                node.retire(wpg, "a checkpoint was loaded in part")
                raise


def _cut(wpg: Wpg, request: CutState, parts: list[CutPart]) -> Cut:
    return Cut(
        wpg.key,
        wpg.incarnation,
        request.operation,
        request.name,
        request.seq,
        parts,
        rank_offset=wpg.rank_offset,
        num_ranks=wpg.num_ranks,
    )


async def _all(works: Sequence[Awaitable[str]]) -> list[str]:
    """Raises: the first failure, once none is under way any more."""
    digests = []
    for ended in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
        digests.append(ended)
    return digests


def _fill(saved: SavedState, rank: Rank, memory: memoryview) -> str:
    """Returns the memory's digest. In a thread."""
    saved.fill(rank.tensors, memory, NEVER)
    return digest_of(memory)


def _read(copy: SealedCopy, digest: str, index: int, memory: memoryview) -> str:
    """Returns the memory's digest. In a thread."""
    copy.read(copy.places[index], memory)
    return digest


def _copy(source: Source, target: memoryview) -> None:
    """In steps: each holds the interpreter."""
    for start in range(0, len(source), _STEP_BYTES):
        target[start : start + _STEP_BYTES] = source[start : start + _STEP_BYTES]


def _is_of(cut: Cut, wpg: Wpg, marker: Marker) -> bool:
    """Whether the checkpoint is this cut, and these are the ranks that were cut."""
    is_same = cut.incarnation == wpg.incarnation and cut.operation == marker.operation_id
    return is_same and [part.table for part in cut.parts] == [r.table for r in wpg.ranks]
