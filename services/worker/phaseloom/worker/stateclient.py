"""A rank's side of the state manager: its session, and the weights versions it makes and reads.

What it copies when told to is `hostcopies`. Copies run in a thread and without the GIL: the event
loop goes on.

The client outlives the daemon: see `statelink`. Only when its `closed` is done it is gone for good.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from opentelemetry import trace

from phaseloom.common.errors import (
    CallerError,
    Code,
    InternalError,
    PhaseloomError,
    ResourceError,
)
from phaseloom.common.framing import Peer, close_fds
from phaseloom.common.hugepages import make_huge
from phaseloom.common.ids import VersionKey
from phaseloom.common.messages import Ticket
from phaseloom.common.statewire import (
    CheckpointRead,
    CheckpointWritten,
    CommitInitial,
    CommitParts,
    CommitVersion,
    CopyAside,
    CopyFrom,
    CopyIn,
    CopyOut,
    CreateVersion,
    CutState,
    CutTaken,
    Done,
    HeapRegistered,
    HoldVersion,
    LetGo,
    OnDevice,
    OpenOnDevice,
    OpenSlices,
    OpenVersion,
    PartSources,
    PruneCheckpoints,
    RankHello,
    RankResume,
    ReadCheckpoint,
    RegisterHeap,
    ShareOnDevice,
    Slice,
    StateMessage,
    StillMapped,
    TensorSlot,
    Unpin,
    VersionExtent,
    VersionParts,
    WriteCheckpoint,
    extent_bytes,
)
from phaseloom.common.tensortable import TensorTable
from phaseloom.common.versionparts import is_manifest
from phaseloom.worker import devicememory
from phaseloom.worker.copying import (
    MappedVersions,
    Mapping,
    hashed,
    verify,
)
from phaseloom.worker.core.reading import Runs
from phaseloom.worker.devicememory import DeviceMemory
from phaseloom.worker.heap import align
from phaseloom.worker.hostcopies import HostCopies
from phaseloom.worker.layouts import Layouts
from phaseloom.worker.statelink import RECONNECT_S, StateLink, ask, expect

log = logging.getLogger(__name__)

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class VersionCopy:
    """A weights version as it stands in host memory."""

    digest: str
    num_bytes: int
    is_new: bool
    """False: it existed already, and nothing was copied."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a version's key names, as it stands in host memory."""

    asked: OpenVersion
    described: VersionExtent
    memory: memoryview
    """Its own: its content stands while it is kept."""
    table: TensorTable

    @property
    def is_manifest(self) -> bool:
        """The version is written in parts, and this says what they are."""
        return len(self.table) == 1 and is_manifest(self.table.tensors)


class RankStateClient:
    """A rank's connection: hands its heap to the state manager and copies when told to.

    When `closed` is done the rank has lost its memory's authority and must exit.
    """

    def __init__(
        self,
        path: str | Path,
        token: str,
        *,
        applied: Callable[[], int],
        on_loaded: Callable[[], None],
        executor: Executor | None,
        reconnect_s: float,
    ) -> None:
        self._token = token
        self._on_loaded = on_loaded
        self._own_executor = None if executor else ThreadPoolExecutor(1, "state-copy")
        self._executor = executor or self._own_executor
        self._link = StateLink(path, self._greet, self._handle, reconnect_s)
        self._copies = HostCopies(applied, on_loaded)
        self._versions = MappedVersions()
        self._layouts = Layouts()

    @classmethod
    async def connect(
        cls,
        path: str | Path,
        token: str,
        *,
        applied: Callable[[], int],
        on_loaded: Callable[[], None],
        executor: Executor | None = None,
        reconnect_s: float = RECONNECT_S,
    ) -> RankStateClient:
        """Join the state manager.

        Args:   applied: seq of the last mutating operation in the heap, asked at each copy out.
                on_loaded: called in the executor after the heap's bytes were replaced by a load.
                executor: one thread, in which all copies run. That of the backend, so that copies
                    and operations exclude each other; None: one of its own. Calls of this client
                    must not be waited for inside it.
        Raises: ResourceError: nobody listens. CallerError: PERMISSION_DENIED.
        """
        client = cls(
            path,
            token,
            applied=applied,
            on_loaded=on_loaded,
            executor=executor,
            reconnect_s=reconnect_s,
        )
        await client._link.connect()
        return client

    @property
    def closed(self) -> asyncio.Future[str]:
        return self._link.closed

    async def close(self) -> None:
        """Leave; a copy under way ends first."""
        await self._link.close()
        if self._own_executor is not None:
            self._own_executor.shutdown()

    async def _greet(self, peer: Peer[StateMessage]) -> None:
        if self._copies.heap is None:
            await ask(peer, RankHello(self._token), Done)
            return
        applied, digest = self._copies.copied
        await ask(
            peer,
            RankResume(
                token=self._token,
                heap_bytes=self._copies.heap.num_bytes,
                tensors=self._layouts.table(self._copies.slots).packed,
                filled=self._copies.is_filled,
                resident=self._copies.is_resident,
                applied=applied,
                digest=digest,
                host_bytes=self._copies.host_bytes,
            ),
            Done,
        )

    async def register_heap(
        self,
        heap: DeviceMemory,
        slots: list[TensorSlot],
        host_bytes: int = 0,
        *,
        frozen: bool = False,
        model: str = "",
    ) -> int:
        """Give the heap into the state manager's hands; maps its extent.

        Args:    host_bytes: of state that lives in `host_memory` alone.
                 frozen, model: see `RegisterHeap`.

        Returns: the seq that the extent holds, from a seal: it comes into the heap at the first
                 switch-in. 0: none, fill the heap and `commit_initial`.
        Raises:  ResourceError: no room; DATA_LOSS: the seal's file is bad. CallerError:
                 FAILED_PRECONDITION, with the numbers: the seal is of another layout.
        """
        request = RegisterHeap(
            heap.num_bytes,
            self._layouts.table(slots).packed,
            host_bytes=host_bytes,
            frozen=frozen,
            model=model,
            pins=devicememory.is_pinning(heap) and not frozen,
        )
        answer, fds = await self._link.call(request)
        registered = expect(answer, HeapRegistered)
        if len(fds) != (not frozen or registered.applied == 0):
            close_fds(fds)
            raise InternalError(f"{len(fds)} extents came for one heap")
        extent: Mapping | None = None
        for fd in fds:
            extent = Mapping(fd, extent_bytes(heap.num_bytes, host_bytes), writable=True)
        self._copies.register(heap, slots, host_bytes, extent, frozen=frozen)
        if registered.applied:
            self._copies.commit(registered.applied, "")
            await self._run(heap.release)
        return registered.applied

    @property
    def host_memory(self) -> memoryview:
        """See `HostCopies.host_memory`."""
        return self._copies.host_memory

    async def commit_initial(self, applied: int = 0) -> None:
        """Copy the filled heap to the extent and release it: the deployment starts offloaded.

        Args: applied: seq that this state stands for, where it came from a checkpoint.
        """
        heap, extent = self._copies.registered()
        await self._run(lambda: self._copies.out(heap, extent))
        digest = await self._run(lambda: hashed(extent.buffer))
        await self._commit_initial(digest, applied)

    async def commit_checkpoint(self, name: str, applied: int) -> None:
        """Instead of `commit_initial`: have the extent filled from a checkpoint, whatever the heap
        holds. Raises: as `read_checkpoint`."""
        read = await self._link.ask(ReadCheckpoint(name), CheckpointRead)
        await self._commit_initial(read.digest, applied)

    async def _commit_initial(self, digest: str, applied: int) -> None:
        heap, extent = self._copies.registered()
        if self._copies.is_frozen:
            await self._run(extent.close)
            self._copies.extent = None
        await self._link.ask(CommitInitial(digest, applied), Done)
        self._copies.commit(applied, digest)
        await self._run(heap.release)

    async def cut_state(self, operation: str, name: str, seq: int) -> None:
        """Have the state of all ranks copied aside for a checkpoint; then they may go on.

        Raises: CallerError: ALREADY_EXISTS. ResourceError: no host memory.
        """
        await self._link.ask(CutState(operation, name, seq), CutTaken)

    async def write_checkpoint(self, operation: str, name: str, config: str, keep: int) -> str:
        """Returns, once it is durable, the SHA-256 of its weights.

        Raises: ResourceError: the disk is full, or fails.
        """
        message = WriteCheckpoint(operation, name, config, keep)
        return (await self._link.ask(message, CheckpointWritten)).weights_sha256

    async def read_checkpoint(self, name: str) -> str:
        """Replace the state of all ranks. From the leader; whatever is raised, nothing was changed,
        or the ranks are cut off.

        Returns: the SHA-256 of its weights; empty: it does not say.
        Raises:  CallerError: NOT_FOUND; FAILED_PRECONDITION: of another model. ResourceError:
                 DATA_LOSS; no host memory.
        """
        read = await self._link.ask(ReadCheckpoint(name), CheckpointRead)
        trace.get_current_span().set_attribute("source", read.source)
        return read.weights_sha256

    async def prune_checkpoints(self, keep: int, needed: list[str]) -> None:
        await self._link.ask(PruneCheckpoints(keep, needed), Done)

    async def create_version(self, key: VersionKey, slots: Sequence[TensorSlot]) -> VersionCopy:
        """Cut a weights version from these slots of the heap. Idempotent by key.

        Raises: ResourceError: no host memory. CallerError: not this deployment's version.
        """
        heap = self._copies.registered_heap()
        places, pairs = self._layouts.cut(slots)
        target = await self.begin_version(key, places)
        if isinstance(target, VersionCopy):
            return target
        digest = await self._run(lambda: devicememory.gather(heap, target, pairs))
        copy = await self._commit_version(key, target, digest)
        if devicememory.can_share(heap) and not self._copies.is_frozen and not key.part:
            await self._share_on_device(key, len(target), pairs)
        return copy

    async def _share_on_device(
        self, key: VersionKey, num_bytes: int, pairs: list[tuple[TensorSlot, TensorSlot]]
    ) -> None:
        """For who syncs on the same device: from there, without the host."""
        heap = self._copies.registered_heap()
        fd = await self._run(lambda: devicememory.share(heap, num_bytes, pairs))
        if fd is None:
            return
        try:
            await self._link.call(ShareOnDevice(key), [fd])
        except PhaseloomError as error:
            # The version is committed, and in host memory: this is a cache of it.
            log.warning("version %s is not shared on the device: %s", key, error)
        finally:
            os.close(fd)

    async def _load_on_device(
        self, described: VersionExtent, pairs: list[tuple[TensorSlot, TensorSlot]]
    ) -> bool:
        """False: it is not on this device; nothing has changed."""
        heap = self._copies.registered_heap()
        if not devicememory.can_share(heap):
            return False
        answer, fds = await self._link.call(OpenOnDevice(described.version))
        try:
            if not expect(answer, OnDevice).exists or len(fds) != 1:
                return False
            num_bytes = described.num_bytes
            return await self._run(lambda: devicememory.take(heap, fds[0], num_bytes, pairs))
        finally:
            close_fds(fds)

    async def begin_version(
        self, key: VersionKey, slots: list[TensorSlot]
    ) -> memoryview | VersionCopy:
        """Memory for a version (by a node's first rank) or a part of one; then `commit_version`.

        Where the version exists already, what it is. The memory's content is undefined, the gaps
        between tensors included: write them all, so that equal weights have equal digests.

        Args:   slots: of the version, packed: aligned, one after another from offset 0.
        Raises: ResourceError: no host memory. CallerError: not this deployment's version.
        """
        num_bytes = align(slots[-1].offset + slots[-1].num_bytes) if slots else 0
        request = CreateVersion(key, num_bytes, self._layouts.table(slots).packed)
        answer, fds = await self._link.call(request)
        described = expect(answer, VersionExtent)
        if described.exists:
            close_fds(fds)
            return VersionCopy(described.digest, described.num_bytes, is_new=False)
        memory = self._versions.map(key, fds, num_bytes, writable=True)
        await self._run(lambda: make_huge(memory))
        return memory

    async def commit_version(self, key: VersionKey, buffer: memoryview) -> VersionCopy:
        """What `begin_version` gave is written: it is immutable from now on."""
        digest = await self._run(lambda: hashed(buffer))
        return await self._commit_version(key, buffer, digest)

    async def _commit_version(
        self, key: VersionKey, buffer: memoryview, digest: str
    ) -> VersionCopy:
        await self._link.ask(CommitVersion(key, digest), Done)
        return VersionCopy(digest, len(buffer), is_new=True)

    async def commit_parts(self, key: VersionKey, manifest: VersionParts) -> VersionCopy:
        """All parts of a version are committed, wherever they are: it can be read here from now on.
        Idempotent.

        Raises: CallerError: FAILED_PRECONDITION: a part that is here is another one.
        """
        answer = await self._link.ask(CommitParts(key, manifest), VersionExtent)
        num_bytes = sum(part.num_bytes for part in manifest.parts)
        return VersionCopy(answer.digest, num_bytes, is_new=True)

    async def open(
        self,
        key: VersionKey,
        sources: list[str],
        ticket: Ticket | None = None,
        digest: str = "",
    ) -> Opened:
        """A version, its manifest, or a part, as it lies in host memory; not verified here yet.

        Args:   ticket: that the sources ask for; none is needed for what is on this node.
                digest: what it must have to be fetched; empty: whatever it has there.
        Raises: CallerError: NOT_FOUND: exists nowhere, or only some of it; FAILED_PRECONDITION: a
                source has something else. ResourceError: no source could deliver it.
        """
        return await self._open(OpenVersion(key, sources, ticket, digest))

    async def _open(self, asked: OpenVersion) -> Opened:
        answer, fds = await self._link.call(asked)
        described = expect(answer, VersionExtent)
        memory = self._versions.map(asked.version, fds, described.num_bytes, writable=False)
        return Opened(asked, described, memory, self._layouts.read(described.tensors))

    async def verified(self, opened: Opened) -> Opened:
        """The same; or, where it is bad, what the state manager brings in its place.

        Raises: ResourceError: DATA_LOSS.
        """
        return await self._using(opened, lambda now: verify(now.memory, now.described))

    async def _using(self, opened: Opened, use: Callable[[Opened], None]) -> Opened:
        """Do something that verifies before it changes anything; returns what it was done with.

        Memory that is bad is told to the state manager, which mends it, and then it is done again.
        """
        try:
            await self._run(lambda: use(opened))
            return opened
        except ResourceError as error:
            if error.info.code is not Code.DATA_LOSS:
                raise
            log.warning("%s: it is opened again", error)
        again = await self._open(msgspec.structs.replace(opened.asked, doubted=True))
        await self._run(lambda: use(again))
        return again

    async def scatter(self, pieces: list[tuple[memoryview, Runs]]) -> None:
        """Copy bytes of verified memory to their places in the heap."""
        heap = self._copies.registered_heap()

        def scatter() -> None:
            for memory, runs in pieces:
                devicememory.copy_runs(memory, heap, runs)
            self._on_loaded()

        await self._run(scatter)

    async def load(self, opened: Opened, slots: Sequence[TensorSlot]) -> None:
        """Copy an open version, verified, over these slots of the heap, by tensor name.

        Raises: CallerError: it is of another model. ResourceError: DATA_LOSS; or no source could
                deliver it. Whatever is raised, nothing was written.
        """
        heap = self._copies.registered_heap()
        pairs = self._layouts.paired(opened.table, slots)
        if await self._load_on_device(opened.described, pairs):
            await self._run(self._on_loaded)
            return

        def load(now: Opened) -> None:
            verify(now.memory, now.described)
            pairs = self._layouts.paired(now.table, slots)
            devicememory.scatter(now.memory, heap, pairs)
            self._on_loaded()

        await self._using(opened, load)

    async def hold_version(self, key: VersionKey, applied: int) -> None:
        """The whole heap is this version since `applied`: a frozen one needs no copy of its own."""
        if self._copies.is_frozen:
            await self._run(self._copies.drop_source)
            await self._link.ask(HoldVersion(key, applied), Done)

    async def open_slices(
        self,
        key: VersionKey,
        slices: list[Slice],
        sources: list[PartSources],
        ticket: Ticket | None = None,
    ) -> tuple[memoryview, VersionExtent]:
        """Exactly these slices of a version, verified, each at its offset.

        Args:   sources: of each part; all of them are asked, each for something else.
        Raises: CallerError: a bad slice, or sources that hold different versions. ResourceError:
                DATA_LOSS; or nobody could deliver some of them.
        """
        num_bytes = max((each.offset + each.num_bytes for each in slices), default=0)
        asked = OpenSlices(key, num_bytes, slices, sources, ticket)
        opened = await self._opened_slices(asked)
        try:
            await self._run(lambda: verify(*opened))
        except ResourceError as error:
            if error.info.code is not Code.DATA_LOSS:
                raise
            log.warning("%s: it is opened again", error)
            opened = again = await self._opened_slices(msgspec.structs.replace(asked, doubted=True))
            await self._run(lambda: verify(*again))
        return opened

    async def _opened_slices(self, asked: OpenSlices) -> tuple[memoryview, VersionExtent]:
        answer, fds = await self._link.call(asked)
        described = expect(answer, VersionExtent)
        memory = self._versions.map(asked.version, fds, described.num_bytes, writable=False)
        return memory, described

    async def _handle(
        self, body: StateMessage, fds: list[int]
    ) -> tuple[StateMessage, Sequence[int]]:
        if self._copies.is_frozen and isinstance(body, CopyOut | CopyIn):
            return await self._run(lambda: self._copies.copy_frozen(body, fds)), ()
        if isinstance(body, CopyAside | CopyFrom):
            return await self._run(lambda: self._copies.copy_apart(body, fds)), ()
        close_fds(fds)
        match body:
            case LetGo():
                await self._run(self._copies.drop_source)
                return StillMapped(self._versions.let_go()), ()
            case CopyOut(release=release):
                return await self._run(lambda: self._copies.copy_out(release=release)), ()
            case CopyIn(digest=digest):
                return await self._run(lambda: self._copies.copy_in(digest)), ()
            case Unpin():
                heap, _ = self._copies.registered()
                await self._run(lambda: devicememory.unpin(heap))
                return Done(), ()
        raise CallerError(f"a rank does not answer {type(body).__name__}", field="type")

    async def _run(self, work: Callable[[], Kind]) -> Kind:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
