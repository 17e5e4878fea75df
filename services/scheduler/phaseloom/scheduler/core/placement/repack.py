"""Repacking: jobs move when their cycle becomes known or changes, and when other jobs leave.

A job that was measured on its own nodes is placed again, and moves if that is cheaper (PlexRL
§4.3). If a change of a job's cycle overloads its group, only that job is placed again (WEAVE §5.3).
If the policy plans for the whole cluster, it does so whenever a job has left or its cycle has
changed. Such a plan is computed from a copy, outside the scheduler's loop, and comes back as an
event. Each move is made only if its groups and nodes have not changed since the copy.
"""

from __future__ import annotations

from msgspec.structs import replace

from phaseloom.common.contract.events import PhaseTrace, PlannedMove, ReplanComputed
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.specs import Cycle
from phaseloom.scheduler.core.placement import assignment
from phaseloom.scheduler.core.planning import admission, groups, nodes
from phaseloom.scheduler.core.planning.weave import company
from phaseloom.scheduler.core.planning.weave.period import is_overloaded
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import (
    Cluster,
    Group,
    Host,
    Member,
    Move,
    Need,
    Placed,
    Pool,
)
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.outputs import ComputeReplan
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import JOB_ENDED
from phaseloom.scheduler.core.state.tree import State

WORTH = 1e-6
"""Savings below this fraction of the cost count as rounding errors."""

# --- one job, whose cycle is news ----------------------------------------------------------------


def traced(step: Step, trace: PhaseTrace) -> None:
    """Apply a profiler's trace: update the job's cycle, and move the job if that pays."""
    name = str(trace.job)
    job = step.state.jobs.get(name)
    if job is None or job.state in JOB_ENDED:
        return
    step.state.set_trace(name, trace)
    cycle = admission.cycle_of(trace)
    if cycle is None or name not in step.state.cluster.placed:
        return
    group = groups.group_of(step.state.cluster, name)
    known_cycle = group.members[name].cycle
    if known_cycle is None:
        groups.set_cycle(step.state.cluster, name, cycle)
        _profiled(step, job)
    elif _has_changed(step, group, group.members[name], trace):
        _drifted(step, job, _with_share(cycle, known_cycle))
    elif cycle.num_optim_steps != known_cycle.num_optim_steps:
        recounted = replace(known_cycle, num_optim_steps=cycle.num_optim_steps)
        groups.set_cycle(step.state.cluster, name, recounted)
    else:
        return
    assignment.count_iterations(step, job)
    step.job_changed(name)
    step.follow_up(FollowUp.PLACE)


def _has_changed(step: Step, group: Group, member: Member, trace: PhaseTrace) -> bool:
    """Whether a trace shows that the job's own cycle has changed, beyond the slowdown by its
    neighbours."""
    known_cycle = member.cycle
    assert known_cycle is not None
    if assignment.policy_of(step).replan and member.iterations and groups.is_measurable(member):
        return False  # `iterated` compares the iterations themselves
    slowdown = company.most_slowdown(step.state.cluster, group, member)
    if slowdown > 1 and known_cycle.period_s <= trace.period_s <= slowdown * known_cycle.period_s:
        return False
    return bool(trace.drift) or trace.period_s > known_cycle.worst_period_s


def iterated(step: Step, key: JobKey) -> None:
    """Update a job's cycle from its last iterations, if the policy plans with remaining budgets.

    Such a policy needs it early, and only if it is certain, because every change may cause moves. A
    profile is a median over more iterations, so it lags, and changes with chance.
    """
    if assignment.policy_of(step).replan is None:
        return
    name = str(key)
    member = groups.group_of(step.state.cluster, name).members[name]
    period_s = groups.trend_of(member)
    if period_s is not None and member.cycle is not None:
        trace = step.state.traces.get(name)
        profile = admission.cycle_of(trace) if trace is not None else None
        shape = _with_share(profile, member.cycle) if profile is not None else member.cycle
        _drifted(step, step.job(key), groups.scaled(shape, period_s))
        step.job_changed(name)
        step.follow_up(FollowUp.PLACE)


def _drifted(step: Step, job: Job, cycle: Cycle) -> None:
    """Set a changed cycle. Place the job again if its group is now overloaded, and request a new
    plan."""
    name = str(job.key)
    group = groups.group_of(step.state.cluster, name)
    was_overloaded = _is_overloaded(step, group)
    groups.set_cycle(step.state.cluster, name, cycle)
    if not was_overloaded and _is_overloaded(step, group):
        _resubmit(step, job, cycle.period_s)
    step.state.set_replan_due()
    step.follow_up(FollowUp.REPLAN)


def _with_share(cycle: Cycle, before: Cycle) -> Cycle:
    """Scale the worst case of a changed cycle in proportion to its usual duration.

    The measured worst case may stem from iterations before the change, and the usual duration of
    few iterations may be chance.
    """
    share = before.worst_period_s / before.period_s
    segments = [replace(s, worst_s=share * s.duration_s) for s in cycle.segments]
    return replace(cycle, segments=segments)


def _profiled(step: Step, job: Job) -> None:
    """Place a job whose cycle has just become known again, and move it if that is cheaper."""
    member = _member(step, job)
    assert member.cycle is not None
    step.notify("job profiled", f"its cycle takes {member.cycle.period_s:.3g} s", member.job)
    after, placed = placed_anew(step, job)
    before = groups.cost(step.state.cluster)
    if placed is not None and groups.cost(after) < before * (1 - WORTH):
        assignment.move(step, job, placed)


def _is_overloaded(step: Step, group: Group) -> bool:
    """Whether a group is overloaded, by the rule of its placement policy."""
    cluster = step.state.cluster
    rule = assignment.policy_of(step).is_overloaded
    return rule(cluster, group) if rule else is_overloaded(group, cluster.limits.switch_s)


def _resubmit(step: Step, job: Job, period_s: float) -> None:
    member = _member(step, job)
    drifted = f"its cycle now takes {period_s:.3g} s, which is too long for its group"
    _, placed = placed_anew(step, job)
    if placed is not None and not _is_there(member, placed):
        assignment.move(step, job, replace(placed, reason=f"{drifted}; {placed.reason}"))
    else:
        step.notify("job drifted", f"{drifted}, and it fits nowhere else", member.job)


def placed_anew(step: Step, job: Job) -> tuple[Cluster, Placed | None]:
    """Place a job as if it were new. Returns a copy of the cluster with the result, and the
    placement."""
    after = groups.copy(step.state.cluster)
    member = groups.group_of(after, str(job.key)).members[str(job.key)]
    groups.leave(after, member.job)
    member = replace(member, nodes={}, shift_s=0.0)
    decision = admission.decide(after, member, assignment.policy_of(step))
    if not isinstance(decision, Placed):
        return after, None
    groups.join(after, member, decision)
    return after, decision


def _member(step: Step, job: Job) -> Member:
    return groups.group_of(step.state.cluster, str(job.key)).members[str(job.key)]


def _is_there(member: Member, placed: Placed) -> bool:
    placed_nodes = {pool: set(names) for pool, names in placed.nodes.items()}
    return placed_nodes == {pool: set(names) for pool, names in member.nodes.items()}


# --- the whole cluster, outside the loop ---------------------------------------------------------


def ask(step: Step) -> None:
    """Request a plan if jobs have come or left and the policy plans for the whole cluster.

    Only one plan is computed at a time. A job that comes or leaves in the meantime causes another
    one.
    """
    state = step.state
    if not state.is_replan_due or state.replanning:
        return
    state.set_replan_due(False)
    if assignment.policy_of(step).replan is None:
        return
    request = _question(state, step.sequence)
    if request.cluster.groups:
        state.replanning = step.sequence
        step.emit(request)


def unanswered(state: State) -> ComputeReplan | None:
    """Return the outstanding replan request after a restart, since its computation may have been
    lost.

    It must be answered even if there is nothing to plan, because the core makes no other request
    until then.
    """
    return _question(state, state.replanning) if state.replanning else None


def _question(state: State, as_of: int) -> ComputeReplan:
    assert state.config is not None
    return ComputeReplan(as_of, state.config.placement, groups.copy(state.cluster))


def compute(request: ComputeReplan) -> ReplanComputed:
    """Compute the moves that the policy plans. Pure, but too slow for the scheduler's loop."""
    replan = PLACEMENT[request.placement].replan
    versions = {name: group.version for name, group in request.cluster.groups.items()}
    homes = dict(request.cluster.placed)
    moves = replan(groups.copy(request.cluster)) if replan is not None else []
    touched = {homes[move.job] for move in moves} | {move.placed.group for move in moves}
    return ReplanComputed(
        as_of=request.as_of,
        moves=[_planned(move) for move in moves],
        num_groups=request.cluster.num_groups,
        versions={name: version for name, version in versions.items() if name in touched},
    )


def _planned(move: Move) -> PlannedMove:
    placed = move.placed
    job = JobKey(*move.job.split("."))
    return PlannedMove(
        job, placed.group, placed.nodes, placed.reason, placed.shift_s, placed.takes_turns
    )


def answered(step: Step, event: ReplanComputed) -> None:
    """Make the planned moves that are still valid."""
    state = step.state
    if event.as_of != state.replanning:
        return  # answered twice, by two leaders
    state.replanning = 0
    step.follow_up(FollowUp.REPLAN)  # jobs may have come or left meanwhile
    plan = _Plan(step, event)
    for move in event.moves:
        plan.make(move)
    if plan.num_left_out:
        reason = f"{plan.num_left_out} of {len(event.moves)}: their groups have changed meanwhile"
        step.notify("planned moves skipped", reason)


class _Plan:
    """Planned moves, which build on one another.

    If a move is skipped, later moves that involve its groups are skipped too.
    """

    def __init__(self, step: Step, event: ReplanComputed) -> None:
        self._step = step
        self._num_groups = event.num_groups
        self.num_left_out = 0
        groups_now = step.state.cluster.groups
        self._as_planned = {
            name: name
            for name, version in event.versions.items()
            if name in groups_now and groups_now[name].version == version
        }
        """Group name in the plan → actual group name, for groups that are still as planned."""

    def make(self, move: PlannedMove) -> None:
        new_name = ""
        if not move.group:
            self._num_groups += 1
            new_name = f"g{self._num_groups}"
        cluster = self._step.state.cluster
        source = cluster.placed.get(str(move.job), "")
        target = self._as_planned.get(move.group, "")
        if not self._holds(source, target, move):
            self.num_left_out += 1
            self._as_planned = {
                plans: ours
                for plans, ours in self._as_planned.items()
                if ours not in (source, target)
            }
            return
        job = self._step.state.jobs[str(move.job)]
        placed = Placed(target, move.nodes, move.why, move.shift_s, move.takes_turns)
        assignment.move(self._step, job, placed)
        self._as_planned[new_name or move.group] = cluster.placed[str(move.job)]

    def _holds(self, source: str, target: str, move: PlannedMove) -> bool:
        cluster = self._step.state.cluster
        if source not in self._as_planned.values() or source == target:
            return False
        if move.group and target not in cluster.groups:
            return False
        needs = cluster.groups[source].members[str(move.job)].needs
        return move.nodes.keys() == needs.keys() and all(
            self._takes(cluster.hosts[name], pool, needs[pool], target)
            for pool, names in move.nodes.items()
            for name in names
        )

    def _takes(self, host: Host, pool: Pool, need: Need, group: str) -> bool:
        """Whether a node is still available: it may be in use by now, or have changed while it was
        away."""
        free = self._step.state.cluster.free.get(pool, [])
        is_there = host.pool == pool and nodes.is_usable(host, need)
        return is_there and (host.group == group if host.group else host.node in free)
