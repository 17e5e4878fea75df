"""Another build of Phaseloom: a copy of this tree whose scheduler has a later core version."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

from phaseloom.scheduler.core.state.tree import CORE_VERSION
from tests.support.containers import ROOT

NEWER = CORE_VERSION + 1
_STATE = "services/scheduler/phaseloom/scheduler/core/state"


def newer_build(directory: Path) -> str:
    """Make the build in a directory.

    Returns: PYTHONPATH of processes that run it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    places: list[str] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["dev-mode-dirs"]
    for place in places:
        source = ROOT / place / "phaseloom"
        shutil.copytree(source, directory / place / "phaseloom", ignore=_COMPILED)
    _replace(directory / _STATE / "tree.py", f"{CORE_VERSION = }", f"CORE_VERSION = {NEWER}")
    table = "UPGRADES: Mapping[int, Upgrade] = {"
    _replace(directory / _STATE / "upgrades.py", table, f"{table}{CORE_VERSION}: unchanged, ")
    return os.pathsep.join(str(directory / place) for place in places)


_COMPILED = shutil.ignore_patterns("__pycache__")


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file}: {old}"
    file.write_text(text.replace(old, new))
