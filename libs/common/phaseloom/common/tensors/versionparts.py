"""Weights versions that several ranks write: names of parts, and the manifest that ties them.

A part is everything that one rank holds; ranks that hold the same share one part. The manifest is
stored as the version itself: it says how the policy is laid out, and what each part is. Everything
here is pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import Role, TensorSlot, VersionParts

_PART = re.compile(r"(0|[1-9][0-9]{0,5})of[1-9][0-9]{0,5}\Z")
_REMEDY = "count parts from 0: `2of4` is the third of four"
_MANIFEST = "manifest"


def part_name(number: int, count: int) -> str:
    return f"{number}of{count}"


def check_part(part: str, field: str) -> str:
    """Check the name of a part, and return it.

    Raises: CallerError: it is no name of a part.
    """
    if not _PART.match(part):
        raise CallerError(f"{part!r} is no part", field=field, remedy=_REMEDY)
    return part


def part_of(version: VersionKey, part: str) -> VersionKey:
    return msgspec.structs.replace(version, part=part)


def layout_digest(table: bytes) -> str:
    """The digest of a packed `TensorTable`."""
    return blake3(table).hexdigest()


def encode_manifest(manifest: VersionParts) -> bytes:
    """The bytes of a manifest, of which the version's digest is taken.

    Equal manifests give equal bytes.
    """
    return msgspec.msgpack.encode(manifest)


def decode_manifest(memory: bytes | memoryview, version: VersionKey) -> VersionParts:
    """Read the manifest of a version from its bytes.

    Raises: ResourceError: DATA_LOSS: the bytes are no manifest.
    """
    try:
        return msgspec.msgpack.decode(memory, type=VersionParts)
    except msgspec.DecodeError as error:
        raise ResourceError(
            f"the manifest of version {version} cannot be read: {error}", code=Code.DATA_LOSS
        ) from None


def manifest_slots(num_bytes: int) -> list[TensorSlot]:
    """The layout of a manifest's memory."""
    return [TensorSlot(_MANIFEST, Role.MANIFEST, "uint8", [num_bytes], 0, num_bytes)]


def is_manifest(tensors: Sequence[TensorSlot]) -> bool:
    """Whether a version of this layout is written in parts."""
    return len(tensors) == 1 and tensors[0].role is Role.MANIFEST
