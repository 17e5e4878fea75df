"""Images of the services, built by podman on a base of Debian's packages, and run as compose does.

The base stands in for the public Python image: this way a build fetches nothing but packages.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.containers import DOCKERFILE, ROOT

SUITE = "bookworm"
BASE = "localhost/phaseloom-python:latest"
_PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
_TOOLS = ("podman", "runc", "debootstrap", "catatonit", "netavark", "iptables", "apt-get")


def missing() -> str:
    """What this machine lacks to build images; empty: nothing."""
    if os.geteuid() != 0:
        return "root"
    return " ".join(tool for tool in _TOOLS if not shutil.which(tool, path=_PATH))


_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/libexec/podman", "/usr/lib/podman"))


def settings_of_podman(directory: Path) -> None:
    """Let podman do with what a machine without systemd, and with old cgroups, allows.

    runc takes both versions of cgroups at once. The limits are those that this process has: a
    process without CAP_SYS_RESOURCE cannot raise them.
    """
    limits = {
        name: min(resource.getrlimit(number)[1], most)
        for name, number, most in (
            ("nofile", resource.RLIMIT_NOFILE, 2**20),
            ("nproc", resource.RLIMIT_NPROC, 2**14),
        )
    }
    ulimits = [f"{name}={most}:{most}" for name, most in limits.items()]
    file = directory / "containers.conf"
    file.write_text(
        f"[containers]\ndefault_ulimits = {json.dumps(ulimits)}\n"
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    os.environ["CONTAINERS_CONF"] = str(file)


def run(*command: str | Path) -> str:
    """Run a command to its end; returns what it prints.

    Raises: AssertionError: it fails; with its last words.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def make_base(directory: Path) -> None:
    """Make the base image of Debian's packages, from where this machine gets its own.

    One that is there stays: `podman image rm` has it made anew.
    """
    if subprocess.run(["podman", "image", "exists", BASE], check=False).returncode == 0:
        return
    targets = run("apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)").splitlines()
    mirror = next(line.split()[0] for line in targets if line.split()[-1] == SUITE)
    root = directory / "root"
    run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", SUITE, root, mirror)
    archive = directory / "root.tar"
    run("tar", "--create", "--file", archive, "--directory", root, ".")
    run("podman", "import", archive, BASE)
    archive.unlink()


def build(service: str, directory: Path) -> str:
    """Build the image of a service; returns its name."""
    image = f"localhost/phaseloom-{service}:latest"
    run(
        *("podman", "build", "--isolation=chroot", "--build-arg", f"PYTHON_IMAGE={BASE}"),
        *_pip_settings(directory),
        *("--build-arg", f"SERVICE={service}", "--file", DOCKERFILE, "--tag", image, ROOT),
    )
    return image


def _pip_settings(directory: Path) -> list[str]:
    """Options by which pip in a build finds packages where this machine's pip does."""
    settings: dict[str, str] = {}
    for line in run("pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = value.strip("'")
    file = directory / "pip.conf"
    lines = [f"{name} = {value}" for name, value in settings.items()]
    file.write_text("\n".join(["[global]", *lines]))
    paths = {file: "/etc/pip.conf"}
    for value in settings.values():
        for local, found in re.findall(r"(?:^|\s)(file://)?(/[\w./-]+)", value):
            # An index of files has these beside its pages.
            here = Path(found).parent if local else Path(found)
            if here.exists():
                paths[here] = str(here)
    return [f"--volume={here}:{there}:ro" for here, there in paths.items()]


def run_arguments(name: str, spec: dict[str, Any], network: str, prefix: str) -> list[str]:
    """The options of `podman run` that do what a service of the compose file says."""
    arguments = [f"--name={prefix}-{name}", f"--hostname={name}", f"--network={network}"]
    arguments += [f"--network-alias={name}"]
    arguments += [f"--tmpfs={path}" for path in spec.get("tmpfs", [])]
    arguments += [f"--cap-drop={capability}" for capability in spec.get("cap_drop", [])]
    # podman says it without a value.
    arguments += [f"--security-opt={o.removesuffix(':true')}" for o in spec["security_opt"]]
    arguments += ["--read-only"] * spec["read_only"] + ["--init"] * spec["init"]
    arguments += [f"--env={key}={value}" for key, value in spec["environment"].items()]
    arguments += [f"--volume={prefix}-{volume}" for volume in spec.get("volumes", [])]
    return arguments


def remove(names: Sequence[str], *more: Sequence[str]) -> None:
    """Remove containers, and what else the commands name, whether or not it is there."""
    for name in reversed(names):
        subprocess.run(["podman", "rm", "--force", "--time=5", name], check=False)
    for command in more:
        subprocess.run(["podman", *command], check=False)
