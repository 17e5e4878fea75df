"""Moves that make groups cheaper: a local search on paper, carried out job by job.

A step takes all members of a group, or one of them, and gives each the place where it costs least,
perhaps nodes of its own. It counts if what is saved over the next hours is more than the moves cost
(WEAVE §6.6: 197-419 s of pause each). The best step is taken, and again, a few times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning.weave.candidates import MOVE_S, Seat, Seats, moved, nodes_of
from phaseloom.scheduler.core.planning.weave.pool import pinned
from phaseloom.scheduler.core.planning.weave.search_state import NEW, Board, board_of
from phaseloom.scheduler.core.planning.weave.timing import ROLLOUT, TRAIN
from phaseloom.scheduler.core.state.cluster import Cluster, Move, Placed

PRICE_OF_PAUSE = 0.6
"""What a pause costs, in prices of the job's own nodes: its progress and others' idle nodes."""
HORIZON_S = 7200.0
"""A saving is counted for so long at most: by then groups have changed again."""
MAX_STEPS = 6
MAX_SOURCES = 24
"""Groups that a step may take apart: those that cost most for what they do."""


class Plan(NamedTuple):
    groups: dict[str, Seats]
    places: dict[str, str]
    """Of the jobs that move: the group."""


def replan(cluster: Cluster) -> list[Move]:
    """Moves in the order in which they are to be made; may be none."""
    board = board_of(cluster)
    plan = Plan(dict(board.groups), {})
    for _ in range(MAX_STEPS):
        better = _step(board, plan)
        if better is None:
            break
        plan = better
    return _moves(cluster, board.groups, plan)


def _step(board: Board, plan: Plan) -> Plan | None:
    """The step that is worth most; None: none is worth its moves. Ties: the first found."""
    best: tuple[float, Plan] | None = None
    for name, out in _sources(board, plan):
        trial = _without(board, plan, name, out)
        found = _settle(board, plan, trial) if trial.gain > 0 else None
        if found is not None and (best is None or found[0] > best[0]):
            best = found
    return best[1] if best is not None else None


def _sources(board: Board, plan: Plan) -> Iterator[tuple[str, Seats]]:
    ranked = sorted(plan.groups, key=lambda n: -board.standing(plan.groups[n]))
    for name in ranked[:MAX_SOURCES]:
        group = plan.groups[name]
        yield name, group
        if len(group) > 1:
            yield from ((name, (seat,)) for seat in group)


class _Try(NamedTuple):
    """Members taken out of a group, the rest left where they are."""

    source: str
    out: Seats
    groups: dict[str, Seats]
    gain: float
    """In $/h, of taking them out."""


def _without(board: Board, plan: Plan, name: str, out: Seats) -> _Try:
    group = plan.groups[name]
    rest = tuple(seat for seat in group if seat not in out)
    groups = {other: members for other, members in plan.groups.items() if other != name}
    if rest:
        groups[name] = rest
    return _Try(name, out, groups, board.standing(group) - board.standing(rest))


def _settle(board: Board, plan: Plan, trial: _Try) -> tuple[float, Plan] | None:
    """Give everybody that was taken out another place, the heaviest first.

    Returns: what it saves, in $/h times seconds, moves paid for, and the plan; None: nothing.
    """
    groups = trial.groups
    places = dict(plan.places)
    gain, pauses = trial.gain, 0.0
    for seat in sorted(trial.out, key=lambda s: -s.timing.solo_s):
        mover: Seat | None = seat
        if seat.job not in plan.places:
            mover = moved(seat, MOVE_S)
            pauses += PRICE_OF_PAUSE * board.own_price(seat) * MOVE_S
        if mover is None:
            return None
        targets = {name: group for name, group in groups.items() if name != trial.source}
        alone = board.alone(mover)
        alone_worth = board.worth((alone,))
        found = board.best(targets, mover, alone_worth)
        if found is not None:
            gain -= found.worth
            name, mover = found.group, found.seat
        elif len(plan.groups[trial.source]) > 1:
            gain -= alone_worth
            name, mover = board.new_group(), alone
        else:
            return None
        groups[name] = (*groups.get(name, ()), mover)
        places[mover.job] = name
    saved = gain * min(HORIZON_S, max(seat.work_s for seat in trial.out)) - pauses
    if saved <= 0 or not _has_nodes(board, groups):
        return None
    return saved, Plan(groups, places)


def _has_nodes(board: Board, groups: dict[str, Seats]) -> bool:
    new = sum(node.startswith(NEW) for group in groups.values() for node in nodes_of(group))
    trains = sum(g[0].train.num_nodes for name, g in groups.items() if name.startswith(NEW))
    free = board.cluster.free
    return new <= len(free.get(ROLLOUT, ())) and trains <= len(free.get(TRAIN, ()))


def _moves(cluster: Cluster, before: Mapping[str, Seats], plan: Plan) -> list[Move]:
    """Nodes for the names on paper. Only nodes that are free now are taken as new ones: one that a
    move gives back may be wanted by another that shares it."""
    was = {seat.job: (name, seat.nodes) for name, group in before.items() for seat in group}
    rolling, training = iter(cluster.free.get(ROLLOUT, [])), iter(cluster.free.get(TRAIN, []))
    chosen: dict[str, NodeId] = {}
    made: dict[str, tuple[str, list[NodeId]]] = {}
    moves = []
    for job, name in _in_order(plan, was):
        seat = next(seat for seat in plan.groups[name] if seat.job == job)
        for node in seat.nodes:
            if node not in chosen:
                chosen[node] = next(rolling) if node.startswith(NEW) else NodeId(node)
        if not name.startswith(NEW):
            group, trains = name, cluster.groups[name].nodes.get(TRAIN, [])
        elif name in made:
            group, trains = made[name]
        else:
            group, trains = "", [next(training) for _ in range(seat.train.num_nodes)]
            made[name] = f"g{cluster.num_groups + len(made) + 1}", trains
        nodes = pinned((chosen[node] for node in seat.nodes), trains)
        why = f"repacked: with {len(plan.groups[name]) - 1} more"
        moves.append(Move(job, Placed(group, nodes, why)))
    return moves


def _in_order(plan: Plan, was: dict[str, tuple[str, tuple[str, ...]]]) -> list[tuple[str, str]]:
    """(job, group) of those that really move, so that no group is empty while somebody is still
    to join it; none at all where there is no such order."""
    is_at = {seat.job: (name, seat.nodes) for name, group in plan.groups.items() for seat in group}
    going = [(job, name) for job, name in plan.places.items() if is_at[job] != was[job]]
    inside = Counter(name for name, _ in was.values())
    coming = Counter(name for _, name in going)
    ordered: list[tuple[str, str]] = []
    while going:
        for job, name in going:
            source = was[job][0]
            if source == name or inside[source] > 1 or not coming[source]:
                break
        else:
            return []
        going.remove((job, name))
        ordered.append((job, name))
        inside[source] -= 1
        inside[name] += 1
        coming[name] -= 1
    return ordered
