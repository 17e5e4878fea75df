"""How a rank's state is described to the state manager of its node.

The state manager keeps a deployment's state as one host extent that mirrors the rank's device heap
byte for byte, and behind that holds what never is on a device; the `TensorSlot`s say what lies
where. Digests are those of `phaseloom.common.tensors.blockhash`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from phaseloom.common.contract.specs import Layout

EXTENT_ALIGNMENT_BYTES = 4096


def host_start(heap_bytes: int) -> int:
    """Where, in a rank's extent, the state begins that lives in host memory alone."""
    return -(-heap_bytes // EXTENT_ALIGNMENT_BYTES) * EXTENT_ALIGNMENT_BYTES


def extent_bytes(heap_bytes: int, host_bytes: int) -> int:
    """How much of a rank's extent is its state: the heap's copy, and what lives there alone."""
    return host_start(heap_bytes) + host_bytes if host_bytes else heap_bytes


class Role(StrEnum):
    WEIGHT = "weight"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    MANIFEST = "manifest"
    """No tensor: of a weights version that is written in parts, what these are (`VersionParts`)."""


class TensorSlot(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor's place in a heap or in a weights version, and what of the whole tensor it is."""

    name: str
    """The parameter's fully qualified name; optimizer state: `<parameter>.<key>`."""
    role: Role
    dtype: str
    """As numpy spells it: `float32`."""
    shape: list[int]
    offset: int
    """Bytes, a multiple of 64."""
    num_bytes: int
    global_shape: list[int] = []
    """Of the whole tensor; empty: it is here whole."""
    start: list[int] = []
    """Where in the whole tensor this slice begins, one index a dim; empty: it is here whole."""


class VersionPart(msgspec.Struct, frozen=True, array_like=True):
    """What one source rank holds of a weights version."""

    part: str
    """As in VersionKey: `2of4`."""
    num_bytes: int
    digest: str
    """Of its memory."""
    layout: str
    """BLAKE3 of what lies where in it, in hex."""


class VersionParts(msgspec.Struct, frozen=True, array_like=True):
    """The manifest of a version that is written in parts: its bytes, as MessagePack, are what the
    version's own key names. So equal parts of equal layout are equal versions."""

    layout: Layout
    """Of the ranks that wrote it."""
    fsdp: int
    """Over how many of the replicas rows are sharded."""
    tensors: str
    """BLAKE3, in hex, of what lies where in such a version that is written whole: what model it
    is of."""
    parts: list[VersionPart]


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor in some part of a version, and where the reader wants it."""

    part: str
    """As in VersionKey; empty: of a version that was written whole."""
    name: str
    dtype: str
    start: list[int]
    """In the tensor as that part has it, one index a dim."""
    size: list[int]
    offset: int
    """In the reader's memory: bytes, a multiple of 64. The box lies there without gaps."""
    num_bytes: int


class PartSources(msgspec.Struct, frozen=True):
    part: str
    endpoints: list[str]
    """Of the state managers that hold it; all of them are asked, each for something else."""
