"""Whose turn it is to be looked at: bounded, fair, and nobody is forgotten."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.ids import JobKey
from phaseloom.profiler.core.agenda import BURST, SPACING_S, Agenda


def job(number: int) -> JobKey:
    return JobKey("demo", f"job-{number}")


def test_a_burst_of_looks_is_free_and_then_they_are_spaced() -> None:
    agenda = Agenda()
    for number in range(2 * BURST):
        agenda.add(job(number), 5.0, number)
    at_once = [agenda.next(5.0) for _ in range(2 * BURST)]
    assert at_once == [*map(job, range(BURST)), *[None] * BURST]
    assert agenda.next(5.0 + 0.9 * SPACING_S) is None
    assert agenda.next(5.0 + 1.1 * SPACING_S) == job(BURST)
    assert agenda.next(5.0 + 1.2 * SPACING_S) is None


def test_nobody_is_looked_at_before_it_is_due() -> None:
    agenda = Agenda()
    agenda.add(job(1), 7.0, 1)
    agenda.add(job(2), 6.0, 2)
    assert [agenda.next(t) for t in (5.9, 6.9, 6.9, 7.0, 7.0)] == [None, job(2), None, job(1), None]


def test_who_is_discarded_has_no_turn_until_added_again() -> None:
    agenda = Agenda()
    agenda.add(job(1), 1.0, 1)
    agenda.discard(job(1))
    assert job(1) not in agenda
    assert agenda.next(2.0) is None
    agenda.add(job(1), 1.0, 2)
    agenda.discard(job(1))
    agenda.add(job(1), 4.0, 3)
    assert [agenda.next(3.0), agenda.next(4.0), agenda.next(4.0)] == [None, job(1), None]


@given(
    steps=st.lists(
        st.tuples(st.floats(0.0, 0.5), st.integers(0, 40), st.floats(0.0, 3.0)), max_size=300
    )
)
def test_looks_are_bounded_and_everyone_has_its_turn(
    steps: list[tuple[float, int, float]],
) -> None:
    agenda, now_s = Agenda(), 0.0
    looks_s: list[float] = []
    due_s: dict[JobKey, float] = {}
    for sequence, (pause_s, number, delay_s) in enumerate(steps):
        now_s += pause_s
        if job(number) not in agenda:
            due_s[job(number)] = now_s + delay_s
            agenda.add(job(number), now_s + delay_s, sequence)
        looked = agenda.next(now_s)
        if looked is not None:
            assert due_s.pop(looked) <= min([now_s, *due_s.values()]), "longest due first"
            looks_s.append(now_s)
    for i, first_s in enumerate(looks_s):
        until = bisect_left(looks_s, first_s + 1.0)
        assert until - i <= BURST + 1.0 / SPACING_S + 1
    while due_s:
        now_s += 3.0
        looked = agenda.next(now_s)
        assert looked is not None
        del due_s[looked]
    assert agenda.next(now_s + 3.0) is None
