"""Cancel an operation that its caller no longer wants."""

from __future__ import annotations

from phaseloom.common.contract.commands import CancelOperation
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import CancelRequested
from phaseloom.scheduler.core.dispatch import explain
from phaseloom.scheduler.core.operations import operations
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import OpState


def request(step: Step, event: CancelRequested) -> None:
    """End an operation without a permit, or stop a running reading operation, and answer with its
    state."""
    deployment = step.deployment_of(event.key)
    op = deployment.queue.find(event.key) if deployment else None
    error = _refusal(deployment, op, event)
    if error is not None or deployment is None or op is None:
        step.emit(outputs.Answer(event.request, error=error))
        return
    op.is_cancelled = True
    if op.state is OpState.PERMITTED:
        step.send(
            CancelOperation,
            step.node_of(deployment),
            operation=op.key,
            incarnation=deployment.wpg.incarnation,
            keeps_partial=event.keeps_partial,
        )
    else:
        operations.end_if_unwanted(step, deployment, op)
    step.touch(deployment)
    explanation = explain.explain(step, deployment, op)
    step.emit(outputs.Answer(event.request, explanation=explanation))


def _refusal(
    deployment: Deployment | None, op: Op | None, event: CancelRequested
) -> ErrorInfo | None:
    if deployment is None:
        message = f"deployment {event.key.deployment_key} does not exist"
        return ErrorInfo(Code.NOT_FOUND, message, field="deployment")
    if op is None or op.state not in (OpState.QUEUED, OpState.PERMITTED):
        return explain.not_open_error(deployment, event.key)
    if op.is_mutating and (op.state is OpState.PERMITTED or op.uncertain):
        return ErrorInfo(
            Code.FAILED_PRECONDITION,
            f"{event.key} is already running and changes the state of its deployment",
            remedy="wait for its outcome",
        )
    return None
