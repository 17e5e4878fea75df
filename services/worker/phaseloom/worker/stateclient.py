"""The worker's side of the state manager: the agent's orders and the ranks' copies.

A rank's heap and its host extent are two mappings of the same size: switches are one memcpy each
way, in chunks that are hashed while they are in the cache. Extents are mapped once and kept,
because first touch is ten times slower than a copy. Copies run in a thread and without the GIL: the
event loop goes on.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from phaseloom.common.errors import CallerError, Code, InternalError, ResourceError
from phaseloom.common.framing import Handler, Peer, close_fds
from phaseloom.common.ids import DeploymentKey, VersionKey
from phaseloom.common.statewire import (
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
    HeapRegistered,
    OpenVersion,
    PrepareSeal,
    RankHello,
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
    WriteSeal,
)
from phaseloom.worker.heap import PAGE_BYTES, Heap, align

_CHUNK_BYTES = 1024 * 1024
_MAX_MAPPED_VERSIONS = 3
"""Mappings of version extents kept for reuse; each keeps its extent's memory alive."""

Kind = TypeVar("Kind")


class AgentStateClient:
    """The agent's orders to its node's state manager. Every call raises what the answer says."""

    def __init__(self, peer: Peer[StateMessage]) -> None:
        self._peer = peer

    @classmethod
    async def connect(cls, path: str | Path, secret: str) -> AgentStateClient:
        """Raises: ResourceError: nobody listens. CallerError: PERMISSION_DENIED."""
        return cls(await _greet(path, AgentHello(secret)))

    @property
    def closed(self) -> asyncio.Future[str]:
        """Done when the state manager is gone."""
        return self._peer.closed

    async def close(self) -> None:
        await self._peer.close()

    async def register_wpg(
        self, token: str, deployment: DeploymentKey, incarnation: int, device: int, seal_seq: int
    ) -> None:
        """Announce a rank; fences older incarnations. Raises: ResourceError: ABORTED, fenced."""
        message = RegisterWpg(token, deployment, incarnation, device, seal_seq)
        await _ask(self._peer, message, Done)

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
        return await _ask(self._peer, message, Switched)

    async def switch_out(self, deployment: DeploymentKey, incarnation: int, epoch: int) -> Switched:
        return await _ask(self._peer, SwitchOut(deployment, incarnation, epoch), Switched)

    async def prepare_seal(self, deployment: DeploymentKey, incarnation: int, seq: int) -> None:
        """Between operations only; when it returns, the deployment may run on."""
        await _ask(self._peer, PrepareSeal(deployment, incarnation, seq), Done)

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
        return await _ask(self._peer, message, Sealed)

    async def drop_wpg(
        self, deployment: DeploymentKey, incarnation: int, *, forget: bool = False
    ) -> None:
        """Its ranks are dead and reaped."""
        await _ask(self._peer, DropWpg(deployment, incarnation, forget), Done)

    async def drop_versions(self, versions: list[VersionKey]) -> None:
        await _ask(self._peer, DropVersions(versions), Done)

    async def status(self) -> StatusReport:
        return await _ask(self._peer, StatusRequest(), StatusReport)


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
        applied: Callable[[], int],
        on_loaded: Callable[[], None],
        executor: Executor | None,
    ) -> None:
        self._applied = applied
        self._on_loaded = on_loaded
        self._own_executor = None if executor else ThreadPoolExecutor(1, "state-copy")
        self._executor = executor or self._own_executor
        self._peer: Peer[StateMessage] | None = None
        self._heap: Heap | None = None
        self._extent: _Mapping | None = None
        self._versions: OrderedDict[tuple[int, int, bool], _Mapping] = OrderedDict()

    @classmethod
    async def connect(
        cls,
        path: str | Path,
        token: str,
        *,
        applied: Callable[[], int],
        on_loaded: Callable[[], None],
        executor: Executor | None = None,
    ) -> RankStateClient:
        """Join the state manager.

        Args:   applied: seq of the last mutating operation in the heap, asked at each copy out.
                on_loaded: called in the executor after the heap's bytes were replaced by a load.
                executor: one thread, in which all copies run. That of the backend, so that copies
                    and operations exclude each other; None: one of its own. Calls of this client
                    must not be waited for inside it.
        Raises: ResourceError: nobody listens. CallerError: PERMISSION_DENIED.
        """
        client = cls(applied, on_loaded, executor)
        client._peer = await _greet(path, RankHello(token), client._handle)
        return client

    @property
    def closed(self) -> asyncio.Future[str]:
        return self._connected().closed

    async def close(self) -> None:
        """Leave; a copy under way ends first."""
        await self._connected().close()
        if self._own_executor is not None:
            self._own_executor.shutdown()

    async def register_heap(self, heap: Heap, slots: list[TensorSlot]) -> int:
        """Give the heap into the state manager's hands; maps its extent.

        Returns: the seq that the extent holds, from a seal: it comes into the heap at the first
                 switch-in. 0: none, fill the heap and `commit_initial`.
        Raises:  ResourceError: no room; DATA_LOSS: the seal's file is bad.
        """
        answer, fds = await self._connected().call(RegisterHeap(heap.num_bytes, slots))
        registered = _as(answer, HeapRegistered)
        if len(fds) != 1:
            close_fds(fds)
            raise InternalError(f"{len(fds)} extents came for one heap")
        self._extent = _Mapping(fds[0], heap.num_bytes, writable=True)
        self._heap = heap
        if registered.applied:
            await self._run(heap.release)
        return registered.applied

    async def commit_initial(self) -> None:
        """Copy the filled heap to the extent and release it: the deployment starts offloaded."""
        heap, extent = self._registered()
        digest = await self._run(lambda: copy_hashed(heap.buffer, extent.buffer))
        await _ask(self._connected(), CommitInitial(digest), Done)
        await self._run(heap.release)

    async def create_version(self, key: VersionKey, slots: Sequence[TensorSlot]) -> VersionCopy:
        """Cut a weights version from these slots of the heap. Idempotent by key.

        Raises: ResourceError: no host memory. CallerError: not this deployment's version.
        """
        heap, _ = self._registered()
        packed, num_bytes = _packed(slots)
        answer, fds = await self._connected().call(CreateVersion(key, num_bytes, packed))
        described = _as(answer, VersionExtent)
        if described.exists:
            close_fds(fds)
            return VersionCopy(described.digest, described.num_bytes, is_new=False)
        target = self._map_version(fds, num_bytes, writable=True)
        digest = await self._run(
            lambda: _gather(target, heap.buffer, list(zip(slots, packed, strict=True)))
        )
        await _ask(self._connected(), CommitVersion(key, digest), Done)
        return VersionCopy(digest, num_bytes, is_new=True)

    async def load_version(
        self, key: VersionKey, sources: list[str], slots: Sequence[TensorSlot]
    ) -> str:
        """Copy a version, verified, over these slots of the heap, by tensor name.

        Returns: the version's digest.
        Raises:  CallerError: it is of another model; nothing was written. ResourceError: DATA_LOSS,
                 nothing was written; or no source could deliver it.
        """
        heap, _ = self._registered()
        answer, fds = await self._connected().call(OpenVersion(key, sources))
        described = _as(answer, VersionExtent)
        source = self._map_version(fds, described.num_bytes, writable=False)
        pairs = _paired(described.tensors, slots)
        await self._run(lambda: _scatter(source, described, heap.buffer, pairs))
        return described.digest

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
        return Copied(digest, applied, _resident_bytes(heap), time.monotonic() - started)

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
        return Copied(digest, applied, _resident_bytes(heap), time.monotonic() - started)

    def _map_version(self, fds: list[int], num_bytes: int, *, writable: bool) -> memoryview:
        """This extent's memory: through the known mapping where it was mapped before."""
        if len(fds) != 1:
            close_fds(fds)
            raise InternalError(f"{len(fds)} extents came for one version")
        status = os.fstat(fds[0])
        identity = (status.st_dev, status.st_ino, writable)
        mapping = self._versions.pop(identity, None)
        if mapping is None or len(mapping.buffer) < num_bytes:
            mapping = _Mapping(fds[0], num_bytes, writable=writable)
        else:
            close_fds(fds)
        self._versions[identity] = mapping
        while len(self._versions) > _MAX_MAPPED_VERSIONS:
            self._versions.popitem(last=False)
        return mapping.buffer[:num_bytes]

    async def _run(self, work: Callable[[], Kind]) -> Kind:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _connected(self) -> Peer[StateMessage]:
        assert self._peer is not None
        return self._peer

    def _registered(self) -> tuple[Heap, _Mapping]:
        if self._heap is None or self._extent is None:
            raise CallerError("no heap is registered", code=Code.FAILED_PRECONDITION)
        return self._heap, self._extent


class _Mapping:
    """An extent in this process's memory. Unmapped when the last reference is gone."""

    def __init__(self, fd: int, num_bytes: int, *, writable: bool) -> None:
        """Takes `fd` and closes it: the mapping outlives it."""
        mapped_bytes = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
        try:
            # Private where it is read-only: nothing is ever written through it, and ctypes takes
            # the address of writable mappings only. Unwritten private pages are the shared ones.
            flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
            self.buffer = memoryview(mmap.mmap(fd, mapped_bytes, flags=flags))[:num_bytes]
        finally:
            os.close(fd)


def _resident_bytes(heap: Heap) -> int:
    """What is not known counts as resident: the state manager then loads the copy back."""
    try:
        return heap.resident_bytes()
    except OSError:
        return heap.num_bytes


def copy_hashed(source: memoryview, target: memoryview) -> str:
    """Copy `source` over `target`; the xxh3-128 of what was written, in hex. As fast as memcpy."""
    digest = xxhash.xxh3_128()
    _copy(source, target, digest)
    return digest.hexdigest()


def _copy(source: memoryview, target: memoryview, digest: xxhash.xxh3_128) -> None:
    """Each chunk is hashed where it was written, while it is still in the cache.

    Neither the copy nor the hash holds the GIL; slice assignment would.
    """
    source_address, target_address = _address(source), _address(target)
    for start in range(0, len(source), _CHUNK_BYTES):
        end = min(start + _CHUNK_BYTES, len(source))
        ctypes.memmove(target_address + start, source_address + start, end - start)
        digest.update(target[start:end])


def _address(view: memoryview) -> int:
    return ctypes.addressof((ctypes.c_char * len(view)).from_buffer(view)) if len(view) else 0


def _gather(
    target: memoryview, heap: memoryview, pairs: list[tuple[TensorSlot, TensorSlot]]
) -> str:
    """Copy heap slots to their places in a version; the gaps between become zeroes.

    So that equal weights have equal digests, whatever the extent held before.
    """
    digest = xxhash.xxh3_128()
    end = 0
    for slot, place in pairs:
        _clear(target[end : place.offset], digest)
        end = place.offset + place.num_bytes
        _copy(heap[slot.offset : slot.offset + slot.num_bytes], target[place.offset : end], digest)
    _clear(target[end:], digest)
    return digest.hexdigest()


def _clear(gap: memoryview, digest: xxhash.xxh3_128) -> None:
    gap[:] = bytes(len(gap))
    digest.update(gap)


def _scatter(
    source: memoryview,
    described: VersionExtent,
    heap: memoryview,
    pairs: list[tuple[TensorSlot, TensorSlot]],
) -> None:
    """Verify a version, then copy its tensors to their slots of the heap."""
    digest = xxhash.xxh3_128(source).hexdigest()
    if digest != described.digest:
        raise ResourceError(
            f"version {described.version} has digest {digest}, not {described.digest}",
            code=Code.DATA_LOSS,
        )
    source_address, heap_address = _address(source), _address(heap)
    for place, slot in pairs:
        ctypes.memmove(heap_address + slot.offset, source_address + place.offset, slot.num_bytes)


def _packed(slots: Sequence[TensorSlot]) -> tuple[list[TensorSlot], int]:
    """The same tensors one after another from offset 0, and their bytes."""
    packed = []
    end = 0
    for slot in slots:
        packed.append(TensorSlot(slot.name, slot.role, slot.dtype, slot.shape, end, slot.num_bytes))
        end = align(end + slot.num_bytes)
    return packed, end


def _paired(
    tensors: list[TensorSlot], slots: Sequence[TensorSlot]
) -> list[tuple[TensorSlot, TensorSlot]]:
    """Each slot with the version's tensor of its name. Raises: CallerError: not the same model."""
    by_name = {tensor.name: tensor for tensor in tensors}
    if by_name.keys() != {slot.name for slot in slots}:
        odd = sorted(by_name.keys() ^ {slot.name for slot in slots})
        raise CallerError(
            f"the version is of another model: {', '.join(odd[:3])} is on one side only",
            code=Code.FAILED_PRECONDITION,
        )
    pairs = [(by_name[slot.name], slot) for slot in slots]
    for tensor, slot in pairs:
        if (tensor.dtype, tensor.shape) != (slot.dtype, slot.shape):
            raise CallerError(
                f"{slot.name} is {tensor.dtype}{tensor.shape} in the version and "
                f"{slot.dtype}{slot.shape} here",
                code=Code.FAILED_PRECONDITION,
            )
    return pairs


async def _greet(
    path: str | Path,
    hello: AgentHello | RankHello,
    handler: Handler[StateMessage] | None = None,
) -> Peer[StateMessage]:
    peer: Peer[StateMessage] = await Peer.connect(path, StateMessage, handler)
    try:
        await _ask(peer, hello, Done)
    except BaseException:
        await peer.close()
        raise
    return peer


async def _ask(peer: Peer[StateMessage], body: StateMessage, kind: type[Kind]) -> Kind:
    answer, fds = await peer.call(body)
    close_fds(fds)
    return _as(answer, kind)


def _as(answer: StateMessage, kind: type[Kind]) -> Kind:
    if not isinstance(answer, kind):
        raise InternalError(f"expected {kind.__name__}, got {type(answer).__name__}")
    return answer
