"""Ready operations, and the phases that they belong to.

An operation is ready if it waits for nothing but a device: its WPG is up, and everything that it
names in `after` has completed. Among the ordered operations of a deployment these are the mutating
one at `head_seq`, or all reading ones from there up to the next mutating one or gap. Unordered
operations do not wait for each other.

A phase is a run of operations of one job on one device in which no kind occurs twice. If the
controller declared a phase, it lasts until the controller ends it, but at most one cycle. A phase
may continue while the job has kinds that have not run yet and its next operation is predicted soon.
Some ordering policies serve whole phases.

Cost: linear in the operations looked at. Each device knows which of its deployments have any.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from phaseloom.common.contract.ids import OperationKey
from phaseloom.scheduler.core.devices import estimates
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.operation import Mutation, Op
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import OpState, WpgState
from phaseloom.scheduler.core.wpgs import moves

READ_AHEAD = 512
"""How far above `head_seq` reading operations may run.

This bounds how many ended operations stay in the queue and how many a look at it visits.
"""
LONGEST_GAP = 0.05
"""A longer gap, as a share of the job's period, ends a phase. The profiler splits segments the same
way."""


def options_on(
    step: Step, slot: Slot, *, of_job: str | None = None, but_job: str = ""
) -> Iterator[tuple[Deployment, Op]]:
    """Deployments with something to run on the device, each with its first operation.

    Args: of_job: only this job's deployments. but_job: all except this job's.
    """
    for name, job in slot.ready.items():
        if job != but_job and of_job in (None, job):
            deployment = step.state.deployments[name]
            op = first(step, deployment)
            if op is not None:
                yield deployment, op


def is_any_on(step: Step, slot: Slot, *, of_job: str | None = None, but_job: str = "") -> bool:
    return next(options_on(step, slot, of_job=of_job, but_job=but_job), None) is not None


def before_claim(step: Step, slot: Slot, claimant: Deployment) -> list[Deployment]:
    """Deployments on the device that have waited longer than one that claims it, the longest wait
    first."""
    claimed = first(step, claimant)
    if claimed is None:
        return []
    limit = (waits_since_s(claimant, claimed), claimed.arrival)
    waiting = [
        (waits_since_s(deployment, op), op.arrival, deployment.name)
        for deployment, op in options_on(step, slot)
    ]
    return [step.state.deployments[name] for *since, name in sorted(waiting) if (*since,) < limit]


def operations(step: Step, deployment: Deployment) -> Iterable[Op]:
    """Ready operations by arrival, even if the weights version that one reads is out of reach."""
    activation, queue = deployment.activation, deployment.queue
    if activation.retry_at_s > step.now_s or activation.idle_ranks:
        return ()
    # Replays run one at a time and before everything else.
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
    """The operation that would run first if the device were free."""
    for op in operations(step, deployment):
        if is_reachable(step, deployment, op):
            return op
    return None


def batch(step: Step, deployment: Deployment, room: int) -> list[Op]:
    """Operations that may run together now: one mutating one, or reading ones by arrival.

    If reading operations run for several jobs and not all fit, each job gets the same number, as
    far as the first `READ_AHEAD` of them show. A reading operation that ran when its WPG died runs
    alone: if it kills the WPG again, no other operation suffers, and the culprit is clear.
    """
    ops: list[Op] = []
    has_payers = False
    for op in operations(step, deployment):
        has_payers = has_payers or bool(op.payer)
        # With several payers look further than there is room, so that none is passed over.
        if len(ops) >= room and (not has_payers or len(ops) >= READ_AHEAD):
            break
        if not is_reachable(step, deployment, op):
            continue
        if op.is_mutating or op.uncertain:
            return _fair_share(deployment, ops, room) if ops else [op]
        ops.append(op)
    return _fair_share(deployment, ops, room)


def _fair_share(deployment: Deployment, ops: list[Op], room: int) -> list[Op]:
    """At most `room` of these operations, taking one per job in turn, by arrival.

    Running operations of a job on the deployment count towards its turns.
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


def waits_elsewhere(deployment: Deployment) -> bool:
    """Whether the next ordered operation of a deployment is known and waits for other
    deployments."""
    head = deployment.queue.operations.get(deployment.queue.head_seq)
    return head is not None and head.state is OpState.QUEUED and head.eligible_s < 0


def waits_for_device(op: Op) -> bool:
    is_wanted = not (op.is_cancelled or op.is_settling or op.has_snapshot)
    return op.state is OpState.QUEUED and op.eligible_s >= 0 and is_wanted


def _ordered(deployment: Deployment) -> Iterable[Op]:
    """Ready operations in the deployment's order: usually only the head."""
    queue = deployment.queue
    head = queue.operations.get(queue.head_seq)
    if head is None:
        return ()
    if head.is_mutating or queue.head_seq + 1 not in queue.operations:
        return (head,) if _may_begin(deployment, head) else ()
    return _reading(deployment)


def _reading(deployment: Deployment) -> Iterator[Op]:
    """Ready reading operations from the head up to the next mutating one or gap."""
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
    """Whether the weights version that an operation reads can be fetched, according to the known
    state.

    A version is stored in the memory of its policy's node and may be lost with it. Unless it is
    also on disk, the policy makes it again when it is rebuilt.
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
    # A replay gets the age of the oldest operation that waits for it, so that it is not overtaken
    # forever by operations of other jobs.
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


def has_phase(step: Step, job: Job, slot: Slot) -> bool:
    """Whether the job's current controller has declared a phase on the device's pool."""
    declared = job.controller.phases
    return bool(declared) and declared.get(pool_of(step, slot)) == job.controller.session


def pool_of(step: Step, slot: Slot) -> str:
    used_by = step.state.deployments.get(slot.used_by)
    return used_by.spec.pool if used_by is not None else ""


def is_continued(step: Step, slot: Slot, deployment: Deployment, kind: str) -> bool:
    """Whether an operation of this kind belongs to the current phase of the device."""
    if slot.phase.job != deployment.job_name:
        return False
    if kind not in slot.phase.kinds:
        return True
    job = step.job_of(deployment)
    if not has_phase(step, job, slot):
        return False
    config = step.config
    longest_s = estimates.worst_period_s(step.state, deployment.job_name)
    longest_s = longest_s or max(config.quantum_s, config.phase_hold_s)
    return step.now_s < slot.phase.began_s + longest_s


def kind_of(deployment: Deployment, op: Op) -> str:
    return f"{deployment.key.deployment}.{op.kind}"


def phase_until_s(step: Step, slot: Slot) -> float:
    """Until when a phase without ready operations may still continue; 0: it is over."""
    job = step.state.jobs.get(slot.phase.job)
    if job is None or slot.is_released:
        return 0.0
    if has_phase(step, job, slot):
        return slot.idle_since_s + step.config.phase_hold_s
    expected = slot.expected.get(slot.phase.job)
    if expected is None:
        return 0.0
    soon_s = LONGEST_GAP * estimates.period_s(step.state, slot.phase.job)
    if expected.at_s - expected.ended_s > soon_s or _is_complete(step, slot):
        return 0.0
    return max(expected.late_s, expected.ended_s + soon_s)


def _is_complete(step: Step, slot: Slot) -> bool:
    """Whether every kind of operation that the job usually runs on this device has occurred."""
    trace = step.state.traces.get(slot.phase.job)
    if trace is None:
        return True
    keys = {step.state.deployments[name].key for name in slot.placed}
    names = {key.deployment for key in keys if str(key.job_key) == slot.phase.job}
    usual = {f"{e.deployment}.{e.kind}" for e in trace.estimates if e.deployment in names}
    return usual <= set(slot.phase.kinds)


def waited_s(step: Step, deployment: Deployment, op: Op) -> float:
    """Seconds for which other operations have kept this one from running."""
    return max(0.0, step.now_s - waits_since_s(deployment, op))


def waits_since_s(deployment: Deployment, op: Op) -> float:
    """Since when only a device is missing: a deployment does not wait while it runs."""
    return max(op.ready_s, deployment.activation.idle_since_s)


def slack_s(step: Step, deployment: Deployment, op: Op) -> float:
    """Seconds that an operation may still wait before the job it runs for misses its SLO.

    It counts from the job's first operation. Time that was neither waiting nor switching would have
    passed without other jobs too.

    Returns: inf if the job has no SLO.
    """
    job = step.payer_of(deployment, op)
    if job.spec.slo <= 0:
        return float("inf")
    age_s = step.now_s - (job.progress.began_s if job.progress.began_s >= 0 else op.ready_s)
    alone_s = age_s - job.progress.lag_s - waited_s(step, deployment, op)
    return job.spec.slo * alone_s - age_s
