"""What is seen to be slower side by side than the table of slowdowns says is believed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.events import (
    Event,
    JobFinished,
    OperationFinished,
    SchedulerConfigured,
)
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import SlowdownTable
from phaseloom.scheduler.core.dispatch import shares
from phaseloom.scheduler.core.state.node import Slot
from phaseloom.scheduler.core.state.observed import (
    ALONE,
    FINDING_LIFETIME,
    MEMORY,
    MIN_OPERATIONS,
    UNKNOWN,
    Finding,
    Observed,
    certain_slowdown,
    name_of,
)
from phaseloom.scheduler.core.state.outputs import Output, PublishNotice
from phaseloom.scheduler.core.state.step import Step
from tests.support.world import TENANT, World, deployment
from tests.unit.scheduler.test_shares import overlap_s, run_of, table_of, world_of

SPREAD = 0.15
"""The sigma of single durations' logarithms: they differ by about 10 % at the median, as on a quiet
machine."""
TRAIN = "train"


def works(
    rng: random.Random, count: int, factor: float, spread: float = SPREAD
) -> Iterator[tuple[float, dict[str, float]]]:
    """Operations of seconds alone, 1.85 times as long beside training by the table, and by `factor`
    more in truth. Training comes and goes, so that the longer an operation the more it meets.

    Yields: the work of each by the table, and the parts of its time in each company.
    """
    for _ in range(count):
        left_s, work_s, is_beside = math.exp(rng.gauss(0.0, spread)), 0.0, rng.random() < 0.7
        spent_s = {ALONE: 0.0, TRAIN: 0.0}
        while left_s > 1e-12:
            by_table = 1 / 1.85 if is_beside else 1.0
            speed = by_table / factor if is_beside else 1.0
            passed_s = min(rng.expovariate(1.0 if is_beside else 2.3), left_s / speed)
            left_s -= passed_s * speed
            work_s += passed_s * by_table
            spent_s[TRAIN if is_beside else ALONE] += passed_s
            is_beside = not is_beside
        whole_s = sum(spent_s.values())
        yield work_s, {company: each / whole_s for company, each in spent_s.items()}


def factors_of(seed: int, count: int, factor: float, spread: float = SPREAD) -> list[float]:
    """What is believed after each of so many operations."""
    observed, found = Observed("forward_backward", TRAIN), []
    for work_s, beside in works(random.Random(seed), count, factor, spread):
        observed.record(work_s, beside)
        finding = observed.findings.get(TRAIN)
        found.append(1.0 if finding is None else certain_slowdown([finding]))
    return found


@pytest.mark.parametrize(("spread", "most"), [(0.09, 0), (0.15, 0), (0.5, 2)])
def test_a_right_table_is_hardly_ever_corrected(spread: float, most: int) -> None:
    """100 deployments of 300 operations each, looked at after each of these: how many are ever
    believed to be slower by the margin that policies have."""
    wrong = [seed for seed in range(100) if max(factors_of(seed, 300, 1.0, spread)) > 1.05]
    assert len(wrong) <= most


@pytest.mark.parametrize(("factor", "within"), [(1.5, 150), (2.0, 60)])
def test_what_is_slower_is_believed_soon_and_never_by_much_more_than_it_is(
    factor: float, within: int
) -> None:
    for seed in range(20):
        found = factors_of(seed, 200, factor)
        assert max(found[:within]) > 1.05, seed
        assert max(found) < 1.1 * factor, seed


def test_what_is_found_is_right_on_average() -> None:
    found = []
    for seed in range(40):
        observed = Observed("forward_backward", TRAIN)
        for work_s, beside in works(random.Random(seed), 150, 1.3):
            observed.record(work_s, beside)
        found.append(observed.findings[TRAIN].excess)
    assert math.exp(fmean(found)) == pytest.approx(1.3, rel=0.04)


def test_nothing_is_learnt_where_all_have_the_same_company_for_the_same_part() -> None:
    observed, rng = Observed("generate", "decode_large"), random.Random(1)
    for _ in range(300):
        observed.record(math.exp(rng.gauss(0.0, SPREAD)), {ALONE: 0.3, TRAIN: 0.7})
    assert certain_slowdown([observed.findings[TRAIN]]) == 1.0


def test_time_at_an_unknown_speed_spoils_nothing() -> None:
    """What has been given units that it does not use yet is slower than the table says."""
    observed, rng = Observed("forward_backward", TRAIN), random.Random(1)
    for number in range(200):
        part = (0.0, 0.3, 0.6)[number % 3]
        other = (1.0, 0.5)[number % 2] * (1 - part)
        work_s = math.exp(rng.gauss(0.0, 0.05)) * (1 + 0.75 * part)
        observed.record(work_s, {UNKNOWN: part, TRAIN: other, ALONE: 1 - part - other})
    assert certain_slowdown([observed.findings[TRAIN]]) == 1.0
    assert abs(observed.findings[TRAIN].excess) < 0.05
    assert UNKNOWN not in observed.findings


def test_one_that_took_ever_so_long_proves_nothing() -> None:
    observed, rng = Observed("generate", "decode_large"), random.Random(1)
    for _ in range(40):
        observed.record(math.exp(rng.gauss(0.0, SPREAD)), {ALONE: 1.0})
    observed.record(50.0, {TRAIN: 1.0})
    assert not observed.findings
    for _ in range(int(MIN_OPERATIONS)):
        observed.record(math.exp(rng.gauss(0.0, SPREAD)), {TRAIN: 1.0})
    assert certain_slowdown([observed.findings[TRAIN]]) == 1.0


def test_what_was_found_is_held_and_at_last_tried_again() -> None:
    observed = Observed("forward_backward", TRAIN)
    for work_s, beside in works(random.Random(1), 100, 2.0):
        observed.record(work_s, beside)
    held = certain_slowdown([observed.findings[TRAIN]])
    assert held > 1.5
    for _ in range(FINDING_LIFETIME):
        observed.age()
        observed.record(1.0, {ALONE: 1.0})
        assert certain_slowdown([observed.findings[TRAIN]]) == held
    observed.age()
    assert not observed.findings
    for work_s, beside in works(random.Random(2), 40, 1.0):
        observed.record(work_s, beside)
    assert certain_slowdown([observed.findings[TRAIN]]) == 1.0, (
        "what was seen before is nearly forgotten"
    )


def test_the_more_certain_of_two_counts_more() -> None:
    sure, unsure = Finding(0.4, 0.05, 30.0), Finding(0.0, 0.5, 8.0)
    assert certain_slowdown([unsure]) == 1.0
    assert certain_slowdown([sure, unsure]) == pytest.approx(certain_slowdown([sure]), rel=0.02)
    assert certain_slowdown([sure, sure]) > certain_slowdown([sure])


def test_sizes_are_told_apart_by_powers_of_two() -> None:
    names = [name_of("forward", tokens) for tokens in (0, 1023, 1024, 2047, 2048)]
    assert len(set(names)) == 4
    assert names[2] == names[3]


# --- in the core ---------------------------------------------------------------------------------


@dataclass
class Busy(World):
    """Two jobs that train, each with a pause between an outcome and the next call."""

    calls: int = 0
    """The calls that each of the jobs makes."""
    pause_s: float = 1.0
    """The longest pause."""

    def feed(self, event: Event) -> list[Output]:
        made = super().feed(event)
        if isinstance(event, OperationFinished) and int(event.key.slot) < self.calls:
            self._call(event.key.job, int(event.key.slot) + 1)
        return made

    def _call(self, job: str, seq: int) -> None:
        pause_s = self.random.uniform(0.0, self.pause_s)
        self.queue(job, "policy", seq, "forward_backward", delay_s=pause_s)

    def train(self, calls: int) -> None:
        self.calls = calls
        for job in "ab":
            self._call(job, 1)
        self.run()


class Contended(Busy):
    """What begins beside something else takes four times as long as it would alone."""

    def _permit(self, command: Permit) -> None:
        key, usual_s = command.operation.deployment_key, self.duration_s
        is_beside = any(ranks.running for name, ranks in self.ranks.items() if name != key)
        self.duration_s = usual_s * (4.0 if is_beside else 1.0)
        super()._permit(command)
        self.duration_s = usual_s


FREE = table_of(1.0)
"""Side by side everything is as fast as alone: the truth of a plain `World`."""


def busy(
    multiplexing: str = "greedy",
    *,
    slowdowns: SlowdownTable | None,
    corrects: bool = True,
    kind: type[Busy] = Busy,
) -> Busy:
    world = world_of(multiplexing, slowdowns=slowdowns, corrects=corrects, kind=kind)
    assert isinstance(world, Busy)
    return world


def slot_of(world: World) -> Slot:
    return world.core.state.nodes["d0"].devices[0].slots[0]


def step_of(world: World) -> Step:
    return Step(world.core.state, world.core.state.sequence + 1, world.now_s)


def slower(world: World) -> list[str]:
    return shares.describe_corrections(step_of(world), world.core.state.jobs["t.a"])


def beside_s(world: World, first: int, last: int) -> float:
    """The seconds in which training of both jobs ran, of calls from one to another."""
    ran = {
        job: [run_of(world, f"{job}.policy.{seq}") for seq in range(first, last)] for job in "ab"
    }
    return sum(max(0.0, min(e, f) - max(b, c)) for b, e in ran["a"] for c, f in ran["b"])


def told(world: World) -> list[str]:
    return [
        each.reason for made in world.outputs for each in made if isinstance(each, PublishNotice)
    ]


def test_sharing_that_loses_stops_by_itself() -> None:
    as_it_is = busy(slowdowns=FREE, corrects=False, kind=Contended)
    corrected = busy(slowdowns=FREE, kind=Contended)
    for world in (as_it_is, corrected):
        world.train(150)
        assert set(world.done.values()) == {Outcome.COMPLETED}
    assert beside_s(as_it_is, 100, 150) > 20.0
    assert beside_s(corrected, 1, 150) > 5.0
    assert beside_s(corrected, 100, 150) == 0.0
    assert max(end for _, end, _ in corrected.runs) < max(begin for begin, _, _ in as_it_is.runs)
    (line,) = slower(corrected)
    assert line.startswith("device 0 of d0: train next to train takes at least ")
    assert "times as long as the table of slowdowns says, according to " in line
    assert [reason for reason in told(corrected) if "train next to train" in reason]
    assert not as_it_is.core.state.observed
    corrected.check_replay()


def test_where_both_always_have_work_some_run_alone_to_compare_with_and_sharing_stops() -> None:
    as_it_is = busy(slowdowns=FREE, corrects=False, kind=Contended)
    corrected = busy(slowdowns=FREE, kind=Contended)
    for world in (as_it_is, corrected):
        world.pause_s = 0.0
        world.train(150)
    assert beside_s(as_it_is, 100, 150) > 40.0
    assert beside_s(corrected, 100, 150) == 0.0
    assert slower(corrected)
    corrected.check_replay()


@pytest.mark.parametrize(("pause_s", "most"), [(0.0, 1.12), (1.0, 1.03)])
def test_a_right_table_is_not_corrected_and_little_is_put_off(pause_s: float, most: float) -> None:
    """Durations differ by three times as much as on a quiet machine."""
    plain, looking = (busy(slowdowns=FREE, corrects=corrects) for corrects in (False, True))
    for world in (plain, looking):
        world.pause_s = pause_s
        world.train(150)
    assert slower(looking) == []
    assert looking.core.state.observed
    begun_s, plain_s, looking_s = 1000.0, plain.now_s, looking.now_s
    assert looking_s - begun_s < most * (plain_s - begun_s), "without a pause turns take twice"


@pytest.mark.parametrize(
    ("multiplexing", "slowdowns"), [("off", FREE), ("greedy", None)], ids=["off", "no table"]
)
def test_nothing_is_kept_where_nothing_is_shared_by_a_table(
    multiplexing: str, slowdowns: SlowdownTable | None
) -> None:
    world = busy(multiplexing, slowdowns=slowdowns)
    world.train(5)
    assert not world.core.state.observed
    world.queue("a", "policy", 6, "forward_backward")
    world.queue("b", "sampler", 1, "generate")
    world.run(until_s=world.now_s + 0.3)
    assert all(share.pace is None for share in slot_of(world).shares)


def test_nothing_is_corrected_where_placement_counts_on_the_table() -> None:
    """A rollout that waited, to be compared with, would break what its job was promised."""
    world = busy(slowdowns=FREE)
    world.train(5)
    assert world.core.state.observed
    config = world.core.state.config
    assert config is not None
    config = replace(config, placement="coexec_repack", ordering="fcfs")
    world.later(0, SchedulerConfigured(config))
    world.run()
    assert not world.core.state.observed
    world.queue("a", "policy", 6, "forward_backward")
    world.queue("b", "policy", 6, "forward_backward")
    world.run()
    assert not world.core.state.observed
    world.check_replay()


def observed(world: World) -> dict[str, float]:
    """By deployment: the operations that were counted; older ones count less."""
    return {
        name: sum(each.sums[0][0] for each in kinds.values())
        for name, kinds in world.core.state.observed.items()
    }


def test_an_outcome_that_comes_twice_is_counted_once() -> None:
    world = busy(slowdowns=FREE)
    world.train(4)
    before = observed(world)
    (finished, *_) = (
        event
        for _, event in reversed(world.log)
        if isinstance(event, OperationFinished) and event.key.job == "a"
    )
    world.core.step(len(world.log) + 1, world.now_s, finished)
    assert observed(world) == before
    assert before["t.a.policy"] > 2.0, "all but the first one, which finds everything cold"


def test_what_a_killed_rank_was_at_is_not_counted() -> None:
    world = busy(slowdowns=FREE)
    world.train(3)
    before = observed(world)
    world.queue("a", "policy", 4, "forward_backward")
    world.run(until_s=world.now_s + 0.3)
    world.kill(deployment("a", "policy"))
    world.run()
    assert world.done["t.a.policy.4"] is Outcome.COMPLETED
    counted = [
        event
        for _, event in world.log
        if isinstance(event, OperationFinished) and event.key.slot == "4" and not event.replay
    ]
    expected = before["t.a.policy"] * (1 - 1 / MEMORY) + 1.0 if counted else before["t.a.policy"]
    assert observed(world)["t.a.policy"] == pytest.approx(expected)


def test_the_parts_of_an_operations_time_are_those_that_it_had() -> None:
    """B's rollout comes a while after A's training has begun and ends before it: until the rank has
    given up a unit A is alone, and after it has got it back, nobody knows how fast it is."""
    world = world_of(slowdowns=table_of(1.4), kind=World)
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("b", "sampler", 1, "generate")
    world.run()
    world.duration_s = 10.0
    world.queue("a", "policy", 2, "forward_backward")
    world.run(until_s=world.now_s + 1.0)
    world.duration_s = 1.0
    world.queue("b", "sampler", 2, "generate")
    world.run()
    (found,) = world.core.state.observed["t.a.policy"].values()
    began_s, ended_s = run_of(world, "a.policy.2")
    come_s, gone_s = run_of(world, "b.sampler.2")
    whole_s = ended_s - began_s
    parts = {company: found.sums[0][place] for place, company in enumerate(found.combinations, 1)}
    assert parts == {
        "decode_large": pytest.approx((gone_s - come_s) / whole_s, abs=0.01),
        UNKNOWN: pytest.approx((ended_s - gone_s) / whole_s, abs=0.01),
    }
    asked_s = gone_s - come_s
    work_s = come_s - began_s + asked_s / 1.4 + ended_s - gone_s
    assert math.exp(found.products[0]) == pytest.approx(work_s, abs=0.1)


def test_what_was_seen_is_forgotten_with_its_table_and_with_its_deployment() -> None:
    world = busy(slowdowns=FREE)
    world.train(4)
    world.feed(SchedulerConfigured(replace(world.config, quantum_s=1.0)))
    assert set(observed(world)) == {"t.a.policy", "t.b.policy"}
    world.feed(JobFinished(JobKey(TENANT, "a"), "finish"))
    world.run()
    assert set(observed(world)) == {"t.b.policy"}
    world.feed(SchedulerConfigured(replace(world.config, slowdowns=table_of(1.1))))
    assert observed(world) == {}


def test_an_slo_is_protected_by_what_is_seen() -> None:
    """By the table training loses nothing by a rollout beside it; in truth it takes four times as
    long. What it ran beside before is of the same kind."""
    state_of = world_of(slowdowns=FREE, slos={"a": 1.5}, kind=Contended)
    finding = Finding(math.log(4.0), 0.1, 20.0)
    found = state_of.core.state.observe("t.a.policy", "forward_backward", TRAIN, 0)
    found.findings["decode_large"] = finding
    state_of.queue("a", "policy", 1, "forward_backward")
    state_of.queue("b", "sampler", 1, "generate")
    state_of.run()
    assert overlap_s(state_of, "a.policy.1", "b.sampler.1") <= 0


@given(st.data(), st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_a_regression_finds_what_was_put_in(data: st.DataObject, companies: int) -> None:
    """Without noise, whatever the mixture, but for what the table counts: where all of four
    companies are as slow as can be, that is a twentieth of what was put in."""
    names = [f"kind{i}" for i in range(companies)]
    truth = {name: data.draw(st.floats(-1.0, 1.0)) for name in names}
    rng = random.Random(data.draw(st.integers(0, 1000)))
    found = Observed("forward", TRAIN)
    for _ in range(200):
        drawn = {name: rng.random() for name in (ALONE, *names)}
        whole = sum(drawn.values())
        beside = {name: part / whole for name, part in drawn.items()}
        found.record(math.exp(1.0 + sum(truth[n] * beside[n] for n in names)), beside)
    for name in names:
        assert found.findings[name].excess == pytest.approx(truth[name], abs=0.08)
