"""What a job reports reaches the trackers, as their own files show."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phaseloom.client import CallerError, Code, tracker
from phaseloom.common.process import config

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("TRACKERS_PYTHON", ".venv-trackers/bin/python")).absolute()
TARGETS = ("tensorboard:boards", "wandb:curves", "trackio:curves")
REPORTED: list[list[Any]] = [
    [0, "reward", 0.0],
    [1, "reward", 0.5],
    [1, "kl_k3:sum", 0.25],
    [4, "reward", 1.0],
]


@pytest.mark.parametrize("target", ["", "wandb", "wandb:", "mlflow:runs", ":x"])
def test_unknown_target_is_refused_by_its_field(target: str) -> None:
    with pytest.raises(CallerError, match="expected tensorboard:DIRECTORY") as refused:
        tracker(target, "first")
    assert refused.value.info.field == "target"


@pytest.mark.skipif(find_spec("trackio") is not None, reason="trackio is installed here")
def test_missing_package_is_reported_with_the_extra_to_install() -> None:
    with pytest.raises(CallerError, match="trackio needs the package trackio") as refused:
        tracker("trackio:curves", "first")
    assert refused.value.info.code is Code.FAILED_PRECONDITION
    assert "phaseloom[trackers]" in (refused.value.info.remedy or "")


@pytest.mark.sdks
@pytest.mark.skipif(not PYTHON.exists(), reason="make test-sdks installs it")
def test_reports_are_in_the_files_of_every_tracker(tmp_path: Path) -> None:
    paths = [str(ROOT), *(str(path) for path in [*ROOT.glob("libs/*"), *ROOT.glob("services/*")])]
    environment = config.inherited() | {
        "PYTHONPATH": os.pathsep.join(paths),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }

    def child(*words: str) -> bytes:
        command = [str(PYTHON), "-m", "tests.support.trackers_child", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE
        ).stdout

    child(*TARGETS)
    found: dict[str, Any] = msgspec.json.decode(child("read"))
    assert sorted(found["wandb"]) == sorted(found["trackio"]) == sorted(REPORTED)
    # TensorBoard's writer replaces what its own paths do not allow.
    renamed = [[step, name.replace(":", "_"), value] for step, name, value in REPORTED]
    assert sorted(found["tensorboard"]) == sorted(renamed)
