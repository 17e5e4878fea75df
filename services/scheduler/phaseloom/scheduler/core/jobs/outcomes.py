"""The consequences of an operation's outcome for its deployment."""

from __future__ import annotations

from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import OperationFinished, OutcomesDropped, StateSnapshotTaken
from phaseloom.common.contract.operations import Outcome
from phaseloom.scheduler.core.devices import devices, estimates, round_robin
from phaseloom.scheduler.core.dispatch import shares, speculative
from phaseloom.scheduler.core.durability import seals
from phaseloom.scheduler.core.jobs import rollback
from phaseloom.scheduler.core.operations import gradients, operations
from phaseloom.scheduler.core.placement import assignment, repack
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.operation import Mutation, Op
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import OpEvent, OpState, WpgState
from phaseloom.scheduler.core.wpgs import wpgs


def finish(step: Step, event: OperationFinished) -> None:
    """Handle a stored outcome.

    The first outcome in the stream DONE is the one that counts. Only an outcome of the present
    incarnation frees devices.
    """
    deployment = step.deployment_of(event.key)
    if deployment is None:
        return
    if event.incarnation == 0:
        _record_settled(step, deployment, event)
        return
    op = deployment.queue.find(event.key)
    _charge(step, deployment, op, event)
    is_current = event.incarnation == deployment.wpg.incarnation and bool(
        deployment.wpg.assignments
    )
    if is_current:
        if event.key in deployment.activation.running:
            _note_latency(step, deployment, op, event)
            shares.observe(step, deployment, op, event)
            if event.outcome is Outcome.COMPLETED and not event.replay:
                deployment.note_duration(event.kind, event.duration_s)
            devices.free(step, deployment, event.key, event.kind)
            speculative.expect(step, deployment, event.kind)
        step.touch(deployment)
    elif deployment.wpg.state in (WpgState.RECOVERING, WpgState.READY):
        # A late outcome of a dead incarnation. The operation runs again and will report itself.
        return
    if op is not None and not op.has_ended:
        step.state.add_outcome(event.key.tenant, event.outcome_bytes)
    if event.dirty and is_current:
        _record_outcome(step, deployment, op, event)
        wpgs.rebuild(step, deployment, event.error)
    elif deployment.durability.replay and event.key.seq == deployment.durability.replay[0]:
        if event.key.seq in deployment.queue.snapshots:
            _record_outcome(step, deployment, op, event)
        wpgs.replayed(step, deployment, deployment.durability.replay[0])
    else:
        _record_outcome(step, deployment, op, event)


def dropped(step: Step, event: OutcomesDropped) -> None:
    step.state.drop_outcomes(event.tenant, event.before_s)


def snapshot_taken(step: Step, event: StateSnapshotTaken) -> None:
    """Let a deployment continue while the snapshot of its `save_state` is written."""
    deployment = step.deployment_of(event.key)
    if deployment is None or event.incarnation != deployment.wpg.incarnation:
        return
    op = deployment.queue.find(event.key)
    if op is None or event.key not in deployment.activation.running or deployment.durability.replay:
        return
    deployment.queue.note_snapshot(op)
    if deployment.move.relocation is not None:
        step.job_changed(deployment.job_name)
    devices.free(step, deployment, event.key, op.kind)
    speculative.expect(step, deployment, op.kind)
    step.touch(deployment)


def _note_latency(
    step: Step, deployment: Deployment, op: Op | None, event: OperationFinished
) -> None:
    """Measure how much later than its duration suggests an operation that ran alone has ended."""
    if op is None or len(deployment.activation.running) > 1 or event.replay:
        return
    ended_s = estimates.began_s(step.state, deployment, op) + event.duration_s
    step.state.record_latency(step.now_s - ended_s)


def _charge(step: Step, deployment: Deployment, op: Op | None, event: OperationFinished) -> None:
    """Charge the device time of an operation to the job whose weights it read.

    If that job is gone, the reader's own job is charged. A save whose snapshot is taken is written
    without the devices and costs nothing.
    """
    if op is not None and op.has_snapshot:
        return
    device_s = event.duration_s * event.share * len(deployment.places)
    step.payer_of(deployment, op).charge(deployment.spec.pool, device_s)


def _record_outcome(
    step: Step, deployment: Deployment, op: Op | None, event: OperationFinished
) -> None:
    seq = event.key.seq
    if op is None or op.has_ended:
        return
    if op.state is OpState.QUEUED:
        # It ended in an incarnation that died before this event arrived.
        step.advance_op(op, OpEvent.PERMITTED)
    completed = event.outcome is Outcome.COMPLETED
    step.advance_op(op, OpEvent(event.outcome))
    rollback.record_checkpoint(step, event)
    if op.is_mutating and completed:
        assert seq is not None
        deployment.durability.took_effect(
            Mutation(seq, op.kind, op.num_bytes, op.version, event.duration_s)
        )
        seals.record_mutation(step, deployment, op)
        if op.kind == "optim_step" and assignment.stepped(step, deployment.key.job_key):
            round_robin.iterated(step, deployment)
            repack.iterated(step, deployment.key.job_key)
    else:
        step.emit(outputs.DeleteOperations([op.key]))
    was_refused = gradients.was_refused(deployment, op, event)
    operations.remove_ended(step, deployment, op, completed)
    if was_refused:
        # The workers that refused the step have zeroed its gradients. The operations that made them
        # must not be replayed, so nothing reads them again.
        seals.delete_operations(step, deployment, gradients.drop(deployment, op))


def _record_settled(step: Step, deployment: Deployment, event: OperationFinished) -> None:
    """Handle the stored outcome of an operation whose incarnation has died.

    If the outcome changes the effective operations, a live incarnation has started from a wrong
    state and is rebuilt.
    """
    op = deployment.queue.find(event.key)
    if op is None:
        return
    applied, history = deployment.durability.applied, list(deployment.durability.history)
    _record_outcome(step, deployment, op, event)
    if op.is_mutating and op.state is OpState.COMPLETED:
        deployment.durability.start_from(applied)
    is_up = deployment.wpg.state in (WpgState.RECOVERING, WpgState.READY)
    if is_up and deployment.durability.history != history:
        reason = (
            f"{event.key.slot} had already ended as {event.outcome} in the previous incarnation"
        )
        wpgs.rebuild(step, deployment, ErrorInfo(Code.ABORTED, reason))
    step.touch(deployment)
