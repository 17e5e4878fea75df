"""Round-robin positions: the meta-iteration of its group that each job is in (WEAVE §4.3).

A *position* is a pair (round, index of the job in its group). A round belongs to the job, not to a
device, so that every device serves the jobs in the same order. With per-device counters, two
devices could stay permanently out of phase. Two pools could then have a period of twice the longest
iteration, and so could two rollout nodes on which multi-node jobs meet single-node jobs.

A job enters its next round when it starts a phase on a device where it has already had its phase of
the current round. A job that fell behind (it was late or has just joined) is next on every device,
and enters the latest round of its group. It does so only once: all phases of one iteration count
for the same round, on all devices (`began`, `iterated`).

Only differences between positions matter, and nothing is decided here. Cost: O(jobs of the group).
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
    """Sort the jobs of a device by the positions of their next phases on it."""
    positions = {
        job: (_round(state, slot, job), place) for job, place in _places(state, jobs).items()
    }
    return sorted(positions, key=positions.__getitem__)


def began(step: Step, deployment: Deployment, slots: list[Slot]) -> None:
    """Record that a phase of a deployment starts on its devices."""
    state, name = step.state, deployment.job_name
    progress = state.jobs[name].progress
    number = max([_round(state, slot, name) for slot in slots])
    # Jobs that take turns are at most one round apart: a job that trains late in a round may start
    # its rollout of that round after an early one has started the next. Phases that remain of a
    # round keep their position.
    if number > progress.round and number < (latest := _latest(state, name)) - 1:
        number = latest
    progress.enter_round(number)
    for slot in slots:
        note_round(slot, name, number)


def iterated(step: Step, deployment: Deployment) -> None:
    """Record that an operation of this deployment has ended an iteration of its job.

    The job's next phase then belongs to the next round on every device. This includes devices where
    it had no phase in this round, because its processes arrived there in the middle of the
    iteration. Otherwise the job would start every round with a different phase than before, and the
    other jobs would wait for it.
    """
    job = deployment.job_name
    slots = slots_of(step, deployment)
    number = max((slot.rounds.get(job, NOWHERE) for slot in slots), default=NOWHERE)
    for sibling in step.deployments_of(step.job_of(deployment)):
        for slot in slots_of(step, sibling):
            if sibling.name in slot.placed and slot.rounds.get(job, NOWHERE) < number:
                note_round(slot, job, number)


def _places(state: State, jobs: Iterable[str]) -> dict[str, int]:
    """Index of each job in the order of its group. `NOWHERE` if it has left the group."""
    cluster = state.cluster
    indices: dict[str, int] = {}
    order: dict[str, int] = {}
    for job in jobs:
        group = cluster.groups.get(cluster.placed.get(job, ""))
        if group is not None and job not in order:
            order = {member: place for place, member in enumerate(group.members)}
        indices[job] = order.get(job, NOWHERE)
    return indices


def _round(state: State, slot: Slot, job: str) -> int:
    return max(slot.rounds.get(job, NOWHERE) + 1, state.jobs[job].progress.round)


def _latest(state: State, job: str) -> int:
    """Latest round that any job of the group has started. `NOWHERE` if the job has no group."""
    group = state.cluster.groups.get(state.cluster.placed.get(job, ""))
    if group is None:
        return NOWHERE
    return max([state.jobs[member].progress.round for member in group.members])
