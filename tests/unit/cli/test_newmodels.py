"""The directory of a new model."""

from __future__ import annotations

from pathlib import Path

from phaseloom.cli.newmodels import new_directory


def test_folders_above_a_new_directory_are_made(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "models" / "mine"
    with new_directory(directory) as partial:
        partial.mkdir()
        (partial / "config.json").touch()
    assert [each.name for each in directory.iterdir()] == ["config.json"]
    assert [each.name for each in directory.parent.iterdir()] == ["mine"]
