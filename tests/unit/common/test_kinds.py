"""The table of operation kinds: complete, and all that a new kind needs beside who does it."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from phaseloom.client import Deployment
from phaseloom.common.contract.kinds import KINDS, MUTATING_KINDS, Gradients
from phaseloom.common.contract.operations import Args, Result, result_kind
from phaseloom.worker.backends.base import Backend
from tests.support import newkind

ROOT = Path(__file__).parents[3]


def test_every_operation_and_every_result_is_in_the_table() -> None:
    assert {kind.args for kind in KINDS.values()} == set(get_args(Args))
    assert {kind.result for kind in KINDS.values()} == set(get_args(Result))


@pytest.mark.parametrize("name", KINDS)
def test_kind_is_called_the_same_everywhere(name: str) -> None:
    kind = KINDS[name]
    assert kind.result.__struct_config__.tag == f"{name}_result"
    assert hasattr(Deployment, name)
    has_method = {hasattr(Backend, name), hasattr(Backend, f"check_{name}")}
    assert has_method == {not kind.moves_state}


@pytest.mark.parametrize("name", KINDS)
def test_kind_says_of_itself_what_its_docstring_says(name: str) -> None:
    doc = inspect.getdoc(KINDS[name].args) or ""
    assert doc.startswith("Mutating." if name in MUTATING_KINDS else "Reading.")


@pytest.mark.parametrize("name", KINDS)
def test_kind_is_consistent(name: str) -> None:
    kind = KINDS[name]
    assert kind.is_mutating or not (kind.replaces_state or kind.trains)
    assert not kind.items or kind.items in kind.args.__struct_fields__
    assert not kind.items or kind.merge is not None
    assert kind.gradients is Gradients.NONE or not kind.moves_state


def test_result_names_its_kind() -> None:
    result = KINDS["publish_weights"].result(version=1, digest="d", num_bytes=2)
    assert result_kind(result) == "publish_weights"


def test_new_kind_is_added_in_four_files(tmp_path: Path) -> None:
    """It is written into a copy of the tree, and goes from the controller to the ranks and back."""
    assert len(newkind.ADDED) <= 4
    folders = sorted({Path(*Path(name).parts[:2]) for name in newkind.ADDED})
    for folder in folders:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    newkind.add(tmp_path)
    path = [*(tmp_path / folder for folder in folders), ROOT]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.newkind"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
    )
    assert ran.stdout == "scored\n", ran.stderr
