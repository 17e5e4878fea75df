"""What a gateway must know after a restart, kept in the KV bucket `gateway`.

A model of the Tinker API is a job of the mesh, and its operations, results and checkpoints are the
mesh's. So this is only which names stand for what.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

from phaseloom.client import Adapter
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus


class SessionRecord(msgspec.Struct, frozen=True, tag="session"):
    """A session of an SDK's client."""

    tenant: str
    id: str


class ModelRecord(msgspec.Struct, frozen=True, tag="model"):
    """A model that is trained: a job with the deployments `policy` and `sampler`."""

    tenant: str
    id: str
    job: str
    base: str
    """The registered model that it began as."""
    offset: int = 0
    """The mesh's number of an operation less the SDK's: 1 where the model was made by a load, which
    the SDK does not count."""
    metadata: dict[str, Any] = {}
    """The `user_metadata` of the call that made it."""
    adapter: Adapter | None = None
    """What is trained on the base; None: all its weights."""


class SamplerRecord(msgspec.Struct, frozen=True, tag="sampler"):
    """A sampling session: fixed weights to sample from."""

    tenant: str
    id: str
    base: str
    model: str = ""
    """The trained model whose own sampler it is; empty: the tenant's sampler of the base."""
    version: str = ""
    """The checkpoint with the weights; empty: the base's own."""
    path: str = ""
    """The checkpoint's path, where it has one."""


class CheckpointRecord(msgspec.Struct, frozen=True, tag="checkpoint"):
    """A checkpoint that was saved under a path."""

    tenant: str
    id: str
    """`tinker://<model>/weights/<name>` or `tinker://<model>/sampler_weights/<name>`."""
    model: str
    base: str
    source: str
    """The `<job>/<deployment>` that saved it."""
    name: str
    """The mesh's name of it."""
    saved_s: float
    """Unix seconds."""
    metadata: dict[str, Any] = {}
    adapter: Adapter | None = None
    """That of the model."""


Record = SessionRecord | ModelRecord | SamplerRecord | CheckpointRecord
R = TypeVar("R", SessionRecord, ModelRecord, SamplerRecord, CheckpointRecord)

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class Book:
    """All records, in memory and in the bucket."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._records: dict[tuple[type[Record], str, str], Record] = {}

    async def load(self) -> None:
        """Read what an earlier gateway has kept."""
        for key in await self._bus.kv_keys(Bucket.GATEWAY):
            stored = await self._bus.kv_get(Bucket.GATEWAY, key)
            if stored is not None:
                self._remember(_decoder.decode(stored.payload))

    async def put(self, record: Record) -> None:
        self._remember(record)
        await self._bus.kv_put(Bucket.GATEWAY, _key(record), msgspec.json.encode(record))

    async def drop(self, record: Record) -> None:
        self._records.pop((type(record), record.tenant, record.id), None)
        stored = await self._bus.kv_get(Bucket.GATEWAY, _key(record))
        if stored is not None:
            await self._bus.kv_delete(Bucket.GATEWAY, _key(record), stored.sequence)

    def find(self, kind: type[R], tenant: str, id: str) -> R | None:
        found: R | None = self._records.get((kind, tenant, id))  # type: ignore[assignment]
        return found

    def get(self, kind: type[R], tenant: str, id: str) -> R:
        """Raises: CallerError: NOT_FOUND: the tenant has none of that name."""
        found = self.find(kind, tenant, id)
        if found is None:
            what = kind.__name__.removesuffix("Record").lower()
            raise CallerError(
                f"there is no {what} {id!r}",
                code=Code.NOT_FOUND,
                field=what,
                remedy="names are of one tenant, and of what was made and not deleted",
            )
        return found

    def all(self, kind: type[R], tenant: str) -> list[R]:
        return [
            record  # type: ignore[misc]
            for (of, owner, _), record in self._records.items()
            if of is kind and owner == tenant
        ]

    def _remember(self, record: Record) -> None:
        self._records[type(record), record.tenant, record.id] = record


def _key(record: Record) -> str:
    """The record's key. Its id has characters that keys cannot have."""
    digest = hashlib.sha256(record.id.encode()).hexdigest()[:32]
    return f"{record.tenant}.{type(record).__name__}.{digest}"
