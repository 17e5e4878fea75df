"""The commit record of a deployment's newest seal, in KV `seals`.

Each node of a WPG adds its part by compare and swap. The previous seal is authoritative until the
last part is added; all later steps are idempotent. Only agents write the record.
"""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from phaseloom.common.contract.codec import decode, encode
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.events import SealCommitted, SealRecord
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.keys import Conflict
from phaseloom.common.transport.retry import until_done


class SealRecords:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def newest(self, key: DeploymentKey) -> int:
        """The seq of the deployment's newest committed seal; 0: none."""
        record, _ = await self.read(key)
        return record.newest

    async def commit(self, part: SealCommitted, num_parts: int) -> None:
        """Add one node's part of a seal; the last part commits the seal. Idempotent.

        Raises: ResourceError: ABORTED: the record of another seal was written in the meantime.
        """
        key = part.deployment
        may_begin = True
        while True:
            record, revision = await self.read(key)
            if part in record.parts:
                return
            if record.seq == part.seq and not record.is_whole:
                following = replace(record, parts=[*record.parts, part])
            elif may_begin:
                following = SealRecord(part.seq, num_parts, [part], record.newest)
            else:
                raise ResourceError(f"another seal of {key} was committed", code=Code.ABORTED)
            value = encode(following)
            swap = partial(self._bus.keys.swap, Bucket.SEALS, str(key), value, revision)
            try:
                await until_done(swap, "write a seal's record")
                return
            except Conflict:
                # The conflict is another node's part, or our own write whose answer was lost.
                may_begin = num_parts > 1

    async def read(self, key: DeploymentKey) -> tuple[SealRecord, int]:
        """The record of a deployment and its revision. Without a record, one with seq 0."""
        stored = await until_done(
            lambda: self._bus.keys.get(Bucket.SEALS, str(key)), "read a seal's record"
        )
        if stored is None:
            return SealRecord(0), 0
        return decode(stored.payload, SealRecord), stored.sequence
