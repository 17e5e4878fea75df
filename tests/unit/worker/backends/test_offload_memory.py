"""Offloading really gives memory back, and training goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MIN_STATE_BYTES = 128 * 1024 * 1024


def test_process_gives_back_its_state_and_the_next_loss_is_bit_equal() -> None:
    """In a process of its own: what a worker does when another job takes its device."""
    root = Path(__file__).parents[4]
    child = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.unit.worker.backends.offload_child"],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    seen = json.loads(child.stdout)
    assert seen["state_bytes"] >= MIN_STATE_BYTES
    given_back = seen["rss_anon_before"] - seen["rss_anon_after"]
    assert given_back >= 0.9 * seen["state_bytes"]
    assert seen["heap_resident_after"] == 0
    assert seen["loss_after"] == seen["loss_before"]
    assert seen["next_after"] == seen["next_before"]
