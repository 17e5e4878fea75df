"""Weights that operations name, as a rank reads with them beside its own: versions and checkpoints.

The operations that run at a time and name the same weights have them in host memory once. Those of
checkpoints, which take longest to read, stay there: as many as the rank has places for on its
device, the ones used last.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.contract.operations import Args, Forward, Generate, NamedWeights
from phaseloom.common.contract.specs import Adapter
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.contract.state_rank import AdapterOpened
from phaseloom.common.tensors.resharding import holding_of, tensors_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import layout_digest
from phaseloom.worker.backends.base import AdapterVersion, TakesAdapters
from phaseloom.worker.core.reading import Reader
from phaseloom.worker.rank.executor import Executor
from phaseloom.worker.rank.weightsync import PartsReader
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.copying import copy_rows
from phaseloom.worker.state.heap import align
from phaseloom.worker.state.versions import Opened


class _PeftConfig(msgspec.Struct):
    """The fields of `adapter_config.json` that do not follow from the tensors."""

    r: int
    lora_alpha: float
    base_model_name_or_path: str | None = None
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}


def named_in(args: Args) -> NamedWeights | None:
    """The weights that an operation names; None: it names none."""
    return args.weights if isinstance(args, Generate | Forward) else None


@dataclass
class WeightsReader:
    """Reads the weights that operations name."""

    state: RankStateClient
    executor: Executor
    _read: WeakValueDictionary[str, AdapterVersion] = field(default_factory=WeakValueDictionary)
    _kept: OrderedDict[str, AdapterVersion] = field(default_factory=OrderedDict)
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    async def read(self, args: Args, permit: Permit | None) -> AdapterVersion | None:
        """The weights that an operation names, verified; None: it names none.

        Args:   permit: the operation's permit; None where it names a checkpoint.
        Raises: PhaseloomError: the weights cannot be had, or cannot be used here.
        """
        named = named_in(args)
        if named is None:
            return None
        backend, settings = self.executor.backend, self.executor.settings
        can_read = settings.spec.max_adapters and not settings.is_over_nodes
        if not can_read or not isinstance(backend, TakesAdapters):
            raise CallerError(
                f"{settings.deployment.deployment} reads no weights but its own",
                code=Code.FAILED_PRECONDITION,
                field="args.weights",
                remedy="send it to a sampler on one node, with an adapter and max_adapters",
            )
        if named.checkpoint:
            return await self._checkpoint(named, backend)
        assert permit is not None
        return await self._version(permit, backend)

    # --- versions --------------------------------------------------------------------------------

    async def _version(self, permit: Permit, backend: TakesAdapters) -> AdapterVersion:
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
                slots, memory = await self._whole(opened, permit, backend.adapter_slots(adapter))
                version = AdapterVersion(name, adapter, slots, memory)
                backend.check_adapter(version)
                self._read[name] = version
        return version

    async def _whole(
        self, opened: Opened, permit: Permit, slots: list[TensorSlot]
    ) -> tuple[list[TensorSlot], memoryview]:
        """The tensors of a version and the memory where they lie. A version in parts is assembled
        in memory of this rank's own. Args: slots: the tensors of a version in parts."""
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

    # --- checkpoints -----------------------------------------------------------------------------

    async def _checkpoint(self, named: NamedWeights, backend: TakesAdapters) -> AdapterVersion:
        own = self.executor.settings.deployment
        source = f"{named.job or own.job}/{named.policy}"
        path = f"{source}/{named.checkpoint}"
        async with self._lock(path):
            try:
                version = await self._from_files(named.checkpoint, source)
                backend.check_adapter(version)
            except PhaseloomError as error:
                if error.info.field != "args.name":
                    raise
                info = replace(error.info, field="args.weights.checkpoint")
                raise to_exception(info) from error
            self._keep(version)
        return version

    async def _from_files(self, checkpoint: str, source: str) -> AdapterVersion:
        """The checkpoint that has the name now, from memory or from files."""
        now = await self._opened(checkpoint, source)
        while True:
            opened = now
            # Another one may have the name later.
            name = f"{source}/{checkpoint}@{opened.operation}"
            version = self._kept.get(name) if opened.operation else None
            if version is not None:
                return version
            slots = TensorTable.read(opened.tensors).tensors
            error: PhaseloomError | None = None
            try:
                memory = await self.state.read_adapter(checkpoint, source, _end(slots))
            except PhaseloomError as found:
                error = found
            now = await self._opened(checkpoint, source)
            if now != opened:
                continue  # it was overwritten meanwhile
            if error is not None:
                raise error
            return AdapterVersion(name, self._adapter(opened), slots, memory)

    async def _opened(self, checkpoint: str, source: str) -> AdapterOpened:
        try:
            return await self.state.open_adapter(checkpoint, source)
        except ResourceError:
            # Another one may have taken its place, or it was deleted, while its files were opened.
            return await self.state.open_adapter(checkpoint, source)

    def _adapter(self, opened: AdapterOpened) -> Adapter:
        """The adapter that a checkpoint's config describes. Raises: CallerError: it cannot be used
        here."""
        try:
            config = msgspec.json.decode(opened.config, type=_PeftConfig)
        except msgspec.DecodeError as error:
            raise _not_read(f"its config is none of a LoRA adapter: {error}") from None
        if config.use_rslora or config.use_dora or config.rank_pattern or config.alpha_pattern:
            raise _not_read("it scales its layers in a way of its own")
        base = self.executor.settings.spec.model.registered
        if opened.operation and config.base_model_name_or_path != base:
            raise _not_read(f"it is on {config.base_model_name_or_path!r}, not on {base!r}")
        return Adapter(rank=config.r, alpha=config.lora_alpha)

    def _keep(self, version: AdapterVersion) -> None:
        self._kept[version.name] = version
        self._kept.move_to_end(version.name)
        while len(self._kept) > self.executor.settings.spec.max_adapters:
            self._kept.popitem(last=False)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def _end(slots: list[TensorSlot]) -> int:
    return align(max(slot.offset + slot.num_bytes for slot in slots))


def _not_read(why: str) -> CallerError:
    return CallerError(
        f"the checkpoint cannot be read beside other weights: {why}",
        code=Code.FAILED_PRECONDITION,
        field="args.weights.checkpoint",
        remedy="name one of a deployment with an adapter on the same base",
    )
