"""Records that a gateway needs after a restart, stored in the KV bucket `gateway`.

A model of the Tinker API is a job of the mesh, and its operations, results and checkpoints are the
mesh's. A record therefore only maps a name of the API to the mesh.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import logging
import time
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import nats.errors

from phaseloom.client import Adapter, Lost
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.keys import Conflict

log = logging.getLogger(__name__)

_MAX_RECORDS = 100_000
_PATIENCE_S = 30.0
_PAUSE_S = 0.2


class SessionRecord(msgspec.Struct, frozen=True, tag="session"):
    """A session of an SDK's client."""

    tenant: str
    id: str
    metadata: dict[str, Any] = {}
    display_name: str = ""
    made_s: float = 0.0
    """Creation time in Unix seconds."""


class ModelRecord(msgspec.Struct, frozen=True, tag="model"):
    """A trained model: a job with the deployments `policy` and `sampler`."""

    tenant: str
    id: str
    job: str
    base: str
    """The registered model that training started from."""
    offset: int = 0
    """The mesh's number of an operation minus the SDK's number. It is 1 if a load created the
    model, because the SDK does not count that load."""
    metadata: dict[str, Any] = {}
    adapter: Adapter | None = None
    """The trained adapter. None: all weights are trained."""
    made_s: float = 0.0
    """Creation time in Unix seconds."""


class SamplerRecord(msgspec.Struct, frozen=True, tag="sampler"):
    """A sampling session: fixed weights to sample from."""

    tenant: str
    id: str
    base: str
    model: str = ""
    """The trained model whose own sampler is used. Empty: the tenant's sampler of the base."""
    version: str = ""
    """The checkpoint with the weights. Empty: the base's own weights."""
    path: str = ""
    """The checkpoint's path, if it has one."""


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
    """Name of the checkpoint on the mesh."""
    saved_s: float
    """Time of saving in Unix seconds."""
    metadata: dict[str, Any] = {}
    adapter: Adapter | None = None
    """The saved model's adapter. None: the checkpoint has all weights."""
    expires_s: float | None = None
    """Expiry time in Unix seconds. None: it is kept until it is deleted."""
    replaces: tuple[str, str] | None = None
    """(source, name) of the checkpoint that the path named before, until its files are removed."""
    recipients: list[str] = []
    """Public keys of those for whom downloads are encrypted. Empty: they are not encrypted."""

    @property
    def has_expired(self) -> bool:
        return self.expires_s is not None and self.expires_s <= time.time()


class CallRecord(msgspec.Struct, frozen=True, tag="call"):
    """A call of several steps, stored so that another gateway can finish it."""

    tenant: str
    id: str
    """Name of the call's promise."""
    call: str
    asked: dict[str, Any]
    """The request."""
    answer: dict[str, Any] | None = None
    """The call's answer. None: some steps are still missing."""


class SplitRecord(msgspec.Struct, frozen=True, tag="split"):
    """A training call that needs several operations, because it is too large for one message. The
    operations of the model's later calls have higher numbers."""

    tenant: str
    id: str
    """Name of the call's promise."""
    model: str
    seq: int
    """The SDK's number of the call."""
    first: int
    """The mesh's number of the call's first operation."""
    last: int


Record = SessionRecord | ModelRecord | SamplerRecord | CheckpointRecord | CallRecord | SplitRecord
R = TypeVar(
    "R", SessionRecord, ModelRecord, SamplerRecord, CheckpointRecord, CallRecord, SplitRecord
)

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class Book:
    """All records of a tenant, in memory and in the bucket.

    Only the gateway that serves the tenant writes them. Each write is a compare-and-set, so a
    gateway that lost the tenant without noticing cannot write.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._records: dict[tuple[type[Record], str, str], Record] = {}
        self._splits: dict[str, list[SplitRecord]] = {}
        """The split calls of each model, by number."""
        self._sequences: dict[str, int] = {}
        """Each record's sequence number in the bucket's stream, by key."""

    async def load(self, tenant: str) -> None:
        """Read the records that an earlier gateway stored."""
        for key in await self._bus.keys.names(Bucket.GATEWAY):
            if not key.startswith(f"{tenant}."):
                continue
            stored = await self._bus.keys.get(Bucket.GATEWAY, key)
            if stored is not None:
                self._sequences[key] = stored.sequence
                self._remember(_decoder.decode(stored.payload))

    async def put(self, record: Record) -> None:
        """Write a record. If NATS is away, wait for it, at most `_PATIENCE_S`.

        Raises: Lost: another gateway has written the record. nats.errors.Error: NATS stayed away.
                ResourceError: RESOURCE_EXHAUSTED: the tenant has too many records.
        """
        is_new = (type(record), record.tenant, record.id) not in self._records
        if is_new and len(self._records) >= _MAX_RECORDS:
            raise ResourceError(
                f"a tenant may have at most {_MAX_RECORDS} sessions, models and checkpoints",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="end sessions and delete checkpoints that are no longer needed",
            )
        key, value = _key(record), msgspec.json.encode(record)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                await self._swap(key, value)
            except nats.errors.Error as error:
                if time.monotonic() > deadline:
                    raise
                log.info("could not store %s yet: %r", record.id, error)
                await asyncio.sleep(_PAUSE_S)
            else:
                self._remember(record)
                return

    async def _swap(self, key: str, value: bytes) -> None:
        sequence = self._sequences.get(key, 0)
        try:
            self._sequences[key] = await self._bus.keys.swap(Bucket.GATEWAY, key, value, sequence)
        except Conflict:
            stored = await self._bus.keys.get_raw(Bucket.GATEWAY, key)
            if stored is not None and stored.is_gone:
                sequence = stored.sequence
                self._sequences[key] = await self._bus.keys.swap(
                    Bucket.GATEWAY, key, value, sequence
                )
            # the earlier acknowledgement was lost
            elif stored is not None and stored.payload == value:
                self._sequences[key] = stored.sequence
            else:
                raise Lost("another gateway serves this tenant now", remedy="ask again") from None

    async def drop(self, record: Record) -> None:
        key = _key(record)
        sequence = self._sequences.get(key)
        if sequence is not None:
            # the earlier acknowledgement was lost, or another gateway serves the tenant
            with suppress(Conflict):
                await self._bus.keys.delete(Bucket.GATEWAY, key, sequence)
            del self._sequences[key]
        if isinstance(record, SplitRecord):
            self._splits.pop(record.model, None)  # dropped only with the model's session
        self._records.pop((type(record), record.tenant, record.id), None)

    def find(self, kind: type[R], tenant: str, id: str) -> R | None:
        record: R | None = self._records.get((kind, tenant, id))  # type: ignore[assignment]
        return None if _has_expired(record) else record

    def get(self, kind: type[R], tenant: str, id: str) -> R:
        """Return a record by kind and name. Raises: CallerError: NOT_FOUND: the tenant has none."""
        record = self.find(kind, tenant, id)
        if record is None:
            noun = kind.__name__.removesuffix("Record").lower()
            raise CallerError(
                f"there is no {noun} {id!r}",
                code=Code.NOT_FOUND,
                field=noun,
                remedy="check the name; another tenant's names and deleted ones do not exist here",
            )
        return record

    def all(self, kind: type[R], tenant: str) -> list[R]:
        return [
            record  # type: ignore[misc]
            for (of, owner, _), record in self._records.items()
            if of is kind and owner == tenant and not _has_expired(record)
        ]

    def left_over(self, tenant: str) -> list[CheckpointRecord]:
        """Return checkpoints whose files must be removed: expired ones, and those whose path named
        another checkpoint before."""
        return [
            record
            for record in self._records.values()
            if isinstance(record, CheckpointRecord)
            and record.tenant == tenant
            and (record.has_expired or record.replaces is not None)
        ]

    def numbers(self, model: ModelRecord, seq: int) -> range:
        """Return the mesh's numbers of a model's call: several if the call was split."""
        splits = self._splits.get(model.id, [])
        index = bisect.bisect_right(splits, seq, key=lambda split: split.seq)
        if not index:
            return range(seq + model.offset, seq + model.offset + 1)
        newest = splits[index - 1]
        if newest.seq == seq:
            return range(newest.first, newest.last + 1)
        number = newest.last + seq - newest.seq
        return range(number, number + 1)

    async def split(self, model: ModelRecord, seq: int, id: str, num_operations: int) -> None:
        """Let a call use several numbers of the mesh. None of them, and no later one, may be in
        use. Raises: as `put`."""
        if len(self.numbers(model, seq)) == 1:
            first = self.numbers(model, seq)[0]
            record = SplitRecord(model.tenant, id, model.id, seq, first, first + num_operations - 1)
            # Counted before it is stored, because a later call may arrive meanwhile.
            self._remember(record)
        await self.put(self.get(SplitRecord, model.tenant, id))

    def _remember(self, record: Record) -> None:
        if isinstance(record, SplitRecord):
            splits = self._splits.setdefault(record.model, [])
            if record not in splits:
                bisect.insort(splits, record, key=lambda split: split.seq)
        self._records[type(record), record.tenant, record.id] = record


def _has_expired(record: Record | None) -> bool:
    return isinstance(record, CheckpointRecord) and record.has_expired


def _key(record: Record) -> str:
    """Return a record's key in the bucket: a hash of its id, because ids have characters that keys
    cannot have."""
    digest = hashlib.sha256(record.id.encode()).hexdigest()[:32]
    return f"{record.tenant}.{type(record).__name__}.{digest}"
