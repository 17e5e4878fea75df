"""The gradients that an `optim_step` would miss.

Gradients of `forward_backward`s add up until an `optim_step`. If one of them was not completed, the
step is permitted as *partial*: the workers refuse it and zero the gradients, unless it says that it
accepts partial gradients. The operations whose gradients were zeroed no longer have any effect and
are never replayed.
"""

from __future__ import annotations

from phaseloom.common.contract.errors import Code
from phaseloom.common.contract.events import OperationFinished
from phaseloom.common.contract.kinds import KINDS, Gradients
from phaseloom.common.contract.operations import Outcome
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.operation import Op

_ADDS = frozenset(name for name, kind in KINDS.items() if kind.gradients is Gradients.ADDS)
_USES = frozenset(name for name, kind in KINDS.items() if kind.gradients is Gradients.USES)
_ENDS_A_BATCH = frozenset(name for name, kind in KINDS.items() if kind.ends_gradients)
_UNKNOWN = ""
"""Kind of an operation that could not be read or was never published. It may have added
gradients."""


def is_partial(deployment: Deployment, op: Op) -> bool:
    """Whether this step would use only a part of the gradients that its controller requested."""
    if op.kind not in _USES:
        return False
    seq = op.key.seq
    return seq is not None and any(m < seq for m in deployment.queue.missing_gradients)


def record_missing(deployment: Deployment, op: Op) -> None:
    seq = op.key.seq
    if seq is not None and (op.kind in _ADDS or op.kind == _UNKNOWN):
        deployment.queue.note_missing_gradients(seq)


def took_effect(deployment: Deployment, op: Op) -> None:
    if op.kind in _ENDS_A_BATCH:
        _forget_missing(deployment, op)


def was_refused(deployment: Deployment, op: Op, event: OperationFinished) -> bool:
    """Whether the workers refused a partial step and zeroed the gradients."""
    return (
        event.outcome is Outcome.FAILED
        and not event.dirty
        and event.error is not None
        and event.error.code is Code.FAILED_PRECONDITION
        and is_partial(deployment, op)
    )


def drop(deployment: Deployment, op: Op) -> list[int]:
    """Drop the operations whose gradients a refused step has zeroed, and return their seqs."""
    dropped = pending(deployment)
    deployment.durability.forget(dropped)
    _forget_missing(deployment, op)
    return dropped


def pending(deployment: Deployment) -> list[int]:
    """Seqs of the `forward_backward`s whose gradients are in the state."""
    seqs: list[int] = []
    for mutation in reversed(deployment.durability.history):
        if mutation.kind in _ENDS_A_BATCH:
            break
        if mutation.kind in _ADDS:
            seqs.append(mutation.seq)
    return seqs[::-1]


def _forget_missing(deployment: Deployment, op: Op) -> None:
    seq = op.key.seq
    assert seq is not None
    deployment.queue.forget_missing_gradients(seq)
