"""What a run says at its end, and when it says that it failed."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from phaseloom.demo import verdict
from phaseloom.demo.report import (
    AloneRun,
    JobResult,
    Processors,
    Summary,
    Usage,
    read_log,
    summarize,
)
from tests.support.runlog import alone, shared


def result(name: str, *, end: float = 0.75, sha: str = "") -> JobResult:
    return JobResult(name, 2, 0.5, end, sha or f"sha-{name}", 99.5, 126.0, [0.5, 0.6])


def summary(a: JobResult, b: JobResult, *, baseline: bool = True) -> Summary:
    runs = [
        AloneRun(result("a"), read_log(alone("a", 4.0, 4.0).recorded())),
        AloneRun(result("b"), read_log(alone("b", 3.0, 5.0).recorded())),
    ]
    log = read_log([e for e in shared().recorded() if not getattr(e.event, "error", None)])
    return summarize("r", 0, log, [a, b], alone=runs if baseline else [], notes=["mind this"])


def test_no_problem_when_rewards_rise_and_weights_agree() -> None:
    assert verdict.problems(summary(result("a"), result("b")), judges_rewards=True) == []


def test_differing_weights_are_a_problem() -> None:
    (problem,) = verdict.problems(
        summary(result("a"), result("b", sha="other")), judges_rewards=True
    )
    assert "weights of b differ: alone sha-b, shared other" in problem


def test_reward_that_does_not_rise_is_a_problem_only_where_it_is_judged() -> None:
    flat = summary(result("a"), result("b", end=0.5))
    (problem,) = verdict.problems(flat, judges_rewards=True)
    assert "reward of b did not rise: 0.500 → 0.500" in problem
    assert verdict.problems(flat, judges_rewards=False) == []


def test_failed_operations_are_a_problem() -> None:
    log = read_log(shared().recorded())
    failed = summarize("r", 0, log, [result("a"), result("b")])
    assert verdict.problems(failed, judges_rewards=True) == ["1 operations failed"]


def test_printed_summary_has_the_comparison() -> None:
    said = summary(result("a"), result("b"))
    console = Console(file=io.StringIO(), width=120)
    console.print(verdict.tables(said))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for figure in ("16.000", "12.500", "21.9 % (43.8 %)", "6.00 (0.50)", "1.19 ×", "56.0 %"):
        assert figure in text
    lines = "\n".join(verdict.hashes(said) + verdict.notes(said))
    assert "sha-a  a, shared: identical" in lines
    assert "82.0 s shared, 32.0 s one job after the other" in lines
    assert "note: mind this" in lines


def test_printed_summary_without_a_baseline_has_no_comparison() -> None:
    said = summary(result("a"), result("b"), baseline=False)
    assert "saved" not in "\n".join(verdict.notes(said))
    assert verdict.hashes(said)[2] == "  sha-a  a"


@pytest.mark.parametrize(
    ("shared", "cause"),
    [
        (Usage(100.0, 90.0, 105.0), "busy with other work: the jobs' processes got 0.9 of 2 cores"),
        (Usage(100.0, 190.0, 5.0), "share 2 cores, of which the jobs' processes used 1.9"),
        (Usage(100.0, 100.0, 5.0), "switches took 6.0 s, of which 0.5 s were hidden"),
    ],
)
def test_loss_is_told_as_a_cost_with_its_cause(shared: Usage, cause: str) -> None:
    said = replace(
        summary(result("a"), result("b")),
        saved_percent=-74.7,
        processors=Processors(2, Usage(80.0, 120.0, 8.0), shared),
    )
    lines = "\n".join(verdict.notes(said))
    assert "cost 74.7 % more device-seconds per training step than one job after the other" in lines
    assert f"because {cause}" in lines.replace("the machine was ", "").replace(
        "the emulated devices ", ""
    )
    assert "alone 30.00 s in 20.00 s (1.5 of 2 cores, other programs 0.1)" in lines
    assert "-74.7" not in lines
