"""Checkpoints made while work continues: a snapshot of the state, then its files in the background.

A snapshot never changes, and survives both its ranks and a kill of this daemon, because it is part
of the node's manifest. The operation that requested the checkpoint is answered once the files are
on disk. If the operation is delivered again, it waits for the write that is under way, or finds it
done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.operations import SaveStateResult
from phaseloom.common.contract.state_rank import (
    CheckpointWritten,
    SnapshotTaken,
    TakeSnapshot,
    WriteCheckpoint,
)
from phaseloom.common.contract.tenantlimits import limit_exceeded
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import error_boundary
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.checkpoints.files import Checkpoints, name_taken, writing
from phaseloom.statemgr.checkpoints.marker import Marker
from phaseloom.statemgr.checkpoints.shards import Written, write_state
from phaseloom.statemgr.checkpoints.staging import StagedState, Staging, check
from phaseloom.statemgr.disk.files import StateDirectory, find_parts, header_of
from phaseloom.statemgr.node.background import Background
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.records.incarnations import Rank, Wpg
from phaseloom.statemgr.records.seals import seal_header
from phaseloom.statemgr.records.snapshots import Snapshot, Snapshots
from phaseloom.statemgr.records.stateheader import Section, SectionRef

log = logging.getLogger(__name__)


_OPERATION_DIGITS = 16


class NodeParts:
    """Parts of checkpoints: the states that each node of a deployment leaves for rank 0's node.

    Each node except rank 0's writes its ranks' states as a state file under the checkpoint root,
    next to the checkpoint. Rank 0's node reads these files and makes whole tensors of all states,
    so the nodes must share the file system of that root. The file name has a hash of the
    operation's id and the incarnation, because two incarnations may differ in bits and must never
    be mixed. Blocking: call it in a thread.
    """

    def __init__(self, checkpoints: Checkpoints, directory: StateDirectory) -> None:
        self._checkpoints = checkpoints
        self._directory = directory

    def is_written(self, snapshot: Snapshot) -> bool:
        """Whether this node's part of another node's checkpoint is on disk, from the snapshot's
        incarnation.

        Args: snapshot: its `parts` may be empty.
        """
        return header_of(self._own(snapshot)) is not None

    def write(
        self, snapshot: Snapshot, ranks: Sequence[StagedState], cancelled: threading.Event
    ) -> None:
        """Write this node's part of a checkpoint."""
        sections = [Section(len(state.memory), state.tensors, state.digest) for state in ranks]
        header = seal_header(
            snapshot.key,
            snapshot.seq,
            sections,
            rank_offset=snapshot.rank_offset,
            num_ranks=snapshot.num_ranks,
        )
        memories = [state.memory for state in ranks]
        self._directory.write(self._own(snapshot), header, memories, cancelled)

    def find(self, snapshot: Snapshot) -> list[SectionRef]:
        """The states of the other nodes' ranks.

        Raises: CallerError: FAILED_PRECONDITION: a node's part is not under this root.
                ResourceError: DATA_LOSS: a part is bad.
        """
        place = self._checkpoints.directory(snapshot.key, snapshot.name).parent
        refs: list[SectionRef] = []
        for rank in range(len(snapshot.parts), snapshot.num_ranks, len(snapshot.parts)):
            path = next(place.glob(f"{_beginning(snapshot, rank)}.*.part"), None)
            if path is None:
                raise CallerError(
                    f"the part of checkpoint {snapshot.name!r} from ranks {rank} and up is not "
                    "under this node's checkpoint root: their node wrote it elsewhere",
                    code=Code.FAILED_PRECONDITION,
                    remedy="give the state managers of all nodes of the deployment one "
                    "checkpoint_root, on a file system that they share",
                )
            refs += find_parts(path)
        return refs

    def discard(self, snapshot: Snapshot) -> None:
        """Remove the parts of the other nodes, which are no longer needed."""
        place = self._checkpoints.directory(snapshot.key, snapshot.name).parent
        self._directory.discard(*place.glob(f"{_prefix(snapshot)}-*.part"))

    def forget(self, key: DeploymentKey) -> None:
        """Remove this node's parts of checkpoints of a deployment that has ended."""
        if self._checkpoints.root is not None:
            place = self._checkpoints.directory(key, "any").parent
            self._directory.discard(*place.glob(f".*.{self._checkpoints.node}.part"))

    def _own(self, snapshot: Snapshot) -> Path:
        directory = self._checkpoints.directory(snapshot.key, snapshot.name)
        begin = _beginning(snapshot, snapshot.rank_offset)
        return directory.with_name(f"{begin}.{self._checkpoints.node}.part")


def _prefix(snapshot: Snapshot) -> str:
    digits = blake3(snapshot.operation.encode()).hexdigest()[:_OPERATION_DIGITS]
    return f".{snapshot.name}.{digits}"


def _beginning(snapshot: Snapshot, rank: int) -> str:
    return f"{_prefix(snapshot)}-{snapshot.incarnation:d}-{rank:d}"


def _checkpoint_bytes(tables: Sequence[TensorTable], num_ranks: int) -> int:
    """Return the size of a checkpoint of ranks of which this node has these; the others are alike.

    Equal slices of several ranks count once.
    """
    slices = {
        (slot.name, *slot.start): slot.num_bytes for table in tables for slot in table.tensors
    }
    return sum(slices.values()) * max(num_ranks, 1) // len(tables)


MAX_OPERATION_CHARS = 200
"""Longest id of an operation: it is in the node's manifest and in a file."""


@dataclass(slots=True)
class _Write:
    """A snapshot that is being written to disk."""

    snapshot: Snapshot
    cancelled: threading.Event
    done: asyncio.Future[CheckpointWritten] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Exporter:
    """Takes snapshots and writes them to disk."""

    def __init__(
        self,
        directory: StateDirectory,
        checkpoints: Checkpoints,
        staging: Staging,
        snapshots: Snapshots,
        *,
        ledger: Ledger,
        background: Background,
        file_bytes: int,
        limit_of: Callable[[str], int],
    ) -> None:
        """Args: directory: the state directory at the checkpoint root. file_bytes: the most bytes
        in one file of a checkpoint, unless one tensor is larger. limit_of: tenant → the most bytes
        of its checkpoints; 0: no limit."""
        self._limit_of = limit_of
        self._admitted: dict[tuple[DeploymentKey, str], int] = {}
        """Snapshots that are about to be taken → bytes of their checkpoints."""
        self._ledger = ledger
        self._background = background
        self._snapshots = snapshots
        self._directory = directory
        self._checkpoints = checkpoints
        self._parts = NodeParts(checkpoints, directory)
        self._staging = staging
        self._file_bytes = file_bytes
        self._numbering = asyncio.Lock()
        """Held from the choice of a checkpoint's number to its commit, so that numbers are
        unique."""
        self._writes: dict[tuple[DeploymentKey, str], _Write] = {}
        self._locks: defaultdict[DeploymentKey, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Per deployment: only one snapshot, or start of a write, at a time."""

    async def take_snapshot(self, rank: Rank, request: TakeSnapshot) -> SnapshotTaken:
        """Copy every rank's state into a snapshot. Does nothing if this operation's snapshot
        exists, or its checkpoint is written.

        Raises: CallerError: ALREADY_EXISTS: the checkpoint belongs to another operation;
                FAILED_PRECONDITION: another seq was applied last. ResourceError: no host memory, or
                the tenant's checkpoints would exceed their limit, with the numbers; a rank is lost.
        """
        key, operation = rank.wpg.key, request.operation
        if not 0 < len(operation) <= MAX_OPERATION_CHARS:
            raise CallerError(
                f"an operation's id must have 1 to {MAX_OPERATION_CHARS} characters, got "
                f"{len(operation)}",
                field="operation",
                remedy=f"name it in at most {MAX_OPERATION_CHARS}",
            )
        rank.wpg.check_alive()
        async with self._locks[key]:
            write = self._writes.get((key, operation))
            if write is not None and not self._has_snapshot(rank.wpg, operation):
                # Another incarnation's snapshot, which must be taken again.
                with contextlib.suppress(PhaseloomError):
                    await asyncio.shield(write.done)
            is_written = await self._written_by(key, request) is not None
            if is_written or self._has_snapshot(rank.wpg, operation):
                return SnapshotTaken()
            for write in [*self._writes.values()]:
                if write.snapshot.key == key and write.snapshot.name == request.name:
                    if not request.overwrite:
                        raise name_taken(request.name)
                    with contextlib.suppress(PhaseloomError):
                        await asyncio.shield(write.done)
            for old in self._snapshots.of(key):
                if (key, old.operation) not in self._writes:
                    self._staging.free(old)
            if not rank.wpg.rank_offset:  # the node of rank 0 writes the checkpoint
                await self._admit(rank.wpg, operation)
            try:
                await self._staging.snapshot(rank.wpg, request)
            finally:
                self._admitted.pop((key, operation), None)
        return SnapshotTaken()

    async def _admit(self, wpg: Wpg, operation: str) -> None:
        """Reserve disk space for a checkpoint. Once its snapshot is taken, that holds the
        reservation.

        Raises: ResourceError: RESOURCE_EXHAUSTED: the tenant's checkpoints would exceed their
                limit.
        """
        tenant = wpg.key.tenant
        limit = await asyncio.to_thread(self._limit_of, tenant)
        if not limit:
            return
        num_bytes = _checkpoint_bytes([rank.table for rank in wpg.ranks], wpg.num_ranks)
        # A checkpoint may be committed while the disk is read. Then it counts twice, not never.
        reserved = self._reserved(tenant)
        stored = await asyncio.to_thread(self._checkpoints.num_bytes, tenant)
        reserved |= self._reserved(tenant)
        used = stored + sum(reserved.values()) + num_bytes
        if used > limit:
            raise limit_exceeded(
                "max_checkpoint_bytes",
                "bytes of checkpoints would be stored",
                used,
                limit,
                "delete checkpoints, or save them with `keep` or `ttl_s`",
            )
        self._admitted[wpg.key, operation] = num_bytes

    def _reserved(self, tenant: str) -> dict[tuple[DeploymentKey, str], int]:
        """Bytes of the tenant's checkpoints that are not written yet."""
        reserved = dict(self._admitted)
        for place, snapshot in self._snapshots.items():
            tables = [part.table for part in snapshot.parts]
            reserved[place] = _checkpoint_bytes(tables, snapshot.num_ranks)
        return {place: size for place, size in reserved.items() if place[0].tenant == tenant}

    async def _written_by(
        self, key: DeploymentKey, request: TakeSnapshot | WriteCheckpoint
    ) -> Marker | None:
        saved = request.operation, key, request.name
        written_by = self._checkpoints.written_by
        return await asyncio.to_thread(written_by, *saved, overwrite=request.overwrite)

    def _has_snapshot(self, wpg: Wpg, operation: str) -> bool:
        """Whether the operation has a usable snapshot. If a deployment is on several nodes, each
        incarnation takes its own on all of them: two incarnations may differ in bits, and only some
        nodes may have the first one's snapshot."""
        snapshot = self._snapshots.get((wpg.key, operation))
        return snapshot is not None and (
            snapshot.is_whole or snapshot.incarnation == wpg.incarnation
        )

    async def write(self, rank: Rank, request: WriteCheckpoint) -> CheckpointWritten:
        """Write the operation's snapshot to disk. The write continues if the caller leaves.
        Idempotent.

        Raises: CallerError: ALREADY_EXISTS: the name belongs to another operation. ResourceError:
                ABORTED: there is no such snapshot; RESOURCE_EXHAUSTED: the disk is full, and
                no part of the checkpoint is left behind.
        """
        key, operation = rank.wpg.key, request.operation
        async with self._locks[key]:
            write = self._writes.get((key, operation))
            if write is None:
                marker = await self._written_by(key, request)
                if marker is not None:
                    return CheckpointWritten(marker.result.weights_sha256)
                has_snapshot = (key, operation) in self._snapshots
                if rank.wpg.rank_offset and not has_snapshot:
                    # This node's part of another node's checkpoint may be on disk already.
                    empty = Snapshot.of(rank.wpg, operation, request.name, 0, [])
                    if await asyncio.to_thread(self._parts.is_written, empty):
                        return CheckpointWritten("")
                write = self._begin(key, request)
        return await asyncio.shield(write.done)

    def _begin(self, key: DeploymentKey, request: WriteCheckpoint) -> _Write:
        snapshot = self._snapshots.get((key, request.operation))
        if snapshot is None or snapshot.name != request.name:
            raise ResourceError(
                f"there is no snapshot of {key} for {request.name!r}: none was taken, or the agent "
                "has left since",
                code=Code.ABORTED,
            )
        write = _Write(snapshot, self._background.event())
        self._writes[(key, request.operation)] = write
        self._background.start(self._run(write, request))
        return write

    async def _run(self, write: _Write, request: WriteCheckpoint) -> None:
        snapshot = write.snapshot
        failure: Exception | None = None
        sha256 = ""
        try:
            with (
                error_boundary(metrics.UNFORESEEN, "checkpoint"),
                metrics.timed(metrics.CHECKPOINT_DURATION, node=self._ledger.node),
            ):
                sha256 = await self._write_files(snapshot, request, write.cancelled)
        except PhaseloomError as error:
            log.warning("%s is not written: %s", snapshot, error)
            failure = error
        del self._writes[(snapshot.key, snapshot.operation)]
        async with self._ledger.change():
            self._staging.free(snapshot)
        if failure is None:
            log.info(
                "checkpoint %r of %s at %d is written", snapshot.name, snapshot.key, snapshot.seq
            )
            write.done.set_result(CheckpointWritten(sha256))
        else:
            write.done.set_exception(failure)
            # The caller may be gone: the exception counts as retrieved.
            write.done.exception()

    async def _write_files(
        self, snapshot: Snapshot, request: WriteCheckpoint, cancelled: threading.Event
    ) -> str:
        """Write the files of a snapshot: those of its checkpoint, or this node's part of one.

        Returns: the SHA-256 of the weights; empty: this node wrote only its part.
        """
        async with self._of_other_nodes(snapshot) as remote_states:
            await self._staging.until_proved(snapshot)
            ranks = []
            for index, part in enumerate(snapshot.parts, snapshot.rank_offset):
                assert part.checksums is not None
                memory = self._staging.view(part.extent, part.num_bytes)
                ranks.append(StagedState(index, part.tensors, memory, part.checksums))
            if snapshot.rank_offset:
                await asyncio.to_thread(self._parts.write, snapshot, ranks, cancelled)
                return ""
            return await self._write_checkpoint(
                snapshot, request, [*ranks, *remote_states], cancelled
            )

    @asynccontextmanager
    async def _of_other_nodes(self, snapshot: Snapshot) -> AsyncIterator[list[StagedState]]:
        """The states of other nodes' ranks, which rank 0's node needs for whole tensors; else
        empty."""
        refs: list[SectionRef] = []
        if not snapshot.is_whole and not snapshot.rank_offset:
            refs = await asyncio.to_thread(self._parts.find, snapshot)
        label = f"other ranks' part of {snapshot}"
        async with self._staging.room((p.part.num_bytes, label) for p in refs) as extents:
            staged = []
            for ref, extent in zip(refs, extents, strict=True):
                part, index = ref.part, ref.header.rank_offset + ref.index
                memory = self._staging.view(extent, part.num_bytes)
                await asyncio.to_thread(self._directory.read, ref, memory)
                staged.append(StagedState(index, part.tensors, memory, part.blocks))
            try:
                yield staged
            finally:
                staged.clear()

    async def _write_checkpoint(
        self,
        snapshot: Snapshot,
        request: WriteCheckpoint,
        staged: list[StagedState],
        cancelled: threading.Event,
    ) -> str:
        path = f"{snapshot.key.job}/{snapshot.key.deployment}/{snapshot.name}"
        try:
            written = await asyncio.to_thread(self._draft, snapshot, staged, request, cancelled)
            async with self._numbering:
                with writing():
                    number = await asyncio.to_thread(self._checkpoints.next_number, snapshot.key)
                marker = Marker(
                    operation_id=snapshot.operation,
                    result=SaveStateResult(path, written.weights_sha256),
                    seq=snapshot.seq,
                    number=number,
                    keep=request.keep,
                    files=written.files,
                    model=request.model,
                    adapter=request.adapter,
                )
                await asyncio.to_thread(
                    self._checkpoints.commit,
                    snapshot.key,
                    snapshot.name,
                    marker,
                    ttl_s=request.ttl_s,
                    overwrite=request.overwrite,
                )
        except BaseException:
            await asyncio.to_thread(self._checkpoints.drop, snapshot.key, snapshot.name)
            raise
        await asyncio.to_thread(self._parts.discard, snapshot)
        return written.weights_sha256

    def _draft(
        self,
        snapshot: Snapshot,
        staged: list[StagedState],
        request: WriteCheckpoint,
        cancelled: threading.Event,
    ) -> Written:
        """Write the draft, then verify the states that were written. Blocking."""
        written = write_state(
            self._directory.disk,
            self._checkpoints.begin(snapshot.key, snapshot.name),
            [(state.tensors, state.memory) for state in staged],
            request.config,
            file_bytes=self._file_bytes,
            cancelled=cancelled,
            companions=request.companions,
        )
        # All states have been read: one that is still whole now was whole then.
        check(snapshot.key, staged)
        return written

    def abandon(self) -> None:
        """Free the snapshots that are not being written, because the agent that would request it
        has left."""
        for snapshot in [*self._snapshots.values()]:
            if (snapshot.key, snapshot.operation) not in self._writes:
                self._staging.free(snapshot)

    async def forget(self, key: DeploymentKey) -> None:
        """Cancel the writes of a deployment whose job has ended, and free its snapshots. Returns
        once nothing is being written."""
        for write in [write for write in self._writes.values() if write.snapshot.key == key]:
            write.cancelled.set()
            with contextlib.suppress(PhaseloomError):
                await asyncio.shield(write.done)
        for snapshot in self._snapshots.of(key):
            self._staging.free(snapshot)
        self._locks.pop(key, None)
        await asyncio.to_thread(self._parts.forget, key)
        await asyncio.to_thread(self._checkpoints.forget_pins, key)
