"""Copies of a deployment's seals and durable weights versions on other nodes' disks.

A node that is to run a deployment fetches the files that it lacks. A node that seals a deployment
durably beyond itself reports the seal only after other nodes have fetched it. A file that is here
and whole is not fetched again. Where a seal proves bad when it is read, a good copy is fetched from
the nodes that the last request named as sources.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import msgspec

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey, check_key
from phaseloom.common.contract.state_agent import FetchState, WriteSeal
from phaseloom.statemgr.disk.files import StateDirectory, header_of
from phaseloom.statemgr.node.stores import HostSealStore
from phaseloom.statemgr.records.incarnations import Rank
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.stateheader import StateHeader
from phaseloom.statemgr.seals.remotefiles import RemoteFile, open_file, parts_of, path_of
from phaseloom.statemgr.seals.sealing import Sealer
from phaseloom.statemgr.transfer import wire
from phaseloom.statemgr.transfer.fetching import Home, call_once
from phaseloom.statemgr.transfer.served import Served
from phaseloom.statemgr.transfer.wire import FileName, KeepFiles
from phaseloom.statemgr.versions.weights import Weights

log = logging.getLogger(__name__)


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
    """The requests whose files are being fetched, by deployment."""

    async def fetch(self, request: FetchState) -> None:
        """Fetch the files that a request names, unless they are on this disk or in host memory."""
        check_key(request.deployment)
        self._note_kept(request)
        await self._fetch_files(self._lacking(request))
        if request.keeps is not None:
            await self.weights.keep(request.keeps, request.sources)
        if request.holds is not None:
            # Ahead of the version's sync, which fetches it if this fails.
            try:
                await self.weights.get(request.holds, request.sources)
            except PhaseloomError as error:
                log.info("version %s is not fetched ahead: %s", request.holds.version, error)

    def _note_kept(self, request: FetchState) -> None:
        """Note that versions that ranks here had fetched stay, as the files that are fetched do."""
        for seq in request.versions:
            self.weights.mark_kept(VersionKey(request.deployment, seq))

    def _lacking(self, request: FetchState) -> FetchState:
        """The request without the seal and the versions that are in host memory."""
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
        with self._working_for(request):
            if request.seal_seq:
                await self._have(FileName("seal", key, request.seal_seq), request)
            for seq in request.versions:
                try:
                    await self._have_version(FileName("version", key, seq), request)
                except ResourceError as error:
                    if error.info.code is not Code.DATA_LOSS:
                        raise
                    # No node has it: it may have been released everywhere by now.
                    log.warning("%s", error)

    @contextmanager
    def _working_for(self, request: FetchState) -> Iterator[None]:
        requests = self._under_way.setdefault(request.deployment, [])
        requests.append(request)
        try:
            yield
        finally:
            # By identity: another request may ask for the same files.
            requests[:] = [each for each in requests if each is not request]
            if not requests and self._under_way.get(request.deployment) is requests:
                del self._under_way[request.deployment]

    def _is_forgotten(self, request: FetchState) -> bool:
        """Whether the deployment was forgotten since a request for its files came."""
        return all(each is not request for each in self._under_way.get(request.deployment, ()))

    async def _have_version(self, name: FileName, request: FetchState) -> None:
        """Fetch a version: first the parts that a source has, then the manifest, so that where a
        manifest is on disk its parts are, too."""
        if await self._is_here(name):
            return
        if request.ticket is not None and request.sources:
            remote = RemoteFile(name, request.ticket, request.sources, self.home)
            for part in (await remote.describe()).parts:
                await self._have(msgspec.structs.replace(name, part=part), request)
        await self._have(name, request)

    async def _have(self, name: FileName, request: FetchState) -> None:
        lock = self._fetching.setdefault(name, asyncio.Lock())
        async with lock:
            ranks = (request.rank_offset, request.num_ranks)
            if not await self._is_here(name, ranks) and not self._is_forgotten(request):
                await self._fetch_file(name, request)
            if self._is_forgotten(request):
                raise _forgotten(name)

    async def _is_here(self, name: FileName, ranks: tuple[int, int] = (0, 0)) -> bool:
        """Whether a file is here with a good header; its blocks are verified when they are read.

        Args: ranks: as in `StateHeader.is_of`.
        """
        path = path_of(self.directory, name)
        header = await asyncio.to_thread(header_of, path)
        return header is not None and header.is_of(*ranks)

    async def _fetch_file(self, name: FileName, request: FetchState) -> None:
        if request.ticket is None or not request.sources:
            raise CallerError(f"nobody is known to have {name}", field="sources")
        remote = RemoteFile(name, request.ticket, request.sources, self.home)
        ranks = (request.rank_offset, request.num_ranks)
        header = await remote.fetch(self.directory, ranks=ranks)
        if self._is_forgotten(request):
            await asyncio.to_thread(self.directory.discard, path_of(self.directory, name))
            raise _forgotten(name)
        self._found(name, header)

    def _found(self, name: FileName, header: StateHeader) -> None:
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
        """Forget a deployment whose job has ended, or that needs no copy here any more: what is
        being fetched of it is removed when it has come."""
        self._elsewhere.pop(key, None)
        self._under_way.pop(key, None)

    async def restore(self, rank: Rank) -> None:
        """Fill the extent of a registered heap from the seal that its incarnation starts from.

        Where the seal here is bad, it is fetched again from another node: every block, for any may
        be bad.
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
                known = msgspec.structs.replace(
                    self._elsewhere.get(key, FetchState(key, seq, [], []))
                )
                with self._working_for(known):
                    await self._fetch_file(FileName("seal", key, seq), known)
            except PhaseloomError as second:
                log.error("%s", second)
                raise error from second
            self.host_seals.drop(key, seq)
            await self.sealer.fill(rank)

    # --- copies for other nodes ------------------------------------------------------------------

    async def open(self, name: FileName) -> tuple[StateHeader, Served]:
        """The header and the blocks of a file that this node has. Raises: as `open_file`."""
        return await open_file(self.host_seals, self.directory, name)

    async def parts_of(self, name: FileName) -> list[str]:
        """The parts of a weights version that are on this disk; empty for other files."""
        return await parts_of(self.directory, name)

    async def keep(self, asked: KeepFiles) -> None:
        """Fetch another node's files, as a replica of them."""
        key = asked.deployment
        check_key(key)
        request = FetchState(
            key,
            asked.seal_seq,
            asked.versions,
            [asked.source],
            asked.ticket,
            rank_offset=asked.rank_offset,
            num_ranks=asked.num_ranks,
        )
        self._note_kept(request)
        await self._fetch_files(request)
        await self.sealer.remove_superseded(key, asked.seal_seq, asked.committed)

    async def replicate(self, request: WriteSeal) -> None:
        """Return once every replica has the seal, and the versions with it, on its disk.

        Raises: PhaseloomError: a replica could not fetch them.
        """
        calls = [self._hand_over(endpoint, request) for endpoint in request.replicas.values()]
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _hand_over(self, endpoint: str, request: WriteSeal) -> None:
        if request.ticket is None:
            raise CallerError("replicas without a ticket", field="ticket")
        wpg = self.records.residency.current(request.deployment, request.incarnation)
        asked = KeepFiles(
            request.deployment,
            request.seq,
            request.versions,
            request.committed,
            self.home.endpoint,
            request.ticket,
            wpg.rank_offset,
            wpg.num_ranks,
        )
        await call_once(endpoint, asked, wire.FilesKept, self.home)


def _forgotten(name: FileName) -> ResourceError:
    return ResourceError(f"{name} is not kept: {name.deployment} was forgotten", code=Code.ABORTED)
