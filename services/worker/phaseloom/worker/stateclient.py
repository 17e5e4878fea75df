"""The worker's side of the state manager: the agent's orders and the ranks' copies.

A rank's heap and its host extent are two mappings: switches are one memcpy each way, by several
threads; what comes in is hashed while it is in the cache. Extents are mapped once and kept, because
first touch is ten times slower than a copy. Copies run in a thread and without the GIL: the event
loop goes on.

Both clients outlive the daemon: see `statelink`. Only when their `closed` is done it is gone for
good.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from phaseloom.common.errors import CallerError, Code, InternalError, ResourceError
from phaseloom.common.framing import MAX_FDS, Peer, close_fds
from phaseloom.common.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.common.messages import Durability, FilesTicket, Ticket
from phaseloom.common.statewire import (
    Adopt,
    Adopted,
    AgentHello,
    BringState,
    CheckpointRead,
    CheckpointWritten,
    CommitInitial,
    CommitVersion,
    Copied,
    CopyAside,
    CopyFrom,
    CopyIn,
    CopyOut,
    CreateVersion,
    CutState,
    CutTaken,
    Done,
    DropVersions,
    DropWpg,
    HandOver,
    HeapRegistered,
    HoldVersion,
    KeepHandles,
    LetGo,
    OnDevice,
    OpenOnDevice,
    OpenSlices,
    OpenVersion,
    PartSources,
    Prefetch,
    PrepareSeal,
    PruneCheckpoints,
    RankHello,
    RankResume,
    ReadCheckpoint,
    RegisterHeap,
    RegisterWpg,
    Sealed,
    ShareOnDevice,
    Slice,
    StateMessage,
    StatusReport,
    StatusRequest,
    StillMapped,
    Switched,
    SwitchIn,
    SwitchOut,
    TensorSlot,
    Unpin,
    VersionExtent,
    Welcome,
    WriteCheckpoint,
    WriteSeal,
    extent_bytes,
    host_start,
)
from phaseloom.worker import devicememory
from phaseloom.worker.copying import (
    MappedVersions,
    Mapping,
    copy,
    hashed,
    packed,
    paired,
    verify,
)
from phaseloom.worker.devicememory import DeviceMemory
from phaseloom.worker.heap import align
from phaseloom.worker.statelink import RECONNECT_S, StateLink, expect

log = logging.getLogger(__name__)

Kind = TypeVar("Kind")


class AgentStateClient:
    """The agent's orders to its node's state manager. Every call raises what the answer says.

    It keeps the daemon's handles, and hands them to the daemon's next life.
    """

    def __init__(self, path: str | Path, secret: str, reconnect_s: float) -> None:
        self._secret = secret
        self._index = ""
        self._handles: dict[int, int] = {}
        """handle → descriptor"""
        self._link = StateLink(path, self._greet, self._handle, reconnect_s)

    @classmethod
    async def connect(
        cls, path: str | Path, secret: str, *, reconnect_s: float = RECONNECT_S
    ) -> AgentStateClient:
        """Raises: ResourceError: nobody listens. CallerError: PERMISSION_DENIED."""
        client = cls(path, secret, reconnect_s)
        await client._link.connect()
        return client

    @property
    def closed(self) -> asyncio.Future[str]:
        """Done when the state manager is gone for good."""
        return self._link.closed

    async def close(self) -> None:
        await self._link.close()
        close_fds(self._handles.values())
        self._handles.clear()

    async def _greet(self, peer: Peer[StateMessage]) -> None:
        welcome = await _ask(peer, AgentHello(self._secret, self._index), Welcome)
        if not welcome.adopts:
            return
        handles = list(self._handles)
        for start in range(0, len(handles), MAX_FDS):
            some = handles[start : start + MAX_FDS]
            await peer.call(HandOver(some), [self._handles[handle] for handle in some])
        adopted = await _ask(peer, Adopt(), Adopted)
        for deployment in adopted.lost:
            log.warning("%s was lost with the state manager", deployment)

    async def _handle(
        self, body: StateMessage, fds: list[int]
    ) -> tuple[StateMessage, Sequence[int]]:
        if not isinstance(body, KeepHandles) or len(body.keep) != len(fds):
            close_fds(fds)
            raise CallerError(f"an agent does not answer this {type(body).__name__}", field="type")
        if body.index != self._index:
            close_fds(self._handles.values())
            self._handles.clear()
            self._index = body.index
        close_fds(self._handles.pop(handle) for handle in body.drop if handle in self._handles)
        self._handles.update(zip(body.keep, fds, strict=True))
        return Done(), ()

    async def register_wpg(
        self,
        tokens: list[str],
        deployment: DeploymentKey,
        incarnation: int,
        devices: list[int],
        seal_seq: int,
    ) -> None:
        """Announce the ranks of one life, rank 0 first; fences older incarnations.

        Raises: ResourceError: ABORTED, fenced. CallerError: tokens or devices that cannot be.
        """
        message = RegisterWpg(tokens, deployment, incarnation, devices, seal_seq)
        await self._link.ask(message, Done)

    async def switch_in(
        self,
        deployment: DeploymentKey,
        incarnation: int,
        epoch: int,
        displaces: list[DeploymentKey],
        traceparent: str = "",
    ) -> Switched:
        """Raises: ResourceError: no room, stale, or undone after a failure."""
        message = SwitchIn(deployment, incarnation, epoch, displaces, traceparent)
        return await self._link.ask(message, Switched)

    async def switch_out(self, deployment: DeploymentKey, incarnation: int, epoch: int) -> Switched:
        return await self._link.ask(SwitchOut(deployment, incarnation, epoch), Switched)

    async def prepare_seal(self, deployment: DeploymentKey, incarnation: int, seq: int) -> None:
        """Between operations only; when it returns, the deployment may run on."""
        await self._link.ask(PrepareSeal(deployment, incarnation, seq), Done)

    async def write_seal(
        self,
        deployment: DeploymentKey,
        incarnation: int,
        seq: int,
        versions: list[int],
        *,
        committed: int = 0,
        durability: Durability = Durability.NODE,
        replicas: dict[NodeId, str] | None = None,
        ticket: FilesTicket | None = None,
    ) -> Sealed:
        """Args: committed: seq of the newest committed seal, which is kept."""
        message = WriteSeal(
            deployment,
            incarnation,
            seq,
            versions,
            committed,
            durability,
            replicas or {},
            ticket,
        )
        return await self._link.ask(message, Sealed)

    async def bring_state(self, request: BringState) -> None:
        """Raises: ResourceError: what could not be brought, and why."""
        await self._link.ask(request, Done)

    async def drop_wpg(
        self, deployment: DeploymentKey, incarnation: int, *, forget: bool = False
    ) -> None:
        """Its ranks are dead and reaped."""
        await self._link.ask(DropWpg(deployment, incarnation, forget), Done)

    async def prefetch(
        self, deployment: DeploymentKey, incarnation: int, in_s: float | None
    ) -> None:
        """Say when it is predicted to be used next; None: never mind."""
        await self._link.ask(Prefetch(deployment, incarnation, in_s), Done)

    async def drop_versions(self, versions: list[VersionKey]) -> None:
        await self._link.ask(DropVersions(versions), Done)

    async def status(self) -> StatusReport:
        return await self._link.ask(StatusRequest(), StatusReport)


@dataclass(frozen=True, slots=True)
class VersionCopy:
    """A weights version as it stands in host memory."""

    digest: str
    num_bytes: int
    is_new: bool
    """False: it existed already, and nothing was copied."""


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
        self._applied = applied
        self._on_loaded = on_loaded
        self._own_executor = None if executor else ThreadPoolExecutor(1, "state-copy")
        self._executor = executor or self._own_executor
        self._link = StateLink(path, self._greet, self._handle, reconnect_s)
        self._heap: DeviceMemory | None = None
        self._slots: list[TensorSlot] = []
        self._host_bytes = 0
        self._extent: Mapping | None = None
        self._source: tuple[tuple[int, int], Mapping] | None = None
        """Of a frozen heap: the extent that was loaded last, by device and inode."""
        self._is_frozen = False
        self._is_filled = False
        self._is_resident = False
        self._copied: tuple[int, str] = (0, "")
        """seq and digest of the host copy, as far as this rank knows."""
        self._versions = MappedVersions()

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
        if self._heap is None:
            await _ask(peer, RankHello(self._token), Done)
            return
        applied, digest = self._copied
        await _ask(
            peer,
            RankResume(
                token=self._token,
                heap_bytes=self._heap.num_bytes,
                tensors=self._slots,
                filled=self._is_filled,
                resident=self._is_resident,
                applied=applied,
                digest=digest,
                host_bytes=self._host_bytes,
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
            slots,
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
        for fd in fds:
            self._extent = Mapping(fd, extent_bytes(heap.num_bytes, host_bytes), writable=True)
        self._heap, self._slots, self._host_bytes = heap, slots, host_bytes
        self._is_frozen = frozen
        if registered.applied:
            self._copied = (registered.applied, "")
            self._is_filled = True
            await self._run(heap.release)
        return registered.applied

    @property
    def host_memory(self) -> memoryview:
        """State that is there and never on the device; zeroes, or what a seal holds, at first.

        It stays where it is for as long as this rank lives. Nothing may write it but an operation.
        """
        heap, extent = self._registered()
        return extent.buffer[host_start(heap.num_bytes) :]

    async def commit_initial(self, applied: int = 0) -> None:
        """Copy the filled heap to the extent and release it: the deployment starts offloaded.

        Args: applied: seq that this state stands for, where it came from a checkpoint.
        """
        heap, extent = self._registered()
        await self._run(lambda: self._out(heap, extent))
        digest = await self._run(lambda: hashed(extent.buffer))
        await self._commit_initial(digest, applied)

    async def commit_checkpoint(self, name: str, applied: int) -> None:
        """Instead of `commit_initial`: have the extent filled from a checkpoint, whatever the heap
        holds. Raises: as `read_checkpoint`."""
        read = await self._link.ask(ReadCheckpoint(name), CheckpointRead)
        await self._commit_initial(read.digest, applied)

    async def _commit_initial(self, digest: str, applied: int) -> None:
        heap, extent = self._registered()
        if self._is_frozen:
            await self._run(extent.close)
            self._extent = None
        await self._link.ask(CommitInitial(digest, applied), Done)
        self._copied = (applied, digest)
        self._is_filled = True
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
        return (await self._link.ask(ReadCheckpoint(name), CheckpointRead)).weights_sha256

    async def prune_checkpoints(self, keep: int, needed: list[str]) -> None:
        await self._link.ask(PruneCheckpoints(keep, needed), Done)

    async def create_version(self, key: VersionKey, slots: Sequence[TensorSlot]) -> VersionCopy:
        """Cut a weights version from these slots of the heap. Idempotent by key.

        Raises: ResourceError: no host memory. CallerError: not this deployment's version.
        """
        heap = self._registered_heap()
        places, _ = packed(slots)
        target = await self.begin_version(key, places)
        if isinstance(target, VersionCopy):
            return target
        pairs = list(zip(slots, places, strict=True))
        digest = await self._run(lambda: devicememory.gather(heap, target, pairs))
        copy = await self._commit_version(key, target, digest)
        if devicememory.can_share(heap) and not self._is_frozen:
            await self._share_on_device(key, len(target), pairs)
        return copy

    async def _share_on_device(
        self, key: VersionKey, num_bytes: int, pairs: list[tuple[TensorSlot, TensorSlot]]
    ) -> None:
        """For who syncs on the same device: from there, without the host."""
        heap = self._registered_heap()
        fd = await self._run(lambda: devicememory.share(heap, num_bytes, pairs))
        if fd is None:
            return
        try:
            await self._link.call(ShareOnDevice(key), [fd])
        finally:
            os.close(fd)

    async def _load_on_device(
        self, described: VersionExtent, pairs: list[tuple[TensorSlot, TensorSlot]]
    ) -> bool:
        """False: it is not on this device; nothing has changed."""
        heap = self._registered_heap()
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
        """Memory to write a whole version into, then `commit_version`. Rank 0 only.

        Where the version exists already, what it is. The memory's content is undefined, the gaps
        between tensors included: write them all, so that equal weights have equal digests.

        Args:   slots: of the version, packed: aligned, one after another from offset 0.
        Raises: ResourceError: no host memory. CallerError: not this deployment's version.
        """
        num_bytes = align(slots[-1].offset + slots[-1].num_bytes) if slots else 0
        answer, fds = await self._link.call(CreateVersion(key, num_bytes, slots))
        described = expect(answer, VersionExtent)
        if described.exists:
            close_fds(fds)
            return VersionCopy(described.digest, described.num_bytes, is_new=False)
        return self._versions.map(key, fds, num_bytes, writable=True)

    async def commit_version(self, key: VersionKey, buffer: memoryview) -> VersionCopy:
        """What `begin_version` gave is written: it is immutable from now on."""
        digest = await self._run(lambda: hashed(buffer))
        return await self._commit_version(key, buffer, digest)

    async def _commit_version(
        self, key: VersionKey, buffer: memoryview, digest: str
    ) -> VersionCopy:
        await self._link.ask(CommitVersion(key, digest), Done)
        return VersionCopy(digest, len(buffer), is_new=True)

    async def open_version(
        self,
        key: VersionKey,
        sources: list[str],
        slots: Sequence[TensorSlot],
        ticket: Ticket | None = None,
    ) -> tuple[memoryview, str]:
        """A whole version to read, verified, and its digest.

        The memory is the version's own: its content stands while the version is kept.

        Args:   slots: the tensors that it must consist of; their offsets do not matter.
                ticket: that the sources ask for; none is needed for what is on this node.
        Raises: CallerError: it is of another model, or NOT_FOUND: exists nowhere. ResourceError:
                DATA_LOSS; or no source could deliver it.
        """
        described, source = await self._open(key, sources, ticket)
        paired(described.tensors, slots)
        await self._run(lambda: verify(source, described))
        return source, described.digest

    async def load_version(
        self,
        key: VersionKey,
        sources: list[str],
        slots: Sequence[TensorSlot],
        ticket: Ticket | None = None,
    ) -> str:
        """Copy a version, verified, over these slots of the heap, by tensor name.

        Returns: the version's digest.
        Raises:  as `open_version`; whatever is raised, nothing was written.
        """
        heap = self._registered_heap()
        described, source = await self._open(key, sources, ticket)
        pairs = paired(described.tensors, slots)
        if await self._load_on_device(described, pairs):
            return described.digest

        def load() -> None:
            verify(source, described)
            devicememory.scatter(source, heap, pairs)

        await self._run(load)
        return described.digest

    async def hold_version(self, key: VersionKey, applied: int) -> None:
        """The whole heap is this version since `applied`: a frozen one needs no copy of its own."""
        if self._is_frozen:
            await self._run(self._drop_source)
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
        answer, fds = await self._link.call(OpenSlices(key, num_bytes, slices, sources, ticket))
        described = expect(answer, VersionExtent)
        source = self._versions.map(key, fds, described.num_bytes, writable=False)
        await self._run(lambda: verify(source, described))
        return source, described

    async def _open(
        self, key: VersionKey, sources: list[str], ticket: Ticket | None
    ) -> tuple[VersionExtent, memoryview]:
        answer, fds = await self._link.call(OpenVersion(key, sources, ticket))
        described = expect(answer, VersionExtent)
        return described, self._versions.map(key, fds, described.num_bytes, writable=False)

    async def _handle(
        self, body: StateMessage, fds: list[int]
    ) -> tuple[StateMessage, Sequence[int]]:
        if self._is_frozen and isinstance(body, CopyOut | CopyIn):
            return await self._run(lambda: self._copy_frozen(body, fds)), ()
        if isinstance(body, CopyAside | CopyFrom):
            return await self._run(lambda: self._copy_apart(body, fds)), ()
        close_fds(fds)
        match body:
            case LetGo():
                await self._run(self._drop_source)
                return StillMapped(self._versions.let_go()), ()
            case CopyOut(release=release):
                return await self._run(lambda: self._copy_out(release=release)), ()
            case CopyIn(digest=digest):
                return await self._run(lambda: self._copy_in(digest)), ()
            case Unpin():
                heap, _ = self._registered()
                await self._run(lambda: devicememory.unpin(heap))
                return Done(), ()
        raise CallerError(f"a rank does not answer {type(body).__name__}", field="type")

    def _copy_frozen(self, order: CopyOut | CopyIn, fds: list[int]) -> Copied:
        """From or to the extent that came along; nobody has it mapped writable afterwards."""
        heap = self._registered_heap()
        if len(fds) > 1 or (isinstance(order, CopyIn) and not fds):
            close_fds(fds)
            raise InternalError(f"{len(fds)} extents came for one copy")
        if isinstance(order, CopyOut) and not fds:
            return self._stay_with_copy(heap, order)
        if isinstance(order, CopyIn):
            self._extent = self._source_of(fds[0], heap.num_bytes)
            try:
                return self._copy_in(order.digest)
            finally:
                self._extent = None
        self._drop_source()
        self._extent = extent = Mapping(fds[0], heap.num_bytes, writable=True)
        try:
            copied = self._copy_out(release=order.release)
            digest = hashed(extent.buffer)
            self._copied = (copied.applied, digest)
            return msgspec.structs.replace(copied, digest=digest)
        finally:
            self._extent = None
            extent.close()

    def _copy_apart(self, order: CopyAside | CopyFrom, fds: list[int]) -> Copied:
        """To or from memory of its own, which is mapped no longer than that takes."""
        heap = self._registered_heap()
        if len(fds) != 1:
            close_fds(fds)
            raise InternalError(f"{len(fds)} extents came for one copy")
        started = time.monotonic()
        apart = Mapping(fds[0], extent_bytes(heap.num_bytes, self._host_bytes), writable=True)
        try:
            digest = ""
            if isinstance(order, CopyAside):
                devicememory.copy_out(heap, apart.buffer)
                if self._host_bytes:
                    copy(self.host_memory, apart.buffer[host_start(heap.num_bytes) :])
            else:
                digest = self._replace(heap, apart.buffer, order.digest)
            left = devicememory.resident_bytes(heap)
            return Copied(digest, self._applied(), left, time.monotonic() - started)
        finally:
            apart.close()

    def _replace(self, heap: DeviceMemory, source: memoryview, expected: str) -> str:
        digest = devicememory.copy_in(source, heap)
        if digest != expected:
            raise ResourceError(f"what came is {digest}, not {expected}", code=Code.DATA_LOSS)
        if self._host_bytes:
            copy(source[host_start(heap.num_bytes) :], self.host_memory)
        self._on_loaded()
        return digest

    def _source_of(self, fd: int, num_bytes: int) -> Mapping:
        """What the host copy is read from. Takes `fd`. Kept for the next load, for mapping it takes
        a third of the time that copying does; `_drop_source` gives it up."""
        status = os.fstat(fd)
        identity = (status.st_dev, status.st_ino)
        if self._source is not None and self._source[0] == identity:
            close_fds([fd])
            return self._source[1]
        self._drop_source()
        mapping = Mapping(fd, num_bytes, writable=False)
        self._source = (identity, mapping)
        return mapping

    def _drop_source(self) -> None:
        if self._source is not None:
            self._source[1].close()
            self._source = None

    def _stay_with_copy(self, heap: DeviceMemory, order: CopyOut) -> Copied:
        """Nothing is copied where the host copy has all that the heap has."""
        started, applied = time.monotonic(), self._applied()
        if applied != order.whole_at:
            return Copied("", applied, devicememory.resident_bytes(heap), 0.0, changed=True)
        if order.release:
            heap.release()
            self._is_resident = False
        self._copied = (applied, order.digest)
        left = devicememory.resident_bytes(heap)
        return Copied(order.digest, applied, left, time.monotonic() - started)

    def _copy_out(self, *, release: bool) -> Copied:
        heap, extent = self._registered()
        started, applied = time.monotonic(), self._applied()
        self._out(heap, extent)
        if release:
            heap.release()
            self._is_resident = False
        # The state manager takes the digest, when the device has the next one to do.
        self._copied = (applied, "")
        return Copied("", applied, devicememory.resident_bytes(heap), time.monotonic() - started)

    def _out(self, heap: DeviceMemory, extent: Mapping) -> None:
        self._pin(heap, extent)
        devicememory.copy_out(heap, extent.buffer)

    def _pin(self, heap: DeviceMemory, extent: Mapping) -> None:
        """What is mapped for one copy only is not worth it."""
        if not self._is_frozen:
            devicememory.pin(heap, extent.buffer)

    def _copy_in(self, expected: str) -> Copied:
        heap, extent = self._registered()
        started = time.monotonic()
        try:
            self._pin(heap, extent)
            digest = devicememory.copy_in(extent.buffer, heap)
            if digest != expected:
                raise ResourceError(
                    f"the host copy's digest is {digest}, not {expected}", code=Code.DATA_LOSS
                )
            self._on_loaded()
            applied = self._applied()
        except BaseException:
            # A failed load counts as not resident.
            heap.release()
            raise
        self._is_resident = True
        there = devicememory.resident_bytes(heap)
        return Copied(digest, applied, there, time.monotonic() - started)

    async def _run(self, work: Callable[[], Kind]) -> Kind:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _registered(self) -> tuple[DeviceMemory, Mapping]:
        heap = self._registered_heap()
        if self._extent is None:
            raise CallerError("a frozen heap has no extent", code=Code.FAILED_PRECONDITION)
        return heap, self._extent

    def _registered_heap(self) -> DeviceMemory:
        if self._heap is None:
            raise CallerError("no heap is registered", code=Code.FAILED_PRECONDITION)
        return self._heap


async def _ask(peer: Peer[StateMessage], body: StateMessage, kind: type[Kind]) -> Kind:
    answer, fds = await peer.call(body)
    close_fds(fds)
    return expect(answer, kind)
