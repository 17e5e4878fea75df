"""What goes wrong, and when."""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.ids import DeploymentKey


class NodeFault(msgspec.Struct, frozen=True, tag=True):
    """A node dies with all that runs on it, and comes back empty."""

    node: str
    at_s: float
    down_s: float


class Crash(msgspec.Struct, frozen=True, tag=True):
    """A job's controller gives up; it submits the job again, from its checkpoint."""

    job: str
    at_s: float
    tenant: str = "sim"


class WorkersDie(msgspec.Struct, frozen=True, tag=True):
    """The workers of one deployment die, and their node lives."""

    deployment: DeploymentKey
    at_s: float


Fault = NodeFault | Crash | WorkersDie
