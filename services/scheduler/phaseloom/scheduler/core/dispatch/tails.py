"""The long tail of a `generate`: where it is gathered, and whose devices it frees (WEAVE §4.3).

When most of a rollout's samples are done, its stragglers need few of its devices. A deployment
whose replicas share batches then goes on on some of its ranks, and the devices of the others are
free for other jobs until it ends: no activation is closed for that, and its state leaves those
devices only when another's comes. What follows on the deployment waits until the tail has ended.

The ranks that go on have no more samples each than before: as many as their share of all, rounded
up. They are those whose devices the fewest others are placed on.
"""

from __future__ import annotations

import math

from phaseloom.common.contract.events import TailGathered
from phaseloom.common.contract.kinds import KINDS
from phaseloom.common.contract.specs import Batching
from phaseloom.scheduler.core.devices import devices
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step


def gathers_on(step: Step, deployment: Deployment, op: Op) -> list[int]:
    """The ranks on which the tail of an operation is to be gathered; none: it is not."""
    spec = deployment.spec
    num_ranks = spec.layout.num_ranks
    can = spec.batching is Batching.SHARED and num_ranks == spec.layout.dp > 1
    if not (can and spec.tail_share and KINDS[op.kind].shares_calls):
        return []
    if len(deployment.wpg.assignments) > 1:
        return []
    ranks = {place: rank for rank, place in enumerate(deployment.places)}
    others = _others(step, deployment)
    uses = [0] * num_ranks
    for other in others:
        for place in other.places:
            if place in ranks:
                uses[ranks[place]] += 1
    num_kept = math.ceil(num_ranks * spec.tail_share)
    kept = sorted(sorted(range(num_ranks), key=lambda rank: uses[rank])[:num_kept])
    stays = {deployment.places[rank] for rank in kept}
    frees_any = any(stays.isdisjoint(other.places) for other in others)
    return kept if frees_any else []


def _others(step: Step, deployment: Deployment) -> list[Deployment]:
    """The deployments of other jobs that share a device with this one."""
    here = {name for slot in devices.slots_of(step, deployment) for name in slot.placed}
    placed = [step.state.deployments[name] for name in sorted(here)]
    return [other for other in placed if other.key.job_key != deployment.key.job_key]


def gathered(step: Step, event: TailGathered) -> None:
    """Free the devices of the ranks that have nothing to do any more.

    Where another operation was permitted meanwhile, all ranks are needed for that.
    """
    deployment = step.deployment(event.operations[0].deployment_key)
    if deployment is None:
        return
    activation = deployment.activation
    is_current = event.incarnation == deployment.wpg.incarnation and event.epoch == activation.epoch
    if not is_current or not activation.running:
        return
    if not set(activation.running) <= set(event.operations):
        return
    devices.free_tail(step, deployment, event.freed)
    step.touch(deployment)
