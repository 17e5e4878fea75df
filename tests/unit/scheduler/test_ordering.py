"""Ordering policies as functions: golden cases, ties, no starvation, no dependence on order."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.scheduler.core.policies.baselines.ordering.hrrn import hrrn
from phaseloom.scheduler.core.policies.baselines.ordering.hrrs_literal import hrrs_literal
from phaseloom.scheduler.core.policies.baselines.ordering.sjf import STARVED as SJF_STARVED
from phaseloom.scheduler.core.policies.baselines.ordering.sjf import sjf
from phaseloom.scheduler.core.policies.device_view import (
    Candidate,
    DeviceView,
    Resident,
    TurnMember,
    Wait,
    timeline,
)
from phaseloom.scheduler.core.policies.ordering.hold import LEAST_TURN, PATIENCE, hold
from phaseloom.scheduler.core.policies.ordering.hrrs import hrrs, score
from phaseloom.scheduler.core.policies.registry import ORDERING

GOLDEN = Path(__file__).parents[2] / "golden"
SWITCH_S = 20.0


def golden(name: str) -> list[Any]:
    """(setup in seconds, case) of each case of a file."""
    document = json.loads((GOLDEN / f"{name}.json").read_text())
    setup_s = document["setup"]["t_load"] + document["setup"]["t_offload"]
    return [pytest.param(setup_s, case, id=case["name"]) for case in document["cases"]]


def of_case(case: dict[str, Any], setup_s: float) -> list[Candidate]:
    running = case["running"]
    resident = running["job"] if running else case.get("resident")
    made = [
        Candidate(
            operation=request["id"],
            deployment=request["id"],
            job=request["job"],
            arrival_s=request["arrival"],
            arrival=0,
            duration_s=request["exec"],
            switch_s=0.0 if request["job"] == resident else setup_s,
            setup_s=setup_s,
        )
        for request in case["reqs"]
    ]
    if running:
        left_s = running["remaining"]
        going_on = Candidate(
            *(running["id"], running["id"], running["job"], running["arrival"], 0, left_s, 0.0),
            setup_s=setup_s,
            is_running=True,
        )
        made.append(going_on)
    return made


def ordered(policy: str, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
    left, order = list(candidates), []
    while left:
        chosen = ORDERING[policy].choose(DeviceView(now_s, left))
        assert isinstance(chosen, Candidate)
        order.append(chosen)
        left.remove(chosen)
    return order


# --- Golden ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setup_s", "case"), golden("hrrs"))
def test_hrrs_orders_and_scores_as_derived_by_hand(setup_s: float, case: dict[str, Any]) -> None:
    order = ordered("hrrs", of_case(case, setup_s), case["now"])
    assert [c.operation for c in order] == case["order"]
    assert [score(c, case["now"]) for c in order] == pytest.approx(case["scores"])


@pytest.mark.parametrize(("setup_s", "case"), golden("hrrs_timeline"))
def test_timelines_are_as_derived_by_hand(setup_s: float, case: dict[str, Any]) -> None:
    candidates = of_case(case, setup_s)
    for policy, name in (("hrrs", "fixed"), ("hrrs_literal", "literal")):
        order = ordered(policy, candidates, case["now"])
        plan = ORDERING[policy].timeline(order, case["now"])
        assert [[e.operation, e.start_s, e.end_s] for e in plan] == case[name]
        is_stopped = case["running"] is not None and not order[0].is_running
        assert is_stopped is case["stop"]


def test_literal_form_draws_nothing_to_the_resident_job() -> None:
    """Charged to both, the switch does not favour the one that needs none."""
    resident = made("resident", arrival_s=90, duration_s=20, switch_s=0.0)
    other = made("other", arrival_s=86, duration_s=20)
    view = DeviceView(100.0, [resident, other])
    assert hrrs.choose(view) is resident
    assert hrrs_literal.choose(view) is other
    assert hrrn.choose(view) is other


# --- All of them ----------------------------------------------------------------------------------


def made(name: str, **fields: Any) -> Candidate:
    given: dict[str, Any] = {
        "arrival_s": 0.0,
        "arrival": 0,
        "duration_s": 10.0,
        "switch_s": SWITCH_S,
        "setup_s": SWITCH_S,
    }
    job = fields.pop("job", name)
    return Candidate(operation=f"{name}.1", deployment=name, job=job, **{**given, **fields})


@st.composite
def views(draw: st.DrawFn) -> DeviceView:
    times = st.sampled_from([0.0, 1.0, 5.0, 50.0, 99.0])
    candidates = []
    for index in range(draw(st.integers(1, 5))):
        is_resident = draw(st.booleans())
        candidates.append(
            made(
                f"d{index}",
                job=draw(st.sampled_from("abc")),
                arrival_s=draw(times),
                arrival=draw(st.integers(1, 2)),
                duration_s=draw(st.sampled_from([0.0, 0.1, 10.0, 60.0])),
                switch_s=0.0 if is_resident else SWITCH_S,
                back_s=0.0 if is_resident else draw(st.sampled_from([0.0, SWITCH_S])),
                slack_s=draw(st.sampled_from([math.inf, 5.0, 0.0])),
                served=draw(st.integers(0, 2)),
                continues=draw(st.booleans()),
            )
        )
    resident = Resident(
        job=draw(st.sampled_from("abcd")),
        since_s=draw(times),
        idle_since_s=draw(times),
        phase_until_s=draw(st.sampled_from([0.0, 110.0])),
        net_gap_s=draw(st.sampled_from([0.0, 15.0, math.inf])),
        away_switch_s=draw(st.sampled_from([0.0, SWITCH_S])),
        is_busy=draw(st.booleans()),
        is_blocked=draw(st.booleans()),
    )
    members = [TurnMember(job, draw(st.sampled_from([0.0, 130.0]))) for job in "cabd"]
    return DeviceView(
        now_s=100.0,
        candidates=candidates,
        resident=draw(st.sampled_from([None, resident])),
        members=members,
        may_wait=draw(st.booleans()),
    )


@pytest.mark.parametrize("policy", ORDERING)
@settings(max_examples=60, deadline=None)
@given(view=views(), data=st.data())
def test_answer_does_not_depend_on_the_order_of_the_candidates(
    policy: str, view: DeviceView, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(list(view.candidates)))
    other = DeviceView(
        view.now_s, shuffled, view.resident, members=view.members, may_wait=view.may_wait
    )
    assert ORDERING[policy].choose(view) == ORDERING[policy].choose(other)


@pytest.mark.parametrize("policy", ORDERING)
@settings(max_examples=60, deadline=None)
@given(view=views())
def test_answer_is_a_candidate_or_a_wait_with_an_end(policy: str, view: DeviceView) -> None:
    answer = ORDERING[policy].choose(view)
    if isinstance(answer, Wait):
        assert view.may_wait
        assert ORDERING[policy].may_wait
        assert view.now_s < answer.until_s < math.inf
        assert answer.job not in {c.job for c in view.candidates}
    else:
        assert answer in view.candidates
        assert ORDERING[policy].why(answer, view)


@pytest.mark.parametrize("policy", ORDERING)
@settings(max_examples=20, deadline=None)
@given(
    durations_s=st.lists(st.sampled_from([5.0, 10.0, 60.0]), min_size=2, max_size=5),
    sibling_s=st.sampled_from([5.0, 60.0]),
)
def test_every_candidate_is_chosen_within_a_bound(
    policy: str, durations_s: list[float], sibling_s: float
) -> None:
    """Each deployment has its next operation ready as soon as one has ended, for ever; the first
    two are of one job."""
    kinds = [(f"d{i}", "d0" if i == 1 else f"d{i}", s) for i, s in enumerate(durations_s)]
    kinds[1] = ("d1", "d0", sibling_s)
    arrivals = {name: 0.0 for name, _, _ in kinds}
    chosen: dict[str, int] = {name: 0 for name, _, _ in kinds}
    served: dict[str, int] = {}
    holder, since_s, now_s, turn = "", 0.0, 0.0, 0
    phase: set[str] = set()
    bound_s = 2 * (SJF_STARVED + len(kinds)) * (max(s for _, _, s in kinds) + 2 * SWITCH_S)
    while min(chosen.values()) < 2:
        turn += 1
        candidates = [
            made(
                name,
                job=job,
                arrival_s=arrivals[name],
                arrival=turn,
                duration_s=duration_s,
                switch_s=0.0 if job == holder else SWITCH_S,
                back_s=0.0 if job == holder else SWITCH_S,
                served=served.get(job, 0),
                continues=job == holder and name not in phase,
            )
            for name, job, duration_s in kinds
        ]
        jobs = sorted({job for _, job, _ in kinds})
        last = max(range(len(jobs)), key=lambda i: (served.get(jobs[i], 0), i))
        answer = ORDERING[policy].choose(
            DeviceView(
                now_s,
                candidates,
                Resident(holder, since_s, now_s) if holder else None,
                members=[TurnMember(job, 0.0) for job in [*jobs[last + 1 :], *jobs[: last + 1]]],
                may_wait=True,
            )
        )
        assert isinstance(answer, Candidate)
        if answer.job != holder:
            holder, since_s = answer.job, now_s
        phase = phase | {answer.deployment} if answer.continues else {answer.deployment}
        now_s += answer.switch_s + answer.duration_s
        arrivals[answer.deployment] = now_s
        served[answer.job] = turn
        chosen[answer.deployment] += 1
        waiting_s = now_s - min(arrivals.values())
        assert waiting_s <= bound_s, f"{policy}: {chosen} after {now_s} s"


# --- Each -----------------------------------------------------------------------------------------


def test_fcfs_and_sjf_choose_by_arrival_and_by_duration() -> None:
    early = made("early", arrival_s=1.0, duration_s=50.0)
    short = made("short", arrival_s=2.0, duration_s=1.0)
    view = DeviceView(10.0, [short, early])
    assert ORDERING["fcfs"].choose(view) is early
    assert sjf.choose(view) is short
    later = DeviceView(
        SJF_STARVED * 50.0 + 1.0, [made("short", arrival_s=1e4, duration_s=1.0), early]
    )
    assert sjf.choose(later) is early, "it has waited for long enough"


def test_least_recently_served_goes_by_jobs() -> None:
    a, b = made("a", served=7), made("b", served=3, arrival_s=9.0)
    new = made("new", served=0, arrival_s=9.5)
    assert ORDERING["lrs"].choose(DeviceView(10.0, [a, b, new])) is new
    assert ORDERING["lrs"].choose(DeviceView(10.0, [a, b])) is b


def resident_of(**fields: Any) -> Resident:
    given: dict[str, Any] = {"job": "a", "since_s": 0.0, "idle_since_s": 100.0}
    return Resident(**{**given, **fields})


RIVAL = made("b", arrival_s=95.0, back_s=SWITCH_S)


def holding(resident: Resident, *candidates: Candidate, now_s: float = 100.0) -> Any:
    return hold.choose(DeviceView(now_s, candidates, resident, may_wait=True))


def test_device_is_held_while_the_gap_is_shorter_than_the_switch_back() -> None:
    short = resident_of(net_gap_s=SWITCH_S - 1.0)
    answer = holding(short, RIVAL)
    assert answer == Wait(100.0 + PATIENCE * SWITCH_S, "a", answer.why)
    assert "its gap here takes 19.00 s, and to return takes 20.00 s" in answer.why
    assert holding(resident_of(net_gap_s=SWITCH_S), RIVAL) is RIVAL
    assert holding(resident_of(), RIVAL) is RIVAL, "the gap is not known"
    beside = made("b", arrival_s=95.0, back_s=0.0)
    assert holding(short, beside) is beside, "to leave costs nothing"


def test_gap_includes_the_switches_that_the_job_needs_elsewhere() -> None:
    gap = resident_of(net_gap_s=12.0, away_switch_s=7.0)
    assert isinstance(holding(gap, RIVAL), Wait)
    assert holding(resident_of(net_gap_s=12.0, away_switch_s=8.0), RIVAL) is RIVAL


def test_job_that_waits_for_another_device_holds_none() -> None:
    assert holding(resident_of(net_gap_s=5.0, is_blocked=True), RIVAL) is RIVAL


def test_device_is_left_once_the_job_is_overdue_unless_it_is_still_busy_elsewhere() -> None:
    overdue_s = 100.0 + PATIENCE * SWITCH_S
    assert holding(resident_of(net_gap_s=5.0), RIVAL, now_s=overdue_s) is RIVAL
    busy = resident_of(net_gap_s=5.0, is_busy=True, period_s=200.0)
    assert isinstance(holding(busy, RIVAL, now_s=overdue_s), Wait)


def test_turn_ends_once_others_have_waited_for_a_cycle_of_every_job() -> None:
    """A cycle of each job, with both of its switches; a turn that has just begun goes on."""
    own = made("a", arrival_s=100.0, switch_s=0.0)
    assert hrrs.choose(DeviceView(100.0, [own, RIVAL])) is RIVAL, "HRRS: it has not waited yet"
    rival = made("b", arrival_s=95.0, back_s=SWITCH_S, period_s=60.0)
    turn = resident_of(period_s=30.0)
    end_s = 95.0 + (60.0 + 2 * SWITCH_S) + (30.0 + 2 * SWITCH_S)
    assert holding(turn, own, rival, now_s=end_s - 1.0) is own
    assert holding(turn, own, rival, now_s=end_s) is rival
    fresh = resident_of(period_s=30.0, since_s=end_s - 1.0)
    assert holding(fresh, own, rival, now_s=end_s) is own
    least_s = end_s - 1.0 + LEAST_TURN * 2 * SWITCH_S
    assert holding(fresh, own, rival, now_s=least_s) is rival
    going_on = made("a", arrival_s=100.0, switch_s=0.0, continues=True)
    assert holding(fresh, going_on, rival, now_s=least_s) is going_on, "a phase is not broken into"


def test_hold_ends_if_an_slo_has_no_slack_left() -> None:
    gap = resident_of(net_gap_s=5.0)
    own = made("a", arrival_s=100.0, switch_s=0.0)
    tight = made("b", arrival_s=95.0, back_s=SWITCH_S, slack_s=SWITCH_S)
    assert holding(gap, tight) is tight
    looser = made("b", arrival_s=95.0, back_s=SWITCH_S, slack_s=SWITCH_S + 7.0)
    assert holding(gap, looser).until_s == 107.0
    assert holding(gap, own, looser) is looser, "its operation would take 10 s"


def test_reasons_say_why_a_device_is_held_or_left() -> None:
    held = DeviceView(100.0, [RIVAL], resident_of(net_gap_s=5.0), may_wait=True)
    left = DeviceView(100.0, [RIVAL], resident_of(net_gap_s=50.0), may_wait=True)
    assert hold.why(RIVAL, held).startswith(
        "the last job on the device keeps it for now: its gap here takes 5.00 s, and to return "
        "takes 20.00 s; response ratio 1.17: waited 5.00 s"
    )
    assert "leaves it: its gap here takes 50.00 s, and to return takes 20" in hold.why(RIVAL, left)


def test_round_robin_waits_for_the_next_in_order() -> None:
    choose = ORDERING["round_robin"].choose
    a, c = made("a"), made("c", arrival_s=5.0)
    members = [TurnMember("b", 130.0), TurnMember("c", 0.0), TurnMember("a", 130.0)]
    answer = choose(DeviceView(100.0, [a, c], members=members, may_wait=True))
    assert answer == Wait(130.0, "b", answer.why)  # type: ignore[union-attr]
    assert choose(DeviceView(130.0, [a, c], members=members, may_wait=True)) is c, (
        "b is passed over"
    )
    b = made("b", arrival_s=99.0)
    assert choose(DeviceView(100.0, [a, b, c], members=members, may_wait=True)) is b


@pytest.mark.parametrize("policy", ["round_robin", "fifo_lock"])
def test_phase_is_not_broken_into(policy: str) -> None:
    choose = ORDERING[policy].choose
    going_on = made("a", arrival_s=99.0, continues=True)
    members = [TurnMember("b", 0.0), TurnMember("a", 0.0)]
    turn = resident_of(phase_until_s=110.0)
    assert choose(DeviceView(100.0, [RIVAL, going_on], turn, members, may_wait=True)) is going_on
    wait = choose(DeviceView(100.0, [RIVAL], turn, members, may_wait=True))
    assert isinstance(wait, Wait)
    assert (wait.until_s, wait.job) == (110.0, "a")
    assert choose(DeviceView(110.0, [RIVAL], turn, members, may_wait=True)) is RIVAL
    next_phase = made("a", arrival_s=99.0)
    assert choose(DeviceView(100.0, [RIVAL, next_phase], turn, members, may_wait=True)) is RIVAL


def test_timeline_brings_back_what_a_foreign_one_displaced() -> None:
    here = made("a", switch_s=0.0)
    plan = timeline([here, RIVAL, made("a2", job="a", switch_s=0.0)], 0.0)
    assert [(e.start_s, e.end_s) for e in plan] == [(0, 10), (30, 40), (60, 70)]


def test_timeline_switches_a_job_in_once_for_all_that_it_does_in_a_row() -> None:
    """a runs until 110; b comes in for both of its operations, then a comes back for two."""
    running = made("a", switch_s=0.0, duration_s=10.0)
    b2 = made("b2", job="b", duration_s=10.0, switch_s=SWITCH_S)
    b1 = made("b1", job="b", duration_s=30.0, switch_s=SWITCH_S)
    back = [made(name, job="a", switch_s=0.0, duration_s=5.0) for name in ("a2", "a3")]
    plan = timeline([running, b2, b1, *back], 100.0)
    starts_s = [entry.start_s for entry in plan]
    assert starts_s == [100, 130, 140, 190, 195]
