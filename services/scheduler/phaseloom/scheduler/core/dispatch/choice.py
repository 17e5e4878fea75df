"""The choice on a device: the holder's quantum first, then the ordering policy.

A deployment over several devices is chosen only where it would be chosen on each of them (gang
scheduling), so that the jobs beside it are served as fairly as on a device of their own. Choices on
several devices may miss each other for ever: once the deployment has waited for `GANG_TIMEOUT`
quanta, being chosen on one device is enough. Being chosen is a claim on all of its devices at once,
and claims are in one order on every device: nothing deadlocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from phaseloom.scheduler.core.devices import devices, estimates
from phaseloom.scheduler.core.dispatch import device_views, idle_hold, ready, tails
from phaseloom.scheduler.core.dispatch.device_views import Option
from phaseloom.scheduler.core.policies.device_view import Ordering, Wait
from phaseloom.scheduler.core.policies.registry import ORDERING
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step

GANG_TIMEOUT = 2.0
"""Quanta for which a deployment over several devices waits to be chosen on all of them."""
LEAST_GANG_TIMEOUT_S = 1.0
NEVER_S = float("inf")


class Contenders(NamedTuple):
    """The operations of one device among which the policy chooses."""

    options: list[Option]
    """The operations that are let in now; the policy chooses among them."""
    rest: list[Option]
    """The holder's operations after its quantum: they go on if no other operation can begin."""
    lets_in_s: float
    """When the operations of other jobs are let in."""
    may_wait: bool = True
    """Whether the policy may leave the device idle."""


NO_CONTENDERS = Contenders([], [], NEVER_S)


def policy_of(step: Step) -> Ordering:
    return ORDERING[step.config.ordering]


def choose(step: Step, slot: Slot) -> tuple[Deployment | None, float]:
    """Choose the deployment whose operation begins next in a free slot.

    Returns: the deployment, or None and the time at which to look again (`NEVER_S`: at the next
    event).
    """
    among = contenders_on(step, slot)
    again_s, may_wait = among.lets_in_s, among.may_wait
    for group in (among.options, among.rest):
        options = group
        while options:
            preferred = prefer(step, slot, options, may_wait=may_wait)
            if isinstance(preferred, Wait):
                return None, min(again_s, preferred.until_s)
            deployment, op = preferred
            until_s = _elsewhere_s(step, slot, deployment, op)
            if until_s <= step.now_s:
                return deployment, NEVER_S
            again_s = min(again_s, until_s)
            if policy_of(step).is_strict:
                return None, again_s
            # This one is ready but cannot begin: the policy need not wait for anything to come.
            may_wait = False
            options = [option for option in options if option[0] is not deployment]
    return None, again_s


def contenders_on(step: Step, slot: Slot) -> Contenders:
    """The operations among which the policy chooses: for a quantum the holder's, then others'.

    A policy that may wait says itself when the holder gives the device away: for such a policy the
    quantum is only the least time of the holder.
    """
    if not slot.ready:
        return NO_CONTENDERS
    quantum_s = step.config.quantum_s
    of_holder = list(ready.on(step, slot, of_job=slot.holder))
    is_alone = len(of_holder) == len(slot.ready)
    if (
        of_holder
        and not slot.speculative
        and not idle_hold.is_quantum_over(step, slot.held_since_s)
    ):
        lets_in_s = NEVER_S if is_alone else slot.held_since_s + quantum_s
        return Contenders(_after_quantum(step, slot, of_holder), [], lets_in_s, may_wait=False)
    others = [] if is_alone else list(ready.on(step, slot, but_job=slot.holder))
    if not others:
        return Contenders(_after_quantum(step, slot, of_holder), [], NEVER_S)
    if slot.speculative or (of_holder and (quantum_s == 0 or policy_of(step).may_wait)):
        return Contenders([*of_holder, *others], [], NEVER_S)
    lets_in_s = 0.0 if of_holder else idle_hold.held_until_s(step, slot)
    if lets_in_s > step.now_s:
        return Contenders([], [], lets_in_s)
    return Contenders(others, of_holder, NEVER_S)


def _after_quantum(step: Step, slot: Slot, options: list[Option]) -> list[Option]:
    """The options without the deployment whose quantum is over, if its job has others."""
    if (
        len(options) > 1
        and step.config.quantum_s
        and idle_hold.is_quantum_over(step, slot.used_since_s)
    ):
        return [o for o in options if o[0].name != slot.used_by] or options
    return options


def _elsewhere_s(step: Step, slot: Slot, deployment: Deployment, op: Op) -> float:
    """The time from which a deployment may claim its other devices; a past time: now."""
    slots = devices.slots_of(step, deployment)
    if len(slots) == 1:
        return 0.0
    timeout_s = _gang_timeout_s(step, deployment)
    until_s = max(op.ready_s, deployment.activation.idle_since_s) + timeout_s
    for other in slots:
        if until_s <= step.now_s or other is slot or tails.may_go_without(step, deployment, other):
            continue
        among = contenders_on(step, other)
        if not among.options:
            return min(until_s, among.lets_in_s)
        preferred = prefer(step, other, among.options, may_wait=among.may_wait)
        if isinstance(preferred, Wait):
            return min(until_s, among.lets_in_s, preferred.until_s)
        if preferred[0] is not deployment:
            return min(until_s, among.lets_in_s)
    return 0.0


def _gang_timeout_s(step: Step, deployment: Deployment) -> float:
    """How long a deployment waits to be chosen on all of its devices."""
    least_s = max(GANG_TIMEOUT * step.config.quantum_s, LEAST_GANG_TIMEOUT_S)
    if not policy_of(step).is_strict:
        return least_s
    # It waits for a round of all that it could meet: sooner, it would break the order.
    here = {name for slot in devices.slots_of(step, deployment) for name in slot.placed}
    jobs = {step.state.deployments[name].job_name for name in here}
    group = step.state.cluster.groups.get(step.state.cluster.placed.get(deployment.job_name, ""))
    jobs.update(group.members if group is not None else ())
    periods_s = [estimates.worst_period_s(step.state, job) for job in jobs]
    return max(least_s, math.fsum(periods_s))


def prefer(step: Step, slot: Slot, options: list[Option], *, may_wait: bool) -> Option | Wait:
    """Ask the ordering policy about a free slot."""
    policy = policy_of(step)
    if len(options) == 1 and not (
        may_wait and device_views.has_alternative(step, slot, options[0], policy)
    ):
        return options[0]
    view = device_views.view_of(step, slot, options, policy, may_wait=may_wait)
    chosen = policy.choose(view)
    return chosen if isinstance(chosen, Wait) else options[view.candidates.index(chosen)]
