"""The manifest: what the next daemon must know of this one, as a record that survives a kill.

    magic (8 bytes) | generation (uint64) | length (uint64) | xxh3-128 (16 bytes) | `Manifest`

Records are written in turn to two places, so that a kill in the middle of a write leaves the
record before. The checksum covers generation and payload. Where both records are whole, the one of
the higher generation counts. What a record says of memory is never taken for granted: the memory is
verified by digest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec
import xxhash

from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.checkpoints.snapshots import Snapshot, SnapshotPart, Snapshots
from phaseloom.statemgr.residency.incarnations import SharedCopy
from phaseloom.statemgr.residency.residency import Residency, State
from phaseloom.statemgr.seals.hostseals import HostSeals
from phaseloom.statemgr.sharing.sharedcopies import SharedCopies
from phaseloom.statemgr.versions.versions import Versions

MAGIC = b"PLMANIF5"
_PREFIX = struct.Struct("<8sQQ16s")
_GENERATION = struct.Struct("<Q")


class RankEntry(msgspec.Struct, frozen=True, array_like=True):
    """One rank of an incarnation; `tensors` is its `TensorTable.packed`."""

    device: int
    token: str
    state: State
    heap_bytes: int
    tensors: msgspec.Raw
    extent: int | None
    applied: int
    digest: str
    host_bytes: int
    pins: bool
    is_dirty: bool
    frozen: bool
    model: str
    shared_copy: int | None
    scratch_bytes: int = 0


class WpgEntry(msgspec.Struct, frozen=True, array_like=True):
    """One incarnation that is alive, with its ranks."""

    key: DeploymentKey
    incarnation: int
    seal_seq: int
    epoch: int
    prepared: int | None
    """The seq of the prepared seal, whose host copies are kept; None: no seal is prepared."""
    sealed: list[int]
    """The seqs of the seals that the incarnation has written."""
    ranks: list[RankEntry]
    rank_offset: int
    num_ranks: int


class VersionEntry(msgspec.Struct, frozen=True, array_like=True):
    """A weights version that is in host memory; the others are found on disk."""

    key: VersionKey
    num_bytes: int
    tensors: msgspec.Raw
    digest: str
    extent: int
    incarnation: int | None


class SharedCopyEntry(msgspec.Struct, frozen=True, array_like=True):
    """A shared copy without its users: each `RankEntry` names its copy by `number`."""

    number: int
    owner: DeploymentKey
    applied: int
    num_bytes: int
    tensors: msgspec.Raw
    digest: str
    extent: int | None
    is_immutable: bool
    version: VersionKey | None
    hash: str
    is_base: bool
    state: State


class SnapshotPartEntry(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of a checkpoint's snapshot."""

    extent: int
    num_bytes: int
    tensors: msgspec.Raw
    checksums: bytes | None


class SnapshotEntry(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint's snapshot, which is in host memory until the checkpoint is written."""

    key: DeploymentKey
    incarnation: int
    operation: str
    name: str
    seq: int
    parts: list[SnapshotPartEntry]
    rank_offset: int
    num_ranks: int


class SealEntry(msgspec.Struct, frozen=True, array_like=True):
    """A seal that is in host memory; the others are found on disk."""

    key: DeploymentKey
    seq: int
    extent: int
    num_bytes: int


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """All that a state manager holds in host memory, as the next one finds it."""

    endpoint: str
    """host:port at which other nodes were told to fetch versions."""
    fences: list[tuple[DeploymentKey, int]]
    """The newest incarnation ever seen of each deployment."""
    wpgs: list[WpgEntry]
    versions: list[VersionEntry]
    shared_copies: list[SharedCopyEntry]
    snapshots: list[SnapshotEntry]
    seals: list[SealEntry]


def manifest_of(  # noqa: PLR0917 - all that a node has
    residency: Residency,
    versions: Versions,
    shared_copies: SharedCopies,
    snapshots: Snapshots,
    seals: HostSeals,
    endpoint: str,
) -> Manifest:
    """The manifest of all that the node holds in host memory now."""
    return Manifest(
        endpoint=endpoint,
        fences=residency.fences(),
        wpgs=[
            WpgEntry(
                key=wpg.key,
                incarnation=wpg.incarnation,
                seal_seq=wpg.seal_seq,
                epoch=wpg.epoch,
                prepared=wpg.prepared.seq if wpg.prepared is not None else None,
                sealed=sorted(wpg.sealed),
                ranks=[
                    RankEntry(
                        device=rank.device,
                        token=rank.token,
                        state=rank.state,
                        heap_bytes=rank.heap_bytes,
                        tensors=msgspec.Raw(rank.table.packed),
                        extent=rank.extent,
                        applied=rank.applied,
                        digest=rank.digest,
                        frozen=rank.frozen,
                        model=rank.model,
                        shared_copy=None if rank.shared_copy is None else rank.shared_copy.number,
                        host_bytes=rank.host_bytes,
                        pins=rank.pins,
                        is_dirty=rank.is_dirty,
                        scratch_bytes=rank.scratch_bytes,
                    )
                    for rank in wpg.ranks
                ],
                rank_offset=wpg.rank_offset,
                num_ranks=wpg.num_ranks,
            )
            for wpg in residency.alive()
        ],
        versions=[
            VersionEntry(
                key=version.key,
                num_bytes=version.num_bytes,
                tensors=msgspec.Raw(version.table.packed),
                digest=version.digest,
                extent=version.extent,
                incarnation=version.incarnation,
            )
            for version in versions.known()
            if version.extent is not None
        ],
        shared_copies=[_entry_of(each) for each in shared_copies.all()],
        snapshots=[_entry_of_snapshot(each) for each in snapshots.every()],
        seals=[SealEntry(s.key, s.seq, s.extent, s.num_bytes) for s in seals.every()],
    )


def _entry_of_snapshot(snapshot: Snapshot) -> SnapshotEntry:
    parts = [
        SnapshotPartEntry(
            part.extent, part.num_bytes, msgspec.Raw(part.table.packed), part.checksums
        )
        for part in snapshot.parts
    ]
    return SnapshotEntry(
        key=snapshot.key,
        incarnation=snapshot.incarnation,
        operation=snapshot.operation,
        name=snapshot.name,
        seq=snapshot.seq,
        parts=parts,
        rank_offset=snapshot.rank_offset,
        num_ranks=snapshot.num_ranks,
    )


def snapshot_of(entry: SnapshotEntry) -> Snapshot:
    """The checkpoint's snapshot that an entry describes."""
    parts = [
        SnapshotPart(part.extent, part.num_bytes, TensorTable.read(part.tensors), part.checksums)
        for part in entry.parts
    ]
    return Snapshot(
        key=entry.key,
        incarnation=entry.incarnation,
        operation=entry.operation,
        name=entry.name,
        seq=entry.seq,
        parts=parts,
        rank_offset=entry.rank_offset,
        num_ranks=entry.num_ranks,
    )


def _entry_of(copy: SharedCopy) -> SharedCopyEntry:
    return SharedCopyEntry(
        number=copy.number,
        owner=copy.owner,
        applied=copy.applied,
        num_bytes=copy.num_bytes,
        tensors=msgspec.Raw(copy.table.packed),
        digest=copy.digest,
        extent=copy.extent,
        is_immutable=copy.is_immutable,
        version=copy.version,
        hash=copy.hash,
        is_base=copy.is_base,
        state=copy.state,
    )


def shared_copy_of(entry: SharedCopyEntry) -> SharedCopy:
    """The shared copy of an entry, as it was but without its users."""
    return SharedCopy(
        number=entry.number,
        owner=entry.owner,
        applied=entry.applied,
        num_bytes=entry.num_bytes,
        table=TensorTable.read(entry.tensors),
        digest=entry.digest,
        extent=entry.extent,
        is_immutable=entry.is_immutable,
        version=entry.version,
        hash=entry.hash,
        is_base=entry.is_base,
        state=entry.state,
    )


def encode_record(generation: int, payload: bytes) -> bytes:
    """A record of an encoded manifest, in the format of the module's docstring."""
    digest = xxhash.xxh3_128_digest(_GENERATION.pack(generation) + payload)
    return _PREFIX.pack(MAGIC, generation, len(payload), digest) + payload


def newest_record(places: Iterable[bytes]) -> tuple[int, bytes] | None:
    """Generation and payload of the newest record that is whole; None: no record is.

    Args: places: the bytes of each place; bytes after the record do not matter.
    """
    whole = [record for place in places if (record := _decode(place)) is not None]
    return max(whole, default=None)


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
