"""Copies of a deployment's seals and durable weights versions on other nodes' disks.

A node that is to run a deployment brings what it lacks; a node that seals one durably beyond itself
has others fetch it before it says so. What is here and whole is not brought again. Of a seal that
proves bad when it is read, the good copy is brought from where it was said to be.
"""

from __future__ import annotations

import asyncio
import logging
from weakref import WeakValueDictionary

import msgspec

from phaseloom.common.errors import CallerError, Code, PhaseloomError, ResourceError, to_exception
from phaseloom.common.ids import DeploymentKey, VersionKey, check_name
from phaseloom.common.messages import FilesTicket
from phaseloom.common.statewire import BringState, WriteSeal
from phaseloom.statemgr.core.statefile import StateHeader
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.mesh import tls
from phaseloom.statemgr.mesh.tls import Identity
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.seals.filefetching import FileFetching
from phaseloom.statemgr.seals.fileserving import path_of
from phaseloom.statemgr.seals.filewire import (
    MAX_REPLY_BYTES,
    SERVICE,
    FileName,
    FileRefused,
    FilesKept,
    KeepFiles,
    Kept,
)
from phaseloom.statemgr.seals.sealing import Sealer
from phaseloom.statemgr.versions.weights import Weights

log = logging.getLogger(__name__)


class Replicator:
    def __init__(
        self,
        node: Node,
        directory: StateDirectory,
        sealer: Sealer,
        weights: Weights,
        *,
        identity: Identity,
        timeout_s: float,
    ) -> None:
        self._node = node
        self._directory = directory
        self._sealer = sealer
        self._weights = weights
        self._identity = identity
        self._timeout_s = timeout_s
        self._bringing: WeakValueDictionary[FileName, asyncio.Lock] = WeakValueDictionary()
        self._elsewhere: dict[DeploymentKey, tuple[list[str], FilesTicket]] = {}
        """Where each deployment's files may be had, as was said last."""
        sealer.bring_again = self._bring_again

    async def bring(self, request: BringState) -> None:
        """Have what is asked for on this node's disk.

        Raises: ResourceError: as `FileFetching.bring`.
        """
        key = request.deployment
        _check_key(key)
        if request.ticket is not None and request.sources:
            self._elsewhere[key] = (request.sources, request.ticket)
        if request.seal_seq:
            await self._have(FileName("seal", key, request.seal_seq), request)
        for seq in request.versions:
            await self._have_unless_released(FileName("version", key, seq), request)
        if request.holds is not None:
            await self._bring_held(request)

    async def _have_unless_released(self, name: FileName, request: BringState) -> None:
        """A version may be released everywhere while it is being asked for."""
        try:
            await self._have(name, request)
        except ResourceError as error:
            if error.info.code is not Code.DATA_LOSS:
                raise
            log.warning("%s", error)

    async def _have(self, name: FileName, request: BringState) -> None:
        lock = self._bringing.setdefault(name, asyncio.Lock())
        async with lock:
            if await self._is_here(name):
                return
            await self._fetch(name, request.sources, request.ticket)

    async def _is_here(self, name: FileName) -> bool:
        """Its header is good; its blocks are verified when they are read."""
        path = path_of(self._directory, name)
        try:
            await asyncio.to_thread(find_parts, path)
        except PhaseloomError:
            return False
        return True

    async def _fetch(self, name: FileName, sources: list[str], ticket: FilesTicket | None) -> None:
        if ticket is None or not sources:
            raise CallerError(f"nobody is known to have {name}", field="sources")
        fetching = FileFetching(name, ticket, self._directory, self._identity, self._timeout_s)
        header = await fetching.bring(sources)
        log.info("%s came: %d bytes", name, fetching.num_bytes)
        self._found(name, header)

    def _found(self, name: FileName, header: StateHeader) -> None:
        if name.kind == "seal":
            self._sealer.found(header, str(path_of(self._directory, name)))
            return
        version = self._node.versions.find(VersionKey(name.deployment, name.seq))
        if version is None:
            self._weights.found(header)
        elif version.digest == header.digest:
            version.is_on_disk = True

    async def _bring_held(self, request: BringState) -> None:
        """It is only sooner here so: the sync that brings it does so where this cannot."""
        assert request.holds is not None
        try:
            await self._weights.bring(request.holds, request.sources)
        except PhaseloomError as error:
            log.info("version %s is not brought ahead: %s", request.holds.version, error)

    def forget(self, key: DeploymentKey) -> None:
        """Its job has ended."""
        self._elsewhere.pop(key, None)

    async def _bring_again(self, key: DeploymentKey, seq: int) -> None:
        """Of a seal that is bad here. Raises: PhaseloomError: there is no good one either."""
        sources, ticket = self._elsewhere.get(key, ([], None))
        await self._fetch(FileName("seal", key, seq), sources, ticket)

    # --- copies for other nodes ------------------------------------------------------------------

    async def keep(self, asked: KeepFiles) -> None:
        """Be a copy of another node's state. Raises: ResourceError: as `bring`."""
        key = asked.deployment
        _check_key(key)
        request = BringState(key, asked.seal_seq, asked.versions, [asked.source], asked.ticket)
        await self.bring(request)
        await self._sealer.remove_superseded(key, asked.seal_seq, asked.committed)

    async def replicate(self, request: WriteSeal) -> None:
        """Returns once every replica has the seal, and the versions with it, on its disk.

        Raises: PhaseloomError: one has not.
        """
        calls = [self._hand_over(endpoint, request) for endpoint in request.replicas.values()]
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _hand_over(self, endpoint: str, request: WriteSeal) -> None:
        if request.ticket is None:
            raise CallerError("replicas without a ticket", field="ticket")
        asked = KeepFiles(
            request.deployment,
            request.seq,
            request.versions,
            request.committed,
            self._node.endpoint,
            request.ticket,
        )
        stream = await tls.connect(endpoint, SERVICE, self._identity, self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                await stream.send(asked)
            while True:
                async with asyncio.timeout(self._timeout_s):
                    payload = await stream.receive(MAX_REPLY_BYTES)
                answer: Kept = msgspec.msgpack.decode(payload, type=Kept)
                if isinstance(answer, FileRefused):
                    raise to_exception(answer.error)
                if isinstance(answer, FilesKept):
                    return
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            raise tls.explained(error, endpoint, self._timeout_s) from error
        finally:
            stream.close()


def _check_key(key: DeploymentKey) -> None:
    """Raises: CallerError: a name that is no plain file name."""
    for name in (key.tenant, key.job, key.deployment):
        check_name(name, "deployment")
