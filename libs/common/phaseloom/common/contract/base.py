"""The base of every message of the contract."""

from __future__ import annotations

import msgspec

Int32s = list[int] | bytes


Float32s = list[float] | bytes


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class Message(msgspec.Struct, frozen=True, tag=_snake, tag_field="type", omit_defaults=True):
    """Base of everything that is part of a union on the wire."""
