"""Seals: a host copy made whole between operations, then written to disk while work goes on."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from phaseloom.common.errors import CallerError, Code
from phaseloom.common.ids import DeploymentKey, VersionKey
from phaseloom.common.statewire import CopyOut, PrepareSeal, Sealed, WriteSeal
from phaseloom.statemgr.core.residency import State, Wpg
from phaseloom.statemgr.core.statefile import StateHeader, check_restorable, superseded_seals
from phaseloom.statemgr.files import StateDirectory, read_header, read_memory
from phaseloom.statemgr.node import Node

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _OnDisk:
    sealed: Sealed
    incarnation: int | None
    """Life that wrote it; None: found at start."""


class Sealer:
    def __init__(self, node: Node, directory: StateDirectory) -> None:
        self._node = node
        self._directory = directory
        self._seals: dict[DeploymentKey, dict[int, _OnDisk]] = {}

    def found(self, header: StateHeader, file: str) -> None:
        """A seal that was on disk at start."""
        sealed = Sealed(file, header.digest, header.num_bytes)
        self._add(header.deployment, header.seq, _OnDisk(sealed, None))

    async def prepare(self, request: PrepareSeal) -> None:
        """Make the host copy whole at `seq` and keep it so. Nothing to do where it is sealed.

        Raises: CallerError: FAILED_PRECONDITION: another seq was applied last.
                ResourceError: stale, or its rank is lost.
        """
        node = self._node
        wpg = node.residency.current(request.deployment, request.incarnation)
        async with node.device_locks[wpg.device]:
            if self._find(wpg, request.seq) is not None:
                return
            if wpg.prepared is not None and wpg.prepared.seq == request.seq:
                return
            await node.until(lambda: wpg.prepared is None or not wpg.prepared.is_writing)
            node.residency.end_seal(wpg)
            node.residency.check_sealable(wpg)
            if wpg.state is State.RESIDENT:
                node.residency.begin_copy(wpg)
                copied = await node.ask(wpg, CopyOut(release=False))
                node.residency.finish_copy(wpg, copied.applied, copied.digest)
            node.residency.prepare_seal(wpg, request.seq)

    async def write(self, request: WriteSeal) -> Sealed:
        """Put the prepared copy, and before it the versions, on disk. Idempotent.

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
        self._add(wpg.key, request.seq, _OnDisk(sealed, wpg.incarnation))
        await self._remove_superseded(wpg.key, request.seq, request.committed)
        return sealed

    async def restore(self, wpg: Wpg, seq: int) -> None:
        """Fill the extent of a registered heap from a seal.

        Raises: ResourceError: DATA_LOSS naming the file. CallerError: another layout.
        """
        node = self._node
        path = self._directory.seal(wpg.key, seq)
        header, offset = await asyncio.to_thread(read_header, path)
        check_restorable(header, wpg.heap_bytes, wpg.tensors, str(path))
        assert wpg.extent is not None
        memory = node.memory[wpg.extent].view(header.num_bytes)
        await asyncio.to_thread(read_memory, path, header, offset, memory)
        node.residency.fill(wpg, seq, header.digest)

    def abandon(self) -> None:
        """The agent is gone: nobody will write what it had prepared."""
        for wpg in self._node.residency.unwritten_seals():
            log.info("the seal of %s will not be written: its agent is gone", wpg)
            self._node.residency.end_seal(wpg)
            self._node.settle(wpg)

    async def forget(self, key: DeploymentKey) -> None:
        """Delete every seal of a deployment."""
        for seq in self._seals.pop(key, {}):
            await asyncio.to_thread(self._directory.remove, self._directory.seal(key, seq))

    async def _write(self, wpg: Wpg, seq: int) -> Sealed:
        assert wpg.extent is not None
        path = self._directory.seal(wpg.key, seq)
        header = StateHeader("seal", wpg.key, seq, wpg.heap_bytes, wpg.tensors, wpg.digest)
        memory = self._node.memory[wpg.extent].view(wpg.heap_bytes)
        await asyncio.to_thread(self._directory.write, path, header, memory)
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
                await asyncio.to_thread(self._directory.write, path, header, memory)
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
        found = self._seals.get(wpg.key, {}).get(seq)
        if found is None or (found.incarnation != wpg.incarnation and seq != wpg.seal_seq):
            return None
        return found.sealed

    def _add(self, key: DeploymentKey, seq: int, found: _OnDisk) -> None:
        self._seals.setdefault(key, {})[seq] = found
