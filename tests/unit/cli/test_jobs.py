"""What `phaseloom jobs --profile` shows."""

from __future__ import annotations

import io

from rich.console import Console

from phaseloom.cli.jobs import profile_tables
from phaseloom.common.contract.events import KindEstimate, PhaseTrace, StepRun
from phaseloom.common.contract.ids import JobKey


def shown(estimate: KindEstimate) -> str:
    console = Console(file=io.StringIO(), width=200)
    trace = PhaseTrace(JobKey("demo", "sums"), 0.0, [], [estimate])
    console.print(*profile_tables("demo.sums", trace), sep="\n")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_sub_stages_of_a_rollout_are_told_in_their_order() -> None:
    stages = (StepRun(1, 640, 0.03), StepRun(40, 40 * 64, 0.2), StepRun(90, 90 * 3, 0.15))
    text = shown(KindEstimate("sampler", "generate", 0.4, 0.0, 9, sub_stages=stages))
    told = "30 ms in 1 step of 640 tokens, then 200 ms in 40 steps of 64 tokens, then 150 ms in 90 "
    assert f"sub-stages of sampler.generate: {told}steps of 3 tokens" in text


def test_each_replica_has_a_line() -> None:
    stages = StepRun(40, 40, 0.2, 0), StepRun(10, 20, 0.1, 1)
    text = shown(KindEstimate("sampler", "generate", 0.4, 0.0, 9, sub_stages=stages))
    assert "sub-stages of sampler.generate, replica 0: 200 ms in 40 steps of 1 tokens\n" in text
    assert "sub-stages of sampler.generate, replica 1: 100 ms in 10 steps of 2 tokens\n" in text


def test_operation_without_forward_steps_has_no_line() -> None:
    assert "sub-stages" not in shown(KindEstimate("policy", "optim_step", 0.1, 0.0, 9))
