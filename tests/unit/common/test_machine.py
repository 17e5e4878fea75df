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
