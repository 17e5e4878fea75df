"""The weights versions that a rank makes and reads, between host memory and its heap."""

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
from phaseloom.common.tensors.resharding import Rows
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import is_manifest
from phaseloom.common.transport.framing import close_fds
from phaseloom.worker.core.reading import Runs
from phaseloom.worker.state import devicememory
from phaseloom.worker.state.borrowing import OwnBytes
from phaseloom.worker.state.copying import MappedVersions
from phaseloom.worker.state.heap import align
from phaseloom.worker.state.hostcopies import HostCopies
from phaseloom.worker.state.layouts import Layouts
from phaseloom.worker.state.link import StateLink, expect

log = logging.getLogger(__name__)

Kind = TypeVar("Kind")


class Runner(Protocol):
    """Runs work in the thread in which copies and operations exclude each other."""

    async def __call__(self, work: Callable[[], Kind]) -> Kind: ...


@dataclass(frozen=True, slots=True)
class VersionCopy:
    """A weights version in host memory, as it was made."""

    digest: str
    num_bytes: int
    is_new: bool
    """Whether it was copied now; False: it existed already."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A version, manifest or part that was opened, in host memory."""

    asked: OpenVersion
    described: VersionExtent
    memory: memoryview
    """A mapping of its own: the content stays as it is while this is kept."""
    table: TensorTable

    @property
    def is_manifest(self) -> bool:
        """Whether the version is written in parts, and this is the list of them."""
        return len(self.table) == 1 and is_manifest(self.table.tensors)


class RankVersions:
    """A rank's versions. Copies run in the runner, all else on the event loop."""

    def __init__(
        self,
        link: StateLink,
        copies: HostCopies,
        layouts: Layouts,
        run: Runner,
    ) -> None:
        """Start without a version."""
        self._link = link
        self._copies = copies
        self._layouts = layouts
        self._run = run
        self._mapped = MappedVersions()

    def unmap_unused(self) -> list[VersionKey]:
        """Unmap the memory that is only kept for reuse. Returns: the versions that are in use."""
        return self._mapped.unmap_unused()

    async def create(self, key: VersionKey, slots: Sequence[TensorSlot]) -> VersionCopy:
        """Write these slots of the heap as a weights version. Idempotent by key.

        Raises: ResourceError: no host memory. CallerError: the version is not this deployment's.
        """
        heap = self._copies.registered_heap()
        places, pairs = self._layouts.cut(slots)
        target = await self.begin(key, places)
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
        """Share a version with the samplers on the same device, which then sync without the
        host."""
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
        """Load a version from this device. Returns: False: it is not there; nothing has changed."""
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

    async def begin(self, key: VersionKey, slots: list[TensorSlot]) -> memoryview | VersionCopy:
        """Memory for a version (from a node's first rank) or for a part of one; call `commit` then.

        The memory's content is undefined, the gaps between tensors included: write all of it, so
        that equal weights have equal digests.

        Args:    slots: the tensors of the version, packed: aligned, one after another from offset
                 0.
        Returns: the memory; or the version's description, if it exists already.
        Raises:  ResourceError: no host memory. CallerError: the version is not this deployment's.
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
        """Commit the memory that `begin` gave and that is written now: it is immutable from now
        on."""
        await self._link.ask(CommitVersion(key, digest), Done)
        return VersionCopy(digest, len(buffer), is_new=True)

    async def commit_parts(self, key: VersionKey, manifest: VersionParts) -> VersionCopy:
        """Make a version of committed parts readable here, wherever its parts are. Idempotent.

        Raises: CallerError: FAILED_PRECONDITION: a part on this node is not the manifest's.
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
    ) -> Opened:
        """Open a version, its manifest, or a part; the state manager has verified it.

        Args:   ticket: the ticket that the sources ask for; none is needed for a version on this
                    node.
                digest: the digest that a fetched version must have; empty: any.
                permit: the permit of the operation that reads it; all ranks share one verification
                    for it.
                is_unverified: whether only `load` reads it, which has it verified if need be.
                is_ahead: whether no operation waits for it yet.
        Raises: CallerError: NOT_FOUND: it exists nowhere, or only some of it; FAILED_PRECONDITION:
                a source has other bytes. ResourceError: no source could deliver it; DATA_LOSS.
        """
        return await self._open(
            OpenVersion(key, sources, ticket, digest, permit, is_unverified, is_ahead)
        )

    async def _open(self, asked: OpenVersion) -> Opened:
        answer, fds = await self._link.call(asked)
        described = expect(answer, VersionExtent)
        num_bytes = described.num_bytes
        mapping = self._mapped.map(asked.version, fds, num_bytes, writable=False)
        memory = mapping.buffer[:num_bytes]
        return Opened(asked, described, memory, self._layouts.read(described.tensors))

    @property
    def may_load_on_device(self) -> bool:
        """Whether `load` may need no bytes of host memory, so that these need not be verified."""
        return devicememory.can_share(self._copies.registered_heap())

    async def scatter(self, pieces: list[tuple[memoryview, Runs]]) -> None:
        """Copy bytes of verified memory to their places in the heap."""
        heap = self._copies.registered_heap()

        def scatter() -> None:
            for memory, runs in pieces:
                devicememory.copy_rows(memory, heap, runs)
            self._copies.weights_replaced()

        await self._run(scatter)

    @contextmanager
    def lent(self, pieces: Sequence[tuple[memoryview, Runs]], own: OwnBytes) -> Iterator[None]:
        """Within this, the heap has the weights of verified memory, and behind it every byte that
        it had before. Call it in the runner's thread, in which nobody else sees the heap meanwhile.

        Where its own weights cannot be given back the process ends: nobody may use it any more.

        Args: own: memory for the heap's first bytes; each of these may be written meanwhile.
        """
        heap = self._copies.registered_heap()
        assert own.applied == self._copies.applied(), "they would not be its own"
        if not own.is_filled:
            devicememory.copy_first_out(heap, own.memory)
        try:
            for memory, runs in pieces:
                devicememory.copy_rows(memory, heap, runs)
            yield
        finally:
            try:
                devicememory.copy_rows(own.memory, heap, [Rows(0, 0, len(own.memory))])
            except BaseException:
                log.critical("the heap has not its own weights any more", exc_info=True)
                os._exit(1)

    async def load(self, opened: Opened, slots: Sequence[TensorSlot]) -> None:
        """Copy an open version over these slots of the heap, by tensor name.

        Whatever is raised, nothing was written.

        Raises: CallerError: it is of another model. ResourceError: DATA_LOSS; or no source could
                deliver it.
        """
        heap = self._copies.registered_heap()
        pairs = self._layouts.paired(opened.table, slots)
        if await self._load_on_device(opened.described, pairs):
            await self._run(self._copies.weights_replaced)
            return
        if opened.asked.is_unverified:
            opened = await self._open(msgspec.structs.replace(opened.asked, is_unverified=False))
            pairs = self._layouts.paired(opened.table, slots)

        def load() -> None:
            devicememory.scatter(opened.memory, heap, pairs)
            self._copies.weights_replaced()

        await self._run(load)

    async def hold(self, key: VersionKey, applied: int) -> None:
        """Note that the whole heap equals this version since `applied`: a frozen heap needs no
        other copy."""
        if self._copies.is_frozen:
            await self._run(self._copies.drop_source)
            await self._link.ask(HoldVersion(key, applied), Done)

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
        """Fetch exactly these tensor slices of a version, verified, each at its offset.

        Args:   sources: the sources of each part; each of them is asked for different slices.
                permit: the permit of the operation that reads them.
                is_ahead: whether no operation waits for them yet.
        Raises: CallerError: a bad slice, or sources that hold different versions. ResourceError:
                DATA_LOSS; or nobody could deliver some of them.
        """
        num_bytes = max((each.offset + each.num_bytes for each in slices), default=0)
        asked = OpenSlices(key, num_bytes, slices, sources, ticket, permit, is_ahead)
        answer, fds = await self._link.call(asked)
        described = expect(answer, VersionExtent)
        mapping = self._mapped.map(key, fds, described.num_bytes, writable=False)
        return mapping.buffer[: described.num_bytes], described
