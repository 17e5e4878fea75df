"""What a configuration says of a machine, against what is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import DeviceKind
from phaseloom.common.process import machine

EMULATED, CUDA = DeviceKind.EMULATED, DeviceKind.CUDA
ALL = machine.memory_bytes()


def test_devices_that_are_there_are_taken() -> None:
    machine.check_devices(EMULATED, [ALL, ALL], "worker")
    machine.check_devices(CUDA, [80, 40], "worker", lambda: [80, 80, 80])


@pytest.mark.parametrize(
    ("kind", "devices", "gpus", "field", "code"),
    [
        (EMULATED, [1, ALL + 1], [], "worker.devices", Code.RESOURCE_EXHAUSTED),
        (CUDA, [1], [], "worker.device_kind", Code.FAILED_PRECONDITION),
        (CUDA, [1, 1, 1], [80, 80], "worker.device_kind", Code.FAILED_PRECONDITION),
        (CUDA, [80, 81], [80, 80], "worker.devices", Code.RESOURCE_EXHAUSTED),
    ],
)
def test_devices_that_are_not_there_are_refused(
    kind: DeviceKind, devices: list[int], gpus: list[int], field: str, code: Code
) -> None:
    with pytest.raises(CallerError) as refused:
        machine.check_devices(kind, devices, "worker", lambda: gpus)
    assert refused.value.info.field == field
    assert refused.value.info.code is code
    assert refused.value.info.remedy


def test_gpus_are_those_that_the_driver_shows_and_hides() -> None:
    """On a machine without a GPU there are none either way."""
    hidden = subprocess.run(
        [sys.executable, "-m", machine.__name__],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(hidden.stdout) == []
    assert len(machine.gpus()) <= len(list(Path("/dev").glob("nvidia[0-9]*")))


def test_directory_that_cannot_be_made_or_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for directory, why in (
        (file, "cannot write to .*: .*file is not a directory"),
        (file / "checkpoints", "cannot create .*: .*file is not a directory"),
        (Path("/proc/sys"), "cannot write to .*: /proc/sys is not writable"),
    ):
        if directory == Path("/proc/sys") and os.access(directory, os.W_OK):
            continue
        with pytest.raises(CallerError, match=why) as refused:
            machine.check_writable(directory, "mesh.checkpoint_root")
        assert refused.value.info.field == "mesh.checkpoint_root"


def test_directory_that_can_be_made_is_not_made_yet(tmp_path: Path) -> None:
    machine.check_writable(tmp_path / "a" / "b", "mesh.checkpoint_root")
    assert not list(tmp_path.iterdir())


GiB = 2**30


def put(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def proc_of(root: Path, groups: str, *, available: int = 4 * GiB) -> Path:
    put(root / "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable: {available // 1024} kB\n")
    put(root / "proc/self/cgroup", groups)
    return root / "proc"


def test_available_memory_is_the_machine_s_without_a_limit(tmp_path: Path) -> None:
    proc = proc_of(tmp_path, "0::/\n", available=3 * 2**20)
    put(tmp_path / "fs/memory.max", "max\n")
    assert machine.available_bytes(proc, tmp_path / "fs") == 3 * 2**20
    assert machine.available_bytes(tmp_path / "none", tmp_path / "none") == ALL


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/memory.max": 2 * GiB, "a/b/memory.max": "max"}, 2 * GiB),
        ("0::/a\n", {"a/memory.max": 2 * GiB, "a/memory.current": GiB}, GiB),
        (
            "0::/a\n",
            {
                "a/memory.max": 2 * GiB,
                "a/memory.current": GiB,
                "a/memory.stat": f"anon 5\ninactive_file {GiB // 2}\nactive_file 7",
            },
            3 * GiB // 2,
        ),
        # In a container, the path is the host's and only the root is mounted.
        ("0::/host/path\n", {"memory.max": GiB}, GiB),
        ("0::/../x\n", {"memory.max": GiB}, GiB),
        ("4:cpu,memory:/a\n1:pids:/\n0::/\n", {"memory/a/memory.limit_in_bytes": GiB}, GiB),
        (
            "4:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": 2 * GiB,
                "memory/a/memory.usage_in_bytes": GiB,
                "memory/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {GiB // 4}",
            },
            5 * GiB // 4,
        ),
        # Version 1 has this number where there is no limit.
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": 9223372036854771712}, 4 * GiB),
        ("0::/\n", {"memory.max": GiB, "memory.current": 2 * GiB}, 0),
    ],
)
def test_available_memory_is_what_control_groups_leave(
    tmp_path: Path, groups: str, files: dict[str, object], expected: int
) -> None:
    for name, content in files.items():
        put(tmp_path / "fs" / name, f"{content}\n")
    proc = proc_of(tmp_path, groups)
    assert machine.available_bytes(proc, tmp_path / "fs") == min(expected, ALL)
