"""Cycles in `after`: operations that wait for one another would wait for ever.

An operation waits for what its `after` names. In its own deployment a mutating one waits for every
lower seq, a reading one for the mutating ones below it (and through them for what is below those).
The one that closes a cycle is the last of it to be filed; what it closes with named it, or one
behind it, before. Cost: nothing for an operation that nobody has named yet, which is the rule; else
linear in the job's open operations.
"""

from __future__ import annotations

from bisect import bisect_left

from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.tree import State

_OpRef = tuple[str, int]
"""(deployment's text form, seq)"""


def record_targets(state: State, op: Op) -> None:
    """Note up to which seq of each deployment an operation's `after` waits."""
    for after in op.after:
        target = state.deployments.get(_name(op, after.deployment))
        if target is not None:
            target.queue.awaited_seq = max(target.queue.awaited_seq, after.seq)


def find_cycle(state: State, deployment: Deployment, op: Op) -> list[str]:
    """The cycle that this operation closes, as `<deployment> <seq>` from itself to itself; empty
    where it closes none."""
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
    """The operations that directly hold back the one at a place, as far as is known.

    Args: open_seqs: of each deployment looked at so far, in order.
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
    """The open operations below this one that hold it back.

    They go down to the next mutating one, which waits itself for what is below it.
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
