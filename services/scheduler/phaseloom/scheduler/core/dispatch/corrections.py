"""The table of slowdowns, corrected by what is seen to be slower beside others than it says.

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

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from phaseloom.common.contract.events import OperationFinished
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import SlowdownTable
from phaseloom.scheduler.core.devices import devices
from phaseloom.scheduler.core.policies.sharing_view import MARGIN, alike
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.observed import (
    ENOUGH_ALONE,
    TOGETHER,
    Finding,
    perhaps,
    surely,
)
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step

LEAST_PART = 0.5
"""The part of the time from its permit until its end was known that an operation must have run to
be counted: the rest is its switch and the way of messages, and nobody knows what ran beside it
when."""


Pair = tuple[str, str]
"""A kind of sub-stage, and another one beside it."""


def are_on(step: Step) -> bool:
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
    beside = {kind: dict(row) for kind, row in table.beside.items()}
    for (stage, other), factor in factors.items():
        for one in alike(stage):
            row = beside.setdefault(one, {})
            row |= {each: table.factor(one, each) * factor for each in alike(other)}
    return replace(table, beside=beside)


def _factors(
    step: Step, slot: Slot, bound: Callable[[Sequence[Finding]], float] = surely
) -> dict[Pair, float]:
    """By which factor a kind of sub-stage beside another is slower on a device than the table says,
    where it is."""
    if not step.state.observed:
        return {}
    found = {pair: bound(findings) for pair, findings in _findings(step, slot).items()}
    return {pair: factor for pair, factor in found.items() if factor > 1.0}


def lacks_comparison(step: Step, deployment: Deployment, kinds: Collection[str]) -> bool:
    """Whether too few operations of these kinds of a deployment run beside nothing."""
    found = step.state.observed.get(deployment.name, {}).values()
    records = [observed for observed in found if observed.kind in kinds]
    return sum(each.alone for each in records) < ENOUGH_ALONE


def _findings(step: Step, slot: Slot) -> dict[Pair, list[Finding]]:
    found: dict[Pair, list[Finding]] = defaultdict(list)
    for name in slot.placed:
        for observed in step.state.observed.get(name, {}).values():
            for other, finding in observed.findings.items():
                found[observed.stage, other].append(finding)
    return found


def note(step: Step, deployment: Deployment, op: Op | None, event: OperationFinished) -> None:
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
    if not (is_single and has_run) or is_first or event.duration_s <= LEAST_PART * took_s:
        return
    devices.pass_time(share, step.now_s)
    if any(TOGETHER in company for company in pace.beside_s):
        return
    beside = {company: seconds / took_s for company, seconds in pace.beside_s.items()}
    work_s = event.duration_s * pace.work_s / took_s
    before = _factors(step, slots[0])
    step.state.age_observed(deployment.name)
    observed = step.state.observe(deployment.name, event.kind, pace.stage, event.num_tokens)
    observed.take(work_s, beside)
    for pair, why in _told(step, slots[0]).items():
        if before.get(pair, 1.0) <= 1 + MARGIN:
            step.notify("slower than the table says", why, f"{slots[0].node}/{slots[0].device}")


def _told(step: Step, slot: Slot) -> dict[Pair, str]:
    """A line for each pair that is slower on a device than the table says, by more than tables
    err."""
    told = {}
    findings = _findings(step, slot)
    for (stage, other), factor in _factors(step, slot).items():
        if factor > 1 + MARGIN:
            count = sum(finding.count for finding in findings[stage, other])
            told[stage, other] = (
                f"{stage} beside {other} takes at least {factor:.2f} times as long as the table of "
                f"slowdowns says, by {count:.0f} operations"
            )
    return told


def describe(step: Step, job: Job) -> list[str]:
    """Lines that say what is slower on the devices of a job than the table of slowdowns says."""
    if not step.state.observed:
        return []
    slots = {
        (slot.node, slot.device): slot
        for deployment in step.deployments_of(job)
        for slot in devices.slots_of(step, deployment)
    }
    return [
        f"device {device} of {node}: {why}"
        for (node, device), slot in sorted(slots.items())
        for why in _told(step, slot).values()
    ]
