"""Weights versions that operations name, as a rank generates with them beside its own.

The operations that run at a time and name the same version have it in host memory once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import Adapter
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.resharding import holding_of, tensors_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import layout_digest
from phaseloom.worker.backends.base import AdapterVersion, TakesAdapters
from phaseloom.worker.core.reading import Reader
from phaseloom.worker.rank.executor import Executor
from phaseloom.worker.rank.weightsync import PartsReader
from phaseloom.worker.state.copying import copy_runs
from phaseloom.worker.state.heap import align
from phaseloom.worker.state.versions import Opened, RankVersions


@dataclass
class NamedWeights:
    versions: RankVersions
    executor: Executor
    _read: WeakValueDictionary[str, AdapterVersion] = field(default_factory=WeakValueDictionary)
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    async def read(self, permit: Permit) -> AdapterVersion | None:
        """The version that an operation names, verified; None: it names none.

        Raises: PhaseloomError: it cannot be had, or cannot be generated with.
        """
        adapter, ticket = permit.adapter, permit.ticket
        if adapter is None or ticket is None:
            return None
        name = str(ticket.version)
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            version = self._read.get(name)
            if version is None:
                version = await self._fetch(permit, adapter)
                self._read[name] = version
        return version

    async def _fetch(self, permit: Permit, adapter: Adapter) -> AdapterVersion:
        backend, ticket = self.executor.backend, permit.ticket
        assert ticket is not None
        if not isinstance(backend, TakesAdapters):
            raise CallerError(
                "this deployment reads no weights but its own",
                code=Code.FAILED_PRECONDITION,
                field="args.weights",
                remedy="send it to a sampler with an adapter and max_adapters",
            )
        opened = await self.versions.open(ticket.version, permit.sources, ticket)
        if opened.is_manifest:
            slots = backend.adapter_slots(adapter)
            memory = await self._assembled(opened, permit, slots)
        else:
            opened = await self.versions.verified(opened)
            slots, memory = opened.table.tensors, opened.memory
        version = AdapterVersion(str(ticket.version), adapter, slots, memory)
        backend.check_adapter(version)
        return version

    async def _assembled(
        self, opened: Opened, permit: Permit, slots: list[TensorSlot]
    ) -> memoryview:
        """The whole version in memory of this rank's own. Args: opened: the version's manifest."""
        assert permit.ticket is not None
        reader = Reader([holding_of(slots)], 0, [0], tensors_of(slots), slots)
        model = layout_digest(TensorTable.of(slots).packed)
        parts = PartsReader(self.versions, model, reader)
        fetched = await parts.fetch(permit.ticket.version, opened, permit)
        memory = memoryview(bytearray(align(max(slot.offset + slot.num_bytes for slot in slots))))
        for source, runs in fetched.pieces:
            copy_runs(source, memory, runs)
        return memory
