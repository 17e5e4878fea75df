"""The pictures: what they show, and that they are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from phaseloom.common.observability.palette import COLOURS, job_colours
from phaseloom.demo.pictures import (
    Panel,
    draw_rewards,
    draw_timeline,
    headline,
    lightened,
    smoothed,
    steady_window,
)
from phaseloom.demo.report import AloneRun, JobResult, read_log, summarize
from tests.support.runlog import alone, shared

PNG = b"\x89PNG\r\n\x1a\n"
RESULTS = [JobResult(job, 2, 0.5, 0.75, f"sha-{job}", 99.5, 126.0, [0.5, 0.6]) for job in "ab"]


def test_smoothed_is_a_mean_over_what_came_before() -> None:
    assert smoothed([1.0, 2.0, 3.0, 7.0], 3) == pytest.approx([1.0, 1.5, 2.0, 4.0])


def test_window_lies_in_the_middle_of_the_time_in_which_both_jobs_train() -> None:
    # a trains from 100 to 119, b from 100 to 125: both until 119; three steps would be longer.
    assert steady_window(Panel("", read_log(shared().recorded()), RESULTS)) == (100.0, 119.0)


def test_jobs_have_the_colours_that_the_page_gives_them() -> None:
    """The page numbers jobs by their names (`Model.take`)."""
    assert job_colours(["b", "a"]) == {"a": COLOURS[0], "b": COLOURS[1]}


def test_lightened_reaches_white() -> None:
    assert lightened("#0072B2", 0.0) == pytest.approx((0, 0x72 / 255, 0xB2 / 255))
    assert lightened("#0072B2", 1.0) == pytest.approx((1, 1, 1))


def test_pictures_are_drawn_with_a_baseline(tmp_path: Path) -> None:
    log = read_log(shared().recorded())
    alone_logs = [
        read_log(alone("a", 4.0, 4.0).recorded()),
        read_log(alone("b", 3.0, 5.0).recorded()),
    ]
    runs = [AloneRun(r, each) for r, each in zip(RESULTS, alone_logs, strict=True)]
    summary = summarize("r", 0, log, RESULTS, alone=runs)
    assert "21.9 % of the device-seconds saved (bound 43.8 %)" in headline(summary)
    panels = [Panel(f"{a.result.name} alone", a.log, [a.result]) for a in runs]
    draw_timeline([*panels, Panel("both", log, RESULTS)], summary, tmp_path / "timeline.png")
    draw_rewards(RESULTS, tmp_path / "rewards.png")
    for name in ("timeline.png", "rewards.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
