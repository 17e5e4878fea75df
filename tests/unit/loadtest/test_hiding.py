"""What is made of a log: which switches nobody waited for, and why others were."""

from __future__ import annotations

import msgspec
import pytest

from loadtest.hiding import Settings, middle, report
from phaseloom.common.contract.ids import DeploymentKey, OperationKey
from phaseloom.demo.report import Execution, RunLog, Switch

DEVICE = ("train-0",)


def ran(job: str, ready_s: float, start_s: float, end_s: float) -> Execution:
    key = OperationKey("bench", job, "policy", str(int(10 * start_s)))
    return Execution(key, "forward_backward", DEVICE, ready_s, ready_s, start_s, end_s)


def switched(job: str, start_s: float, seconds: float) -> Switch:
    to = DeploymentKey("bench", job, "policy")
    return Switch(DEVICE, to, start_s, seconds / 2, seconds / 2, 1, 1)


def test_switch_seconds_are_hidden_or_told_why_not() -> None:
    log = RunLog(
        devices=["train-0"],
        executions=[
            ran("a", 0, 0, 1),
            ran("b", 12, 12, 13),  # it was switched in before
            ran("a", 20.5, 21, 22),  # it came in the middle of that
            ran("b", 29, 31, 32),  # it came, and only then
            ran("a", 37, 37, 40),
            ran("b", 38, 41, 50),  # while another one ran
        ],
        switches=[
            switched("b", 10, 1),
            switched("a", 20, 1),
            switched("b", 30, 1),
            switched("a", 33, 1),
            switched("b", 40, 1),
        ],
    )
    found = report(Settings(), log)
    assert found.switches == 5
    assert (found.switch_seconds, found.hidden_seconds) == (5.0, 2.5)
    assert found.hidden_share == pytest.approx(0.5)
    assert found.unhidden_seconds == {
        "behind another operation": 1.0,
        "begun too late": 0.5,
        "not foreseen": 1.0,
    }
    assert found.hidden_share_settled == pytest.approx(1 / 3, abs=1e-3)
    assert found.idle_share == {"train-0": pytest.approx(1 - (16 + 5) / 50, abs=1e-3)}


def test_of_several_runs_the_median_one_is_reported() -> None:
    log = RunLog(devices=["train-0"], executions=[ran("a", 0, 0, 1)], switches=[])
    runs = [
        msgspec.structs.replace(report(Settings(), log), hidden_share=share, switches=number)
        for number, share in enumerate([0.9, 0.5, 0.7])
    ]
    reported = middle(runs)
    assert (reported.hidden_share, reported.switches) == (0.7, 2)
    assert reported.hidden_shares == [0.5, 0.7, 0.9]
    assert middle(runs[:2]).hidden_share == 0.5, "none is made up"
