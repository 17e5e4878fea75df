"""Weights that operations name, so that a rank reads with them instead of its current weights.

Operations may name versions and checkpoints.
- A sampler uses a named adapter alongside its current one.
- Full weights, and a trainer's adapter, replace the current ones in the heap for one call. Every
  byte is restored afterwards.

Concurrent operations that name the same weights share one copy in host memory. Adapters read from
checkpoints stay in host memory, because they take longest to read. At most as many as the device
has adapter slots stay; the least recently used are dropped first.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from msgspec.structs import replace

from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    ErrorInfo,
    PhaseloomError,
    to_exception,
)
from phaseloom.common.contract.operations import Args, Forward, Generate, NamedWeights
from phaseloom.common.contract.specs import Adapter
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.contract.state_rank import SavedOpened
from phaseloom.common.tensors.adapterfiles import AdapterConfig, adapted_layers
from phaseloom.common.tensors.resharding import StridedRanges, holding_of, tensors_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import layout_digest
from phaseloom.worker.backends.base import (
    AdapterVersion,
    ReadsAdapters,
    ReadsOtherWeights,
    Version,
    WholeVersion,
    WritesPastWeights,
)
from phaseloom.worker.core.reading import Reader, Runs
from phaseloom.worker.rank.executor import Executor
from phaseloom.worker.rank.weightsync import PartsReader, RankWeights
from phaseloom.worker.state.borrowing import SavedBytes
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.copying import copy_rows
from phaseloom.worker.state.heap import align
from phaseloom.worker.state.versions import OpenedVersion

NamedVersion = TypeVar("NamedVersion", AdapterVersion, WholeVersion)


def named_in(args: Args) -> NamedWeights | None:
    """The weights that an operation names; None if it names none."""
    return args.weights if isinstance(args, Generate | Forward) else None


@dataclass
class WeightsReader:
    """Reads the weights that operations name."""

    state: RankStateClient
    executor: Executor
    _read: WeakValueDictionary[str, Version] = field(default_factory=WeakValueDictionary)
    _cached: OrderedDict[str, AdapterVersion] = field(default_factory=OrderedDict)
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    _weights: RankWeights = field(init=False)

    def __post_init__(self) -> None:
        self._weights = RankWeights(self.executor.settings, self.state.versions, self.executor)

    async def read(self, args: Args, permit: Permit | None) -> Version | None:
        """The weights that an operation names, verified; None if it names none.

        Args:   permit: the operation's permit; may be None if it names a checkpoint.
        Raises: PhaseloomError: the weights are unavailable or cannot be used here.
        """
        named = named_in(args)
        if named is None:
            return None
        backend, spec = self.executor.backend, self.executor.settings.spec
        try:
            if spec.model.adapter is not None and isinstance(backend, ReadsAdapters):
                if not spec.max_adapters:
                    raise self._unsupported_error("declare the deployment with max_adapters")
                if named.checkpoint:
                    return await self._adapter_checkpoint(named, backend)
                assert permit is not None
                return await self._adapter_version(permit, backend)
            if not isinstance(backend, ReadsOtherWeights):
                raise self._unsupported_error(
                    "send the operation to a deployment whose backend supports named weights"
                )
            if named.checkpoint:
                source = self._source(named)
                async with self._lock(f"{source}/{named.checkpoint}"):
                    return await self._whole_from_files(named.checkpoint, source)
            assert permit is not None
            return await self._whole_version(permit)
        except CallerError as error:
            raise to_exception(_with_field(error.info, named)) from error

    def _unsupported_error(self, remedy: str) -> CallerError:
        return CallerError(
            f"{self.executor.settings.deployment.deployment} cannot use named weights",
            code=Code.FAILED_PRECONDITION,
            field="args.weights",
            remedy=remedy,
        )

    # --- weights of the deployment's own shape ----------------------------------------------------

    async def _whole_version(self, permit: Permit) -> WholeVersion:
        ticket = permit.ticket
        assert ticket is not None
        name = str(ticket.version)
        async with self._lock(name):
            saved = await self._save_current()
            version = self._read.get(_replacement_key(name, saved))
            if version is None:
                fetched = await self._weights.fetch(ticket.version, permit)
                version = self._register_whole(name, fetched.pieces, saved)
        assert isinstance(version, WholeVersion)
        return version

    async def _whole_from_files(self, checkpoint: str, source: str) -> WholeVersion:

        async def read(opened: SavedOpened, name: str) -> WholeVersion:
            self._check_kind(opened)
            expected = tensors_of(self.executor.backend.version_slots)
            names = [slot.name for slot in TensorTable.read(opened.tensors).tensors]
            places = None
            if {*names} != expected.keys():
                if opened.adapter_config:
                    raise _unusable_error("its tensors differ")
                places = await asyncio.to_thread(self.executor.locate, names)
            saved = await self._save_current()
            version = self._read.get(_replacement_key(name, saved))
            if version is None:
                memory = await self.state.read_saved(checkpoint, source, places=places)
                slots = self.executor.weight_slots
                runs = [StridedRanges(slot.offset, slot.offset, slot.num_bytes) for slot in slots]
                version = self._register_whole(name, [(memory, runs)], saved)
            assert isinstance(version, WholeVersion)
            return version

        return await self._read_unchanged(checkpoint, source, read)

    async def _read_unchanged(
        self,
        checkpoint: str,
        source: str,
        read: Callable[[SavedOpened, str], Awaitable[NamedVersion]],
    ) -> NamedVersion:
        """Read the checkpoint that currently has the name, and retry if it is overwritten
        meanwhile.

        Args: read: receives the checkpoint's description, and a name unique to its files.
        """
        now = await self.state.open_saved(checkpoint, source)
        while True:
            opened = now
            error: PhaseloomError | None = None
            try:
                version = await read(opened, f"{source}/{checkpoint}@{opened.identity}")
            except PhaseloomError as failure:
                error = failure
            now = await self.state.open_saved(checkpoint, source)
            if now != opened:
                continue  # overwritten during the read
            if error is not None:
                raise error
            return version

    def _check_kind(self, opened: SavedOpened) -> None:
        """Check that a checkpoint can replace the deployment's current weights.

        Raises: CallerError: only one of the two has an adapter, or the adapters differ.
        """
        adapter = self.executor.settings.spec.model.adapter
        if adapter is None and opened.adapter_config:
            raise _unusable_error("it contains an adapter, and this deployment trains full weights")
        if adapter is None:
            return
        if not opened.adapter_config:
            raise _unusable_error("it contains full weights and no adapter")
        actual = self._adapter(opened)
        if actual.rank != adapter.rank or not math.isclose(actual.alpha, adapter.alpha):
            raise _unusable_error(
                f"its adapter has rank {actual.rank} and alpha {actual.alpha:g}, this deployment's "
                f"rank {adapter.rank} and alpha {adapter.alpha:g}"
            )

    async def _save_current(self) -> SavedBytes:
        """Memory that saves the heap's current weights while other weights replace them."""
        backend, num_bytes = self.executor.backend, self.state.weights_bytes
        if isinstance(backend, WritesPastWeights):
            num_bytes = backend.exchanged_bytes
        return await self.state.loans.borrow_to_save(num_bytes, self.executor.applied)

    def _register_whole(
        self, name: str, pieces: list[tuple[memoryview, Runs]], saved: SavedBytes
    ) -> WholeVersion:
        version = WholeVersion(name, lambda: self.state.versions.temporarily_loaded(pieces, saved))
        self._read[_replacement_key(name, saved)] = version
        return version

    def _source(self, named: NamedWeights) -> str:
        return f"{named.job or self.executor.settings.deployment.job}/{named.policy}"

    # --- versions of adapters ---------------------------------------------------------------------

    async def _adapter_version(self, permit: Permit, backend: ReadsAdapters) -> AdapterVersion:
        adapter, ticket = permit.adapter, permit.ticket
        assert adapter is not None, "the scheduler says what the version is"
        assert ticket is not None
        name = str(ticket.version)
        async with self._lock(name):
            version = self._read.get(name)
            if version is None:
                opened = await self.state.versions.open(
                    ticket.version, permit.sources, ticket, permit=permit.id
                )
                slots, memory = await self._assemble(opened, permit, backend.adapter_slots(adapter))
                version = AdapterVersion(name, adapter, slots, memory)
                backend.check_adapter(version)
                self._read[name] = version
        assert isinstance(version, AdapterVersion)
        return version

    async def _assemble(
        self, opened: OpenedVersion, permit: Permit, slots: list[TensorSlot]
    ) -> tuple[list[TensorSlot], memoryview]:
        """The tensors of a version and the memory that contains them.

        A version in parts is assembled in new memory of this rank.
        Args: slots: the tensors of a version in parts.
        """
        if not opened.is_manifest:
            return opened.table.tensors, opened.memory
        assert permit.ticket is not None
        reader = Reader([holding_of(slots)], 0, [0], tensors_of(slots), slots)
        model = layout_digest(TensorTable.of(slots).packed)
        parts = PartsReader(self.state.versions, model, reader)
        fetched = await parts.fetch(permit.ticket.version, opened, permit)
        memory = memoryview(bytearray(_end(slots)))
        for source, runs in fetched.pieces:
            copy_rows(source, memory, runs)
        return slots, memory

    # --- checkpoints of adapters ------------------------------------------------------------------

    async def _adapter_checkpoint(
        self, named: NamedWeights, backend: ReadsAdapters
    ) -> AdapterVersion:
        source = self._source(named)
        async with self._lock(f"{source}/{named.checkpoint}"):
            version = await self._adapter_from_files(named.checkpoint, source)
            backend.check_adapter(version)
            self._cached[version.name] = version
            self._cached.move_to_end(version.name)
            while len(self._cached) > self.executor.settings.spec.max_adapters:
                self._cached.popitem(last=False)
        return version

    async def _adapter_from_files(self, checkpoint: str, source: str) -> AdapterVersion:

        async def read(opened: SavedOpened, name: str) -> AdapterVersion:
            if not opened.adapter_config:
                raise _unusable_error("it contains full weights and no adapter")
            version = self._cached.get(name)
            if version is None:
                slots = TensorTable.read(opened.tensors).tensors
                memory = await self.state.read_saved(checkpoint, source, _end(slots))
                version = AdapterVersion(name, self._adapter(opened), slots, memory)
            return version

        return await self._read_unchanged(checkpoint, source, read)

    def _adapter(self, opened: SavedOpened) -> Adapter:
        """Parse a checkpoint's adapter config. Raises: CallerError: this rank cannot use the
        adapter."""
        tensors = TensorTable.read(opened.tensors).tensors
        try:
            config = AdapterConfig(opened.adapter_config)
            scaling = config.uniform_scaling(adapted_layers(slot.name for slot in tensors))
        except ValueError as error:
            raise _unusable_error(f"its adapter is not supported: {error}") from None
        base = self.executor.settings.spec.model.registered
        if opened.operation and config.base_model != base:
            raise _unusable_error(f"its base model is {config.base_model!r}, expected {base!r}")
        return Adapter(rank=scaling.rank, alpha=scaling.alpha)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def _replacement_key(name: str, saved: SavedBytes) -> str:
    """The key of weights read as a replacement for the current weights at this seq."""
    return f"{name} in place of {saved.applied}"


def _end(slots: list[TensorSlot]) -> int:
    return align(max(slot.offset + slot.num_bytes for slot in slots))


def _with_field(error: ErrorInfo, named: NamedWeights) -> ErrorInfo:
    """Name the request field that selected the weights in a refusal."""
    if error.field.startswith("args.weights"):
        return error
    field = "args.weights.checkpoint" if named.checkpoint else "args.weights.version"
    return replace(error, field=field, remedy=error.remedy or "name weights of the same model")


def _unusable_error(reason: str) -> CallerError:
    return CallerError(
        f"this deployment cannot use the checkpoint: {reason}",
        code=Code.FAILED_PRECONDITION,
        field="args.weights.checkpoint",
        remedy="name a checkpoint of the same model; both or neither of the deployments must have "
        "an adapter",
    )
