"""What a program is told of a mesh that does not answer."""

from __future__ import annotations

import pytest

from phaseloom.client import contact
from phaseloom.client.contact import REPORT_AFTER_S, Contact


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(contact, "time", clock)
    return clock


def test_silence_is_reported_once_it_lasts_and_seldom_again(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = Contact(60.0)
    for _ in range(int(10 * (REPORT_AFTER_S + 50))):
        mesh.silent("no answer")
        clock.now_s += 0.1
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("the mesh has not answered for 2 s (no answer)")
    mesh.answered()
    mesh.answered()
    assert [record.getMessage() for record in caplog.records][1:] == ["the mesh answers again"]


def test_one_unanswered_request_is_no_silence_and_an_answer_forgets_it(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = Contact(60.0)
    for _ in range(10):
        mesh.silent("no answer")
        mesh.answered()
        clock.now_s += 10.0
    assert not caplog.records


@pytest.mark.usefixtures("clock")
def test_request_that_waited_long_for_its_answer_counts_from_its_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Contact(60.0).silent("timed out", since_s=95.0)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "not answered for 5 s (timed out)" in told
