"""Sharing a device in space: what runs beside what, and with how many of its compute units.

A deployment that runs has a share of the units of its device. The multiplexing policy says how many
each of those that run gets, and whether the next one begins beside them. A share shrinks in two
steps: its rank is asked for units, and they are given on only when it has confirmed that it uses
them no more, or when nothing of it runs any more. A share grows at once, by units that are free.
So the shares of a device never overlap, whatever is killed in between: what was asked of a rank
that is lost is free with the rank.

Nothing is remembered of what was intended: at each event on a device the shares are compared with
what the policy wants now.

Only a deployment of one rank shares its device, whose state fits beside that of all that runs, and
whose runtime gives the same bits with any share. A device whose jobs exclude one another's state,
or that a deployment over several devices waits for, is not shared. Nothing of another job begins
beside a job that asks to be alone, or where a job that runs would be slower than its SLO, by the
table of slowdowns. Where placement promises SLOs by what jobs get side by side, it has counted on
all company that jobs have. The table is corrected by what is seen (`corrections`). Among what could
begin, the ordering policy says who is next; one that cannot be beside what runs is overtaken only
until it has waited for a quantum.
Cost: O(ready deployments of the device), where it has several units and a policy that shares them.

The table of slowdowns, corrected by what is seen to be slower beside others than it says.

A table can be wrong: it was measured with another model, on another machine, or without a neighbour
that there is now. Where it promises too much, operations would run side by side for ever that are
done sooner in turns, and jobs with an SLO would have company that they cannot stand. So each
operation that ends is compared with others of its deployment and kind (`state/observed.py`), and
what is surely slower is believed: policies and the protection of SLOs go by the corrected table.
Sharing that loses then stops by itself. It is tried again after `HELD_FOR` operations.

That needs operations that run alone, to compare with. Where next to none does by itself, because
all jobs always have work, and as long as it is open whether sharing loses, some are let run alone
(`shares`), so that at any time there are `ENOUGH_ALONE`.

- A device's table is corrected by the deployments that are placed on it, for pairs of kinds of
  sub-stages. Of what several others were beside nothing is learnt.
- Nothing is corrected to be faster: what never runs side by side shows no gain, and what does needs
  none.
- Where placement promises by the table what jobs get side by side, nothing is corrected: a job that
  was kept apart, or was found to have other company, would not have what it was promised.

Cost: none where no table is configured, or nothing is shared in space; else some additions for each
change of what runs on a device, and a look at the deployments placed there for each decision.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

from msgspec.structs import replace

from phaseloom.common.contract.commands import AdjustClaims
from phaseloom.common.contract.events import ClaimsAdjusted, OperationFinished
from phaseloom.common.contract.kinds import KINDS
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import Capabilities, CommandId, Residency, SlowdownTable
from phaseloom.scheduler.core.devices import devices, estimates
from phaseloom.scheduler.core.dispatch import choice, ready
from phaseloom.scheduler.core.planning.chains import Stage
from phaseloom.scheduler.core.planning.weave import company
from phaseloom.scheduler.core.planning.weave.pool import has_promise
from phaseloom.scheduler.core.policies.device_view import Wait
from phaseloom.scheduler.core.policies.registry import MULTIPLEXING
from phaseloom.scheduler.core.policies.sharing_view import (
    MARGIN,
    Claim,
    Multiplexing,
    SharingView,
    alike,
    speeds,
    stages_of,
)
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.node import Share, Slot
from phaseloom.scheduler.core.state.observed import (
    ALONE,
    ENOUGH_ALONE,
    TOGETHER,
    UNKNOWN,
    Finding,
    perhaps,
    surely,
)
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import OpState, WpgState

MIN_PATIENCE_S = 1.0
"""For so long at least one that cannot be beside what runs is overtaken, if there is no quantum."""
MAX_PREDICTED = 8
"""The number of a job's next operations that are predicted."""
MIN_REMAINING = 0.1
"""The share of its usual duration that an operation is taken to have left, however long it has
run."""
MIN_RUN_SHARE = 0.5
"""The part of the time from its permit until its end was known that an operation must have run to
be counted: the rest is its switch and the way of messages, and nobody knows what ran beside it
when."""
Pair = tuple[str, str]
"""A kind of sub-stage, and another one beside it."""


def policy_of(step: Step) -> Multiplexing:
    return MULTIPLEXING[step.config.multiplexing]


def is_on(step: Step, slot: Slot) -> bool:
    return policy_of(step).is_on and devices.units_of(step.state, slot) > 1


def give_share(step: Step, deployment: Deployment) -> None:
    """Give a deployment that is about to run alone its share of each device that is shared."""
    if not policy_of(step).is_on:
        return
    for slot in devices.held_slots(step.state, deployment):
        if not is_on(step, slot) or slot.share_of(deployment.name) is not None:
            continue
        free = devices.free_units(step, slot)
        is_alone = step.job_of(deployment).spec.exclusive
        if _is_divisible(step, deployment) and not is_alone:
            counts = _counts(step, slot, [_claim_of(step, deployment)])
            assert counts is not None, f"{deployment.name}: no share though it is alone"
            free = free[: counts[0]]
        devices.give_share(slot, deployment, free)


def units_for(step: Step, deployment: Deployment, slots: list[Slot]) -> list[int]:
    """The units that a deployment's permits name; none: all of its devices.

    One that joins others while its rank is asked for units must not name these: the rank goes by
    what it was told last.

    Args: slots: those of all of its ranks.
    """
    share = slots[0].share_of(deployment.name) if len(slots) == 1 else None
    if share is None:
        return []
    units = share.asked or share.units
    return [] if len(units) == devices.units_of(step.state, slots[0]) else units


def next_neighbour(step: Step, slot: Slot) -> Deployment | None:
    """Bring the shares of a slot nearer to what the policy wants.

    Args:    slot: one in which something runs with a share.
    Returns: a deployment that begins beside the others now; it has its share.
    """
    if not is_on(step, slot):
        return None
    running = [_claim_of(step, step.state.deployments[name]) for name in slot.runs]
    choice_made = _choose_neighbour(step, slot, running)
    if choice_made is None:
        _grow(step, slot, _counts(step, slot, running) or [])
        return None
    newcomer, counts = choice_made
    for share, count in zip(slot.shares, counts, strict=False):
        if count < len(share.units):
            _request_units(step, slot, share, count)
    free = devices.free_units(step, slot)
    if len(free) < counts[-1]:
        return None
    devices.give_share(slot, newcomer, free[: counts[-1]])
    return newcomer


def record_paces(step: Step, slot: Slot) -> None:
    """Note how fast all that run in a slot are from now on, by the table as it was measured."""
    table = step.config.slowdowns
    if table is None or not corrects_table(step) or not is_on(step, slot):
        return
    claims = [_present_claim(step, step.state.deployments[name]) for name in slot.runs]
    units, counts = devices.units_of(step.state, slot), [len(share.units) for share in slot.shares]
    stages = [next(iter(claim.stages), "") for claim in claims]
    speeds_now = speeds(table, units, claims, counts)
    for index, (share, speed) in enumerate(zip(slot.shares, speeds_now, strict=True)):
        other_stages = filter(None, (*stages[:index], *stages[index + 1 :]))
        neighbours = TOGETHER.join(sorted(other_stages))
        if share.pace is not None and len(share.units) > share.pace.least_units:
            # Decoding uses more units from the next step on, all else from its next pass, if any.
            decodes = all(KINDS[kind].shares_calls for kind in claims[index].kinds)
            neighbours = neighbours if decodes else UNKNOWN
        devices.set_pace(share, step.now_s, stages[index], neighbours, speed)


def adjusted(step: Step, event: ClaimsAdjusted) -> None:
    """Take back the units that a rank has given up; the answer to an older question is void."""
    deployment = step.deployment(event.deployment)
    if deployment is None or event.incarnation != deployment.wpg.incarnation:
        return
    for slot in devices.slots_of(step, deployment):
        share = slot.share_of(deployment.name)
        if share is not None and share.command == event.command:
            devices.confirm(share)
            step.dirty.add((slot.node, slot.device))


def _choose_neighbour(
    step: Step, slot: Slot, running: list[Claim]
) -> tuple[Deployment, list[int]] | None:
    """What begins beside all that runs, and the units of each, the newcomer's last."""
    if choice.policy_of(step).is_strict or not _allows_neighbours(step, slot):
        return None
    options = [option for option in ready.options_on(step, slot) if option[0].name not in slot.runs]
    patience_s = step.config.quantum_s or MIN_PATIENCE_S
    while options:
        preferred = choice.prefer(step, slot, options, may_wait=False)
        assert not isinstance(preferred, Wait), f"{step.config.ordering} waits unasked"
        deployment, op = preferred
        if _fits(step, slot, deployment) and not _is_excluded(step, deployment, running):
            newcomer = _claim_of(step, deployment, op)
            counts = _counts(step, slot, running, newcomer)
            claims = [*running, newcomer]
            if (
                counts is not None
                and _keeps_slos(step, slot, claims, counts)
                and _is_counted_on(step, slot, claims)
            ):
                is_kept_apart = _is_kept_apart(step, slot, running, newcomer)
                return None if is_kept_apart else (deployment, counts)
        if ready.waited_s(step, deployment, op) >= patience_s:
            return None
        options = [option for option in options if option[0] is not deployment]
    return None


def _allows_neighbours(step: Step, slot: Slot) -> bool:
    node = step.node(slot.node)
    if node.residency is Residency.JOB or devices.claimant(step, slot) is not None:
        return False
    running = [step.state.deployments[name] for name in slot.runs]
    return all(_is_divisible(step, d) and not d.activation.is_opening for d in running)


def _is_divisible(step: Step, deployment: Deployment) -> bool:
    """Whether a deployment can run with a part of its device."""
    if len(deployment.places) != 1 or deployment.wpg.state is not WpgState.READY:
        return False
    capabilities = _capabilities_of(step, deployment)
    # The ranks of adapters may share a process, and with it the process's cores.
    return deployment.spec.model.adapter is None and (capabilities is None or capabilities.divides)


def _capabilities_of(step: Step, deployment: Deployment) -> Capabilities | None:
    """What a deployment's runtime can do on its node; None: the node has not told."""
    node = deployment.node
    assert node is not None, deployment.name
    return step.state.cluster.hosts[node].backends.get(deployment.spec.backend)


def _fits(step: Step, slot: Slot, newcomer: Deployment) -> bool:
    """Whether a deployment's state fits on the device beside that of all that runs there."""
    names = {*slot.runs, newcomer.name}
    used = sum(step.state.deployments[name].wpg.state_bytes for name in names)
    memory_bytes = step.node(slot.node).devices[slot.device].memory_bytes
    return _is_divisible(step, newcomer) and used <= memory_bytes


def _is_excluded(step: Step, newcomer: Deployment, running: list[Claim]) -> bool:
    """Whether one of two jobs that would be side by side asks to be alone."""
    jobs = {newcomer.job_name, *(claim.job for claim in running)}
    return len(jobs) > 1 and any(step.state.jobs[job].spec.exclusive for job in jobs)


def _keeps_slos(step: Step, slot: Slot, claims: list[Claim], counts: list[int]) -> bool:
    """Whether no job that runs would be slower beside the newcomer, the last, than its SLO allows.
    The newcomer would wait else, which is slower still."""
    table = table_of(step, slot)
    if table is None:
        return True
    units = devices.units_of(step.state, slot)
    paired = zip(claims[:-1], speeds(table, units, claims, counts), strict=False)
    return all(
        speed * (step.state.jobs[claim.job].spec.slo or math.inf) >= 1
        for claim, speed in paired
        if claim.job != claims[-1].job
    )


def _is_kept_apart(step: Step, slot: Slot, running: list[Claim], newcomer: Claim) -> bool:
    """Whether a newcomer waits for once, so that it is seen how long it takes alone, or how long
    what runs does, which has been alone so far: as long as it is open whether sharing loses."""
    if len(running) > 1:
        return False
    compared = [newcomer]
    pace = slot.shares[0].pace
    if pace is None or {pace.company, *pace.beside_s} == {ALONE}:
        compared.append(running[0])
    deployments = step.state.deployments
    if not any(
        lacks_comparison(step, deployments[claim.deployment], claim.kinds) for claim in compared
    ):
        return False
    table = table_in_doubt(step, slot)
    return _counts(step, slot, running, newcomer, table=table) is None


def _is_counted_on(step: Step, slot: Slot, claims: list[Claim]) -> bool:
    """Whether placement has counted on these side by side, where it promises SLOs by company: other
    company would slow down a job that was promised none."""
    cluster = step.state.cluster
    if not cluster.limits.counts_on_space:
        return True
    group = cluster.groups.get(cluster.hosts[slot.node].group)
    placed = {step.state.deployments[name].job_name for name in slot.placed}
    if group is None or not has_promise(group) or len(placed) < 2:
        return True
    member_names = {member.job for member in company.users_of(group, slot.node)}
    jobs = {claim.job for claim in claims}
    # A second part of the device for one job would be lacking to another.
    if len(jobs) < len(claims) or not jobs <= member_names:
        return False
    return company.slowdown_on(cluster, group, slot.node) is not None


def _ops_of(deployment: Deployment, begins: Op | None = None) -> list[Op]:
    """The operations of a deployment that run, then the one that begins."""
    running = [deployment.queue.find(key) for key in deployment.activation.running]
    return [op for op in (*running, begins) if op is not None]


def _present_claim(step: Step, deployment: Deployment, begins: Op | None = None) -> Claim:
    """The claim of a deployment, without what is predicted of it."""
    kinds = {op.kind for op in _ops_of(deployment, begins)}
    capabilities = _capabilities_of(step, deployment)
    most_units = 0 if capabilities is None else capabilities.most_units
    return Claim(deployment.name, deployment.job_name, tuple(sorted(kinds)), most_units)


def _claim_of(step: Step, deployment: Deployment, begins: Op | None = None) -> Claim:
    claim = _present_claim(step, deployment, begins)
    if not policy_of(step).predicts:
        return claim
    progress = step.job_of(deployment).progress
    age_s = step.now_s - progress.began_s if progress.began_s >= 0 else 0.0
    ahead = _predict_stages(step, deployment, _ops_of(deployment, begins))
    return replace(claim, ahead=ahead, age_s=age_s, lag_s=min(progress.lag_s, age_s))


def _predict_stages(step: Step, deployment: Deployment, ops: list[Op]) -> list[Stage]:
    """The stages that a job is predicted to go through on a device from now on.

    Args: ops: of the deployment, those that run, then the one that begins. The last one of them
          comes first, then what is queued of the job, in the order in which it came; behind that
          what waits for other operations to end.
    """
    if not ops:
        return []
    newest = ops[-1]
    ran_s = 0.0 if newest.state is OpState.QUEUED else step.now_s - newest.permitted_s
    stages = _stages(step, deployment, newest.kind, ran_s)
    (slot,) = devices.slots_of(step, deployment)
    placed = [step.state.deployments[name] for name in slot.placed]
    queued = sorted(
        (waits, op.arrival, deployment_here.name, op.kind)
        for deployment_here in placed
        if deployment_here.job_name == deployment.job_name
        for waits, op in _queued(deployment_here)
        if op is not newest
    )
    for _, _, name, kind in queued[:MAX_PREDICTED]:
        stages += _stages(step, step.state.deployments[name], kind, 0.0)
    return [Stage(kind, seconds, number) for number, (kind, seconds) in enumerate(stages)]


def _queued(deployment: Deployment) -> Iterator[tuple[bool, Op]]:
    """The next ordered operations of a deployment that wait, and whether they do for one of another
    deployment, or come after one that does."""
    queue, waits = deployment.queue, False
    for seq in range(queue.head_seq, queue.head_seq + MAX_PREDICTED):
        op = queue.operations.get(seq)
        if op is not None and op.state is OpState.QUEUED:
            waits = waits or op.eligible_s < 0
            yield waits, op


def _stages(step: Step, deployment: Deployment, kind: str, ran_s: float) -> list[tuple[str, float]]:
    """The sub-stage of an operation and its time that is left; none: it moves state, which takes
    next to no compute units."""
    capabilities = _capabilities_of(step, deployment)
    stages = stages_of(kind, 0 if capabilities is None else capabilities.most_units)
    duration_s = estimates.duration_s(step.state, deployment, kind)
    remaining_s = max(duration_s - ran_s, MIN_REMAINING * duration_s)
    return [(stages[0], remaining_s)] if stages else []


def _counts(
    step: Step,
    slot: Slot,
    running: list[Claim],
    newcomer: Claim | None = None,
    *,
    table: SlowdownTable | None = None,
) -> list[int] | None:
    """The units of each by the policy. Args: table: in place of the device's table of slowdowns."""
    jobs = {step.state.deployments[name].job_name for name in slot.placed}
    units, table = devices.units_of(step.state, slot), table or table_of(step, slot)
    return policy_of(step).share(SharingView(units, len(jobs), running, newcomer, table))


def _request_units(step: Step, slot: Slot, share: Share, count: int) -> None:
    """Ask a rank for all but so many of its units, unless it was asked for that already."""
    if len(share.asked) != count:
        remaining = share.units[:count]
        devices.ask_back(share, remaining, _send_units(step, slot, share, remaining, shrinks=True))


def _grow(step: Step, slot: Slot, counts: list[int]) -> None:
    """Give what is free to those that run; what they were asked for is not needed any more."""
    free = devices.free_units(step, slot)
    for share, count in zip(slot.shares, counts, strict=True):
        missing = max(0, count - len(share.units))
        extra, free = free[:missing], free[missing:]
        if extra or share.asked:
            units = sorted([*share.units, *extra])
            devices.grow(share, units)
            _send_units(step, slot, share, units, shrinks=False)


def _send_units(
    step: Step, slot: Slot, share: Share, units: list[int], *, shrinks: bool
) -> CommandId:
    deployment = step.state.deployments[share.deployment]
    node = step.node(slot.node)
    return step.send_for(AdjustClaims, node, deployment, units=units, shrinks=shrinks)


def corrects_table(step: Step) -> bool:
    """Whether the table is corrected: not where placement promises by it what jobs get side by
    side."""
    return step.config.corrects_slowdowns and not step.state.cluster.limits.counts_on_space


def table_of(step: Step, slot: Slot) -> SlowdownTable | None:
    """The table of slowdowns for a device, corrected; the configured one where nothing is surely
    slower."""
    table = step.config.slowdowns
    return None if table is None else _corrected(table, _factors(step, slot))


def table_in_doubt(step: Step, slot: Slot) -> SlowdownTable | None:
    """The table for a device, with all that may be slower taken to be so, as far as it was looked
    at."""
    table = step.config.slowdowns
    return None if table is None else _corrected(table, _factors(step, slot, perhaps))


def _corrected(table: SlowdownTable, factors: dict[Pair, float]) -> SlowdownTable:
    if not factors:
        return table
    factors_by_stage = {kind: dict(row) for kind, row in table.beside.items()}
    for (stage, neighbour), factor in factors.items():
        for stage_name in alike(stage):
            row = factors_by_stage.setdefault(stage_name, {})
            row |= {
                neighbour_name: table.factor(stage_name, neighbour_name) * factor
                for neighbour_name in alike(neighbour)
            }
    return replace(table, beside=factors_by_stage)


def _factors(
    step: Step, slot: Slot, bound: Callable[[Sequence[Finding]], float] = surely
) -> dict[Pair, float]:
    """By which factor a kind of sub-stage beside another is slower on a device than the table says,
    where it is."""
    if not step.state.observed:
        return {}
    factors = {pair: bound(findings) for pair, findings in _findings(step, slot).items()}
    return {pair: factor for pair, factor in factors.items() if factor > 1.0}


def lacks_comparison(step: Step, deployment: Deployment, kinds: Collection[str]) -> bool:
    """Whether too few operations of these kinds of a deployment run beside nothing."""
    all_observed = step.state.observed.get(deployment.name, {}).values()
    records = [observed for observed in all_observed if observed.kind in kinds]
    return sum(observed.alone for observed in records) < ENOUGH_ALONE


def _findings(step: Step, slot: Slot) -> dict[Pair, list[Finding]]:
    findings: dict[Pair, list[Finding]] = defaultdict(list)
    for name in slot.placed:
        for observed in step.state.observed.get(name, {}).values():
            for neighbour, finding in observed.findings.items():
                findings[observed.stage, neighbour].append(finding)
    return findings


def observe(step: Step, deployment: Deployment, op: Op | None, event: OperationFinished) -> None:
    """Take in an operation that has ended, and whose device is still the deployment's.

    Nothing is learnt of what failed or was run again, of the first operation of a kind, which finds
    everything cold, of what shared its steps with others of its deployment, and of what was beside
    several others.
    """
    slots = devices.slots_of(step, deployment)
    share = slots[0].share_of(deployment.name) if len(slots) == 1 else None
    if share is None or share.pace is None or op is None or not share.pace.stage:
        return
    pace = share.pace
    took_s = step.now_s - pace.began_s
    is_single = event.share >= 1.0 and op.permitted_s == pace.began_s
    is_first = event.kind not in deployment.recent
    has_run = event.outcome is Outcome.COMPLETED and not event.replay
    if not (is_single and has_run) or is_first or event.duration_s <= MIN_RUN_SHARE * took_s:
        return
    devices.pass_time(share, step.now_s)
    if any(TOGETHER in neighbours for neighbours in pace.beside_s):
        return
    share_beside = {neighbours: seconds / took_s for neighbours, seconds in pace.beside_s.items()}
    work_s = event.duration_s * pace.work_s / took_s
    before = _factors(step, slots[0])
    step.state.age_observed(deployment.name)
    observed = step.state.observe(deployment.name, event.kind, pace.stage, event.num_tokens)
    observed.take(work_s, share_beside)
    for pair, line in _describe_slower(step, slots[0]).items():
        if before.get(pair, 1.0) <= 1 + MARGIN:
            step.notify("slower than the table says", line, f"{slots[0].node}/{slots[0].device}")


def _describe_slower(step: Step, slot: Slot) -> dict[Pair, str]:
    """A line for each pair that is slower on a device than the table says, by more than tables
    err."""
    lines = {}
    findings = _findings(step, slot)
    for (stage, neighbour), factor in _factors(step, slot).items():
        if factor > 1 + MARGIN:
            count = sum(finding.count for finding in findings[stage, neighbour])
            lines[stage, neighbour] = (
                f"{stage} beside {neighbour} takes at least {factor:.2f} times as long as the "
                f"table of slowdowns says, by {count:.0f} operations"
            )
    return lines


def describe_corrections(step: Step, job: Job) -> list[str]:
    """Lines that say what is slower on the devices of a job than the table of slowdowns says."""
    if not step.state.observed:
        return []
    slots = {
        (slot.node, slot.device): slot
        for deployment in step.deployments_of(job)
        for slot in devices.slots_of(step, deployment)
    }
    return [
        f"device {device} of {node}: {line}"
        for (node, device), slot in sorted(slots.items())
        for line in _describe_slower(step, slot).values()
    ]
