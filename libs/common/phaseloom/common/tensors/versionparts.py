"""Weights versions written by several ranks: part names, and the manifest that connects the parts.

A part contains everything that one rank has; ranks with equal content share one part. The manifest
is stored as the version itself. It describes the policy's layout and each part. Everything here is
pure.
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
_REMEDY = "number parts from 0: `2of4` is the third of four"
_MANIFEST = "manifest"


def part_name(number: int, count: int) -> str:
    return f"{number}of{count}"


def check_part(part: str, field: str) -> str:
    """Check the name of a part. Returns: the name.

    Raises: CallerError: it is not a valid part name.
    """
    if not _PART.match(part):
        raise CallerError(f"{part!r} is not a valid part name", field=field, remedy=_REMEDY)
    return part


def part_of(version: VersionKey, part: str) -> VersionKey:
    return msgspec.structs.replace(version, part=part)


def layout_digest(table: bytes) -> str:
    """Return the digest of a packed `TensorTable`."""
    return blake3(table).hexdigest()


def encode_manifest(manifest: VersionParts) -> bytes:
    """Encode a manifest. The version's digest is that of these bytes.

    Equal manifests give equal bytes.
    """
    return msgspec.msgpack.encode(manifest)


def decode_manifest(memory: bytes | memoryview, version: VersionKey) -> VersionParts:
    """Decode the manifest of a version.

    Raises: ResourceError: DATA_LOSS: the bytes are not a manifest.
    """
    try:
        return msgspec.msgpack.decode(memory, type=VersionParts)
    except msgspec.DecodeError as error:
        raise ResourceError(
            f"cannot decode the manifest of version {version}: {error}", code=Code.DATA_LOSS
        ) from None


def manifest_slots(num_bytes: int) -> list[TensorSlot]:
    """Return the layout of a manifest's memory."""
    return [TensorSlot(_MANIFEST, Role.MANIFEST, "uint8", [num_bytes], 0, num_bytes)]


def is_manifest(tensors: Sequence[TensorSlot]) -> bool:
    """Whether a version with this layout is written in parts."""
    return len(tensors) == 1 and tensors[0].role is Role.MANIFEST
