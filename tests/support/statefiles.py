"""State directories by the method that this run of the tests prefers: see `make test-kvikio`."""

from __future__ import annotations

import os
from pathlib import Path

from phaseloom.common.contract.state_agent import DiskMethod
from phaseloom.statemgr.disk.files import StateDirectory

PREFERRED = DiskMethod(os.environ.get("PHASELOOM_STATEMGR_DISK_METHOD", DiskMethod.DIRECT))


def state_directory(root: Path) -> StateDirectory:
    return StateDirectory(root, PREFERRED)
