"""Serves state files to other nodes' state managers, and keeps copies of theirs."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path

import msgspec

from phaseloom.common.contract.commands import FilesTicket
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.transport.tickets import is_genuine
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.disk.receiving import page_buffer
from phaseloom.statemgr.disk.statefile import Place, num_blocks
from phaseloom.statemgr.mesh.tls import MAX_REQUEST_BYTES, Stream
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.seals.filewire import (
    BlockFollows,
    FetchFile,
    FileFound,
    FileName,
    FileRefused,
    FileSame,
    FilesKept,
    FileWaiting,
    First,
    KeepFiles,
    ListParts,
    PartsListed,
    TakeBlock,
)
from phaseloom.statemgr.seals.imaging import find_image_parts, read_image_block

log = logging.getLogger(__name__)

ReadBlock = Callable[[Place, int, memoryview], int]

_MAX_LIVES = 4096
_WORDS_PER_TIMEOUT = 3
"""How often who waits hears that its copy is still coming."""


class FilesGate:
    """Checks tickets. One is good until a later life of its deployment has come here."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._lives: OrderedDict[DeploymentKey, int] = OrderedDict()

    def check(self, ticket: FilesTicket, deployment: DeploymentKey, node: str) -> None:
        """Args:   node: that is to get the files.
        Raises: CallerError: PERMISSION_DENIED, and why.
        """
        if not is_genuine(ticket, self._secret):
            raise _denied(f"the ticket of node {node!r} is not signed by this mesh's scheduler")
        if ticket.deployment != deployment:
            raise _denied(f"a ticket for {ticket.deployment}, not {deployment}")
        if node not in ticket.nodes:
            raise _denied(f"a ticket of node {' and '.join(ticket.nodes)}, and this is {node!r}")
        newest = self._lives.get(deployment, 0)
        if ticket.incarnation < newest:
            life = f"incarnation {ticket.incarnation} of {deployment}"
            raise _denied(f"a ticket of {life}, which is at {newest}")
        self._lives[deployment] = ticket.incarnation
        self._lives.move_to_end(deployment)
        while len(self._lives) > _MAX_LIVES:
            self._lives.popitem(last=False)


def _denied(why: str) -> CallerError:
    return CallerError(
        why,
        code=Code.PERMISSION_DENIED,
        field="ticket",
        remedy="the scheduler's next command brings another one",
    )


class FileServer:
    def __init__(
        self,
        node: Node,
        directory: StateDirectory,
        gate: FilesGate,
        *,
        timeout_s: float,
        keep: Callable[[KeepFiles], Coroutine[None, None, None]],
    ) -> None:
        """Args: keep: fetches what is asked for, onto this node's disk."""
        self._node = node
        self._directory = directory
        self._gate = gate
        self._timeout_s = timeout_s
        self._keep = keep

    async def session(self, stream: Stream) -> None:
        """One stream, until the client closes it or has what it asked for."""
        async with asyncio.timeout(self._timeout_s):
            payload = await stream.receive(MAX_REQUEST_BYTES)
        first: First = msgspec.msgpack.decode(payload, type=First)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._node.settled.wait()
            match first:
                case FetchFile():
                    self._gate.check(first.ticket, first.name.deployment, stream.node)
                    await self._serve(stream, first)
                case ListParts():
                    self._gate.check(first.ticket, first.name.deployment, stream.node)
                    await self._send(stream, PartsListed(await self._parts(first.name)))
                case KeepFiles():
                    self._gate.check(first.ticket, first.deployment, self._node.name)
                    await self._keep_for(stream, first)
        except PhaseloomError as error:
            await self._send(stream, FileRefused(error.info))

    async def _serve(self, stream: Stream, asked: FetchFile) -> None:
        places, read = await self._find(asked.name)
        header = places[0].header
        if not header.block_bytes:
            raise CallerError(
                f"{asked.name} is of a release whose files cannot be handed over",
                code=Code.FAILED_PRECONDITION,
                remedy="the next seal can be",
            )
        is_known = asked.digest and asked.digest == header.digest
        await self._send(stream, FileSame() if is_known else FileFound(header.alone()))
        buffer = page_buffer(header.block_bytes)
        while (block := await self._next(stream, places)) is not None:
            try:
                size = await asyncio.to_thread(read, *block, buffer)
            except PhaseloomError as error:
                await self._send(stream, FileRefused(error.info))
                continue
            await self._send(stream, BlockFollows(size))
            await stream.send_bytes(buffer[:size], self._timeout_s)

    async def _find(self, name: FileName) -> tuple[list[Place], ReadBlock]:
        """Its parts, and what reads a block of one."""
        kept = self._node.seals.find(name.deployment, name.seq) if name.kind == "seal" else None
        if kept is not None:
            image = self._node.memory[kept.extent].view(kept.num_bytes)
            return find_image_parts(image, kept.name), partial(read_image_block, image)
        path = path_of(self._directory, name)
        if not path.exists():
            raise CallerError(f"{name} is not here", code=Code.NOT_FOUND, field="name")
        return await asyncio.to_thread(find_parts, path), self._directory.read_block

    async def _parts(self, name: FileName) -> list[str]:
        if not path_of(self._directory, name).exists():
            raise CallerError(f"{name} is not here", code=Code.NOT_FOUND, field="name")
        key = VersionKey(name.deployment, name.seq)
        return await asyncio.to_thread(self._directory.parts, key)

    async def _next(self, stream: Stream, places: list[Place]) -> tuple[Place, int] | None:
        """What the client wants next; None: it has left. It may be silent as long as it lives."""
        try:
            payload = await stream.receive(MAX_REQUEST_BYTES)
        except ConnectionError:
            return None
        asked = msgspec.msgpack.decode(payload, type=TakeBlock)
        if 0 <= asked.part < len(places):
            place = places[asked.part]
            count = num_blocks(place.part.num_bytes, place.header.block_bytes)
            if 0 <= asked.block < count:
                return place, asked.block
        raise CallerError(f"there is no block {asked.block} of part {asked.part}", field="block")

    async def _keep_for(self, stream: Stream, asked: KeepFiles) -> None:
        keeping = asyncio.create_task(self._keep(asked))
        try:
            while not keeping.done():
                pause_s = self._timeout_s / _WORDS_PER_TIMEOUT
                await asyncio.wait([keeping], timeout=pause_s)
                if not keeping.done():
                    await self._send(stream, FileWaiting())
        except BaseException:
            # Who wanted it has left: it will be wanted again, or not.
            keeping.cancel()
            await asyncio.wait([keeping])
            raise
        keeping.result()
        await self._send(stream, FilesKept())

    async def _send(self, stream: Stream, message: msgspec.Struct) -> None:
        async with asyncio.timeout(self._timeout_s):
            await stream.send(message)


def path_of(directory: StateDirectory, name: FileName) -> Path:
    """Raises: CallerError: no such kind, or a name that is no plain file name."""
    match name.kind:
        case "seal":
            return directory.seal(name.deployment, name.seq)
        case "version":
            return directory.version(VersionKey(name.deployment, name.seq, name.part))
    raise CallerError(f"there are no files of kind {name.kind!r}", field="name.kind")
