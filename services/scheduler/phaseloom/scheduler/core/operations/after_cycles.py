"""Cycles in `after`: operations that wait for each other would wait forever.

An operation waits for everything that its `after` names. Within its own deployment a mutating
operation waits for every lower seq. A reading operation waits for the lower mutating ones, and
through them for everything below. A cycle is closed by the last of its operations to arrive, and an
earlier one has named that operation or a later one of its deployment.

Cost: nothing for an operation that nobody has named yet, which is the usual case; else linear in
the job's open operations.
"""

from __future__ import annotations

from bisect import bisect_left

from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.tree import State

_OpRef = tuple[str, int]
"""(text form of the deployment's key, seq)"""


def record_targets(state: State, op: Op) -> None:
    """Record, for each deployment that an operation's `after` names, the highest seq named."""
    for after in op.after:
        target = state.deployments.get(_name(op, after.deployment))
        if target is not None:
            target.queue.awaited_seq = max(target.queue.awaited_seq, after.seq)


def find_cycle(state: State, deployment: Deployment, op: Op) -> list[str]:
    """Return the cycle that this operation closes, as `<deployment> <seq>` from itself to itself.

    Returns: empty if it closes none.
    """
    # Nobody has named an operation of this deployment, so no path leads back to it.
    if not deployment.queue.awaited_seq:
        return []
    seq = op.key.seq
    if seq is None or deployment.queue.awaited_seq < seq:
        return []
    start = (deployment.name, seq)
    came_from: dict[_OpRef, _OpRef] = {}
    open_seqs: dict[str, list[int]] = {}
    frontier = [start]
    seen = {start}
    while frontier:
        op_ref = frontier.pop()
        for target in _waits_for(state, op_ref, open_seqs):
            if target == start:
                return _path(came_from, op_ref, start)
            if target not in seen:
                seen.add(target)
                came_from[target] = op_ref
                frontier.append(target)
    return []


def _waits_for(state: State, op_ref: _OpRef, open_seqs: dict[str, list[int]]) -> list[_OpRef]:
    """The known operations that an operation directly waits for.

    Args: open_seqs: cache of the sorted open seqs of each deployment.
    """
    name, seq = op_ref
    deployment = state.deployments.get(name)
    op = deployment.queue.operations.get(seq) if deployment else None
    if deployment is None or op is None or op.has_ended:
        return []
    if name not in open_seqs:
        open_seqs[name] = sorted(
            s for s, o in deployment.queue.operations.items() if not o.has_ended
        )
    below = _below(deployment, op, seq, open_seqs[name])
    targets = [(_name(op, after.deployment), after.seq) for after in op.after]
    return [(name, lower) for lower in below] + targets


def _below(deployment: Deployment, op: Op, seq: int, seqs: list[int]) -> list[int]:
    """The open operations below this one that it waits for.

    Stops at the next lower mutating operation: it already waits for everything below.
    """
    held_by: list[int] = []
    for lower in reversed(seqs[: bisect_left(seqs, seq)]):
        is_mutating = deployment.queue.operations[lower].is_mutating
        if op.is_mutating or is_mutating:
            held_by.append(lower)
        if is_mutating:
            break
    return held_by


def _name(op: Op, deployment: str) -> str:
    return f"{op.key.tenant}.{op.key.job}.{deployment}"


def _path(came_from: dict[_OpRef, _OpRef], last: _OpRef, start: _OpRef) -> list[str]:
    cycle = [start, last]
    while cycle[-1] != start:
        cycle.append(came_from[cycle[-1]])
    return [f"{name.rpartition('.')[2]} {seq}" for name, seq in reversed(cycle)]
