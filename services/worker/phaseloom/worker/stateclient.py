"""The worker's side of the state manager: the agent's orders and the ranks' copies.

A rank's heap and its host extent are two mappings of the same size: switches are one memcpy each
way, in chunks that are hashed while they are in the cache. Extents are mapped once and kept,
because first touch is ten times slower than a copy. Copies run in a thread and without the GIL: the
event loop goes on.

Both clients outlive the daemon: see `statelink`. Only when their `closed` is done it is gone for
good.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from phaseloom.common.errors import CallerError, Code, InternalError, ResourceError
from phaseloom.common.framing import MAX_FDS, Peer, close_fds
from phaseloom.common.ids import DeploymentKey, VersionKey
from phaseloom.common.statewire import (
    Adopt,
    Adopted,
    AgentHello,
    CommitInitial,
    CommitVersion,
    Copied,
    CopyIn,
    CopyOut,
    CreateVersion,
    Done,
    DropVersions,
    DropWpg,
    HandOver,
    HeapRegistered,
    KeepHandles,
    OpenVersion,
    Prefetch,
    PrepareSeal,
    RankHello,
    RankResume,
    RegisterHeap,
    RegisterWpg,
    Sealed,
    StateMessage,
    StatusReport,
    StatusRequest,
    Switched,
    SwitchIn,
    SwitchOut,
    TensorSlot,
    VersionExtent,
    Welcome,
    WriteSeal,
)
from phaseloom.worker.copying import (
    MappedVersions,
    Mapping,
    copy_hashed,
    gather,
    packed,
    paired,
    resident_bytes,
    scatter,
    verify,
)
from phaseloom.worker.heap import Heap
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
        committed: int = 0,
    ) -> Sealed:
        """Args: committed: seq of the newest committed seal, which is kept."""
        message = WriteSeal(deployment, incarnation, seq, versions, committed)
        return await self._link.ask(message, Sealed)

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
        self._heap: Heap | None = None
        self._slots: list[TensorSlot] = []
        self._extent: Mapping | None = None
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
            ),
            Done,
        )

    async def register_heap(self, heap: Heap, slots: list[TensorSlot]) -> int:
        """Give the heap into the state manager's hands; maps its extent.

        Returns: the seq that the extent holds, from a seal: it comes into the heap at the first
                 switch-in. 0: none, fill the heap and `commit_initial`.
        Raises:  ResourceError: no room; DATA_LOSS: the seal's file is bad. CallerError:
                 FAILED_PRECONDITION, with the numbers: the seal is of another layout.
        """
        answer, fds = await self._link.call(RegisterHeap(heap.num_bytes, slots))
        registered = expect(answer, HeapRegistered)
        if len(fds) != 1:
            close_fds(fds)
            raise InternalError(f"{len(fds)} extents came for one heap")
        self._extent = Mapping(fds[0], heap.num_bytes, writable=True)
        self._heap, self._slots = heap, slots
        if registered.applied:
            self._copied = (registered.applied, "")
            self._is_filled = True
            await self._run(heap.release)
        return registered.applied

    async def commit_initial(self, applied: int = 0) -> None:
        """Copy the filled heap to the extent and release it: the deployment starts offloaded.

        Args: applied: seq that this state stands for, where it came from a checkpoint.
        """
        heap, extent = self._registered()
        digest = await self._run(lambda: copy_hashed(heap.buffer, extent.buffer))
        await self._link.ask(CommitInitial(digest, applied), Done)
        self._copied = (applied, digest)
        self._is_filled = True
        await self._run(heap.release)

    async def create_version(self, key: VersionKey, slots: Sequence[TensorSlot]) -> VersionCopy:
        """Cut a weights version from these slots of the heap. Idempotent by key.

        Raises: ResourceError: no host memory. CallerError: not this deployment's version.
        """
        heap, _ = self._registered()
        places, _ = packed(slots)
        target = await self.begin_version(key, places)
        if isinstance(target, VersionCopy):
            return target
        digest = await self._run(
            lambda: gather(target, heap.buffer, list(zip(slots, places, strict=True)))
        )
        return await self._commit_version(key, target, digest)

    async def begin_version(
        self, key: VersionKey, slots: list[TensorSlot]
    ) -> memoryview | VersionCopy:
        """Memory to write a whole version into, then `commit_version`. Rank 0 only.

        Where the version exists already, what it is. The memory's content is undefined, the gaps
        between tensors included: write them all, so that equal weights have equal digests.

        Args:   slots: of the version, packed: aligned, one after another from offset 0.
        Raises: ResourceError: no host memory. CallerError: not this deployment's version.
        """
        _, num_bytes = packed(slots)
        answer, fds = await self._link.call(CreateVersion(key, num_bytes, slots))
        described = expect(answer, VersionExtent)
        if described.exists:
            close_fds(fds)
            return VersionCopy(described.digest, described.num_bytes, is_new=False)
        return self._versions.map(fds, num_bytes, writable=True)

    async def commit_version(self, key: VersionKey, buffer: memoryview) -> VersionCopy:
        """What `begin_version` gave is written: it is immutable from now on."""
        digest = await self._run(lambda: xxhash.xxh3_128(buffer).hexdigest())
        return await self._commit_version(key, buffer, digest)

    async def _commit_version(
        self, key: VersionKey, buffer: memoryview, digest: str
    ) -> VersionCopy:
        await self._link.ask(CommitVersion(key, digest), Done)
        return VersionCopy(digest, len(buffer), is_new=True)

    async def open_version(
        self, key: VersionKey, sources: list[str], slots: Sequence[TensorSlot]
    ) -> tuple[memoryview, str]:
        """A whole version to read, verified, and its digest.

        The memory is the version's own: its content stands while the version is kept.

        Args:   slots: the tensors that it must consist of; their offsets do not matter.
        Raises: CallerError: it is of another model, or NOT_FOUND: exists nowhere. ResourceError:
                DATA_LOSS; or no source could deliver it.
        """
        described, source = await self._open(key, sources)
        paired(described.tensors, slots)
        await self._run(lambda: verify(source, described))
        return source, described.digest

    async def load_version(
        self, key: VersionKey, sources: list[str], slots: Sequence[TensorSlot]
    ) -> str:
        """Copy a version, verified, over these slots of the heap, by tensor name.

        Returns: the version's digest.
        Raises:  as `open_version`; whatever is raised, nothing was written.
        """
        heap, _ = self._registered()
        described, source = await self._open(key, sources)
        pairs = paired(described.tensors, slots)

        def load() -> None:
            verify(source, described)
            scatter(source, heap.buffer, pairs)

        await self._run(load)
        return described.digest

    async def _open(self, key: VersionKey, sources: list[str]) -> tuple[VersionExtent, memoryview]:
        answer, fds = await self._link.call(OpenVersion(key, sources))
        described = expect(answer, VersionExtent)
        return described, self._versions.map(fds, described.num_bytes, writable=False)

    async def _handle(
        self, body: StateMessage, fds: list[int]
    ) -> tuple[StateMessage, Sequence[int]]:
        close_fds(fds)
        match body:
            case CopyOut(release=release):
                return await self._run(lambda: self._copy_out(release=release)), ()
            case CopyIn(digest=digest):
                return await self._run(lambda: self._copy_in(digest)), ()
        raise CallerError(f"a rank does not answer {type(body).__name__}", field="type")

    def _copy_out(self, *, release: bool) -> Copied:
        heap, extent = self._registered()
        started, applied = time.monotonic(), self._applied()
        digest = copy_hashed(heap.buffer, extent.buffer)
        if release:
            heap.release()
            self._is_resident = False
        self._copied = (applied, digest)
        return Copied(digest, applied, resident_bytes(heap), time.monotonic() - started)

    def _copy_in(self, expected: str) -> Copied:
        heap, extent = self._registered()
        started = time.monotonic()
        try:
            digest = copy_hashed(extent.buffer, heap.buffer)
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
        return Copied(digest, applied, resident_bytes(heap), time.monotonic() - started)

    async def _run(self, work: Callable[[], Kind]) -> Kind:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _registered(self) -> tuple[Heap, Mapping]:
        if self._heap is None or self._extent is None:
            raise CallerError("no heap is registered", code=Code.FAILED_PRECONDITION)
        return self._heap, self._extent


async def _ask(peer: Peer[StateMessage], body: StateMessage, kind: type[Kind]) -> Kind:
    answer, fds = await peer.call(body)
    close_fds(fds)
    return expect(answer, kind)
