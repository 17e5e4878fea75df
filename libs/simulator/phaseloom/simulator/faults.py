"""What goes wrong, and when: given, or drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.simulator.jobs import SimJob


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


def crashes(jobs: Sequence[SimJob], mean_between_s: float, seed: int) -> list[Fault]:
    """Each job crashes at random (a Poisson process) from its arrival on, for as long as it would
    run alone."""
    found: list[Fault] = []
    for job in jobs:
        draw = random.Random(f"{seed}/crash/{job.tenant}/{job.name}")
        end_s = job.arrival_s + job.iterations * job.solo_s
        at_s = job.arrival_s + draw.expovariate(1.0 / mean_between_s)
        while at_s < end_s:
            found.append(Crash(job.name, at_s, job.tenant))
            at_s += draw.expovariate(1.0 / mean_between_s)
    return sorted(found, key=lambda fault: fault.at_s)


def node_faults(
    nodes: Sequence[str], mean_between_s: float, down_s: float, until_s: float, seed: int
) -> list[Fault]:
    """Each node dies at random (a Poisson process) while it is up."""
    found: list[Fault] = []
    for node in nodes:
        draw = random.Random(f"{seed}/node/{node}")
        at_s = draw.expovariate(1.0 / mean_between_s)
        while at_s < until_s:
            found.append(NodeFault(node, at_s, down_s))
            at_s += down_s + draw.expovariate(1.0 / mean_between_s)
    return sorted(found, key=lambda fault: fault.at_s)
