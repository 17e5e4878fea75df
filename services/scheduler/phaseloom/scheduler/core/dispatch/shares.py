"""Sharing a device in space: which deployments run next to each other, and with how many units.

A running deployment has a *share* of the compute units of its device. The multiplexing policy says
how many units each one gets, and whether another deployment may start next to them. A share shrinks
in two steps. First the rank is asked to give up units. Then, once it has confirmed that it no
longer uses them or the deployment no longer runs anything, they go to others. A share grows at
once, by free units. So shares never overlap, even if a process is killed in between: units that a
dead rank was asked for are free because the rank is dead.

No intention is stored. At each event on a device its shares are compared with the policy's present
choice.

A deployment shares its device if it has one rank, its state fits next to those of all that run
there, and its runtime computes the same bits with any share. A device is not shared while its jobs
exclude each other's state, or a deployment over several devices waits for it. Nothing starts next
to a job that asks to be alone, or if the table of slowdowns says that it would slow a running job
beyond its SLO. If placement promises SLOs based on neighbours, jobs get only the neighbours that it
counted on. Among the deployments that could start, the ordering policy chooses. A deployment that
does not fit next to the running ones is overtaken until it has waited for a quantum.

**Corrections.** The table of slowdowns can be wrong: it may come from another model, another
machine or without one of today's neighbours. If it promises too much, operations that would finish
sooner in turns would run side by side forever, and jobs would miss their SLO. So each finished
operation is compared with others of its deployment and kind (`state/observed.py`). Policies and the
protection of SLOs use a corrected table, in which everything is as slow as it has proved to be.
Sharing that loses then stops by itself. It is tried again after `FINDING_LIFETIME` operations.

The comparison needs operations that run alone. If all jobs always have work, nearly none would. So
while it is uncertain whether sharing loses, some operations are delayed to run alone, so that there
are always `MIN_ALONE` of them.

- The table of a device is corrected for pairs of sub-stage kinds, by the deployments placed on it.
  Operations with several neighbours teach nothing.
- Corrections only make entries slower. A pair that never runs side by side shows no gain, and a
  pair that does needs no correction.
- Nothing is corrected if placement bases promises on the table. A job would otherwise lose
  neighbours that it was promised.

Cost: linear in the ready deployments of the device, if it has several units and a policy that
shares them. Corrections cost a few additions whenever an operation starts or ends, and a look at
the placed deployments per decision; without a table they cost nothing.
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
    MIN_ALONE,
    TOGETHER,
    UNKNOWN,
    Finding,
    certain_slowdown,
    possible_slowdown,
)
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import OpState, WpgState

MIN_PATIENCE_S = 1.0
"""If there is no quantum: how long others may overtake a deployment that does not fit next to the
running ones."""
MAX_PREDICTED = 8
"""How many of a job's next operations are predicted."""
MIN_REMAINING = 0.1
"""An operation is assumed to need at least this share of its usual duration more, however long it
has run."""
MIN_RUN_SHARE = 0.5
"""Minimum share of the time since its permit that an operation must have run to count as an
observation. During the rest it was being switched in or its messages were in transit, and its
neighbours are unknown."""
Pair = tuple[str, str]
"""A kind of sub-stage, and the kind that runs next to it."""


def policy_of(step: Step) -> Multiplexing:
    return MULTIPLEXING[step.config.multiplexing]


def is_on(step: Step, slot: Slot) -> bool:
    return policy_of(step).is_on and devices.units_of(step.state, slot) > 1


def give_share(step: Step, deployment: Deployment) -> None:
    """Give a deployment that is about to run alone its share of each shared device."""
    if not policy_of(step).is_on:
        return
    for slot in devices.held_slots(step.state, deployment):
        if not is_on(step, slot) or slot.share_of(deployment.name) is not None:
            continue
        free = devices.free_units(step, slot)
        is_alone = step.job_of(deployment).spec.exclusive
        if _is_divisible(step, deployment) and not is_alone:
            counts = _counts(step, slot, [_claim_of(step, deployment)])
            assert counts is not None, f"{deployment.name} runs alone and got no share"
            free = free[: counts[0]]
        devices.give_share(slot, deployment, free)


def units_for(step: Step, deployment: Deployment, slots: list[Slot]) -> list[int]:
    """The units that a deployment's permits name; empty: all units of its devices.

    While its rank is asked to give up units, a permit must not name them: the rank follows the
    newest command.

    Args: slots: the slots of all ranks of the deployment.
    """
    share = slots[0].share_of(deployment.name) if len(slots) == 1 else None
    if share is None:
        return []
    units = share.remaining_units or share.units
    return [] if len(units) == devices.units_of(step.state, slots[0]) else units


def next_neighbour(step: Step, slot: Slot) -> Deployment | None:
    """Bring the shares of a slot closer to what the policy wants.

    Args:    slot: a slot in which something runs with a share.
    Returns: a deployment to start next to the others now; it has its share already.
    """
    if not is_on(step, slot):
        return None
    running = [_claim_of(step, step.state.deployments[name]) for name in slot.runs]
    choice_made = _choose_neighbour(step, slot, running)
    if choice_made is None:
        _grow(step, slot, _counts(step, slot, running) or [])
        return None
    newcomer, counts = choice_made
    # The newcomer's count comes last and has no share yet, hence strict=False.
    for share, count in zip(slot.shares, counts, strict=False):
        # A rank that was already asked to shrink to this count is not asked again.
        if count < len(share.units) and len(share.remaining_units) != count:
            remaining = share.units[:count]
            command = _send_units(step, slot, share, remaining, shrinks=True)
            devices.ask_back(share, remaining, command)
    free = devices.free_units(step, slot)
    if len(free) < counts[-1]:
        return None
    devices.give_share(slot, newcomer, free[: counts[-1]])
    return newcomer


def record_paces(step: Step, slot: Slot) -> None:
    """Record how fast each deployment in a slot runs from now on, by the uncorrected table."""
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
        if share.pace is not None and len(share.units) > share.pace.min_units:
            # Decoding uses additional units from its next step on. Everything else uses them from
            # its next pass, if there is one, so its pace is unknown until then.
            decodes = all(KINDS[kind].shares_calls for kind in claims[index].kinds)
            neighbours = neighbours if decodes else UNKNOWN
        devices.set_pace(share, step.now_s, stages[index], neighbours, speed)


def adjusted(step: Step, event: ClaimsAdjusted) -> None:
    """Free the units that a rank has given up. An answer to an older command is ignored."""
    deployment = step.deployment(event.deployment)
    if deployment is None or event.incarnation != deployment.wpg.incarnation:
        return
    for slot in devices.slots_of(step, deployment):
        share = slot.share_of(deployment.name)
        # Only the answer to the newest request counts; the share may have grown since an older one.
        if share is not None and share.command == event.command:
            devices.confirm(share)
            step.dirty.add((slot.node, slot.device))


def _choose_neighbour(
    step: Step, slot: Slot, running: list[Claim]
) -> tuple[Deployment, list[int]] | None:
    """Choose a deployment to start next to those that run.

    Returns: the deployment, and the units of each, the newcomer's last.
    """
    if choice.policy_of(step).is_strict or not _allows_neighbours(step, slot):
        return None
    options = [option for option in ready.options_on(step, slot) if option[0].name not in slot.runs]
    patience_s = step.config.quantum_s or MIN_PATIENCE_S
    while options:
        preferred = choice.prefer(step, slot, options, may_wait=False)
        assert not isinstance(preferred, Wait), f"{step.config.ordering} waits although it may not"
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
        # A deployment that has waited too long blocks newcomers: the device drains for it.
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
    # Ranks with adapters may share a process, and cores are assigned to processes.
    return deployment.spec.model.adapter is None and (capabilities is None or capabilities.divides)


def _capabilities_of(step: Step, deployment: Deployment) -> Capabilities | None:
    """Capabilities of a deployment's runtime on its node; None: the node has not reported them."""
    node = deployment.node
    assert node is not None, deployment.name
    return step.state.cluster.hosts[node].backends.get(deployment.spec.backend)


def _fits(step: Step, slot: Slot, newcomer: Deployment) -> bool:
    """Whether a deployment's state fits on the device next to those of all that run there."""
    names = {*slot.runs, newcomer.name}
    used = sum(step.state.deployments[name].wpg.state_bytes for name in names)
    memory_bytes = step.node(slot.node).devices[slot.device].memory_bytes
    return _is_divisible(step, newcomer) and used <= memory_bytes


def _is_excluded(step: Step, newcomer: Deployment, running: list[Claim]) -> bool:
    """Whether one of the jobs that would run side by side asks to be alone."""
    jobs = {newcomer.job_name, *(claim.job for claim in running)}
    return len(jobs) > 1 and any(step.state.jobs[job].spec.exclusive for job in jobs)


def _keeps_slos(step: Step, slot: Slot, claims: list[Claim], counts: list[int]) -> bool:
    """Whether all running jobs keep their SLOs next to the newcomer, which is the last claim.

    The newcomer's own SLO does not matter: waiting would be slower still.
    """
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
    """Whether to delay a newcomer once, to observe operations that run alone.

    This is done while it is uncertain whether sharing loses. It shows how long the newcomer takes
    alone, or how long the running deployment takes if it has had no neighbour yet.
    """
    if len(running) > 1:
        return False
    compared = [newcomer]
    pace = slot.shares[0].pace
    if pace is None or {pace.neighbours, *pace.time_by_neighbours_s} == {ALONE}:
        compared.append(running[0])
    deployments = step.state.deployments
    if not any(
        lacks_comparison(step, deployments[claim.deployment], claim.kinds) for claim in compared
    ):
        return False
    table = table_in_doubt(step, slot)
    return _counts(step, slot, running, newcomer, table=table) is None


def _is_counted_on(step: Step, slot: Slot, claims: list[Claim]) -> bool:
    """Whether placement has counted on these jobs running side by side, if it bases promises on
    that."""
    cluster = step.state.cluster
    if not cluster.limits.counts_on_space:
        return True
    group = cluster.groups.get(cluster.hosts[slot.node].group)
    placed = {step.state.deployments[name].job_name for name in slot.placed}
    if group is None or not has_promise(group) or len(placed) < 2:
        return True
    member_names = {member.job for member in company.users_of(group, slot.node)}
    jobs = {claim.job for claim in claims}
    # A second share for one job would take units that another job was promised.
    if len(jobs) < len(claims) or not jobs <= member_names:
        return False
    return company.slowdown_on(cluster, group, slot.node) is not None


def _ops_of(deployment: Deployment, begins: Op | None = None) -> list[Op]:
    """The running operations of a deployment, then the one that starts."""
    running = [deployment.queue.find(key) for key in deployment.activation.running]
    return [op for op in (*running, begins) if op is not None]


def _present_claim(step: Step, deployment: Deployment, begins: Op | None = None) -> Claim:
    """The claim of a deployment without predictions."""
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

    First the deployment's newest operation, then the job's queued operations by arrival. Operations
    that wait for other deployments come last.

    Args: ops: operations of the deployment: those that run, then the one that starts.
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
    """The next queued operations in a deployment's order, each with whether it, or one before it,
    waits for another deployment."""
    queue, waits = deployment.queue, False
    for seq in range(queue.head_seq, queue.head_seq + MAX_PREDICTED):
        op = queue.operations.get(seq)
        if op is not None and op.state is OpState.QUEUED:
            waits = waits or op.eligible_s < 0
            yield waits, op


def _stages(step: Step, deployment: Deployment, kind: str, ran_s: float) -> list[tuple[str, float]]:
    """The sub-stage of an operation and its remaining seconds.

    Empty for operations that only move state, which need almost no compute units.
    """
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
    """The number of units of each claim, by the policy.

    Args: table: table of slowdowns to use instead of the device's.
    """
    jobs = {step.state.deployments[name].job_name for name in slot.placed}
    units, table = devices.units_of(step.state, slot), table or table_of(step, slot)
    return policy_of(step).share(SharingView(units, len(jobs), running, newcomer, table))


def _grow(step: Step, slot: Slot, counts: list[int]) -> None:
    """Give free units to running deployments, and withdraw requests to give up units."""
    free = devices.free_units(step, slot)
    for share, count in zip(slot.shares, counts, strict=True):
        missing = max(0, count - len(share.units))
        extra, free = free[:missing], free[missing:]
        if extra or share.remaining_units:
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
    """Whether the table of slowdowns is corrected by observations."""
    return step.config.corrects_slowdowns and not step.state.cluster.limits.counts_on_space


def table_of(step: Step, slot: Slot) -> SlowdownTable | None:
    """The corrected table of slowdowns of a device."""
    table = step.config.slowdowns
    return None if table is None else _corrected(table, _factors(step, slot))


def table_in_doubt(step: Step, slot: Slot) -> SlowdownTable | None:
    """The table of a device, corrected as if everything that may be slower were slower."""
    table = step.config.slowdowns
    return None if table is None else _corrected(table, _factors(step, slot, possible_slowdown))


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
    step: Step, slot: Slot, bound: Callable[[Sequence[Finding]], float] = certain_slowdown
) -> dict[Pair, float]:
    """By what factor each pair is slower on a device than the table says; pairs that are not are
    left out."""
    if not step.state.observed:
        return {}
    factors = {pair: bound(findings) for pair, findings in _findings(step, slot).items()}
    return {pair: factor for pair, factor in factors.items() if factor > 1.0}


def lacks_comparison(step: Step, deployment: Deployment, kinds: Collection[str]) -> bool:
    """Whether too few operations of these kinds of a deployment have run alone."""
    all_observed = step.state.observed.get(deployment.name, {}).values()
    records = [observed for observed in all_observed if observed.kind in kinds]
    return sum(observed.num_alone for observed in records) < MIN_ALONE


def _findings(step: Step, slot: Slot) -> dict[Pair, list[Finding]]:
    findings: dict[Pair, list[Finding]] = defaultdict(list)
    for name in slot.placed:
        for observed in step.state.observed.get(name, {}).values():
            for neighbour, finding in observed.findings.items():
                findings[observed.stage, neighbour].append(finding)
    return findings


def observe(step: Step, deployment: Deployment, op: Op | None, event: OperationFinished) -> None:
    """Learn from an operation that has ended while its deployment still holds the device.

    Failed operations and replays are ignored. So are the first operation of a kind, which runs
    cold, operations that shared their steps with others of their deployment, and operations that
    had several neighbours at once.
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
    if any(TOGETHER in neighbours for neighbours in pace.time_by_neighbours_s):
        return
    share_beside = {
        neighbours: seconds / took_s for neighbours, seconds in pace.time_by_neighbours_s.items()
    }
    work_s = event.duration_s * pace.work_s / took_s
    before = _factors(step, slots[0])
    step.state.age_observed(deployment.name)
    observed = step.state.observe(deployment.name, event.kind, pace.stage, event.num_tokens)
    observed.record(work_s, share_beside)
    for pair, line in _describe_slower(step, slots[0]).items():
        if before.get(pair, 1.0) <= 1 + MARGIN:
            step.notify("slower than the table says", line, f"{slots[0].node}/{slots[0].device}")


def _describe_slower(step: Step, slot: Slot) -> dict[Pair, str]:
    """A line for each pair that is slower on a device than the table says, by more than its usual
    error."""
    lines = {}
    findings = _findings(step, slot)
    for (stage, neighbour), factor in _factors(step, slot).items():
        if factor > 1 + MARGIN:
            count = sum(finding.count for finding in findings[stage, neighbour])
            lines[stage, neighbour] = (
                f"{stage} next to {neighbour} takes at least {factor:.2f} times as long as the "
                f"table of slowdowns says, according to {count:.0f} operations"
            )
    return lines


def describe_corrections(step: Step, job: Job) -> list[str]:
    """Lines that describe which pairs are slower on a job's devices than the table of slowdowns
    says."""
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
