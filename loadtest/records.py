"""What benches leave behind: one list of figures, each beside the limit it is held against."""

from __future__ import annotations

from pathlib import Path

import msgspec

LATEST = Path("runs/bench/latest.json")


class Record(msgspec.Struct, frozen=True):
    """One figure. `ratio` is value to limit, as measured in the same run."""

    name: str
    value: float
    unit: str
    limit: str
    """What bounds the value from below: the same work without us."""
    limit_value: float
    """In the same unit."""
    ratio: float


def record(new: list[Record], file: Path = LATEST) -> list[Record]:
    """Merge figures into the file by name, the others left as they are; returns all of them.

    Raises: msgspec.DecodeError: the file is there and is no list of records.
    """
    known = msgspec.json.decode(file.read_bytes(), type=list[Record]) if file.exists() else []
    merged = {entry.name: entry for entry in [*known, *new]}
    records = list(merged.values())
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(records)) + b"\n")
    partial.replace(file)
    return records
