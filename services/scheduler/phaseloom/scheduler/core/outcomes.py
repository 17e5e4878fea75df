"""Outcomes: what a finished operation means for its deployment."""

from __future__ import annotations

from phaseloom.common.messages import OperationFinished, Outcome
from phaseloom.scheduler.core import operations, outputs, seals, wpgs
from phaseloom.scheduler.core.state import Deployment, Mutation, OpState, WpgState
from phaseloom.scheduler.core.step import Step


def finish(step: Step, event: OperationFinished) -> None:
    """An outcome is stored. DONE decides outcomes, epochs decide claims."""
    deployment = step.deployment(event.key.deployment_key)
    if deployment is None:
        return
    in_this_life = event.incarnation == deployment.incarnation and deployment.node is not None
    if in_this_life:
        device = step.device_of(deployment)
        if device.running == event.key:
            step.free(device, event.key, event.kind)
        step.touch(deployment)
    elif deployment.state in (WpgState.RECOVERING, WpgState.READY):
        # Word of a dead life that came late: the operation is being run again and will tell.
        return
    if event.dirty and in_this_life:
        _record(step, deployment, event)
        wpgs.rebuild(step, deployment, event.error)
    elif deployment.replay and event.key.seq == deployment.replay[0]:
        wpgs.replayed(step, deployment, deployment.replay[0])
    else:
        _record(step, deployment, event)


def _record(step: Step, deployment: Deployment, event: OperationFinished) -> None:
    seq = event.key.seq
    op = deployment.open_operation(event.key)
    if op is None:
        return
    if op.state is OpState.QUEUED:
        # It ended in an incarnation that died before its word came.
        step.move_op(op, OpState.PERMITTED)
    completed = event.outcome is Outcome.COMPLETED
    step.move_op(op, OpState.COMPLETED if completed else OpState.FAILED)
    if op.is_mutating and completed:
        assert seq is not None
        deployment.history.append(Mutation(seq, op.kind))
        deployment.applied = seq
        seals.mutated(step, deployment, op)
    else:
        step.emit(outputs.DeleteOperations([op.key]))
    operations.close(step, deployment, op, completed)
