"""Round-robin positions: in which meta-iteration of its group each job is (WEAVE §4.3).

A *position* is (round, place in the group's order). On every device the positions that were served
grow, so that a job which goes from pool to pool has the same jobs before it everywhere. If each
device counted positions for itself, two pools could serve the same jobs out of phase for good, with
a period of twice the longest iteration.

A job's round grows with each phase that it begins on a device where it has had its phase of that
round. Where others have overtaken it (it was late, or it has joined them just now), its round is
the one that is running there, and what it has done of its own elsewhere counts for that.

Only differences matter; nothing is decided here. Cost: O(jobs of the device).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phaseloom.scheduler.core.devices.devices import note_round, slots_of
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.tree import State

NOWHERE = -1


def in_order(state: State, slot: Slot, jobs: Iterable[str]) -> list[str]:
    """Jobs of the device by the positions of their next phases on it."""
    places = _places(state, jobs)
    last = _last(slot, places)
    return sorted(places, key=lambda job: (_round(state, slot, job, places, last), places[job]))


def began(step: Step, deployment: Deployment, here: list[Slot]) -> None:
    """Note that a phase of a deployment begins on its devices.

    They all serve the latest of the positions that the job has on them.
    """
    state, name = step.state, deployment.job_name
    job = state.jobs[name]
    before = number = job.progress.round
    for slot in here:
        if slot.rounds.keys() <= {name}:
            number = max(number, slot.rounds.get(name, NOWHERE) + 1)
            continue
        places = _places(state, [name, *slot.rounds])
        number = max(number, _round(state, slot, name, places, _last(slot, places)))
    if number > before and all(slot.rounds.get(name) != before for slot in here):
        # The job goes on with a round on these devices, and that round has become a later one.
        for other in step.deployments_of(job.key):
            for slot in slots_of(step, other):
                if slot.rounds.get(name) == before:
                    note_round(slot, name, number)
    job.progress.enter_round(number)
    for slot in here:
        note_round(slot, name, number)


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


def _last(slot: Slot, places: Mapping[str, int]) -> tuple[int, int] | None:
    """The latest position that the slot served of these jobs; None: it has served none."""
    served = [(number, places.get(job, NOWHERE)) for job, number in slot.rounds.items()]
    return max(served, default=None)


def _round(
    state: State,
    slot: Slot,
    job: str,
    places: Mapping[str, int],
    last: tuple[int, int] | None,
) -> int:
    number = max(state.jobs[job].progress.round, slot.rounds.get(job, NOWHERE) + 1)
    if last is None:
        return number
    running, place = last
    # Nobody is further ahead than the next round, whatever was counted where it comes from.
    number = min(number, running + 1)
    is_overtaken = (number, places[job]) <= last
    return running + (places[job] <= place) if is_overtaken else number
