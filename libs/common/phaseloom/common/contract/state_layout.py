"""The description of a rank's state for its node's state manager.

A rank's state is one host extent: first a byte-for-byte copy of its device heap, then the state
that is never on a device. `TensorSlot`s say which tensor is where. Digests are computed by
`phaseloom.common.tensors.blockhash`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

EXTENT_ALIGNMENT_BYTES = 4096


def host_start(heap_bytes: int) -> int:
    """Byte offset, in a rank's extent, of the state that exists only in host memory."""
    return -(-heap_bytes // EXTENT_ALIGNMENT_BYTES) * EXTENT_ALIGNMENT_BYTES


def extent_bytes(heap_bytes: int, host_bytes: int) -> int:
    """Size of a rank's extent in bytes: the copy of its heap plus the state that exists only in
    host memory."""
    return host_start(heap_bytes) + host_bytes if host_bytes else heap_bytes


class Role(StrEnum):
    WEIGHT = "weight"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    MANIFEST = "manifest"
    """Not a tensor but the `VersionParts` of a weights version that is written in parts."""


class TensorSlot(msgspec.Struct, frozen=True, omit_defaults=True):
    """Position of a tensor in a heap or version, and which slice of the whole tensor it is."""

    name: str
    """The parameter's fully qualified name. For optimizer state: `<parameter>.<key>`."""
    role: Role
    dtype: str
    """The numpy name, such as `float32`."""
    shape: list[int]
    offset: int
    """Byte offset, a multiple of 64."""
    num_bytes: int
    global_shape: list[int] = []
    """Shape of the whole tensor; empty: this slot has the whole tensor."""
    start: list[int] = []
    """Start index of this slice in the whole tensor, one per dimension; empty: this slot has the
    whole tensor."""


class StoredTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where files have a tensor: as one of their own, or as a run of a larger one."""

    name: str
    """Name of the files' tensor."""
    shape: list[int]
    """The shape that it must have."""
    first: int = 0
    """Index of the run's first element."""


Places = dict[str, list[StoredTensor]]
"""Where files have each tensor, by the name that `transformers` saves it under. It has several
places if the model ties two tensors and the files have both."""


class VersionPart(msgspec.Struct, frozen=True, array_like=True):
    """The part of a weights version that one source rank wrote."""

    part: str
    """The part's name as in VersionKey, such as `2of4`."""
    num_bytes: int
    digest: str
    """Digest of the part's memory."""
    table: bytes
    """The packed `TensorTable` of the part, which says where each tensor slice is."""


class VersionParts(msgspec.Struct, frozen=True, array_like=True):
    """The manifest of a weights version that is written in parts.

    Its MessagePack bytes are stored under the version's own key. So two versions with equal parts
    and layouts have equal manifests.
    """

    tensors: str
    """BLAKE3, in hex, of the layout that the version would have if written whole. It identifies the
    model."""
    parts: list[VersionPart]


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A tensor slice in one part of a version, and its destination in the reader's memory."""

    part: str
    """The part's name as in VersionKey; empty: the version was written whole."""
    name: str
    dtype: str
    start: list[int]
    """Start index of the slice within that part's tensor, one per dimension."""
    size: list[int]
    offset: int
    """Byte offset in the reader's memory, a multiple of 64. The slice is contiguous there."""
    num_bytes: int


class PartSources(msgspec.Struct, frozen=True):
    part: str
    endpoints: list[str]
    """State managers that have the part. Different slices are requested from each."""
