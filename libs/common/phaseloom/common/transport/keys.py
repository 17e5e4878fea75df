"""The KV buckets of the mesh: values by key, with compare-and-set and watch."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from nats.js import api
from nats.js.errors import APIError

from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.link import Link, ordered, position_of
from phaseloom.common.transport.stored import Stored, StoredMessages

_WRONG_LAST_SEQUENCE = frozenset({10071, 10164})


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A key of a KV bucket and its current value."""

    key: str
    stored: Stored | None
    """The key's value; None: the key was deleted or has expired."""


class Conflict(Exception):
    """A compare-and-set failed: the key changed since it was read."""


class Keys:
    """The keys and values of the KV buckets."""

    def __init__(self, link: Link, stored: StoredMessages) -> None:
        self._link = link
        self._stored = stored

    async def get(self, bucket: Bucket, key: str) -> Stored | None:
        """Return a key's value, or None if the key is absent, deleted or expired."""
        stored = await self.get_raw(bucket, key)
        return None if stored is None or stored.is_gone else stored

    async def get_raw(self, bucket: Bucket, key: str) -> Stored | None:
        """Like `get`, but return the marker of a deleted or expired key.

        `swap` needs the marker's sequence.
        """
        return await self._stored.get(f"KV_{bucket}", f"$KV.{bucket}.{key}")

    async def put(self, bucket: Bucket, key: str, value: bytes) -> int:
        return (await self._link.js.publish(f"$KV.{bucket}.{key}", value)).seq

    async def swap(
        self,
        bucket: Bucket,
        key: str,
        value: bytes,
        expected: int,
        ttl_s: float | None = None,
        *,
        headers: dict[str, str] | None = None,
    ) -> int:
        """Replace a key's value by compare-and-set. Returns: the new sequence.

        Args:   expected: stream sequence of the value to replace; 0: the key is new.
                ttl_s: whole seconds until the value expires; None: never.
        Raises: Conflict: the key has another value than expected.
        """
        all_headers = {**(headers or {}), "Nats-Expected-Last-Subject-Sequence": str(expected)}
        try:
            ack = await self._link.js.publish(
                f"$KV.{bucket}.{key}", value, headers=all_headers, msg_ttl=ttl_s
            )
        except APIError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                raise Conflict(f"{bucket}/{key} has changed since it was read") from None
            raise
        return ack.seq

    async def delete(self, bucket: Bucket, key: str, expected: int) -> int:
        """Delete a key by compare-and-set; see `swap`.

        Returns: the sequence of the marker that replaces the value.
        """
        return await self.swap(bucket, key, b"", expected, headers={"KV-Operation": "DEL"})

    async def watch(self, bucket: Bucket, keys: str = ">") -> AsyncGenerator[KeyChange, None]:
        """Yield the keys that match a filter with their current values, then every change, forever.

        If the values of a key change quickly, some may be skipped, but never the last one. Expiry
        is reported only in buckets that leave markers (`leases`).
        """
        prefix = f"$KV.{bucket}."
        config = api.ConsumerConfig(deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT)
        newest: dict[str, int] = {}
        async with aclosing(ordered(self._link, f"KV_{bucket}", prefix + keys, config)) as messages:
            async for message in messages:
                sequence, _ = position_of(message)
                key = message.subject.removeprefix(prefix)
                if sequence <= newest.get(key, 0):
                    continue  # repeated after a restart of the server
                newest[key] = sequence
                stored = Stored(message.data, sequence, dict(message.headers or {}))
                yield KeyChange(key, None if stored.is_gone else stored)

    async def names(self, bucket: Bucket) -> list[str]:
        prefix = f"$KV.{bucket}."
        return [
            s.removeprefix(prefix)
            for s in await self._stored.subjects(f"KV_{bucket}", f"{prefix}>")
        ]
