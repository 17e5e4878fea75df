"""A rank's part in publishing a weights version and in syncing one.

Ranks that hold different rows each write a *part*, and the leader lists the parts in a manifest.
Ranks that hold the same weights write one whole version per node. A sync fetches and verifies the
bytes for all ranks of a node before it changes the weights of the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import PartSources, Slice, VersionPart, VersionParts
from phaseloom.common.contract.state_rank import Failed
from phaseloom.common.tensors.resharding import parts_of, tensors_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import decode_manifest, layout_digest, part_name, part_of
from phaseloom.worker.core.reading import (
    Reader,
    Runs,
    fetches_of_full_version,
    other_model_error,
    plan_node_fetches,
    runs_from_part,
    runs_from_slices,
)
from phaseloom.worker.rank.executor import Executor
from phaseloom.worker.rank.wire import PrefetchWeights, RankConfig
from phaseloom.worker.state.layouts import packed, paired
from phaseloom.worker.state.versions import OpenedVersion, RankVersions

_PARTS_AT_ONCE = 4
"""Parts fetched concurrently. Each uses several streams."""

T = TypeVar("T")
VersionRequest = Permit | PrefetchWeights
"""The permit of an operation that reads a version, or the hint that one will."""


@dataclass(frozen=True, slots=True)
class FetchedVersion:
    """The bytes of a version that a rank needs, verified, in host memory."""

    version: VersionKey
    digest: str
    pieces: list[tuple[memoryview, Runs]]
    is_whole: bool
    """Whether the version was written whole, and not in parts."""


@dataclass(frozen=True, slots=True)
class _PartsPlan:
    """The plan for versions in parts: the bytes that a node fetches and that this rank copies."""

    whole_parts: dict[str, Runs]
    """The bytes to copy out of each part that is fetched whole."""
    slices: list[Slice]
    """The slices to fetch of the other parts."""
    of_slices: Runs
    """The bytes to copy out of the slices."""

    @classmethod
    def of(cls, manifest: VersionParts, reader: Reader) -> _PartsPlan:
        """Plan reading a version in parts. Raises: CallerError: the manifest is of another
        model."""
        needed = plan_node_fetches(manifest, reader)
        tables = {entry.part: entry.table for entry in manifest.parts}
        runs_by_part = {
            part: runs_from_part(TensorTable.read(tables[part]).tensors, fetches, reader)
            for part, fetches in needed.whole_parts.items()
        }
        return cls(
            runs_by_part, needed.slices, runs_from_slices(needed.slices, needed.fetches, reader)
        )


@dataclass
class PartsReader:
    """Reads versions in parts for a rank that needs the same slices of every version."""

    versions: RankVersions
    model: str
    """The digest of the layout that a version would have if written whole."""
    reader: Reader
    _planned: dict[tuple[bytes, ...], _PartsPlan] = field(default_factory=dict)
    """The plan for the last version, keyed by its parts' tables, which are equal for all versions
    of
    a policy."""

    async def fetch(
        self, version: VersionKey, opened: OpenedVersion, request: VersionRequest
    ) -> FetchedVersion:
        """Fetch the bytes of a version that the rank needs. Args: opened: the version's
        manifest."""
        manifest = decode_manifest(opened.memory, version)
        if manifest.tensors != self.model:
            raise other_model_error("its tensors differ")
        key = tuple(part.table for part in manifest.parts)
        if key not in self._planned:
            self._planned = {key: _PartsPlan.of(manifest, self.reader)}
        plan = self._planned[key]
        parts_by_name = {part.part: part for part in manifest.parts}
        sources = {entry.part: entry.endpoints for entry in opened.described.sources}
        # The location of copies of local parts is unknown. If a local part is corrupt, all sources
        # are tried.

        async def fetch_part(part: str, runs: Runs) -> tuple[memoryview, Runs]:
            endpoints = sources.get(part, request.sources)
            return (
                await self._open_part(version, parts_by_name[part], endpoints, request)
            ).memory, runs

        pieces = await _gather_limited([fetch_part(*entry) for entry in plan.whole_parts.items()])
        if plan.slices:
            all_sources = [
                PartSources(part, sources.get(part, request.sources)) for part in parts_by_name
            ]
            memory, _ = await self.versions.open_slices(
                version,
                plan.slices,
                all_sources,
                request.ticket,
                request.id,
                is_ahead=_is_ahead(request),
            )
            pieces.append((memory, plan.of_slices))
        return FetchedVersion(version, opened.described.digest, pieces, is_whole=False)

    async def _open_part(
        self, version: VersionKey, part: VersionPart, sources: list[str], request: VersionRequest
    ) -> OpenedVersion:
        """Open a part and check it against the manifest. Raises: PhaseloomError: it does not
        match."""
        key = part_of(version, part.part)
        ticket, is_ahead = request.ticket, _is_ahead(request)
        opened = await self.versions.open(
            key, sources, ticket, part.digest, permit=request.id, is_ahead=is_ahead
        )
        described = opened.described
        if (described.digest, bytes(described.tensors)) != (part.digest, part.table):
            raise ResourceError(f"version {key} does not match its manifest", code=Code.DATA_LOSS)
        return opened


@dataclass
class RankWeights:
    settings: RankConfig
    versions: RankVersions
    executor: Executor
    _whole_runs: dict[bytes, Runs] = field(default_factory=dict)
    """The bytes to copy out of the last version that was written whole, keyed by its table."""

    def __post_init__(self) -> None:
        self.versions.place_by(lambda packed: self._runs_of_whole(TensorTable.read(packed)))

    # --- publishing ------------------------------------------------------------------------------

    @property
    def is_in_parts(self) -> bool:
        """Whether this deployment publishes in parts, because its ranks hold different weights."""
        return len(self._parts) > 1

    async def write(self, version: VersionKey) -> VersionPart | None:
        """Write this rank's part of a version, or the whole version. Idempotent.

        Returns: the part; None: another rank on this node writes it.
        Raises:  PhaseloomError: nothing is written; no host memory.
        """
        number = next(i for i, ranks in enumerate(self._parts) if self.settings.rank in ranks)
        if self.settings.rank != min(set(self._parts[number]) & set(self._node_ranks)):
            return None
        part = part_name(number, len(self._parts)) if self.is_in_parts else ""
        slots = self.executor.weight_slots
        copy = await self.versions.create(part_of(version, part), slots)
        return VersionPart(part, copy.num_bytes, copy.digest, self._table)

    def manifest(self, written: Iterable[VersionPart | None]) -> VersionParts:
        """Build the manifest from the parts that all ranks have written."""
        parts = {part.part: part for part in written if part is not None}
        names = [part_name(number, len(self._parts)) for number in range(len(self._parts))]
        return VersionParts(self._model, [parts[name] for name in names])

    @cached_property
    def _parts(self) -> list[list[int]]:
        return parts_of(self.executor.backend.holdings)

    @cached_property
    def _node_ranks(self) -> list[int]:
        settings = self.settings
        node = settings.node_of(settings.rank)
        return [rank for rank in range(settings.num_ranks) if settings.node_of(rank) == node]

    @cached_property
    def _model(self) -> str:
        return layout_digest(TensorTable.of(self.executor.backend.version_slots).packed)

    @cached_property
    def _table(self) -> bytes:
        packed_slots, _ = packed(self.executor.weight_slots)
        return TensorTable.of(packed_slots).packed

    # --- syncing ---------------------------------------------------------------------------------

    async def load(self, version: VersionKey, permit: Permit) -> FetchedVersion:
        """Fetch a version and replace the weights with it, in a WPG of one rank.

        Raises: PhaseloomError: nothing has changed.
        """
        opened = await self.versions.open(
            version,
            permit.sources,
            permit.ticket,
            permit=permit.id,
            is_unverified=self.versions.may_load_on_device,
        )
        if opened.is_manifest:
            fetched = await self._parts_reader.fetch(version, opened, permit)
            await self.apply(fetched)
            return fetched
        await self.versions.load(opened, self.executor.weight_slots)
        return FetchedVersion(version, opened.described.digest, [], is_whole=True)

    async def prefetch(self, request: PrefetchWeights) -> None:
        """Fetch the bytes that this rank needs of a version. A sync verifies them again.

        Raises: PhaseloomError: they are unavailable.
        """
        await self.fetch(request.ticket.version, request)

    async def fetch(self, version: VersionKey, request: VersionRequest) -> FetchedVersion:
        """Fetch the bytes of a version that this rank needs, for copying later.

        Raises: PhaseloomError: they are unavailable.
        """
        sources, is_ahead = request.sources, _is_ahead(request)
        opened = await self.versions.open(
            version, sources, request.ticket, permit=request.id, is_ahead=is_ahead
        )
        if opened.is_manifest:
            return await self._parts_reader.fetch(version, opened, request)
        pieces = [(opened.memory, self._runs_of_whole(opened.table))]
        return FetchedVersion(version, opened.described.digest, pieces, is_whole=True)

    def _runs_of_whole(self, table: TensorTable) -> Runs:
        """The bytes that this rank copies out of a version that was written whole.

        Raises: CallerError: the version is of another model.
        """
        runs = self._whole_runs.get(table.packed)
        if runs is None:
            paired(table.tensors, self.executor.backend.version_slots)
            runs = runs_from_part(
                table.tensors, fetches_of_full_version(self._reader), self._reader
            )
            self._whole_runs = {table.packed: runs}
        return runs

    async def apply(self, fetched: FetchedVersion) -> None:
        """Replace this rank's weights. Raises: an error that leaves the weights partly replaced."""
        await self.versions.scatter(fetched.pieces)

    @cached_property
    def _reader(self) -> Reader:
        backend, rank = self.executor.backend, self.settings.rank
        tensors = tensors_of(backend.version_slots)
        return Reader(backend.holdings, rank, self._node_ranks, tensors, self.executor.weight_slots)

    @cached_property
    def _parts_reader(self) -> PartsReader:
        return PartsReader(self.versions, self._model, self._reader)


def _is_ahead(request: VersionRequest) -> bool:
    return isinstance(request, PrefetchWeights)


async def or_failed(work: Awaitable[T]) -> T | Failed:
    """Return the result of `work`, or its refusal as a message."""
    try:
        return await work
    except PhaseloomError as error:
        return Failed(error.info)


async def _gather_limited(works: Sequence[Awaitable[T]]) -> list[T]:
    """Run all works, a few at a time, and return their results.

    Raises: the first failure, after all have ended.
    """
    limit = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def run_one(work: Awaitable[T]) -> T:
        async with limit:
            return await work

    ended = await asyncio.gather(*map(run_one, works), return_exceptions=True)
    done: list[T] = []
    for outcome in ended:
        if isinstance(outcome, BaseException):
            raise outcome
        done.append(outcome)
    return done
