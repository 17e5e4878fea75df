"""The description of a rank's state for the state manager of its node.

A rank's state is one host extent: first a copy of its device heap, byte for byte, then the state
that is never on a device. `TensorSlot`s say which tensor lies where. Digests are those of
`phaseloom.common.tensors.blockhash`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

EXTENT_ALIGNMENT_BYTES = 4096


def host_start(heap_bytes: int) -> int:
    """The offset, in a rank's extent, of the state that is in host memory only, in bytes."""
    return -(-heap_bytes // EXTENT_ALIGNMENT_BYTES) * EXTENT_ALIGNMENT_BYTES


def extent_bytes(heap_bytes: int, host_bytes: int) -> int:
    """The size of a rank's extent in bytes: the copy of its heap, and the state that is in host
    memory only."""
    return host_start(heap_bytes) + host_bytes if host_bytes else heap_bytes


class Role(StrEnum):
    WEIGHT = "weight"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    MANIFEST = "manifest"
    """Not a tensor: the `VersionParts` of a weights version that is written in parts."""


class TensorSlot(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor's place in a heap or a version, and which slice of the whole tensor it is."""

    name: str
    """The parameter's fully qualified name; optimizer state: `<parameter>.<key>`."""
    role: Role
    dtype: str
    """The numpy name, such as `float32`."""
    shape: list[int]
    offset: int
    """The offset in bytes, a multiple of 64."""
    num_bytes: int
    global_shape: list[int] = []
    """The shape of the whole tensor; empty where this is all of it."""
    start: list[int] = []
    """Where in the whole tensor this slice begins, one index a dim; empty likewise."""


class VersionPart(msgspec.Struct, frozen=True, array_like=True):
    """The part of a weights version that one source rank wrote."""

    part: str
    """The part's name as in VersionKey, such as `2of4`."""
    num_bytes: int
    digest: str
    """The digest of the part's memory."""
    table: bytes
    """The packed `TensorTable` of the part: which slice of which tensor lies where in it."""


class VersionParts(msgspec.Struct, frozen=True, array_like=True):
    """The manifest of a weights version that is written in parts.

    Its MessagePack bytes are stored under the version's own key, so equal parts of equal layout are
    equal versions.
    """

    tensors: str
    """BLAKE3, in hex, of the layout that the version would have if written whole: its model."""
    parts: list[VersionPart]


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A tensor slice in one part of a version, and where the reader wants it."""

    part: str
    """The part's name as in VersionKey; empty for a version that was written whole."""
    name: str
    dtype: str
    start: list[int]
    """Where the slice begins in the tensor as that part has it, one index a dim."""
    size: list[int]
    offset: int
    """Byte offset in the reader's memory, a multiple of 64; the slice lies there without gaps."""
    num_bytes: int


class PartSources(msgspec.Struct, frozen=True):
    part: str
    endpoints: list[str]
    """The state managers that hold the part; each of them is asked for different slices."""
