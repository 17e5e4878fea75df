"""The directory of a new model."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from phaseloom.cli.newmodels import new_directory


def test_folders_above_a_new_directory_are_made(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "models" / "mine"
    with new_directory(directory) as partial:
        partial.mkdir()
        (partial / "config.json").touch()
    assert [each.name for each in directory.iterdir()] == ["config.json"]
    assert [each.name for each in directory.parent.iterdir()] == ["mine"]


def test_files_of_a_new_directory_obey_the_umask(tmp_path: Path) -> None:
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    base = tmp_path / "base"
    base.mkdir(mode=0o700)
    (base / "tokenizer.json").touch(0o600)
    with new_directory(tmp_path / "merged") as partial:
        shutil.copytree(base, partial)  # with the permissions of the base
        save_file({"a": torch.zeros(1)}, partial / "model.safetensors")
    merged = tmp_path / "merged"
    files = [(merged / name).stat() for name in ("tokenizer.json", "model.safetensors")]
    assert [file.st_mode for file in files] == [ordinary.stat().st_mode] * 2
    (tmp_path / "folder").mkdir()
    assert merged.stat().st_mode == (tmp_path / "folder").stat().st_mode
