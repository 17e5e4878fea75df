"""What a state manager's next life must know of this one, and the record that survives a kill.

    magic (8 bytes) | generation (uint64) | length (uint64) | xxh3-128 (16 bytes) | `Books`

Records are written in turn to two places, so that a kill in the middle of one leaves the one
before. The checksum covers generation and content; of two whole records the one of the higher
generation counts. What they say of memory is never taken for granted: it is verified by digest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec
import xxhash

from phaseloom.common.ids import DeploymentKey, VersionKey
from phaseloom.statemgr.core.residency import Residency, State
from phaseloom.statemgr.core.versions import Versions

MAGIC = b"PLBOOKS1"
_PREFIX = struct.Struct("<8sQQ16s")
_GENERATION = struct.Struct("<Q")


class RankBook(msgspec.Struct, frozen=True, array_like=True):
    """`tensors` is packed; see `layout.unpack`."""

    device: int
    token: str
    state: State
    heap_bytes: int
    tensors: msgspec.Raw
    extent: int | None
    applied: int
    digest: str


class WpgBook(msgspec.Struct, frozen=True, array_like=True):
    key: DeploymentKey
    incarnation: int
    seal_seq: int
    epoch: int
    prepared: int | None
    """seq whose copies are kept for a seal."""
    sealed: list[int]
    ranks: list[RankBook]


class VersionBook(msgspec.Struct, frozen=True, array_like=True):
    """A version that is in host memory; the others are found on disk."""

    key: VersionKey
    num_bytes: int
    tensors: msgspec.Raw
    digest: str
    extent: int
    incarnation: int | None


class Books(msgspec.Struct, frozen=True, array_like=True):
    endpoint: str
    """Where other nodes were told to fetch versions."""
    fences: list[tuple[DeploymentKey, int]]
    wpgs: list[WpgBook]
    versions: list[VersionBook]


def books_of(residency: Residency, versions: Versions, endpoint: str) -> Books:
    return Books(
        endpoint=endpoint,
        fences=residency.fences(),
        wpgs=[
            WpgBook(
                key=wpg.key,
                incarnation=wpg.incarnation,
                seal_seq=wpg.seal_seq,
                epoch=wpg.epoch,
                prepared=wpg.prepared.seq if wpg.prepared is not None else None,
                sealed=sorted(wpg.sealed),
                ranks=[
                    RankBook(
                        device=rank.device,
                        token=rank.token,
                        state=rank.state,
                        heap_bytes=rank.heap_bytes,
                        tensors=msgspec.Raw(rank.packed_tensors),
                        extent=rank.extent,
                        applied=rank.applied,
                        digest=rank.digest,
                    )
                    for rank in wpg.ranks
                ],
            )
            for wpg in residency.alive()
        ],
        versions=[
            VersionBook(
                key=version.key,
                num_bytes=version.num_bytes,
                tensors=msgspec.Raw(version.packed_tensors),
                digest=version.digest,
                extent=version.extent,
                incarnation=version.incarnation,
            )
            for version in versions.known()
            if version.extent is not None
        ],
    )


def encode_record(generation: int, payload: bytes) -> bytes:
    digest = xxhash.xxh3_128_digest(_GENERATION.pack(generation) + payload)
    return _PREFIX.pack(MAGIC, generation, len(payload), digest) + payload


def newest_record(places: Iterable[bytes]) -> tuple[int, bytes] | None:
    """Generation and content of the newest record that is whole; None: none is.

    Args: places: content of each place; whatever follows a record in it does not matter.
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
