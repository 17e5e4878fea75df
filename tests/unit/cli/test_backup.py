"""What a backup copies while files change."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from phaseloom.cli.backup import Mirror


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "nodes/train-0").mkdir(parents=True)
    (run / "nodes/train-0/old.state").write_bytes(b"old")
    os.utime(run / "nodes/train-0/old.state", (1000.0, 1000.0))
    return run


def content(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_second_pass_copies_only_what_may_have_changed(run: Path, tmp_path: Path) -> None:
    """A file that was written just before it was copied may change again under one time stamp."""
    (run / "new.state").write_bytes(b"new")
    mirror = Mirror(run, tmp_path / "copy")
    assert mirror.update(is_paused=False) == 6
    stamp = (run / "new.state").stat().st_mtime_ns
    (run / "new.state").write_bytes(b"wen")
    os.utime(run / "new.state", ns=(stamp, stamp))
    assert mirror.update(is_paused=True) == 3
    assert content(tmp_path / "copy") == content(run)


def test_what_comes_and_goes_is_followed(run: Path, tmp_path: Path) -> None:
    mirror = Mirror(run, tmp_path / "copy")
    mirror.update(is_paused=False)
    (run / "nodes/train-0/old.state").rename(run / "nodes/train-0/renamed.state")
    (run / "nodes/rollout-0").mkdir()
    (run / "nodes/rollout-0/latest").symlink_to("a.state")
    (run / "gone").mkdir()
    mirror.update(is_paused=False)
    (run / "gone").rmdir()
    (run / "gone").write_bytes(b"a file now")
    mirror.update(is_paused=True)
    assert content(tmp_path / "copy") == content(run)
    assert (tmp_path / "copy/nodes/rollout-0/latest").readlink() == Path("a.state")


def test_what_tells_of_processes_alone_is_left_out(run: Path, tmp_path: Path) -> None:
    for name in ("logs", "spans", "s", "nats"):
        (run / name).mkdir()
    for name in ("logs/router.log", "mesh.json", "nats/nats.log", "nats/nats-server_7.ports"):
        (run / name).write_bytes(b"?")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(run / "nodes/a.sock"))
        Mirror(run, tmp_path / "copy").update(is_paused=True)
    assert content(tmp_path / "copy") == {"nodes/train-0/old.state": b"old"}
