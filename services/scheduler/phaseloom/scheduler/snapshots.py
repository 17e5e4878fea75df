"""Snapshots in the key-value store: of any size, and never overwriting a newer one.

A snapshot is split into chunks with their own keys. Swapping the manifest by compare-and-set makes
it the newest. A leader whose swap fails is no longer the only leader, and must not drop the part of
the log that the other leader's snapshot needs.
"""

from __future__ import annotations

import asyncio
import zlib
from functools import partial

import msgspec

from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import decode, encode
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.keys import Conflict
from phaseloom.common.transport.leases import LeaseLost
from phaseloom.common.transport.retry import until_done
from phaseloom.common.transport.stored import Stored

MANIFEST_KEY = "core"
CHUNK_BYTES = streams.MAX_PAYLOAD_BYTES // 2
_READ_ATTEMPTS = 5
_ATTEMPT_S = 10.0
"""Time limit of one request; a chunk is large."""


class Manifest(msgspec.Struct, frozen=True):
    """Description of the newest snapshot and its chunks."""

    sequence: int
    """Last entry of the decision log that is included."""
    num_chunks: int
    num_bytes: int
    """Total size of the chunks."""
    checksum: int
    """CRC-32 of the chunks."""
    led_since: int | None = None
    """Core version of the leader that has continued from this snapshot. 0: none yet, and the writer
    has performed everything up to it and stopped. None: the writer continues."""


class Snapshot(msgspec.Struct, frozen=True):
    manifest: Manifest
    payload: bytes


class Snapshots:
    """Snapshots as handled by one leader. Call `load` first: it determines the newest one."""

    def __init__(self, bus: Bus, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._bus = bus
        self._chunk_bytes = chunk_bytes
        self._manifest: Manifest | None = None
        self._revision = 0
        """Last known revision of the manifest in the store."""

    async def load(self) -> Snapshot | None:
        """Load the newest snapshot. None: there is none.

        Raises: ResourceError: the snapshot is damaged (DATA_LOSS).
        """
        for _ in range(_READ_ATTEMPTS):
            stored = await self._read(MANIFEST_KEY)
            if stored is None or stored.is_gone:
                self._revision = stored.sequence if stored else 0
                return None
            self._revision = stored.sequence
            self._manifest = decode(stored.payload, Manifest)
            packed = await self._chunks(self._manifest)
            if packed is not None:
                return Snapshot(self._manifest, await asyncio.to_thread(_unpack, packed))
            # Another leader has stored a newer snapshot and dropped the chunks of this one.
        raise ResourceError("the snapshot's chunks are missing or damaged", code=Code.DATA_LOSS)

    async def claim(self, core_version: int) -> None:
        """Record which core version continues from the newest snapshot. Called before it decides
        anything.

        Raises: LeaseLost: another leader has stored one.
        """
        if self._manifest is not None and self._manifest.led_since == 0:
            claimed = msgspec.structs.replace(self._manifest, led_since=core_version)
            await until_done(lambda: self._swap(claimed), "claim", attempt_s=_ATTEMPT_S)

    async def save(self, sequence: int, snapshot: bytes, *, is_last: bool = False) -> int:
        """Store a snapshot. Returns the sequence number of the snapshot before it, or 0.

        Args: is_last: whether the leader has performed everything up to this sequence number and
            handles nothing after it.
        Raises: LeaseLost: another leader has stored one.
        """
        packed = await asyncio.to_thread(zlib.compress, snapshot, 1)
        parts = [
            packed[start : start + self._chunk_bytes]
            for start in range(0, len(packed), self._chunk_bytes)
        ]
        for index, part in enumerate(parts):
            put = partial(self._bus.keys.put, Bucket.SNAPSHOTS, _chunk_key(sequence, index), part)
            await until_done(put, "store a chunk", attempt_s=_ATTEMPT_S)
        before = self._manifest
        checksum, led_since = zlib.crc32(packed), 0 if is_last else None
        manifest = Manifest(sequence, len(parts), len(packed), checksum, led_since)
        await until_done(lambda: self._swap(manifest), "store the manifest", attempt_s=_ATTEMPT_S)
        if before is None:
            return 0
        if before.sequence != sequence:
            await until_done(lambda: self._drop(before), "drop old chunks", attempt_s=_ATTEMPT_S)
        return before.sequence

    async def _read(self, key: str) -> Stored | None:
        read = partial(self._bus.keys.get_raw, Bucket.SNAPSHOTS, key)
        return await until_done(read, "read the snapshot", attempt_s=_ATTEMPT_S)

    async def _drop(self, manifest: Manifest) -> None:
        keys = f"$KV.{Bucket.SNAPSHOTS}.{_chunk_key(manifest.sequence)}"
        await self._bus.stored.delete(f"KV_{Bucket.SNAPSHOTS}", keys)

    async def _swap(self, manifest: Manifest) -> None:
        payload = encode(manifest)
        try:
            self._revision = await self._bus.keys.swap(
                Bucket.SNAPSHOTS, MANIFEST_KEY, payload, self._revision
            )
        except Conflict:
            stored = await self._bus.keys.get_raw(Bucket.SNAPSHOTS, MANIFEST_KEY)
            if stored is None or stored.payload != payload:
                raise LeaseLost(
                    "another scheduler has stored a snapshot, so this one no longer leads",
                    code=Code.ABORTED,
                ) from None
            self._revision = stored.sequence  # our own, of which the answer was lost
        self._manifest = manifest

    async def _chunks(self, manifest: Manifest) -> bytes | None:
        parts = []
        for index in range(manifest.num_chunks):
            key = _chunk_key(manifest.sequence, index)
            stored = await self._read(key)
            if stored is None or stored.is_gone:
                return None
            parts.append(stored.payload)
        packed = b"".join(parts)
        return packed if zlib.crc32(packed) == manifest.checksum else None


def _chunk_key(sequence: int, index: int | str = "*") -> str:
    return f"{MANIFEST_KEY}.{sequence}.{index}"


def _unpack(packed: bytes) -> bytes:
    try:
        return zlib.decompress(packed)
    except zlib.error as error:
        raise ResourceError(
            f"the snapshot cannot be decompressed: {error}", code=Code.DATA_LOSS
        ) from None
