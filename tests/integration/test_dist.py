"""The wheel and the sdist, installed in fresh environments of every Python that is supported."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import free_port

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.11", "3.12", "3.13")
INSTALL_S = 1500.0
READY_S = 120.0


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist, made as by `make dist`."""
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return directory


def test_wheel_has_classifiers_and_everything_that_it_runs(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read("phaseloom-0.1.0.dist-info/METADATA").decode()
    header = metadata.partition("\n\n")[0]
    for version in VERSIONS:
        assert f"Classifier: Programming Language :: Python :: {version}" in header
    assert re.findall(r"(?m)^(?:Author|Maintainer|Home-page|Project-URL|Download)\S*", header) == []
    needed = {
        "phaseloom/__main__.py",
        "phaseloom/common/observability/palette.json",
        "phaseloom/console/static/console.js",
        "phaseloom/demo/examples/grpo.py",
        "phaseloom/cli/py.typed",
    }
    assert needed <= names
    assert not [name for name in names if "node_modules" in name or "tests" in name.split("/")]


def test_sdist_has_the_sources_of_the_wheel(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "pyproject.toml",
        "libs/cli/phaseloom/__main__.py",
        "examples/grpo.py",
    } <= names
    assert not [name for name in names if name.startswith((".venv", "runs/", "dist/"))]


def _python(version: str) -> str:
    """Return a Python of a version that this machine has, or skip the test."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        shutil.which(f"python{version}") or "",
        *map(str, sorted(pyenv.glob(f"{version}.*/bin/python{version}"))),
    ]
    program = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
    for python in filter(None, candidates):
        done = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, check=False, timeout=60
        )
        if done.stdout.strip() == version:
            return python
    pytest.skip(f"this machine has no Python {version} that can make environments")


def _environment(**variables: str) -> dict[str, str]:
    """The environment without what would lead to the sources of this clone."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PHASELOOM_", "VIRTUAL_ENV"))
    }
    return kept | variables


def _run(*command: str | Path, cwd: Path, timeout_s: float = 120.0) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=_environment(COLUMNS="200"),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def _check_installed(binaries: Path, directory: Path, *, console: bool) -> None:
    """Run what a new user runs first: help, doctor, and a mesh with a gateway."""
    assert "doctor" in _run(binaries / "phaseloom", "--help", cwd=directory)
    assert "0.1.0" in _run(binaries / "python", "-m", "phaseloom", "--version", cwd=directory)
    assert "nats-server" in _run(binaries / "python", "-m", "phaseloom", "doctor", cwd=directory)
    port = free_port()
    log = directory / "up.log"
    with log.open("wb") as output:
        mesh = subprocess.Popen(
            [binaries / "phaseloom", "up", "--gateway", str(port)],
            cwd=directory,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    try:
        assert mesh.stdout is not None
        lines = []
        for line in mesh.stdout:
            lines.append(line)
            if line.startswith("Ctrl-C stops"):
                break
        greeting = "".join(lines)
        assert "the mesh is up" in greeting, greeting + log.read_text()
        assert ("console: http" in greeting) == console
        assert f":{port}/v1" in _run(binaries / "phaseloom", "env", cwd=directory)
        mesh.send_signal(signal.SIGINT)
        assert mesh.wait(READY_S) == 0
    finally:
        mesh.kill()
        mesh.communicate()


@pytest.mark.slow
@pytest.mark.timeout(2 * INSTALL_S)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("version", VERSIONS)
def test_mesh_runs_where_the_distribution_is_installed(
    dist: Path, tmp_path: Path, version: str, kind: str
) -> None:
    if kind == "sdist" and version != VERSIONS[0]:
        pytest.skip("the sdist makes the same wheel for each version")
    python = _python(version)
    (file,) = dist.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    binaries = tmp_path / "venv" / "bin"
    _run(python, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    with_worker = version == VERSIONS[0] and kind == "wheel"
    extras = "gateway,console,worker" if with_worker else "gateway,console"
    requirement = f"{file}[{extras}]"
    _run(binaries / "pip", "install", "-q", requirement, cwd=tmp_path, timeout_s=INSTALL_S)
    _check_installed(binaries, tmp_path, console=True)
    backend = "phaseloom.worker.backends.fsdp"
    if with_worker:
        _run(binaries / "python", "-c", f"import torch, {backend}", cwd=tmp_path)
