"""Serves boxes of weights versions' parts to the state managers of other nodes.

A box is gathered from the part's memory as it is sent. While a stream lasts, the parts that it
asked for stay; whether one still is what was committed is reckoned once a stream, beside the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

import msgspec
import xxhash

from phaseloom.common.blockhash import digest_of
from phaseloom.common.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.ids import VersionKey
from phaseloom.common.statewire import TensorSlot
from phaseloom.statemgr.core.slices import MAX_BATCH_BYTES, Box, runs
from phaseloom.statemgr.core.versions import Version
from phaseloom.statemgr.mesh.permission import Gate
from phaseloom.statemgr.mesh.tls import MAX_REQUEST_BYTES, Stream
from phaseloom.statemgr.versions import wire
from phaseloom.statemgr.versions.serving import Mend, while_waiting

_FEW_BYTES = 64 * 1024
"""Shorter runs are copied together before they are sent."""
_MAX_PARTS = 4096


@dataclass(frozen=True)
class OpenPart:
    """A part that stays while it is open."""

    version: Version
    memory: memoryview
    tensors: dict[str, TensorSlot]


def open_part(version: Version, memory: memoryview) -> OpenPart:
    return OpenPart(version, memory, {slot.name: slot for slot in version.tensors})


def gathered(part: OpenPart, box: Box) -> list[memoryview]:
    """The bytes of a box: in place where they lie together, else copied.

    Raises: CallerError: there is no such tensor, or no such box in it.
    """
    tensor = part.tensors.get(box.name)
    if tensor is None:
        raise CallerError(f"{box.name} is not in version {part.version.key}", field="boxes")
    offsets, length = runs(tensor, box)
    source = part.memory[tensor.offset : tensor.offset + tensor.num_bytes]
    if length >= _FEW_BYTES:
        return [source[at : at + length] for at in offsets]
    copied = bytearray(length * len(offsets))
    for number, at in enumerate(offsets):
        copied[number * length : (number + 1) * length] = source[at : at + length]
    return [memoryview(copied)]


OpenPartOf = Callable[[VersionKey], AbstractAsyncContextManager[OpenPart]]
DigestsOf = Callable[[VersionKey], Awaitable[dict[str, str]]]


class SliceServer:
    def __init__(
        self,
        gate: Gate,
        timeout_s: float,
        open_part_of: OpenPartOf,
        digests_of: DigestsOf,
        mend: Mend,
    ) -> None:
        """Args: digests_of: of the parts of a version that are here."""
        self._gate = gate
        self._timeout_s = timeout_s
        self._open_part_of = open_part_of
        self._digests_of = digests_of
        self._mend = mend

    async def session(self, stream: Stream) -> None:
        """One stream, until the client closes it."""
        async with asyncio.timeout(self._timeout_s):
            payload = await stream.receive(MAX_REQUEST_BYTES)
        request = msgspec.msgpack.decode(payload, type=wire.SlicesRequest)
        try:
            self._gate.check(request.ticket, request.version, stream.node)
            if not request.parts:
                await self._send(stream, wire.Holding(await self._digests_of(request.version)))
                return
            if len(request.parts) > _MAX_PARTS:
                raise CallerError(f"{len(request.parts)} parts", field="parts")
            async with AsyncExitStack() as stack:
                parts = {
                    part: await stack.enter_async_context(
                        self._open_part_of(msgspec.structs.replace(request.version, part=part))
                    )
                    for part in sorted(set(request.parts))
                }
                digests = {name: part.version.digest for name, part in parts.items()}
                await self._send(stream, wire.Holding(digests))
                await self._answer_all(stream, parts)
        except PhaseloomError as error:
            await self._send(stream, wire.Refusal(error.info))

    async def _answer_all(self, stream: Stream, parts: dict[str, OpenPart]) -> None:
        while True:
            try:
                payload = await stream.receive(MAX_REQUEST_BYTES)
            except ConnectionError:
                return
            asked: wire.SlicesAsk = msgspec.msgpack.decode(payload, type=wire.SlicesAsk)
            memories: list[memoryview] = []
            reply: wire.SlicesReply
            try:
                part = parts.get(asked.part)
                if part is None:
                    raise CallerError(f"part {asked.part!r} was not asked for", field="part")
                if isinstance(asked, wire.Confirm):
                    await self._confirm(stream, part)
                    reply = wire.Confirmed()
                else:
                    memories, digest = await asyncio.to_thread(_gather, part, asked)
                    reply = wire.Given(digest)
            except PhaseloomError as error:
                reply = wire.Refusal(error.info)
            await self._send(stream, reply)
            for memory in memories:
                await stream.send_bytes(memory, self._timeout_s)

    async def _confirm(self, stream: Stream, part: OpenPart) -> None:
        """Raises: ResourceError: DATA_LOSS: what was sent is bad; by now it may be whole again."""
        taking = asyncio.to_thread(digest_of, part.memory)
        if await while_waiting(stream, self._timeout_s, taking) == part.version.digest:
            return
        await while_waiting(stream, self._timeout_s, self._mend(part.version.key))
        raise ResourceError(
            f"version {part.version.key} does not match its digest any more",
            code=Code.DATA_LOSS,
        )

    async def _send(self, stream: Stream, message: msgspec.Struct) -> None:
        async with asyncio.timeout(self._timeout_s):
            await stream.send(message)


def _gather(part: OpenPart, asked: wire.Give) -> tuple[list[memoryview], str]:
    memories: list[memoryview] = []
    digest = xxhash.xxh3_128()
    size = 0
    for box in asked.boxes:
        for memory in gathered(part, box):
            size += len(memory)
            if size > min(asked.num_bytes, MAX_BATCH_BYTES):
                raise CallerError(f"more than {asked.num_bytes} bytes", field="boxes")
            digest.update(memory)
            memories.append(memory)
    if size != asked.num_bytes:
        raise CallerError(f"{size} bytes, not {asked.num_bytes}", field="num_bytes")
    return memories, digest.hexdigest()
