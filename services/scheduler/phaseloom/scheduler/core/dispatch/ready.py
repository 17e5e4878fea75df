"""Ready operations: those of a deployment that wait for nothing but a device.

Of the ordered ones that is the mutating one at `head_seq`, or the reading ones from there up to the
first mutating one or gap; of the unordered ones every one. An operation counts once what it names
in `after` is done, while its WPG is up.
Cost: O(operations looked at); a device knows by name which of its deployments have any.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from phaseloom.common.contract.ids import OperationKey
from phaseloom.scheduler.core.devices import devices
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.operation import Mutation, Op
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import OpState, WpgState
from phaseloom.scheduler.core.wpgs import moves

READ_AHEAD = 512
"""How far above `head_seq` reading operations may run: it bounds the ended ones that are kept, and
how many are looked at."""


def note(step: Step) -> None:
    """Note on their devices which of the touched deployments have a ready operation."""
    for name in sorted(step.touched):
        deployment = step.state.deployments.get(name)
        if deployment is None:
            continue
        step.request_hints(deployment)
        is_ready = next(iter(operations(step, deployment)), None) is not None
        devices.note_ready(step, deployment, is_ready=is_ready)


def on(
    step: Step, slot: Slot, *, of_job: str | None = None, but_job: str = ""
) -> Iterator[tuple[Deployment, Op]]:
    """Deployments with something to run on the device, each with what it would begin with.

    Args: of_job: only this job's. but_job: all but this one's.
    """
    for name, job in slot.ready.items():
        if job != but_job and of_job in (None, job):
            deployment = step.state.deployments[name]
            op = first(step, deployment)
            if op is not None:
                yield deployment, op


def is_any_on(step: Step, slot: Slot, *, of_job: str | None = None, but_job: str = "") -> bool:
    return next(on(step, slot, of_job=of_job, but_job=but_job), None) is not None


def operations(step: Step, deployment: Deployment) -> Iterable[Op]:
    """Ready ones by arrival, whether or not their weights version can be had."""
    activation, queue = deployment.activation, deployment.queue
    if activation.retry_at_s > step.now_s or activation.idle_ranks:
        return ()
    if deployment.durability.replay and deployment.wpg.state is WpgState.RECOVERING:
        return () if activation.running else (_replay_op(step, deployment),)
    is_moving = deployment.move.relocation is not None
    if deployment.wpg.state is not WpgState.READY or (is_moving and moves.is_paused(deployment)):
        return ()
    if not queue.unordered:
        return _ordered(deployment)
    unordered = (op for op in queue.unordered.values() if _may_begin(deployment, op))
    if queue.head_seq not in queue.operations:
        return unordered
    return heapq.merge(_ordered(deployment), unordered, key=lambda op: op.arrival)


def first(step: Step, deployment: Deployment) -> Op | None:
    """The operation that would run first, were the device free."""
    for op in operations(step, deployment):
        if is_reachable(step, deployment, op):
            return op
    return None


def batch(step: Step, deployment: Deployment, room: int) -> list[Op]:
    """The operations that may run together now: one mutating one, or reading ones by arrival.

    Of reading ones that are run for several jobs, where not all have room, each job has as many as
    another, as far as the first `READ_AHEAD` show it. A reading one that ran while its WPG died
    runs alone: should it be what kills it, the others do not suffer for it again, and the blame is
    clear.
    """
    found: list[Op] = []
    is_shared = False
    for op in operations(step, deployment):
        is_shared = is_shared or bool(op.payer)
        if len(found) >= room and (not is_shared or len(found) >= READ_AHEAD):
            break
        if not is_reachable(step, deployment, op):
            continue
        if op.is_mutating or op.uncertain:
            return _in_turns(deployment, found, room) if found else [op]
        found.append(op)
    return _in_turns(deployment, found, room)


def _in_turns(deployment: Deployment, ops: list[Op], room: int) -> list[Op]:
    """As many of these as there is room for: one of each job after the other, by arrival.

    What runs of a job on the deployment counts.
    """
    if len(ops) <= room:
        return ops
    running = (deployment.queue.find(key) for key in deployment.activation.running)
    num_before = Counter(op.payer for op in running if op is not None)
    turns = []
    for op in ops:
        turns.append((num_before[op.payer], op.arrival, op))
        num_before[op.payer] += 1
    return [op for _, _, op in heapq.nsmallest(room, turns, key=lambda turn: turn[:2])]


def joiners(step: Step, deployment: Deployment, room: int) -> list[Op]:
    """Reading operations that may begin beside those that run: none from behind a mutating one."""
    running = deployment.queue.find(deployment.activation.running[0])
    if running is None or running.is_mutating or running.uncertain:
        return []
    chosen = batch(step, deployment, room)
    return [op for op in chosen if not (op.is_mutating or op.uncertain)]


def waits_elsewhere(deployment: Deployment) -> bool:
    """Whether its next ordered operation is known and comes after others'."""
    head = deployment.queue.operations.get(deployment.queue.head_seq)
    return head is not None and head.state is OpState.QUEUED and head.eligible_s < 0


def waits_for_device(op: Op) -> bool:
    is_wanted = not (op.is_cancelled or op.is_settling or op.has_snapshot)
    return op.state is OpState.QUEUED and op.eligible_s >= 0 and is_wanted


def _ordered(deployment: Deployment) -> Iterable[Op]:
    """Ready operations that have a place in the order: mostly the head alone."""
    queue = deployment.queue
    head = queue.operations.get(queue.head_seq)
    if head is None:
        return ()
    if head.is_mutating or queue.head_seq + 1 not in queue.operations:
        return (head,) if _may_begin(deployment, head) else ()
    return _reading(deployment)


def _reading(deployment: Deployment) -> Iterator[Op]:
    """Ready operations from the head, which is a reading one, up to the first mutating one or
    gap."""
    head = deployment.queue.head_seq
    for seq in range(head, head + READ_AHEAD):
        op = deployment.queue.operations.get(seq)
        if op is None or (op.is_mutating and not op.has_ended):
            return
        if _may_begin(deployment, op):
            yield op


def _may_begin(deployment: Deployment, op: Op) -> bool:
    if deployment.move.relocation is not None and moves.must_wait(deployment, op):
        return False
    return waits_for_device(op)


def is_reachable(step: Step, deployment: Deployment, op: Op) -> bool:
    """Whether the weights version that it reads can be had, as far as is known.

    A version lives in the memory of its policy's node and may be gone with it: it is then made
    again when the policy is rebuilt, unless it is on disk.
    """
    if op.version is None:
        return True
    policy = step.deployment(op.version.policy)
    if policy is None or op.version.seq < policy.queue.first_seq:
        return True
    if policy.wpg.state is WpgState.LOST:
        return False
    is_rebuilding = (
        policy.wpg.state is WpgState.STARTING or op.version.seq in policy.durability.replay
    )
    return not is_rebuilding or op.version.seq in policy.durability.durable_versions


def _replay_op(step: Step, deployment: Deployment) -> Op:
    seq = deployment.durability.replay[0]
    key = deployment.key
    mutation = next(
        (m for m in deployment.durability.history if m.seq == seq), Mutation(seq, "save_state")
    )
    # As old as the oldest that waits for it: whatever comes to the others, it has its turn.
    waiting = [op for op in deployment.queue.operations.values() if not op.has_ended]
    waiting += [op for op in deployment.queue.unordered.values() if not op.has_ended]
    since_s = min((op.queued_s for op in waiting), default=step.now_s)
    return Op(
        key=OperationKey(key.tenant, key.job, key.deployment, str(seq)),
        id="",
        kind=mutation.kind,
        after=[],
        version=mutation.version,
        content_type="",
        arrival=0,
        queued_s=since_s,
        eligible_s=since_s,
    )
