"""docs/extending.md lists the files that an addition takes: they exist, and are enough."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import additions, newkind

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = {
    title: (int(count), re.findall(r"^\| `([^`]+)` \|", body, flags=re.MULTILINE))
    for title, count, body in re.findall(
        r"^## ([^\n:]+): (\d+) files\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL
    )
}
LIKE = {
    "An ordering policy": "fcfs",
    "A placement policy": "isolated",
    "A multiplexing policy": "static",
    "An operation kind": "",
    "A backend": "noop",
    "A service": "profiler",
}
"""What there is already of each."""
OF_SOME_SERVICES = {
    ROOT / "deploy/slurm/phaseloom.sbatch",
    ROOT / "deploy/grafana/dashboards/phaseloom.json",
    ROOT / "deploy/systemd/phaseloom@.service",
}
"""Files that name some services for their own reasons; a new service may do without them."""
ADDED = {
    "An ordering policy": additions.ORDERING,
    "A placement policy": additions.PLACEMENT,
    "A multiplexing policy": additions.MULTIPLEXING,
    "A backend": additions.BACKEND,
}


def test_page_has_a_section_for_each() -> None:
    assert set(SECTIONS) == set(LIKE)


@pytest.mark.parametrize("title", LIKE)
def test_files_are_counted_and_exist(title: str) -> None:
    count, files = SECTIONS[title]
    assert len(files) == count
    for name in files:
        assert (ROOT / name.replace("NAME", LIKE[title])).exists(), name


def test_list_of_an_operation_kind_is_what_adding_one_takes() -> None:
    assert set(SECTIONS["An operation kind"][1]) == set(newkind.ADDED)


@pytest.mark.parametrize("name", SECTIONS["A service"][1])
def test_every_file_of_a_service_names_it(name: str) -> None:
    if "NAME" not in name:
        assert re.search(rf"\b{LIKE['A service']}\b", _text(name))


def test_nothing_else_that_runs_or_ships_a_service_names_each() -> None:
    listed = {ROOT / name for name in SECTIONS["A service"][1]}
    for pattern in ("Makefile", "README.md", "services/Dockerfile", "deploy/**/*", ".github/**/*"):
        for path in ROOT.glob(pattern):
            if path.is_file() and path not in listed and path not in OF_SOME_SERVICES:
                assert LIKE["A service"] not in path.read_text(), path


def _text(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("title", ADDED)
def test_addition_takes_the_files_listed_and_works(title: str, tmp_path: Path) -> None:
    """It is written into a copy of the service that it belongs to, and used."""
    added = ADDED[title]
    assert {name.replace("NAME", added.name) for name in SECTIONS[title][1]} == added.files
    (service,) = {Path(*Path(name).parts[:2]) for name in added.files}
    shutil.copytree(
        ROOT / service, tmp_path / service, ignore=shutil.ignore_patterns("__pycache__")
    )
    added.write(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", added.program],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / service), str(ROOT)])},
    )
    assert ran.stdout == "done\n", ran.stderr
