"""Performs the core's outputs on the bus."""

from __future__ import annotations

import asyncio
import contextlib
import zlib

from opentelemetry.context import Context

from phaseloom.common import streams, telemetry
from phaseloom.common.bus import AlreadyStored, Bus
from phaseloom.common.codec import encode
from phaseloom.common.errors import Code, ResourceError
from phaseloom.common.ids import OperationKey
from phaseloom.common.streams import Bucket
from phaseloom.scheduler.core.outputs import (
    DeleteOperations,
    Output,
    PutView,
    SendCommand,
    Tell,
    WriteCompletion,
)

SNAPSHOT_KEY = "core"
MAX_SNAPSHOT_BYTES = streams.MAX_PAYLOAD_BYTES - 65_536
"""Compressed; room is left for headers."""


def unpack_snapshot(payload: bytes) -> bytes:
    """Inverse of what `save` stores.

    Raises: ResourceError: DATA_LOSS, damaged.
    """
    try:
        return zlib.decompress(payload)
    except zlib.error as error:
        raise ResourceError(f"snapshot unreadable: {error}", code=Code.DATA_LOSS) from None


class BusSink:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._deletions: asyncio.Queue[OperationKey] = asyncio.Queue()
        self._saved_sequence = 0

    async def run(self) -> None:
        """Deletes in the background: nothing waits for it, and it may be done twice."""
        while True:
            key = await self._deletions.get()
            await self._bus.delete_subject(streams.ops_stream(key.tenant), streams.op_subject(key))
            self._deletions.task_done()

    async def perform(self, output: Output, context: Context | None) -> None:
        match output:
            case SendCommand(command):
                await self._bus.publish(
                    streams.permit_subject(command.node),
                    command,
                    msg_id=f"cmd:{command.id}",
                    headers=telemetry.inject({}, context) if context else {},
                )
            case WriteCompletion(key, completion, content_type):
                # The first stored outcome decides; a refusal is a restart's second try.
                with contextlib.suppress(AlreadyStored):
                    await self._bus.publish(
                        streams.done_subject(key), completion, content_type=content_type
                    )
            case DeleteOperations(keys):
                for key in keys:
                    self._deletions.put_nowait(key)
            case PutView(job, status):
                await self._bus.kv_put(Bucket.VIEW, str(job), encode(status))
            case Tell(what, reason, subject):
                await self._bus.notice("scheduler", what, reason, subject)

    async def save(self, sequence: int, snapshot: bytes) -> None:
        """Store a snapshot; the log below the one before it is not needed any more."""
        await self._deletions.join()
        packed = zlib.compress(snapshot, 1)
        if len(packed) > MAX_SNAPSHOT_BYTES:
            # The log stays as long as it is: slower to restart from, and nothing is lost.
            await self._bus.notice("scheduler", "snapshot skipped", f"{len(packed)} bytes")
            return
        await self._bus.kv_put(Bucket.SNAPSHOTS, SNAPSHOT_KEY, packed)
        if self._saved_sequence:
            await self._bus.truncate_log(self._saved_sequence)
        self._saved_sequence = sequence
