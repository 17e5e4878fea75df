"""A node's check of a registered model's files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.tensors.modelfiles import read_model
from phaseloom.worker.agent.modelfiles import ModelFiles
from tests.support.pretrained import save_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


def first_shard(directory: Path) -> Path:
    return min(directory.glob("*.safetensors"))


def move_away(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def lose_a_shard(directory: Path) -> None:
    first_shard(directory).unlink()


def touch_up(path: Path, *, keep_time: bool) -> None:
    """Change a byte in the middle of a file, in place."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


async def test_files_are_hashed_once_while_nobody_touches_them(directory: Path) -> None:
    model = read_model("tiny", directory)
    files = ModelFiles("n0")
    with first_shard(directory).open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        mapped[-1] = mapped[-1]
        await files.verify("tiny", model.directory)
        # Only the first write to a mapped page changes the file's times.
        mapped[-1] ^= 1
        await files.verify("tiny", model.directory)
        with pytest.raises(ResourceError):
            await ModelFiles("n0").verify("tiny", model.directory)


async def test_change_in_place_is_found_whatever_the_files_time(directory: Path) -> None:
    """With its old time, size and inode, as `rsync --inplace --times` leaves it."""
    model = read_model("tiny", directory)
    files = ModelFiles("n0")
    await files.verify("tiny", model.directory)
    touch_up(first_shard(directory), keep_time=True)
    with pytest.raises(ResourceError) as lost:
        await files.verify("tiny", model.directory)
    assert lost.value.info.code is Code.DATA_LOSS


async def test_file_that_has_changed_is_a_loss(directory: Path) -> None:
    model = read_model("tiny", directory)
    files = ModelFiles("n0")
    await files.verify("tiny", model.directory)
    changed = directory / "tokenizer.json"
    touch_up(changed, keep_time=False)
    os.utime(changed, ns=(1, 1))
    with pytest.raises(ResourceError, match=r"tokenizer\.json on node n0") as lost:
        await files.verify("tiny", model.directory)
    assert lost.value.info.code is Code.DATA_LOSS
    assert lost.value.info.field == "model.registered"


@pytest.mark.parametrize("lose", [move_away, lose_a_shard])
async def test_node_without_the_files_refuses(
    directory: Path, lose: Callable[[Path], None]
) -> None:
    model = read_model("tiny", directory)
    lose(directory)
    with pytest.raises(CallerError, match=f"node n0 has no {directory}") as refused:
        await ModelFiles("n0").verify("tiny", model.directory)
    assert refused.value.info.code is Code.NOT_FOUND
    assert "same path" in refused.value.info.remedy
