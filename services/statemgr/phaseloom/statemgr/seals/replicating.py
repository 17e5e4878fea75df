"""Copies of seals and durable weights versions on other nodes' disks, and the state files that
nodes fetch from each other for that.

A node that will run a deployment fetches the files that it lacks. A node that seals a deployment
durably beyond itself reports the seal only after other nodes have fetched it. A whole file that is
here is not fetched again. If a seal proves bad when it is read, a good copy is fetched from the
nodes that the last request named as sources.

Files are served from this node's disk or from host memory. Each block is verified by its checksum
in the file's header. A file gets its name once all of it is on the disk. Memory: one block per
stream.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec
import xxhash

from phaseloom.common.contract.commands import FilesTicket
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey, check_key
from phaseloom.common.contract.state_agent import FetchState, WriteSeal
from phaseloom.common.contract.state_layout import Slice
from phaseloom.common.tensors.blockfile import PAGE_BYTES
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, checksum
from phaseloom.statemgr.disk.disk import MemoryFile, read_block
from phaseloom.statemgr.disk.files import Draft, StateDirectory, find_parts, header_of
from phaseloom.statemgr.disk.statefile import encode_header
from phaseloom.statemgr.node.stores import HostSealStore
from phaseloom.statemgr.records.incarnations import Rank
from phaseloom.statemgr.records.layouts import rounded
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.stateheader import SectionRef, StateHeader
from phaseloom.statemgr.seals.sealing import Sealer
from phaseloom.statemgr.transfer import wire
from phaseloom.statemgr.transfer.fetching import Fetch, Home, LocalError, call_once
from phaseloom.statemgr.transfer.served import Incoming, Served
from phaseloom.statemgr.transfer.tensorslices import (
    MAX_BATCH_BOXES,
    MAX_BATCH_BYTES,
    Batch,
    Box,
    Piece,
    box_of,
)
from phaseloom.statemgr.transfer.tls import Stream
from phaseloom.statemgr.transfer.wire import FileName, KeepFiles
from phaseloom.statemgr.versions.weights import Weights

log = logging.getLogger(__name__)


_PAUSE_S = 0.2
_NOT_THERE = frozenset({Code.NOT_FOUND, Code.DATA_LOSS})
"""Error codes from a source that will never have the whole file."""


@dataclass(frozen=True)
class RemoteFile:
    """A state file that other nodes have."""

    name: FileName
    ticket: FilesTicket
    sources: list[str]
    home: Home

    async def fetch(
        self, directory: StateDirectory, *, ranks: tuple[int, int] = (0, 0)
    ) -> StateHeader:
        """Fetch the file to this node's disk. Returns: its header.

        Args:   ranks: (first rank, ranks on all nodes) that the file must have: see
                `StateHeader.is_of`.
        Raises: ResourceError: DATA_LOSS: every source answers, and none has the whole file;
                UNAVAILABLE: a source does not answer; RESOURCE_EXHAUSTED: this node's disk is full;
                the disk fails.
        """
        header = (await self.describe(ranks)).header
        path = path_of(directory, self.name)
        draft = await asyncio.to_thread(Draft, directory, path, header)
        try:
            num_bytes = await self._fetch_blocks(draft, header)
            await asyncio.to_thread(draft.write, memoryview(encode_header(header)), 0)
            await asyncio.to_thread(draft.finish)
        except BaseException:
            draft.abandon()
            raise
        log.info("fetched %s: %d bytes", self.name, num_bytes)
        return header

    async def _fetch_blocks(self, draft: Draft, header: StateHeader) -> int:
        size = header.block_bytes
        refs = [SectionRef(str(self.name), header, i, at) for i, at in enumerate(draft.offsets)]
        slices: list[Slice] = []
        for ref in refs:
            for block in range(ref.blocks):
                num_bytes, at = ref.block_size(block), len(slices) * size
                box = ([block * size], [num_bytes])
                slices.append(Slice("", str(ref.index), "uint8", *box, at, num_bytes))

        def open_with(parts: list[str], session: str | None) -> wire.OpenFile:
            return wire.OpenFile(self.name, self.ticket)

        # Nodes of a site do not share files: every replica needs its own.
        home, incoming = replace(self.home, site=""), Incoming(slices, {"": header.digest})
        fetch = Fetch(str(self.name), open_with, home, incoming, _Disk(draft, refs))
        batches = [Batch("", [Piece(slice_, box_of(slice_))]) for slice_ in slices]
        try:
            await fetch.fetch_all(batches, {"": self.sources})
        except LocalError as failure:
            raise failure.error from None
        except PhaseloomError as error:
            raise _fetch_error(self.name, list(fetch.errors.values()) or [error]) from error
        return fetch.fetched_bytes

    async def describe(self, ranks: tuple[int, int] = (0, 0)) -> wire.FileDescription:
        """The description of the file by the first source with a good answer. All sources are tried
        repeatedly for one timeout."""
        message = wire.DescribeFile(self.name, self.ticket)
        started_s = time.monotonic()
        while True:
            errors: list[PhaseloomError] = []
            for source in self.sources:
                try:
                    description = await call_once(source, message, wire.FileDescription, self.home)
                    _check(self.name, ranks, description.header)
                    return description
                except PhaseloomError as error:
                    log.warning("%s from %s: %s", self.name, source, error)
                    errors.append(error)
            is_late = time.monotonic() - started_s > self.home.timeout_s
            if is_late or all(error.info.code in _NOT_THERE for error in errors):
                raise _fetch_error(self.name, errors)
            await asyncio.sleep(_PAUSE_S)


class _Disk:
    """A sink that writes to this node's disk, one block at a time."""

    base: memoryview | None = None
    """A file is never sent as a delta."""

    def __init__(self, draft: Draft, refs: list[SectionRef]) -> None:
        self._draft = draft
        self._places = refs
        self._block_bytes = refs[0].header.block_bytes
        self._free: list[memoryview] = []
        """Buffers that no stream uses."""

    async def receive(
        self, stream: Stream, batch: Batch, timeout_s: float, delta_bytes: int = 0
    ) -> str:
        assert not delta_bytes, "nobody asked for a delta"
        ((_, box),) = batch.pieces
        ref, block = self._places[int(box.name)], box.start[0] // self._block_bytes
        buffer = self._free.pop() if self._free else _page_buffer(self._block_bytes)
        view, digest = buffer[: batch.num_bytes], xxhash.xxh3_128()
        await stream.receive_into(view, timeout_s, digest.update)
        if await asyncio.to_thread(checksum, view) != ref.checksum_of(block):
            raise ResourceError(
                f"block {block} of section {ref.index} is bad on arrival", code=Code.DATA_LOSS
            )
        try:
            await asyncio.to_thread(self._draft.write, view, ref.offset + box.start[0])
        except PhaseloomError as error:
            raise LocalError(error) from error
        self._free.append(buffer)
        return digest.hexdigest()

    async def is_sound(self) -> bool | None:
        """Always true: each block was verified on arrival, by the file's header."""
        return True


def _check(name: FileName, ranks: tuple[int, int], header: StateHeader) -> None:
    """Check a header that a source sent.

    Raises: ResourceError: DATA_LOSS: it is of another file or other ranks, or lacks checksums.
    """
    is_meant = name == FileName(header.kind, header.deployment, header.seq, header.part)
    is_blocked = bool(header.parts) and header.block_bytes == BLOCK_BYTES
    has_checksums = is_blocked and all(part.has_checksums(BLOCK_BYTES) for part in header.parts)
    if not header.is_of(*ranks):
        raise ResourceError(f"its {name} has other ranks", code=Code.DATA_LOSS)
    if not (is_meant and has_checksums):
        raise ResourceError(f"it sent another file instead of {name}", code=Code.DATA_LOSS)


def _fetch_error(name: FileName, errors: list[PhaseloomError]) -> ResourceError:
    is_lost = all(error.info.code in _NOT_THERE for error in errors)
    reasons = "; ".join(str(error) for error in errors) or "no node has it"
    return ResourceError(
        f"{name} could not be fetched: {reasons}",
        code=Code.DATA_LOSS if is_lost else Code.UNAVAILABLE,
        remedy="restart the nodes that have it",
    )


# --- Served --------------------------------------------------------------------------------------

ReadBlock = Callable[[SectionRef, int, memoryview], int]


async def open_file(
    host_seals: HostSealStore, directory: StateDirectory, name: FileName
) -> tuple[StateHeader, Served]:
    """The header and blocks of a file on this node's disk, or of a seal in memory."""
    seal = host_seals.records.get((name.deployment, name.seq))
    if name.kind == "seal" and seal is not None:
        image = MemoryFile(host_seals.bytes_of(seal))
        refs, read = host_seals.parts_of(seal), partial(read_block, image)
        return refs[0].header, _File(refs, read)
    path = path_of(directory, name)
    if not path.exists():
        raise CallerError(f"{name} is not here", code=Code.NOT_FOUND, field="name")
    refs = await asyncio.to_thread(find_parts, path)
    return refs[0].header, _File(refs, directory.read_block)


async def parts_of(directory: StateDirectory, name: FileName) -> list[str]:
    """The parts of a weights version that are on this disk; empty for other files."""
    if name.kind != "version" or name.part:
        return []
    return await asyncio.to_thread(directory.parts, VersionKey(name.deployment, name.seq))


class _File:
    """The blocks of a state file, read and verified one at a time."""

    def __init__(self, refs: list[SectionRef], read: ReadBlock) -> None:
        self._places = {str(ref.index): ref for ref in refs}
        self._read = read
        self._buffer = _page_buffer(MAX_BATCH_BYTES + MAX_BATCH_BOXES * PAGE_BYTES)
        """Memory for the blocks of one request, each starting at a page."""
        self._taken = 0
        """Bytes of the buffer that the request's blocks have used so far."""

    def find(self, part: str, box: Box) -> _Block:
        ref = self._places.get(box.name)
        if ref is None or part or len(box.start) != 1:
            raise CallerError(f"there is no section {box.name!r}", field="boxes")
        number, within = divmod(box.start[0], ref.header.block_bytes)
        if within or not 0 <= number < ref.blocks:
            raise CallerError(
                f"there is no block at {box.start} of section {box.name}", field="boxes"
            )
        return _Block(self, ref, number)

    async def until_arrived(self, part: str, boxes: Sequence[Box]) -> None:
        """Return at once: all of the file is here. The blocks of the previous request are sent by
        now."""
        self._taken = 0

    def read(self, block: _Block) -> memoryview:
        memory = self._buffer[self._taken : self._taken + block.num_bytes]
        self._taken += rounded(block.num_bytes)
        self._read(block.place, block.number, memory)
        return memory


class _Block(NamedTuple):
    file: _File
    place: SectionRef
    number: int

    @property
    def num_bytes(self) -> int:
        return self.place.block_size(self.number)

    def of(self, box: Box) -> _Block:
        raise CallerError("blocks of a file cannot be split", field="boxes")

    def read(self) -> list[memoryview]:
        return [self.file.read(self)]


def _page_buffer(num_bytes: int) -> memoryview:
    """Page-aligned memory, which a disk can use directly."""
    return memoryview(mmap.mmap(-1, num_bytes))


def path_of(directory: StateDirectory, name: FileName) -> Path:
    """The path of a state file in a directory.

    Raises: CallerError: there is no such kind, or a name is not a plain file name.
    """
    match name.kind:
        case "seal":
            return directory.seal(name.deployment, name.seq)
        case "version":
            return directory.version(VersionKey(name.deployment, name.seq, name.part))
    raise CallerError(f"unknown kind of file: {name.kind!r}", field="name.kind")


@dataclass
class Replicator:
    records: Records
    host_seals: HostSealStore
    directory: StateDirectory
    sealer: Sealer
    weights: Weights
    home: Home
    _fetching: WeakValueDictionary[FileName, asyncio.Lock] = field(
        default_factory=WeakValueDictionary, init=False
    )
    _elsewhere: dict[DeploymentKey, FetchState] = field(default_factory=dict, init=False)
    """The last request for each deployment that named sources, which may have its files."""
    _under_way: dict[DeploymentKey, list[FetchState]] = field(default_factory=dict, init=False)
    """Requests whose files are being fetched, by deployment."""

    async def fetch(self, request: FetchState) -> None:
        """Fetch the files that a request names, unless they are on this disk or in host memory."""
        check_key(request.deployment)
        self._mark_kept(request)
        await self._fetch_files(self._missing_files(request))
        if request.keeps is not None:
            await self.weights.keep(request.keeps, request.sources)
        if request.holds is not None:
            # A prefetch: if it fails, the version's sync fetches it.
            try:
                await self.weights.get(request.holds, request.sources)
            except PhaseloomError as error:
                log.info("version %s could not be prefetched: %s", request.holds.version, error)

    def _mark_kept(self, request: FetchState) -> None:
        for seq in request.versions:
            self.weights.mark_kept(VersionKey(request.deployment, seq))

    def _missing_files(self, request: FetchState) -> FetchState:
        key, ranks = request.deployment, (request.rank_offset, request.num_ranks)
        versions = self.records.versions
        is_kept = self.sealer.is_kept(key, request.seal_seq, ranks)
        return msgspec.structs.replace(
            request,
            seal_seq=0 if is_kept else request.seal_seq,
            versions=[s for s in request.versions if not versions.is_above(VersionKey(key, s))],
        )

    async def _fetch_files(self, request: FetchState) -> None:
        key = request.deployment
        if request.ticket is not None and request.sources:
            self._elsewhere[key] = request
        with self._tracking(request):
            if request.seal_seq:
                await self._ensure_file(FileName("seal", key, request.seal_seq), request)
            for seq in request.versions:
                try:
                    await self._ensure_version(FileName("version", key, seq), request)
                except ResourceError as error:
                    if error.info.code is not Code.DATA_LOSS:
                        raise
                    # It may have been released everywhere by now.
                    log.warning("%s", error)

    @contextmanager
    def _tracking(self, request: FetchState) -> Iterator[None]:
        requests = self._under_way.setdefault(request.deployment, [])
        requests.append(request)
        try:
            yield
        finally:
            # By identity: another request may name the same files.
            requests[:] = [
                other_request for other_request in requests if other_request is not request
            ]
            if not requests and self._under_way.get(request.deployment) is requests:
                del self._under_way[request.deployment]

    def _is_forgotten(self, request: FetchState) -> bool:
        return all(
            other_request is not request
            for other_request in self._under_way.get(request.deployment, ())
        )

    async def _ensure_version(self, name: FileName, request: FetchState) -> None:
        """Fetch a version: first its parts, then the manifest, so that the parts are on disk if the
        manifest is."""
        if await self._is_on_disk(name):
            return
        if request.ticket is not None and request.sources:
            remote = RemoteFile(name, request.ticket, request.sources, self.home)
            for part in (await remote.describe()).parts:
                await self._ensure_file(msgspec.structs.replace(name, part=part), request)
        await self._ensure_file(name, request)

    async def _ensure_file(self, name: FileName, request: FetchState) -> None:
        lock = self._fetching.setdefault(name, asyncio.Lock())
        async with lock:
            ranks = (request.rank_offset, request.num_ranks)
            if not await self._is_on_disk(name, ranks) and not self._is_forgotten(request):
                await self._fetch_file(name, request)
            if self._is_forgotten(request):
                raise _forgotten_error(name)

    async def _is_on_disk(self, name: FileName, ranks: tuple[int, int] = (0, 0)) -> bool:
        path = path_of(self.directory, name)
        header = await asyncio.to_thread(header_of, path)
        return header is not None and header.is_of(*ranks)

    async def _fetch_file(self, name: FileName, request: FetchState) -> None:
        if request.ticket is None or not request.sources:
            raise CallerError(f"no source of {name} is known", field="sources")
        remote = RemoteFile(name, request.ticket, request.sources, self.home)
        ranks = (request.rank_offset, request.num_ranks)
        header = await remote.fetch(self.directory, ranks=ranks)
        if self._is_forgotten(request):
            await asyncio.to_thread(self.directory.discard, path_of(self.directory, name))
            raise _forgotten_error(name)
        self._adopt(name, header)

    def _adopt(self, name: FileName, header: StateHeader) -> None:
        if name.kind == "seal":
            self.sealer.add_from_disk(header, str(path_of(self.directory, name)))
            return
        key = VersionKey(name.deployment, name.seq, name.part)
        version = self.records.versions.find(key)
        if version is None:
            self.weights.add_from_disk(header)
        elif version.digest == header.digest:
            version.is_on_disk = version.is_kept = True
            version.is_ahead = False

    def forget(self, key: DeploymentKey) -> None:
        """Forget a deployment whose job has ended, or that needs no copy here. Files that are still
        being fetched are removed when they arrive."""
        self._elsewhere.pop(key, None)
        self._under_way.pop(key, None)

    async def restore(self, rank: Rank) -> None:
        """Fill the extent of a registered heap from the seal that its incarnation starts from.

        If the seal here is bad, every block of it is fetched again from another node.

        Raises: as `Sealer.fill`.
        """
        key, seq = rank.wpg.key, rank.wpg.seal_seq
        try:
            await self.sealer.fill(rank)
        except ResourceError as error:
            if error.info.code is not Code.DATA_LOSS:
                raise
            log.error("%s; fetching it from another node", error)
            try:
                request = msgspec.structs.replace(
                    self._elsewhere.get(key, FetchState(key, seq, [], []))
                )
                with self._tracking(request):
                    await self._fetch_file(FileName("seal", key, seq), request)
            except PhaseloomError as second:
                log.error("%s", second)
                raise error from second
            self.host_seals.drop(key, seq)
            await self.sealer.fill(rank)

    # --- copies for other nodes ------------------------------------------------------------------

    async def open(self, name: FileName) -> tuple[StateHeader, Served]:
        """The header and blocks of a file that this node has. Raises: as `open_file`."""
        return await open_file(self.host_seals, self.directory, name)

    async def parts_of(self, name: FileName) -> list[str]:
        return await parts_of(self.directory, name)

    async def keep(self, message: KeepFiles) -> None:
        """Fetch another node's files as a replica."""
        key = message.deployment
        check_key(key)
        request = FetchState(
            key,
            message.seal_seq,
            message.versions,
            [message.source],
            message.ticket,
            rank_offset=message.rank_offset,
            num_ranks=message.num_ranks,
        )
        self._mark_kept(request)
        await self._fetch_files(request)
        await self.sealer.remove_superseded(key, message.seal_seq, message.committed)

    async def replicate(self, request: WriteSeal) -> None:
        """Return once every replica has the seal, and the versions with it, on its disk.

        Raises: PhaseloomError: a replica could not fetch them.
        """
        calls = [self._request_replica(endpoint, request) for endpoint in request.replicas.values()]
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _request_replica(self, endpoint: str, request: WriteSeal) -> None:
        if request.ticket is None:
            raise CallerError("replicas need a ticket", field="ticket")
        wpg = self.records.residency.current(request.deployment, request.incarnation)
        message = KeepFiles(
            request.deployment,
            request.seq,
            request.versions,
            request.committed,
            self.home.endpoint,
            request.ticket,
            wpg.rank_offset,
            wpg.num_ranks,
        )
        await call_once(endpoint, message, wire.FilesKept, self.home)


def _forgotten_error(name: FileName) -> ResourceError:
    return ResourceError(
        f"{name} is not kept because {name.deployment} has ended", code=Code.ABORTED
    )
