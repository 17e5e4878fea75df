"""The long tail of a `generate`: where it is gathered, and who uses the devices that it frees
(WEAVE §4.3).

When most of a rollout's samples are done, its stragglers need few of its devices. A deployment
whose replicas share batches then goes on on some of its ranks, and the devices of the others are
free for other jobs until it ends: no activation is closed for that, and its state leaves those
devices only when another's comes. What follows on the deployment waits until the tail has ended.

The ranks that go on have no more samples each than before: as many as their share of all, rounded
up. They are those whose devices the fewest others are placed on.

Another rollout over the same devices need not wait for the last of them: where all that it lacks
runs a tail, and that is at most a third, it begins on the rest, with more samples on each.
"""

from __future__ import annotations

import math

from phaseloom.common.contract.events import TailGathered
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.kinds import KINDS
from phaseloom.common.contract.specs import Batching
from phaseloom.scheduler.core.devices import devices
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step

MOST_LACKING = 1 / 3
"""Share of its devices without which a rollout begins."""


def gathers_on(step: Step, deployment: Deployment, op: Op) -> list[int]:
    """The ranks on which the tail of an operation is to be gathered; none: it is not."""
    if not (_is_divisible(deployment) and KINDS[op.kind].shares_calls):
        return []
    places = deployment.places
    ranks = ranks_of(deployment) or list(range(len(places)))
    others = _others(step, deployment)
    uses = {rank: sum(places[rank] in other.places for other in others) for rank in ranks}
    num_kept = math.ceil(len(ranks) * deployment.spec.tail_share)
    kept = sorted(sorted(ranks, key=lambda rank: uses[rank])[:num_kept])
    stays = {places[rank] for rank in kept}
    helps_any = any(_can_begin_without(other, stays) for other in others)
    return kept if helps_any and len(kept) < len(ranks) else []


def ranks_of(deployment: Deployment) -> list[int]:
    """The ranks that have a part in what runs; none: all."""
    idle = deployment.activation.idle_ranks
    return [rank for rank in range(len(deployment.places)) if rank not in idle] if idle else []


def gathered(step: Step, event: TailGathered) -> None:
    """Free the devices of the ranks that have nothing to do any more.

    Where another operation was permitted meanwhile, all ranks are needed for that.
    """
    deployment = step.deployment_of(event.operations[0])
    if deployment is None or event.incarnation != deployment.wpg.incarnation:
        return
    activation = deployment.activation
    if not activation.running or event.epoch != activation.epoch:
        return
    if set(activation.running) <= set(event.operations):
        devices.free_tail(step, deployment, event.freed)
        step.touch(deployment)


def in_part(step: Step, deployment: Deployment, ops: list[Op], without: list[int]) -> list[Op]:
    """The operations that may begin although these ranks' devices are taken; none: it waits."""
    if not _can_begin_without(deployment, {deployment.places[rank] for rank in without}):
        return []
    slots = devices.slots_of(step, deployment)
    if not all(may_go_without(step, deployment, slots[rank]) for rank in without):
        return []
    return [op for op in ops if KINDS[op.kind].shares_calls]


def may_go_without(step: Step, deployment: Deployment, slot: Slot) -> bool:
    """Whether what runs in a slot is a tail, without whose device a deployment may begin."""
    runs = step.state.deployments.get(slot.running)
    is_tail = runs is not None and runs is not deployment and bool(runs.activation.idle_ranks)
    return is_tail and _is_divisible(deployment)


def _can_begin_without(deployment: Deployment, taken: set[tuple[NodeId, int]]) -> bool:
    num_lacking = sum(place in taken for place in deployment.places)
    most = MOST_LACKING * len(deployment.places) if _is_divisible(deployment) else 0
    return num_lacking <= most


def _is_divisible(deployment: Deployment) -> bool:
    """Whether some of a deployment's ranks can do a rollout without the others."""
    spec = deployment.spec
    if spec.layout.dp == 1:
        return False
    is_replicated = spec.layout.dp == spec.layout.num_ranks
    is_on_one_node = len(deployment.wpg.assignments) == 1
    is_shared = spec.batching is Batching.SHARED
    return is_replicated and is_on_one_node and is_shared and spec.tail_share > 0


def _others(step: Step, deployment: Deployment) -> list[Deployment]:
    """The deployments of other jobs that share a device with this one."""
    here = {name for slot in devices.slots_of(step, deployment) for name in slot.placed}
    placed = [step.state.deployments[name] for name in sorted(here)]
    return [other for other in placed if other.key.job_key != deployment.key.job_key]
