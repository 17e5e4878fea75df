"""The manifest: the record of what this daemon holds, from which the next one continues after a
kill.

    magic (8 bytes) | generation (uint64) | length (uint64) | xxh3-128 (16 bytes) | `Manifest`

Records are written alternately to two slots, so that a kill during a write leaves the older record
intact. The checksum covers generation and payload. If both records are whole, the higher generation
counts. A record's claims about memory are never trusted: the memory is verified by digest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TypeVar

import msgspec
import xxhash

from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.tensors.tensortable import EMPTY, TensorTable
from phaseloom.statemgr.records.incarnations import Loan, State
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.seals import HostSeal
from phaseloom.statemgr.records.snapshots import Snapshot

MAGIC = b"PLMANIF9"
_PREFIX = struct.Struct("<8sQQ16s")
_GENERATION = struct.Struct("<Q")

E = TypeVar("E", bound=msgspec.Struct)


class RankEntry(msgspec.Struct, frozen=True, array_like=True):
    """One rank of an incarnation: the attributes of `Rank` with these names, the number of its host
    copy, and its loans as pairs."""

    device: int
    token: str
    state: State
    heap_bytes: int
    table: TensorTable
    copy: int | None
    new_extent: int | None
    snapshot: int | None
    applied: int
    host_bytes: int
    pins: bool
    emulated: bool
    frozen: bool
    model: str
    scratch_bytes: int
    loans: list[tuple[int, Loan]]


class WpgEntry(msgspec.Struct, frozen=True, array_like=True):
    """One live incarnation with its ranks."""

    key: DeploymentKey
    incarnation: int
    seal_seq: int
    epoch: int
    prepared: int | None
    """The seq of the prepared seal, whose host copies must not be overwritten, if any."""
    sealed: set[int]
    ranks: list[RankEntry]
    rank_offset: int
    num_ranks: int


class VersionEntry(msgspec.Struct, frozen=True, array_like=True):
    """A weights version in host memory. Versions on disk are found there."""

    key: VersionKey
    num_bytes: int
    table: TensorTable
    digest: str
    extent: int
    incarnation: int | None
    is_ahead: bool = False
    is_kept: bool = True


class CopyEntry(msgspec.Struct, frozen=True, array_like=True):
    """A host copy without its users: each `RankEntry` names its copy by `number`."""

    number: int
    owner: DeploymentKey
    num_bytes: int
    extent: int | None
    is_frozen: bool
    digest: str
    is_dirty: bool
    is_immutable: bool
    version: VersionKey | None
    hash: str
    is_base: bool
    state: State
    table: TensorTable = EMPTY


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """All that a state manager holds in host memory."""

    endpoint: str
    """host:port at which other nodes fetch versions."""
    fences: list[tuple[DeploymentKey, int]]
    """Newest incarnation of each deployment seen so far."""
    wpgs: list[WpgEntry]
    versions: list[VersionEntry]
    host_copies: list[CopyEntry]
    snapshots: list[Snapshot]
    seals: list[HostSeal]
    """Seals in host memory. Seals on disk are found there."""


def manifest_of(records: Records, endpoint: str = "") -> Manifest:
    """Describe all that a node holds in host memory now."""
    wpgs = []
    for wpg in records.residency.alive():
        ranks = [
            _entry_of(
                RankEntry,
                rank,
                copy=rank.copy and rank.copy.number,
                loans=[*rank.loans.items()],
            )
            for rank in wpg.ranks
        ]
        prepared = wpg.prepared and wpg.prepared.seq
        wpgs.append(_entry_of(WpgEntry, wpg, ranks=ranks, prepared=prepared))
    in_memory = [version for version in records.versions.known() if version.extent is not None]
    return Manifest(
        endpoint=endpoint,
        fences=records.residency.fences(),
        wpgs=wpgs,
        versions=[_entry_of(VersionEntry, version) for version in in_memory],
        host_copies=[_entry_of(CopyEntry, copy) for copy in records.host_copies.all()],
        snapshots=[*records.snapshots.values()],
        seals=[*records.seals.values()],
    )


def _entry_of(kind: type[E], record: object, **extra: object) -> E:
    """Build an entry from the attributes of a record that have the names of its fields."""
    names = (name for name in kind.__struct_fields__ if name not in extra)
    return kind(**{name: getattr(record, name) for name in names}, **extra)


def _plain(table: object) -> bytes:
    assert isinstance(table, TensorTable)
    return table.packed


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain, order="deterministic")


def encode_manifest(manifest: Manifest) -> bytes:
    return _ENCODER.encode(manifest)


def decode_manifest(payload: bytes) -> Manifest:
    """Raises: msgspec.DecodeError: it is not a manifest."""
    return msgspec.msgpack.decode(
        payload, type=Manifest, dec_hook=lambda _, packed: TensorTable.read(packed)
    )


def encode_record(generation: int, payload: bytes) -> bytes:
    """Encode a record in the format of the module's docstring."""
    digest = xxhash.xxh3_128_digest(_GENERATION.pack(generation) + payload)
    return _PREFIX.pack(MAGIC, generation, len(payload), digest) + payload


def newest_record(slots: Iterable[bytes]) -> tuple[int, bytes] | None:
    """Generation and payload of the newest whole record, if any.

    Args: slots: the bytes of each slot; bytes after the record do not matter.
    """
    records = [record for place in slots if (record := _decode(place)) is not None]
    return max(records, default=None)


def _decode(place: bytes) -> tuple[int, bytes] | None:
    if len(place) < _PREFIX.size:
        return None
    magic, generation, length, digest = _PREFIX.unpack_from(place)
    payload = place[_PREFIX.size : _PREFIX.size + length]
    if magic != MAGIC or len(payload) != length:
        return None
    if xxhash.xxh3_128_digest(_GENERATION.pack(generation) + payload) != digest:
        return None
    return generation, payload
