"""Certificates of a mesh of this test process, and tickets of its scheduler."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from phaseloom.cli.certs import make_certificates
from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.transport.certificates import directory_of
from phaseloom.common.transport.tickets import signed
from phaseloom.statemgr.transfer.tls import Identity

SECRET = "the mesh's secret"
NODE = "node0"


def certificates(node: str = NODE) -> Path:
    """What a node proves itself by."""
    return _made(_authority(), node)


def identity(node: str = NODE) -> Identity:
    return Identity.load(certificates(node))


def ticket(
    version: VersionKey,
    deployment: str = "sampler",
    *nodes: str,
    incarnation: int = 1,
    secret: str = SECRET,
) -> Ticket:
    """For a deployment of the policy's job, on these nodes, or where tests name none."""
    policy = version.policy
    reader = DeploymentKey(policy.tenant, policy.job, deployment)
    return signed(Ticket(version, reader, incarnation, list(nodes) or [NODE]), secret)


@functools.cache
def _authority() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="pl-certs-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@functools.cache
def _made(directory: Path, node: str) -> Path:
    make_certificates(directory, [node])
    return directory_of(directory, node)
