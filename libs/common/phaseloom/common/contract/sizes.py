"""Sizes in bytes, as people write them: `8GiB`, `1G`, `512 MiB` or a number."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

import msgspec

from phaseloom.common.contract.errors import CallerError

SIZE = msgspec.Meta(extra={"is_size": True})
Size = Annotated[int, SIZE]
"""A setting in bytes. Configuration files and variables may give it with a unit."""
LARGEST = 2**62

_POWERS = "KMGTP"
_TEXT = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?(?:([KMGTP])(i?)B?|B)?\Z", re.IGNORECASE)


def parse_size(text: str, field: str) -> int:
    """Return the bytes of a size.

    `KiB`, `MiB`, `GiB`, … are powers of 1,024, and `KB`, `MB`, `GB`, … of 1,000. The `B` may be
    missing, and case does not matter.

    Raises: CallerError: the text is not a size, or too large.
    """
    match = _TEXT.match(text.strip())
    if match is not None:
        number, unit, is_binary = match.groups()
        power = 1 + _POWERS.index(unit.upper()) if unit else 0
        size = Decimal(number) * (1024 if is_binary else 1000) ** power
        if size == int(size) and size <= LARGEST:
            return int(size)
    raise CallerError(
        f"expected a size in bytes, got {text[:40]!r}",
        field=field,
        remedy="use a number of bytes, or one with a unit: 8GiB (8 × 2³⁰), 512MiB, 1G (10⁹)",
    )


def format_size(num_bytes: float) -> str:
    """Return the size in its largest unit: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"
