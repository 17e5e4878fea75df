"""Round-robin positions: in which meta-iteration of its group each job is (WEAVE §4.3).

A *position* is (round, place in the group's order). A round belongs to the job and not to a device,
so that every device serves the jobs by the same positions. If devices counted for themselves, two
of them could serve the same jobs out of phase for good: two pools with a period of twice the
longest iteration, or two rollout nodes on which jobs over several nodes meet those over one.

A job's round grows with each phase that it begins on a device where it has had its phase of that
round. A job that others have left behind (it was late, or it has joined them just now) is next on
every device, and enters the latest round that a job of its group has begun. It enters it once: all
phases of one iteration count for one round, on whatever devices they run (`began`, `iterated`).

Only differences matter; nothing is decided here. Cost: O(jobs of the group).
"""

from __future__ import annotations

from collections.abc import Iterable

from phaseloom.scheduler.core.devices.devices import note_round, slots_of
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.tree import State

NOWHERE = -1


def in_order(state: State, slot: Slot, jobs: Iterable[str]) -> list[str]:
    """Jobs of the device by the positions of their next phases on it."""
    positions = {
        job: (_round(state, slot, job), place) for job, place in _places(state, jobs).items()
    }
    return sorted(positions, key=positions.__getitem__)


def began(step: Step, deployment: Deployment, here: list[Slot]) -> None:
    """Note that a phase of a deployment begins on its devices."""
    state, name = step.state, deployment.job_name
    progress = state.jobs[name].progress
    number = max([_round(state, slot, name) for slot in here])
    # Jobs in turn are at most one round apart: who trains late in a round may begin its rollout of
    # that round when who trained early has begun the next. What is left of a round keeps its place.
    if number > progress.round and number < (latest := _latest(state, name)) - 1:
        number = latest
    progress.enter_round(number)
    for slot in here:
        note_round(slot, name, number)


def iterated(step: Step, deployment: Deployment) -> None:
    """Note that an iteration of a job has ended with an operation of a deployment.

    The job's next phase is one of the next round on every device, also where it has had none of
    this round: its processes came to that device, or came back to it, in the middle of the
    iteration. Otherwise it would begin each round with another phase than before, and the others
    would wait for it.
    """
    job = deployment.job_name
    here = slots_of(step, deployment)
    number = max((slot.rounds.get(job, NOWHERE) for slot in here), default=NOWHERE)
    for other in step.deployments_of(step.job_of(deployment)):
        for slot in slots_of(step, other):
            if other.name in slot.placed and slot.rounds.get(job, NOWHERE) < number:
                note_round(slot, job, number)


def _places(state: State, jobs: Iterable[str]) -> dict[str, int]:
    """The place of each job in the order of its group; `NOWHERE`: it has left the group."""
    cluster = state.cluster
    found: dict[str, int] = {}
    order: dict[str, int] = {}
    for job in jobs:
        group = cluster.groups.get(cluster.placed.get(job, ""))
        if group is not None and job not in order:
            order = {member: place for place, member in enumerate(group.members)}
        found[job] = order.get(job, NOWHERE)
    return found


def _round(state: State, slot: Slot, job: str) -> int:
    """The round of a job's next phase on a device."""
    return max(slot.rounds.get(job, NOWHERE) + 1, state.jobs[job].progress.round)


def _latest(state: State, job: str) -> int:
    """The latest round that a job of the group has begun; `NOWHERE`: it has no group."""
    group = state.cluster.groups.get(state.cluster.placed.get(job, ""))
    if group is None:
        return NOWHERE
    return max([state.jobs[member].progress.round for member in group.members])
