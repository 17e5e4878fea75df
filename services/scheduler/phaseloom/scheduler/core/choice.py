"""Whose turn it is on a device: the holder's rules first, the ordering policy among the rest.

A deployment over several devices is chosen only where it is its turn on all of them, so that the
jobs beside it on each are served as fairly as on a device of their own. Turns of several devices
may miss each other for ever: once it has waited for `PATIENCE` quanta, one turn is enough. Being
chosen is a claim on all of its devices at once, in one order for all: nothing deadlocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phaseloom.scheduler.core import estimates, holding, ready
from phaseloom.scheduler.core.ordering import POLICIES, Candidate
from phaseloom.scheduler.core.state import Deployment, Device, Node, Op
from phaseloom.scheduler.core.step import Step

PATIENCE = 2.0
"""Quanta that a deployment over several devices waits for a turn on all of them."""
LEAST_PATIENCE_S = 1.0
NEVER_S = float("inf")

Option = tuple[Deployment, Op]


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose turn it is on one device."""

    options: list[Option]
    """Those let in now; the policy chooses among them."""
    rest: list[Option]
    """The holder's, where its turn is over: they go on if none of the others can begin."""
    lets_in_s: float
    """When others are let in."""


def choose(step: Step, node: Node, index: int) -> tuple[Deployment | None, float]:
    """Whose operation begins next on a free device.

    Returns: the deployment, or None and the time at which to look again (`NEVER_S`: at the next
    event).
    """
    turn = turn_on(step, node.devices[index])
    again_s = turn.lets_in_s
    for group in (turn.options, turn.rest):
        options = group
        while options:
            deployment, op = _preferred(step, options)
            until_s = _elsewhere_s(step, node, index, deployment, op)
            if until_s <= step.now_s:
                return deployment, NEVER_S
            again_s = min(again_s, until_s)
            options = [option for option in options if option[0] is not deployment]
    return None, again_s


def turn_on(step: Step, device: Device) -> Turn:
    """The operations among which the policy chooses: for a quantum the holder's, then others'."""
    quantum_s = step.config.quantum_s
    of_holder = list(ready.on(step, device, of_job=device.holder))
    if of_holder and not device.early and not holding.is_quantum_over(step, device.held_since_s):
        is_alone = len(of_holder) == len(device.ready)
        lets_in_s = NEVER_S if is_alone else device.held_since_s + quantum_s
        return Turn(_after_turn(step, device, of_holder), [], lets_in_s)
    others = list(ready.on(step, device, but_job=device.holder))
    if not others:
        return Turn(_after_turn(step, device, of_holder), [], NEVER_S)
    if device.early or (of_holder and quantum_s == 0):
        return Turn([*of_holder, *others], [], NEVER_S)
    lets_in_s = 0.0 if of_holder else holding.held_until_s(step, device)
    if lets_in_s > step.now_s:
        return Turn([], [], lets_in_s)
    return Turn(others, of_holder, NEVER_S)


def _after_turn(step: Step, device: Device, options: list[Option]) -> list[Option]:
    """Within a job too, the deployment whose quantum is over goes after its siblings."""
    if step.config.quantum_s and holding.is_quantum_over(step, device.used_since_s):
        return [o for o in options if o[0].name != device.used_by] or options
    return options


def _elsewhere_s(step: Step, node: Node, index: int, deployment: Deployment, op: Op) -> float:
    """From when on it may claim its other devices; a past time: now."""
    patience_s = max(PATIENCE * step.config.quantum_s, LEAST_PATIENCE_S)
    until_s = max(op.ready_s, deployment.idle_since_s) + patience_s
    for other in deployment.devices:
        if other == index or until_s <= step.now_s:
            continue
        turn = turn_on(step, node.devices[other])
        if not turn.options or _preferred(step, turn.options)[0] is not deployment:
            return min(until_s, turn.lets_in_s)
    return 0.0


def _preferred(step: Step, options: Sequence[Option]) -> Option:
    if len(options) == 1:
        return options[0]
    candidates = [candidate(step, deployment, op) for deployment, op in options]
    chosen = POLICIES[step.config.ordering].choose(candidates, step.now_s)
    return options[candidates.index(chosen)]


def candidate(step: Step, deployment: Deployment, op: Op) -> Candidate:
    return Candidate(
        operation=str(op.key),
        deployment=deployment.name,
        job=job_of(deployment),
        arrival_s=op.ready_s,
        arrival=op.arrival,
        duration_s=estimates.duration_s(step.state, deployment, op.kind),
        switch_s=0.0 if deployment.epoch else estimates.switch_s(step.state, deployment),
    )


def job_of(deployment: Deployment) -> str:
    return str(deployment.key.job_key)
