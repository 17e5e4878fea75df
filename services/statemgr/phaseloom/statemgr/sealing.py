"""Seals: a host copy made whole between operations, then written to disk while work goes on."""

from __future__ import annotations

import asyncio
import logging

from phaseloom.common.errors import CallerError, Code
from phaseloom.common.ids import DeploymentKey, VersionKey
from phaseloom.common.statewire import CopyOut, PrepareSeal, Sealed, WriteSeal
from phaseloom.statemgr.core.residency import Rank, Wpg
from phaseloom.statemgr.core.statefile import (
    Section,
    StateHeader,
    check_restorable,
    seal_header,
    superseded_seals,
)
from phaseloom.statemgr.files import StateDirectory, find_parts
from phaseloom.statemgr.hierarchy import Hierarchy
from phaseloom.statemgr.node import Node
from phaseloom.statemgr.switching import on_each_device

log = logging.getLogger(__name__)


class Sealer:
    def __init__(self, node: Node, directory: StateDirectory, hierarchy: Hierarchy) -> None:
        self._node = node
        self._hierarchy = hierarchy
        self._directory = directory
        self._seals: dict[DeploymentKey, dict[int, Sealed]] = {}

    def found(self, header: StateHeader, file: str) -> None:
        """A seal that was on disk at start."""
        sealed = Sealed(file, header.digest, header.num_bytes)
        self._seals.setdefault(header.deployment, {})[header.seq] = sealed

    async def prepare(self, request: PrepareSeal) -> None:
        """Make the host copies whole at `seq` and keep them so. Nothing to do where it is sealed.

        Raises: CallerError: FAILED_PRECONDITION: another seq was applied last.
                ResourceError: stale, or its rank is lost.
        """
        node = self._node
        wpg = node.residency.current(request.deployment, request.incarnation)
        async with self._hierarchy.in_host(wpg), node.holding(lambda: set(wpg.devices)):
            if self._find(wpg, request.seq) is not None:
                return
            if wpg.prepared is not None and wpg.prepared.seq == request.seq:
                return
            await node.until(lambda: wpg.prepared is None or not wpg.prepared.is_writing)
            node.residency.end_seal(wpg)
            node.residency.check_sealable(wpg)
            await on_each_device(wpg.on_device, self._copy)
            node.residency.prepare_seal(wpg, request.seq)

    async def _copy(self, rank: Rank) -> None:
        self._node.residency.begin_copy(rank)
        copied = await self._node.ask(rank, CopyOut(release=False))
        self._node.residency.finish_copy(rank, copied.applied, copied.digest)

    async def write(self, request: WriteSeal) -> Sealed:
        """Put the prepared copies, and before them the versions, on disk. Idempotent.

        Raises: CallerError: not prepared, or a version that is not here. ResourceError: the disk
                is full or fails; the previous seal stands.
        """
        node = self._node
        wpg = node.residency.current(request.deployment, request.incarnation)
        await node.until(lambda: wpg.prepared is None or not wpg.prepared.is_writing)
        stored = self._find(wpg, request.seq)
        if stored is not None:
            await self._persist_versions(wpg, request.versions)
            return stored
        node.residency.begin_write(wpg, request.seq)
        try:
            await self._persist_versions(wpg, request.versions)
            sealed = await self._write(wpg, request.seq)
        finally:
            node.residency.end_seal(wpg)
            node.settle(wpg)
        self._seals.setdefault(wpg.key, {})[request.seq] = sealed
        wpg.sealed.add(request.seq)
        await self._remove_superseded(wpg.key, request.seq, request.committed)
        wpg.sealed &= self._seals.get(wpg.key, {}).keys()
        return sealed

    async def restore(self, rank: Rank) -> None:
        """Fill the extent of a registered heap from the seal that its life starts from.

        Raises: ResourceError: DATA_LOSS naming the file. CallerError: another layout.
        """
        wpg = rank.wpg
        path = self._directory.seal(wpg.key, wpg.seal_seq)
        places = await asyncio.to_thread(find_parts, path)
        part = check_restorable(
            places[0].header,
            rank.index,
            len(wpg.ranks),
            heap_bytes=rank.heap_bytes,
            tensors=rank.tensors,
            file=str(path),
        )
        assert rank.extent is not None
        memory = self._node.memory[rank.extent].view(part.num_bytes)
        await asyncio.to_thread(self._directory.read, places[rank.index], memory)
        self._node.residency.fill(rank, wpg.seal_seq, part.digest)

    def abandon(self) -> None:
        """The agent is gone: nobody will write what it had prepared."""
        for wpg in self._node.residency.unwritten_seals():
            log.info("the seal of %s will not be written: its agent is gone", wpg)
            self._node.residency.end_seal(wpg)
            self._node.settle(wpg)

    async def forget(self, key: DeploymentKey) -> None:
        """Delete everything of a deployment that is on disk, whichever life wrote it."""
        self._seals.pop(key, None)
        await asyncio.to_thread(self._directory.clear, key)

    async def _write(self, wpg: Wpg, seq: int) -> Sealed:
        path = self._directory.seal(wpg.key, seq)
        sections = [Section(rank.heap_bytes, rank.tensors, rank.digest) for rank in wpg.ranks]
        header = seal_header(wpg.key, seq, sections)
        memories = [
            self._node.memory[rank.extent].view(rank.heap_bytes)
            for rank in wpg.ranks
            if rank.extent is not None
        ]
        await asyncio.to_thread(self._directory.write, path, header, memories)
        return Sealed(str(path), header.digest, header.num_bytes)

    async def _persist_versions(self, wpg: Wpg, seqs: list[int]) -> None:
        node = self._node
        for seq in seqs:
            key = VersionKey(wpg.key, seq)
            version = node.versions.find(key)
            if version is None or not version.is_committed:
                raise CallerError(
                    f"version {key} is not here", code=Code.NOT_FOUND, field="versions"
                )
            if version.is_on_disk:
                continue
            assert version.extent is not None
            header = StateHeader(
                "version", wpg.key, seq, version.num_bytes, version.tensors, version.digest
            )
            memory = node.memory[version.extent].view(version.num_bytes)
            path = self._directory.version(key)
            node.versions.acquire(version)
            try:
                await asyncio.to_thread(self._directory.write, path, header, [memory])
                version.is_on_disk = True
            finally:
                node.release_version(version)
            if version.is_dropped:
                await asyncio.to_thread(self._directory.remove, path)

    async def _remove_superseded(self, key: DeploymentKey, written: int, committed: int) -> None:
        for seq in superseded_seals(list(self._seals[key]), written, committed):
            del self._seals[key][seq]
            path = self._directory.seal(key, seq)
            try:
                await asyncio.to_thread(self._directory.remove, path)
            except OSError as error:
                log.warning("the old seal %s stays: %s", path, error)

    def _find(self, wpg: Wpg, seq: int) -> Sealed | None:
        """The seal at `seq` that this life wrote or began from; an older life's may differ."""
        if seq != wpg.seal_seq and seq not in wpg.sealed:
            return None
        return self._seals.get(wpg.key, {}).get(seq)
