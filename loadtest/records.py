"""What benches leave behind: figures, each beside the limit it is held against, and the machine."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from loadtest.machine import Machine

LATEST = Path("runs/bench/latest.json")

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One figure. `ratio` is value to limit, as measured in the same run."""

    name: str
    value: float
    unit: str
    limit: str
    """What bounds the value: the same work without us."""
    limit_value: float
    """In the same unit."""
    ratio: float
    aim: str = ""
    """What the ratio should be, `≤ 1.5`."""


class Records(msgspec.Struct, frozen=True):
    machine: Machine
    """Of the figures recorded last."""
    figures: list[Record]


def record(new: list[Record], machine: Machine, file: Path = LATEST) -> Records:
    """Merge figures into the file by name, the others left as they are; returns all of them.

    Raises: msgspec.DecodeError: the file is there and holds no records.
    """
    known = msgspec.json.decode(file.read_bytes(), type=Records).figures if file.exists() else []
    merged = {entry.name: entry for entry in [*known, *new]}
    return write(Records(machine, list(merged.values())), file)


def write(results: T, file: Path) -> T:
    """Write results as JSON for people and programs, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    partial.replace(file)
    return results
