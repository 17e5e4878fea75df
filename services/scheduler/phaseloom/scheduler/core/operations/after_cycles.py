"""Cycles in `after`: operations that wait for each other would wait forever.

An operation waits for everything that its `after` names. Within its own deployment a mutating
operation waits for every lower seq. A reading operation waits for the lower mutating ones, and
through them for everything below. A cycle is closed by the last of its operations to arrive, and an
earlier one has named that operation or a later one of its deployment.

Cost: nothing for an operation that nobody has named yet, which is the usual case; else one look at
each open operation of the deployments that a path leads through.
"""

from __future__ import annotations

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
    waiting: dict[str, list[int]] = {}
    frontier = [start]
    seen = {start}
    while frontier:
        op_ref = frontier.pop()
        for target in _waits_for(state, op_ref, start, waiting):
            if target == start:
                return _path(came_from, op_ref, start)
            if target not in seen:
                seen.add(target)
                came_from[target] = op_ref
                frontier.append(target)
    return []


def _waits_for(
    state: State, op_ref: _OpRef, start: _OpRef, waiting: dict[str, list[int]]
) -> list[_OpRef]:
    """The operations that an operation waits for, as far as a path to `start` can lead through
    them: those that it names, those below it that name others, and `start` itself.

    Args: waiting: cache of the open seqs of each deployment that name others.
    """
    name, seq = op_ref
    deployment = state.deployments.get(name)
    op = deployment.queue.operations.get(seq) if deployment else None
    if deployment is None or op is None or op.has_ended:
        return []
    operations = deployment.queue.operations
    if name not in waiting:
        # Most operations name none, so this is all that is done for each open operation.
        waiting[name] = [s for s, o in operations.items() if o.after and not o.has_ended]
    below = [s for s in waiting[name] if s < seq]
    if name == start[0] and start[1] < seq:
        below.append(start[1])
    if below and not op.is_mutating:
        # A reading operation waits for the next lower mutating one, and for all below that.
        highest = max(
            (s for s, o in operations.items() if s < seq and o.is_mutating and not o.has_ended),
            default=0,
        )
        below = [lower for lower in below if lower <= highest]
    targets = [(_name(op, after.deployment), after.seq) for after in op.after]
    return [(name, lower) for lower in sorted(set(below))] + targets


def _name(op: Op, deployment: str) -> str:
    return f"{op.key.tenant}.{op.key.job}.{deployment}"


def _path(came_from: dict[_OpRef, _OpRef], last: _OpRef, start: _OpRef) -> list[str]:
    cycle = [start, last]
    while cycle[-1] != start:
        cycle.append(came_from[cycle[-1]])
    return [f"{name.rpartition('.')[2]} {seq}" for name, seq in reversed(cycle)]
