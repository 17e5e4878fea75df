"""Checks that this machine has the memory, GPUs and directories that a configuration requires.

`python -m phaseloom.common.process.machine` prints the memory size of each GPU, as JSON.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import DeviceKind

_DRIVER = "libcuda.so.1"
_PROBE_TIMEOUT_S = 60.0


def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that new processes can use: what the machine has available, or less if a
    control group of this process (version 1 or 2) leaves less."""
    candidates = [memory_bytes()]
    with suppress(OSError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                candidates.append(1024 * int(line.split()[1]))
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                root, names = cgroups, ("memory.max", "memory.current", "inactive_file ")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
                root = cgroups / "memory"
            else:
                continue
            # In a container, the path may be the host's, and only the root is visible.
            group = Path(path.lstrip("/"))
            for parent in (group, *group.parents):
                candidates += _free_in_group(root / parent, *names)
    return max(0, min(candidates))


def _free_in_group(group: Path, limit: str, usage: str, cache: str) -> list[int]:
    """Return the bytes that a control group may still use, or nothing if it has no limit.

    Pages of files that nobody uses are counted as free, because the kernel takes them back.
    """
    with suppress(OSError, ValueError):  # there is no such group, or the limit is `max`
        free = int((group / limit).read_text())
        with suppress(OSError, ValueError):
            free -= int((group / usage).read_text())
            for line in (group / "memory.stat").read_text().splitlines():
                if line.startswith(cache):
                    free += int(line.split()[1])
        return [free]
    return []


@functools.cache
def gpus() -> tuple[int, ...]:
    """Return the memory size of each GPU that the CUDA driver offers to processes started here;
    empty without a driver.

    A child process queries the driver, because a process that has loaded the driver cannot fork.
    """
    command = [sys.executable, "-m", "phaseloom.common.process.machine"]
    try:
        completed = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(json.loads(completed.stdout.splitlines()[-1]))


def check_devices(
    kind: DeviceKind,
    devices: Sequence[int],
    section: str,
    gpus: Callable[[], Sequence[int]] = gpus,
) -> None:
    """Check that this machine has the devices of a node.

    Args:   devices: the bytes of each device.
            section: prefix of the field names in errors.
            gpus: returns the bytes of each GPU.
    Raises: CallerError: FAILED_PRECONDITION: there are too few GPUs. RESOURCE_EXHAUSTED: a device
            has more bytes than the machine or its GPU.
    """
    available: Sequence[int] = [memory_bytes()] * len(devices)
    if kind is DeviceKind.CUDA:
        available = gpus()
        if len(available) < len(devices):
            raise CallerError(
                f"expected {len(devices)} GPUs for device_kind cuda, but the CUDA driver shows "
                f"{len(available)}",
                code=Code.FAILED_PRECONDITION,
                field=f"{section}.device_kind",
                remedy="configure as many devices as nvidia-smi lists, check the driver "
                "(`phaseloom doctor`), or omit device_kind to emulate the devices",
            )
    for number, (required, limit) in enumerate(zip(devices, available, strict=False)):
        if required > limit:
            raise CallerError(
                f"device {number} must have at most {limit} bytes, got {required}",
                code=Code.RESOURCE_EXHAUSTED,
                field=f"{section}.devices",
                remedy=f"set it to {limit} or less",
            )


def check_memory(num_bytes: int, field: str) -> None:
    """Check that this machine has this much memory.

    Raises: CallerError: RESOURCE_EXHAUSTED.
    """
    available = memory_bytes()
    if num_bytes > available:
        raise CallerError(
            f"{field.rpartition('.')[2]} must be at most {available}, the bytes of this machine's "
            f"memory, got {num_bytes}",
            code=Code.RESOURCE_EXHAUSTED,
            field=field,
            remedy=f"set it to {available} or less",
            details={"configured_bytes": num_bytes, "there_bytes": available},
        )


def check_writable(directory: Path, field: str) -> None:
    """Check that a directory can be written, or created if it does not exist. Changes nothing.

    Raises: CallerError: FAILED_PRECONDITION: it cannot.
    """
    path = directory.absolute()
    # A path below a directory without search permission counts as missing, so the error names
    # that directory.
    nearest = next(candidate for candidate in (path, *path.parents) if os.path.exists(candidate))
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return
    problem = "is not writable" if nearest.is_dir() else "is not a directory"
    raise CallerError(
        f"cannot {'write to' if nearest == path else 'create'} {directory}: {nearest} {problem}",
        code=Code.FAILED_PRECONDITION,
        field=field,
        remedy="choose a directory that this user can write or create",
    )


def _query_driver() -> list[int]:
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    sizes = []
    for number in range(count.value):
        device, size = ctypes.c_int(), ctypes.c_size_t()
        if driver.cuDeviceGet(ctypes.byref(device), number):
            break
        if driver.cuDeviceTotalMem_v2(ctypes.byref(size), device):
            break
        sizes.append(size.value)
    return sizes


if __name__ == "__main__":
    print(json.dumps(_query_driver()))
