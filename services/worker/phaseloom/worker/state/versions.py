"""The weights versions that a rank writes and reads, between host memory and its heap."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.specs import CommandId
from phaseloom.common.contract.state_layout import PartSources, Slice, TensorSlot, VersionParts
from phaseloom.common.contract.state_rank import (
    CommitParts,
    CommitVersion,
    CreateVersion,
    Done,
    HoldVersion,
    OnDevice,
    OpenOnDevice,
    OpenSlices,
    OpenVersion,
    ShareOnDevice,
    VersionExtent,
)
from phaseloom.common.tensors.resharding import StridedRanges
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import is_manifest
from phaseloom.common.transport.framing import close_fds
from phaseloom.worker.core.reading import Runs
from phaseloom.worker.state import devicememory
from phaseloom.worker.state.borrowing import SavedBytes
from phaseloom.worker.state.copying import MappedVersions
from phaseloom.worker.state.heap import align
from phaseloom.worker.state.hostcopies import HeapCopier
from phaseloom.worker.state.layouts import LayoutCache
from phaseloom.worker.state.link import StateLink, expect

log = logging.getLogger(__name__)

Kind = TypeVar("Kind")


class Runner(Protocol):
    """Runs work in the thread in which copies and operations exclude each other."""

    async def __call__(self, work: Callable[[], Kind]) -> Kind: ...


@dataclass(frozen=True, slots=True)
class VersionCopy:
    """A description of a weights version in host memory."""

    digest: str
    num_bytes: int
    is_new: bool
    """Whether this call created the version; False: it already existed."""


@dataclass(frozen=True, slots=True)
class OpenedVersion:
    """An opened version, manifest or part in host memory."""

    request: OpenVersion
    described: VersionExtent
    memory: memoryview
    """A separate mapping: the content stays unchanged while this is referenced."""
    table: TensorTable

    @property
    def is_manifest(self) -> bool:
        """Whether the version is written in parts and this is its manifest."""
        return len(self.table) == 1 and is_manifest(self.table.tensors)


class RankVersions:
    """A rank's weights versions. Copies run in the runner, everything else on the event loop."""

    def __init__(
        self,
        link: StateLink,
        copies: HeapCopier,
        layouts: LayoutCache,
        run: Runner,
    ) -> None:
        self._link = link
        self._copies = copies
        self._layouts = layouts
        self._run = run
        self._mapped = MappedVersions()

    def unmap_unused(self) -> list[VersionKey]:
        """Unmap memory that is kept only for reuse, and return the versions that are still in
        use."""
        return self._mapped.unmap_unused()

    async def create(self, key: VersionKey, slots: Sequence[TensorSlot]) -> VersionCopy:
        """Write these slots of the heap as a weights version. Idempotent by key.

        Raises: ResourceError: no host memory. CallerError: the version belongs to another
                 deployment.
        """
        heap = self._copies.registered_heap()
        packed_slots, pairs = self._layouts.cut(slots)
        target = await self.reserve(key, packed_slots)
        if isinstance(target, VersionCopy):
            return target
        digest = await self._run(lambda: devicememory.gather(heap, target, pairs))
        copy = await self.commit(key, target, digest)
        if devicememory.can_share(heap) and not self._copies.is_frozen and not key.part:
            await self._share_on_device(key, len(target), pairs)
        return copy

    async def _share_on_device(
        self, key: VersionKey, num_bytes: int, pairs: list[tuple[TensorSlot, TensorSlot]]
    ) -> None:
        """Share a version with samplers on the same device, so that they sync without the host."""
        heap = self._copies.registered_heap()
        fd = await self._run(lambda: devicememory.share(heap, num_bytes, pairs))
        if fd is None:
            return
        try:
            await self._link.call(ShareOnDevice(key), [fd])
        except PhaseloomError as error:
            # Only a cache fails here: the version is committed in host memory.
            log.warning("version %s not shared on the device: %s", key, error)
        finally:
            os.close(fd)

    async def _load_on_device(
        self, described: VersionExtent, pairs: list[tuple[TensorSlot, TensorSlot]]
    ) -> bool:
        """Load a version from this device. Return False, with nothing changed, if it is not
        there."""
        heap = self._copies.registered_heap()
        if not devicememory.can_share(heap):
            return False
        answer, fds = await self._link.call(OpenOnDevice(described.version))
        try:
            if not expect(answer, OnDevice).exists or len(fds) != 1:
                return False
            num_bytes = described.num_bytes
            return await self._run(
                lambda: devicememory.copy_shared_in(heap, fds[0], num_bytes, pairs)
            )
        finally:
            close_fds(fds)

    async def reserve(self, key: VersionKey, slots: list[TensorSlot]) -> memoryview | VersionCopy:
        """Reserve memory for a version (by a node's first rank) or for a part; then call `commit`.

        The memory's content is undefined. Write all of it, including the gaps between tensors, so
        that equal weights have equal digests.
        Args:    slots: the version's tensors, packed: aligned, one after another from offset 0.
        Returns: the memory, or the version's description if it already exists.
        Raises:  ResourceError: no host memory. CallerError: the version belongs to another
                 deployment.
        """
        num_bytes = align(slots[-1].offset + slots[-1].num_bytes) if slots else 0
        request = CreateVersion(key, num_bytes, self._layouts.table(slots).packed)
        answer, fds = await self._link.call(request)
        described = expect(answer, VersionExtent)
        if described.exists:
            close_fds(fds)
            return VersionCopy(described.digest, described.num_bytes, is_new=False)
        mapping = self._mapped.map(key, fds, num_bytes, writable=True)
        memory = mapping.buffer[:num_bytes]
        if not mapping.is_settled:
            await self._run(mapping.make_huge)
        return memory

    async def commit(self, key: VersionKey, buffer: memoryview, digest: str) -> VersionCopy:
        """Commit the written memory that `reserve` returned. The version is immutable from now
        on."""
        await self._link.ask(CommitVersion(key, digest), Done)
        return VersionCopy(digest, len(buffer), is_new=True)

    async def commit_parts(self, key: VersionKey, manifest: VersionParts) -> VersionCopy:
        """Make a version of committed parts readable on this node, wherever the parts are.
        Idempotent.

        Raises: CallerError: FAILED_PRECONDITION: a part on this node differs from the manifest.
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
        *,
        permit: CommandId | None = None,
        is_unverified: bool = False,
        is_ahead: bool = False,
    ) -> OpenedVersion:
        """Open a version, its manifest, or a part. The state manager has verified it.

        Args:   ticket: the ticket that remote sources require; not needed for a version on this
                 node.
                digest: the required digest of a fetched version; empty: any.
                permit: the permit of the operation that reads it. All ranks share one verification
                    per
                    permit.
                is_unverified: whether verification may be skipped, because only `load` reads the
                    version;
                    `load` has it verified if it needs the bytes.
                is_ahead: whether this is a prefetch, which no operation waits for yet.
        Raises: CallerError: NOT_FOUND: it is missing or incomplete everywhere; FAILED_PRECONDITION:
                 a
                source has different bytes. ResourceError: no source could deliver it; DATA_LOSS.
        """
        return await self._open(
            OpenVersion(key, sources, ticket, digest, permit, is_unverified, is_ahead)
        )

    async def _open(self, request: OpenVersion) -> OpenedVersion:
        answer, fds = await self._link.call(request)
        described = expect(answer, VersionExtent)
        num_bytes = described.num_bytes
        mapping = self._mapped.map(request.version, fds, num_bytes, writable=False)
        memory = mapping.buffer[:num_bytes]
        return OpenedVersion(request, described, memory, self._layouts.read(described.tensors))

    @property
    def may_load_on_device(self) -> bool:
        """Whether `load` may work without the host memory's bytes, so that these need no
        verification."""
        return devicememory.can_share(self._copies.registered_heap())

    async def scatter(self, pieces: list[tuple[memoryview, Runs]]) -> None:
        """Copy bytes of verified memory to their offsets in the heap."""
        heap = self._copies.registered_heap()

        def scatter() -> None:
            for memory, runs in pieces:
                devicememory.copy_rows(memory, heap, runs)
            self._copies.weights_replaced()

        await self._run(scatter)

    @contextmanager
    def temporarily_loaded(
        self, pieces: Sequence[tuple[memoryview, Runs]], saved: SavedBytes
    ) -> Iterator[None]:
        """Put verified weights into the heap for the duration of the block, then restore every
        byte.

        Call it in the runner's thread, so that nothing else reads the heap in between. If the
        original weights cannot be restored, the process exits, because the heap is no longer
        usable.
        Args: saved: memory that saves the heap's first bytes; the lent weights may overwrite any of
                 them.
        """
        heap = self._copies.registered_heap()
        assert saved.applied == self._copies.applied(), "they would not be its own"
        if not saved.is_filled:
            devicememory.copy_first_out(heap, saved.memory)
        try:
            for memory, runs in pieces:
                devicememory.copy_rows(memory, heap, runs)
            yield
        finally:
            try:
                devicememory.copy_rows(saved.memory, heap, [StridedRanges(0, 0, len(saved.memory))])
            except BaseException:
                log.critical("the heap's original weights could not be restored", exc_info=True)
                os._exit(1)

    async def load(self, opened: OpenedVersion, slots: Sequence[TensorSlot]) -> None:
        """Copy an open version over these slots of the heap, matched by tensor name.

        After any error, nothing has been written.
        Raises: CallerError: it is of another model. ResourceError: DATA_LOSS; or no source could
                 deliver
                it.
        """
        heap = self._copies.registered_heap()
        pairs = self._layouts.paired(opened.table, slots)
        if await self._load_on_device(opened.described, pairs):
            await self._run(self._copies.weights_replaced)
            return
        if opened.request.is_unverified:
            opened = await self._open(msgspec.structs.replace(opened.request, is_unverified=False))
            pairs = self._layouts.paired(opened.table, slots)

        def load() -> None:
            devicememory.scatter(opened.memory, heap, pairs)
            self._copies.weights_replaced()

        await self._run(load)

    async def hold(self, key: VersionKey, applied: int) -> None:
        """Report that the heap has the weights of this version since `applied`.

        A frozen heap then needs no other copy.
        """
        if self._copies.is_frozen:
            await self._run(self._copies.hold_version)
            await self._link.ask(HoldVersion(key, applied), Done)

    def place_by(self, runs_of: Callable[[bytes], Runs]) -> None:
        """Set how the weights of a version are placed in the heap, by its packed table.

        Needed if this rank holds slices. By default, tensors are matched by name.
        """
        self._copies.runs_of = runs_of

    async def open_slices(
        self,
        key: VersionKey,
        slices: list[Slice],
        sources: list[PartSources],
        ticket: Ticket | None = None,
        permit: CommandId | None = None,
        *,
        is_ahead: bool = False,
    ) -> tuple[memoryview, VersionExtent]:
        """Fetch exactly these tensor slices of a version, verified, each to its offset.

        Args:   sources: the sources of each part. Slices of one part are spread over its sources.
                permit: the permit of the operation that reads them.
                is_ahead: whether this is a prefetch, which no operation waits for yet.
        Raises: CallerError: a bad slice, or sources that hold different versions. ResourceError:
                DATA_LOSS; or no source could deliver some of the slices.
        """
        num_bytes = max((piece.offset + piece.num_bytes for piece in slices), default=0)
        request = OpenSlices(key, num_bytes, slices, sources, ticket, permit, is_ahead)
        answer, fds = await self._link.call(request)
        described = expect(answer, VersionExtent)
        mapping = self._mapped.map(key, fds, described.num_bytes, writable=False)
        return mapping.buffer[: described.num_bytes], described
