"""Rounds: in which meta-iteration of its group a job is, the same on every pool (WEAVE §4.3).

A *turn* is (round, place in the group's order). On every device the turns that were served grow, so
that what goes from pool to pool finds there those before it that were before it elsewhere. Were the
turns counted by each device for itself, two pools could serve the same jobs out of phase for good,
with a period of twice the longest iteration.

A job's round grows with each phase that it begins on a device where it has had its phase of that
round. Where others have overtaken it (it was late, or it has joined them just now), its round is
the one that is running there, and what it has done of its own elsewhere counts for that.

Only differences matter; nothing is decided here. Cost: O(jobs of the device).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Device
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.tree import State

NOWHERE = -1


def in_order(state: State, device: Device, jobs: Iterable[str]) -> list[str]:
    """Jobs of the device by the turns of their next phases on it."""
    places = _places(state, jobs)
    last = _last(device, places)
    return sorted(places, key=lambda job: (_round(state, device, job, places, last), places[job]))


def began(step: Step, deployment: Deployment, here: list[Device]) -> None:
    """A phase of its job begins on its devices: they all serve the latest of its turns on them."""
    state, name = step.state, deployment.job_name
    job = state.jobs[name]
    before = number = job.progress.round
    for device in here:
        if device.rounds.keys() <= {name}:
            number = max(number, device.rounds.get(name, NOWHERE) + 1)
            continue
        places = _places(state, [name, *device.rounds])
        number = max(number, _round(state, device, name, places, _last(device, places)))
    if number > before and all(device.rounds.get(name) != before for device in here):
        # It goes on with a round on these devices, and that has become a later one.
        for other in step.deployments_of(job.key):
            for device in step.devices_of(other):
                if device.rounds.get(name) == before:
                    device.rounds[name] = number
    job.progress.enter_round(number)
    for device in here:
        device.rounds[name] = number


def _places(state: State, jobs: Iterable[str]) -> dict[str, int]:
    """In the order in which they joined their group; first those that have left it."""
    cluster = state.cluster
    found: dict[str, int] = {}
    order: dict[str, int] = {}
    for job in jobs:
        group = cluster.groups.get(cluster.placed.get(job, ""))
        if group is not None and job not in order:
            order = {member: place for place, member in enumerate(group.members)}
        found[job] = order.get(job, NOWHERE)
    return found


def _last(device: Device, places: Mapping[str, int]) -> tuple[int, int] | None:
    """The latest turn that it served of those jobs; None: it has served none."""
    served = [(number, places.get(job, NOWHERE)) for job, number in device.rounds.items()]
    return max(served, default=None)


def _round(
    state: State,
    device: Device,
    job: str,
    places: Mapping[str, int],
    last: tuple[int, int] | None,
) -> int:
    number = max(state.jobs[job].progress.round, device.rounds.get(job, NOWHERE) + 1)
    if last is None:
        return number
    running, place = last
    # Nobody is further ahead than the next round, whatever was counted where it comes from.
    number = min(number, running + 1)
    is_overtaken = (number, places[job]) <= last
    return running + (places[job] <= place) if is_overtaken else number
