"""The long tail of a `generate`: where to gather it, and who uses the devices that it frees.

When most samples of a rollout are done, the remaining ones need few of its devices. A deployment
whose replicas share batches then continues on some of its ranks. Other jobs may use the devices of
the other ranks until the rollout ends. Its activation stays open, and its state leaves those
devices only when another state needs the room. Later operations of the deployment wait until the
tail has ended.

No remaining rank gets more samples than it had: the number of remaining ranks is their share of
all, rounded up. They are the ranks whose devices the fewest other deployments use.

A rollout on the same devices need not wait for the last of them. If everything it lacks is occupied
by a tail, and that is at most a third of its devices, it starts on the rest, with more samples on
each.

Source: WEAVE, section 4.3.
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

MAX_LACKING = 1 / 3
"""Largest share of its devices that a rollout can start without."""


def tail_ranks(step: Step, deployment: Deployment, op: Op) -> list[int]:
    """The ranks on which to gather the tail of an operation; empty: it is not gathered."""
    if not (_is_divisible(deployment) and KINDS[op.kind].shares_calls):
        return []
    device_refs = deployment.places
    ranks = ranks_of(deployment) or list(range(len(device_refs)))
    neighbours = _neighbours(step, deployment)
    uses = {
        rank: sum(device_refs[rank] in neighbour.places for neighbour in neighbours)
        for rank in ranks
    }
    num_kept = math.ceil(len(ranks) * deployment.spec.tail_share)
    kept_ranks = sorted(sorted(ranks, key=lambda rank: uses[rank])[:num_kept])
    stays = {device_refs[rank] for rank in kept_ranks}
    # Gathering is pointless unless another deployment can start on the freed devices.
    helps_any = any(_can_start_without(neighbour, stays) for neighbour in neighbours)
    return kept_ranks if helps_any and len(kept_ranks) < len(ranks) else []


def ranks_of(deployment: Deployment) -> list[int]:
    """The ranks that take part in the running operations; empty: all of them."""
    idle = deployment.activation.idle_ranks
    return [rank for rank in range(len(deployment.places)) if rank not in idle] if idle else []


def gathered(step: Step, event: TailGathered) -> None:
    """Free the devices of the ranks that have nothing left to do.

    If another operation was permitted in the meantime, it needs all ranks and nothing is freed.
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


def startable_without(
    step: Step, deployment: Deployment, ops: list[Op], without: list[int]
) -> list[Op]:
    """The operations that may start although the devices of these ranks are taken; empty: they must
    wait."""
    if not _can_start_without(deployment, {deployment.places[rank] for rank in without}):
        return []
    slots = devices.slots_of(step, deployment)
    if not all(can_start_without(step, deployment, slots[rank]) for rank in without):
        return []
    return [op for op in ops if KINDS[op.kind].shares_calls]


def can_start_without(step: Step, deployment: Deployment, slot: Slot) -> bool:
    """Whether a slot is occupied by a tail, and the deployment may start without that slot's
    device."""
    runs = step.state.deployments.get(slot.running)
    is_tail = runs is not None and runs is not deployment and bool(runs.activation.idle_ranks)
    return is_tail and _is_divisible(deployment)


def _can_start_without(deployment: Deployment, taken_refs: set[tuple[NodeId, int]]) -> bool:
    num_lacking = sum(device_ref in taken_refs for device_ref in deployment.places)
    max_lacking = MAX_LACKING * len(deployment.places) if _is_divisible(deployment) else 0
    return num_lacking <= max_lacking


def _is_divisible(deployment: Deployment) -> bool:
    """Whether some ranks of a deployment can do a rollout without the others."""
    spec = deployment.spec
    if spec.layout.dp == 1:
        return False
    is_replicated = spec.layout.dp == spec.layout.num_ranks
    is_on_one_node = len(deployment.wpg.assignments) == 1
    is_shared = spec.batching is Batching.SHARED
    return is_replicated and is_on_one_node and is_shared and spec.tail_share > 0


def _neighbours(step: Step, deployment: Deployment) -> list[Deployment]:
    """Deployments of other jobs that share a device with this one."""
    names = {name for slot in devices.slots_of(step, deployment) for name in slot.placed}
    placed = [step.state.deployments[name] for name in sorted(names)]
    return [neighbour for neighbour in placed if neighbour.key.job_key != deployment.key.job_key]
