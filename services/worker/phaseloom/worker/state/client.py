"""A rank's client of the state manager: its session, initial heap content and checkpoints.

`hostcopies` makes the copies that the state manager orders. `versions` writes and reads weights
versions. Copies run in a thread without the GIL, so the event loop stays responsive. The client
survives restarts of the daemon (see `StateLink`). The future `closed` completes only when the state
manager will not come back.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from phaseloom.common.contract.errors import CallerError, InternalError, ResourceError
from phaseloom.common.contract.specs import Adapter, ModelDirectory
from phaseloom.common.contract.state_layout import Places, TensorSlot, extent_bytes
from phaseloom.common.contract.state_rank import (
    MAX_READ_BYTES,
    CheckpointRead,
    CheckpointRemoved,
    CheckpointWritten,
    CommitInitial,
    CopyIn,
    CopyOut,
    Done,
    HeapRegistered,
    LoadStaged,
    OpenSaved,
    PruneCheckpoints,
    RankHello,
    RankResume,
    ReadCheckpoint,
    ReadSaved,
    RegisterHeap,
    RemoveCheckpoint,
    SavedOpened,
    SavedRead,
    SnapshotTaken,
    StageState,
    StateMessage,
    StillMapped,
    TakeSnapshot,
    Unmap,
    Unpin,
    WriteCheckpoint,
)
from phaseloom.common.tensors.blockhash import digest_in_threads
from phaseloom.common.transport.framing import Peer, close_fds
from phaseloom.worker.state import devicememory
from phaseloom.worker.state.borrowing import Loans
from phaseloom.worker.state.copying import Mapping
from phaseloom.worker.state.devicememory import DeviceMemory
from phaseloom.worker.state.hostcopies import HeapCopier
from phaseloom.worker.state.layouts import LayoutCache
from phaseloom.worker.state.link import RECONNECT_S, StateLink, ask, expect
from phaseloom.worker.state.versions import RankVersions

log = logging.getLogger(__name__)

Kind = TypeVar("Kind")
Locate = Callable[[Sequence[str]], Places]


class RankStateClient:
    """A rank's connection to the state manager, which manages the rank's heap and orders its
    copies.

    The rank must exit when `closed` completes, because nothing manages its memory from then on.
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
        self._private_executor = None if executor else ThreadPoolExecutor(1, "state-copy")
        self._executor = executor or self._private_executor
        self._is_leaving = False
        self._has_memory = True
        """Whether the extent had memory when the heap was registered."""
        self._link = StateLink(path, self._greet, self._handle, reconnect_s)
        self._copies = HeapCopier(applied, on_loaded)
        self._layouts = LayoutCache()
        self.loans = Loans(self._link)
        self.versions = RankVersions(self._link, self._copies, self._layouts, self._run)

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
        """Connect to the state manager.

        Args:   applied: returns the seq of the last mutating operation in the heap; called at every
                 copy
                    out.
                on_loaded: called in the executor after a load has replaced the heap's bytes.
                executor: a single thread that runs all copies. Pass the backend's thread, so that
                    copies
                    and operations exclude each other. None: the client creates a thread. Do not
                        wait
                    for calls of this client inside this thread.
        Raises: ResourceError: nobody listens on the socket. CallerError: PERMISSION_DENIED.
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

    async def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Disconnect after running copies have finished; refuse new orders. Idempotent.

        Args: last: called in the executor before the state manager learns that the rank has left.
        """
        if not self._is_leaving:
            self._is_leaving = True
            self._copies.files.cancelled.set()
            await self._run(last)
        await self.loans.close()
        await self._link.close()
        self._copies.close()
        if self._private_executor is not None:
            self._private_executor.shutdown()

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
                in_extent=devicememory.is_attached(self._copies.heap),
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
        """Register the heap with the state manager and map its extent.

        Args:    host_bytes: size of the state that exists only in `host_memory`.
                 frozen, model: as in `RegisterHeap`.
        Returns: the seq of the seal in the extent; the first switch-in loads it into the heap. 0:
                 there is no seal, so fill the heap and call `commit_initial`.
        Raises:  ResourceError: no room; DATA_LOSS: the seal's file is corrupt. CallerError:
                 FAILED_PRECONDITION, with the numbers: the seal has a different layout.
        """
        request = RegisterHeap(
            heap.num_bytes,
            self._layouts.table(slots).packed,
            host_bytes=host_bytes,
            frozen=frozen,
            model=model,
            pins=devicememory.is_pinning(heap) and not frozen,
            emulated=devicememory.is_emulated(heap),
            scratch_bytes=heap.scratch_bytes,
        )
        answer, fds = await self._link.call(request)
        registered = expect(answer, HeapRegistered)
        if len(fds) != (not frozen or (registered.applied == 0 and registered.has_memory)):
            close_fds(fds)
            raise InternalError(f"unexpected number of extents for a heap: {len(fds)}")
        extent: Mapping | None = None
        for fd in fds:
            if request.emulated and not frozen and not host_bytes:
                self._copies.heap_fd = os.dup(fd)
            extent = Mapping(fd, extent_bytes(heap.num_bytes, host_bytes), writable=True)
        self._copies.register(heap, slots, host_bytes, extent, frozen=frozen)
        self._has_memory = registered.has_memory
        if registered.applied:
            await self._run(self._copies.drop_extent)
            self._copies.commit(registered.applied, "")
            await self._run(heap.release)
        return registered.applied

    @property
    def weights_bytes(self) -> int:
        """See `HeapCopier.weights_bytes`."""
        return self._copies.weights_bytes

    @property
    def host_memory(self) -> memoryview:
        """See `HeapCopier.host_memory`."""
        return self._copies.host_memory

    async def commit_initial(self, applied: int = 0) -> None:
        """Copy the filled heap to the extent and release it, so that the deployment starts
        offloaded.

        Args: applied: the seq of the state if it came from a checkpoint.
        """
        if not self._has_memory:
            await self._commit_initial("", applied)
            return
        heap, extent = self._copies.registered()
        await self._run(lambda: self._copies.out(heap, extent))
        digest = await self._run(lambda: digest_in_threads(extent.buffer))
        await self._commit_initial(digest, applied)

    async def commit_checkpoint(
        self, name: str, applied: int, adapter_config: str = "", locate: Locate | None = None
    ) -> None:
        """Have the state manager fill the extent from a checkpoint and ignore the heap's content.

        Call it instead of `commit_initial`.
        Args:   adapter_config, locate: as in `read_checkpoint`.
        Raises: the errors of `read_checkpoint`.
        """
        load = f"begins at {applied}"
        message = ReadCheckpoint(name, load=load, adapter_config=adapter_config)
        read = await self._read_checkpoint(message, locate)
        await self._commit_initial(read.digest, applied)

    async def _read_checkpoint(
        self, message: ReadCheckpoint, locate: Locate | None
    ) -> CheckpointRead:
        if locate is None:
            return await self._link.ask(message, CheckpointRead)
        read = await self._link.ask(replace(message, places=None), CheckpointRead)
        if read.names:
            places = await asyncio.to_thread(locate, read.names)
            read = await self._link.ask(replace(message, places=places), CheckpointRead)
        return read

    async def _commit_initial(self, digest: str, applied: int) -> None:
        heap = self._copies.registered_heap()
        await self._run(self._copies.drop_extent)
        await self._link.ask(CommitInitial(digest, applied), Done)
        self._copies.commit(applied, digest)
        await self._run(heap.release)

    async def take_snapshot(
        self, operation: str, name: str, seq: int, *, overwrite: bool = False
    ) -> None:
        """Have the state manager copy the state of all ranks for a checkpoint.

        The ranks may continue when this returns.
        Raises: CallerError: ALREADY_EXISTS. ResourceError: no host memory.
        """
        await self._link.ask(TakeSnapshot(operation, name, seq, overwrite), SnapshotTaken)

    async def write_checkpoint(
        self,
        operation: str,
        name: str,
        config: str,
        keep: int,
        companions: ModelDirectory | None = None,
        *,
        ttl_s: float = 0.0,
        overwrite: bool = False,
        model: str = "",
        adapter: Adapter | None = None,
    ) -> str:
        """Write the checkpoint from the copied state; return when it is durable.

        Args:    companions: files to copy next to the tensors.
                 ttl_s, overwrite: as in `SaveState`.
                 model, adapter: as in `SavedCheckpoint`.
        Returns: the SHA-256 of the checkpoint's weights.
        Raises:  ResourceError: the disk is full or fails, or a companion differs from its
                 registration.
        """
        message = WriteCheckpoint(
            operation, name, config, keep, companions, ttl_s, overwrite, model, adapter
        )
        return (await self._link.ask(message, CheckpointWritten)).weights_sha256

    async def read_checkpoint(
        self,
        name: str,
        source: str = "",
        *,
        optimizer: bool = True,
        load: str = "",
        adapter_config: str = "",
        locate: Locate | None = None,
    ) -> str:
        """Replace the state of all ranks by a checkpoint. Called by the leader.

        After any error, either nothing has changed or the state manager has disconnected the ranks.
        Args:    source, optimizer: as in `LoadState`.
                 load, adapter_config: as in `ReadCheckpoint`.
                 locate: returns where the files have each tensor, from the names in the files, or
                 raises a CallerError. None: under the ranks' own names.
        Returns: the SHA-256 of the checkpoint's weights; empty if the checkpoint does not record
                 it.
        Raises:  CallerError: NOT_FOUND; FAILED_PRECONDITION: the checkpoint is of another model.
                 ResourceError: DATA_LOSS; no host memory.
        """
        message = ReadCheckpoint(name, source, optimizer, load, adapter_config)
        return (await self._read_checkpoint(message, locate)).weights_sha256

    async def open_saved(self, name: str, source: str) -> SavedOpened:
        """Describe the weights of a checkpoint.

        Args:   source: as in `LoadState`.
        Raises: CallerError: NOT_FOUND. ResourceError: DATA_LOSS.
        """
        return await self._link.ask(OpenSaved(name, source), SavedOpened)

    async def read_saved(
        self, name: str, source: str, num_bytes: int = 0, places: Places | None = None
    ) -> memoryview:
        """Read and verify the weights of a checkpoint into borrowed memory.

        Args:   num_bytes: size of the layout that `open_saved` described. 0: place every tensor at
                 its offset in the heap.
                places: where the files have each tensor; None: under the rank's own names.
        Raises: the errors of `open_saved`. CallerError: FAILED_PRECONDITION: the weights are of
                 another model. ResourceError: RESOURCE_EXHAUSTED: no host memory.
        """
        size = num_bytes or self._copies.weights_bytes
        memory = await self.loans.borrow(size, f"the weights of checkpoint {name}")
        for start in range(0, len(memory), MAX_READ_BYTES):
            part = memory[start : start + MAX_READ_BYTES]
            request = ReadSaved(name, source, start, len(part), not num_bytes, places or {})
            part[:] = (await self._link.ask(request, SavedRead)).content
            # Two copies of a tensor are compared once.
            places = {tensor: stored[:1] for tensor, stored in (places or {}).items()}
        return memory

    async def prune_checkpoints(self, keep: int, needed: list[str]) -> None:
        await self._link.ask(PruneCheckpoints(keep, needed), Done)

    async def remove_checkpoint(self, name: str) -> int:
        """Remove a checkpoint of this deployment and return the size of its files in bytes.

        Raises: ResourceError: the disk fails.
        """
        return (await self._link.ask(RemoveCheckpoint(name), CheckpointRemoved)).num_bytes

    async def _handle(
        self, body: StateMessage, fds: list[int]
    ) -> tuple[StateMessage, Sequence[int]]:
        if self._is_leaving:
            close_fds(fds)
            raise ResourceError("the rank is shutting down")
        if isinstance(body, CopyOut | CopyIn):
            return await self._run(lambda: self._copies.copy(body, fds)), ()
        if isinstance(body, StageState | LoadStaged):
            return await self._run(lambda: self._copies.copy_staged(body, fds)), ()
        close_fds(fds)
        match body:
            case Unmap():
                await self._run(self._copies.drop_source)
                return StillMapped(self.versions.unmap_unused()), ()
            case Unpin():
                heap, _ = self._copies.registered()
                await self._run(lambda: devicememory.unpin(heap))
                return Done(), ()
        raise CallerError(f"unexpected message for a rank: {type(body).__name__}", field="type")

    async def _run(self, work: Callable[[], Kind]) -> Kind:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
