"""What the demo of one shared device makes of its runs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.processes import child_specs
from phaseloom.cli.recorder import Recorded
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.specs import DeviceKind
from phaseloom.common.process.slowdowns import read
from phaseloom.common.transport.natsserver import Credentials
from phaseloom.demo.command import demo
from phaseloom.demo.controllers import find_example
from phaseloom.demo.report import Execution, JobResult, RunLog
from phaseloom.demo.spatial import (
    SETTINGS,
    SpatialRun,
    SpatialSummary,
    directory_of,
    lines_of,
    mesh_of,
    predicted,
    problems,
    run_of,
    setting_of,
    summarize,
    write,
)
from tests.support.byturns import BESIDE, ON_A_HALF, ROLL_OUT, TABLE, by_turns

CREDENTIALS = Credentials("nats://127.0.0.1:1", "mesh", "word", {"demo": "other"})
SAME = {"a": "11", "b": "22"}


def rounds(*seconds: tuple[float, ...], beside: float = 0.5) -> list[SpatialRun]:
    """Rounds of `off`, `static`, `greedy` and, where there are four figures, `lookahead`."""
    policies = ("off", "static", "greedy", "lookahead")
    return [
        SpatialRun(number, policy, taken, SAME, beside)
        for number, each in enumerate(seconds, 1)
        for policy, taken in zip(policies, each, strict=False)
    ]


def ran(job: str, start_s: float, end_s: float) -> Execution:
    key = OperationKey("demo", job, "policy", "1")
    return Execution(key, "forward_backward", ("device-0/0",), start_s, start_s, start_s, end_s)


def test_ratio_is_the_median_of_the_rounds() -> None:
    found = summarize(rounds((30.0, 25.0, 20.0), (40.0, 20.0, 20.0), (30.0, 20.0, 24.0)))
    assert found.ratios == [1.5, 2.0, 1.25]
    assert found.ratio == 1.5
    assert (found.serial_seconds, found.static_seconds, found.multiplexed_seconds) == (30, 20, 20)
    assert found.weights_identical
    assert problems(found) == []
    assert "identical" in lines_of(found)[-1]


def test_other_weights_are_a_problem_and_a_small_gain_is_none() -> None:
    runs = rounds((30.0, 25.0, 29.0))
    runs[1] = msgspec.structs.replace(runs[1], weights_sha256={**SAME, "b": "33"})
    found = summarize(runs)
    assert not found.weights_identical
    (weights,) = problems(found)
    assert "weights" in weights


def test_a_run_lasts_from_the_first_job_to_the_last() -> None:
    results = [
        JobResult("a", 3, 0.0, 0.0, "11", 10.0, 20.0),
        JobResult("b", 3, 0.0, 0.0, "22", 11.0, 25.0),
    ]
    log = RunLog(executions=[ran("a", 8.0, 16.0), ran("b", 13.0, 19.0)])
    assert run_of(1, "off", results, log) == SpatialRun(1, "off", 15.0, SAME, 0.2, 10.0)


def test_each_run_is_predicted_from_the_run_by_turns_of_its_round(tmp_path: Path) -> None:
    """Two rollouts on a unit each: beside one another until the shorter one ends."""
    mesh, entries, (begin_s, end_s) = by_turns({"a": [ROLL_OUT], "b": [ROLL_OUT]})
    short_s, long_s = sorted(ran_s for (ran_s,) in mesh.ran_s.values())
    log = directory_of(tmp_path, 1, "off") / "events.jsonl"
    log.parent.mkdir()
    log.write_bytes(b"".join(msgspec.json.encode(Recorded(*entry)) + b"\n" for entry in entries))
    runs = [
        SpatialRun(1, policy, end_s - begin_s, SAME, begin_unix_s=begin_s)
        for policy in ("off", "static")
    ]
    by_turns_s, static_s = (run.predicted_seconds for run in predicted(runs, tmp_path, TABLE))
    assert by_turns_s == pytest.approx(end_s - begin_s, abs=1e-4)
    expected_s = ON_A_HALF * (BESIDE * short_s + long_s - short_s)
    assert static_s == pytest.approx(expected_s, abs=1e-4)


def test_runs_are_kept_where_a_prediction_fails(tmp_path: Path) -> None:
    """Of the first round there is no log, in that of the second nothing happened."""
    log = directory_of(tmp_path, 2, "off") / "events.jsonl"
    log.parent.mkdir()
    log.write_bytes(b"")
    runs = rounds((30.0, 25.0, 20.0), (40.0, 20.0, 20.0))
    found = predicted(runs, tmp_path, TABLE)
    assert [run.seconds for run in found] == [run.seconds for run in runs]
    assert all(run.predicted_seconds is None for run in found)
    told = lines_of(summarize(found))
    (missing,) = [line for line in told if line.startswith("round 1, greedy: no prediction")]
    assert "events.jsonl" in missing
    (empty,) = [line for line in told if line.startswith("round 2, greedy: no prediction")]
    assert "no operation that was queued in the window has ended" in empty
    assert not any("predicted +" in line for line in told)


def test_how_far_predictions_are_off_is_told() -> None:
    runs = [
        msgspec.structs.replace(run, predicted_seconds=1.1 * run.seconds)
        for run in rounds((30.0, 25.0, 20.0), (40.0, 20.0, 20.0))
    ]
    found = summarize(runs)
    assert found.serial_predicted_over == pytest.approx([1.1, 1.1])
    assert found.policies["static"].predicted_over == pytest.approx([1.1, 1.1])
    assert sum("predicted +10%" in line for line in lines_of(found)) == 3


def test_each_policy_has_figures_of_its_own() -> None:
    found = summarize(rounds((30.0, 25.0, 20.0, 15.0), (30.0, 30.0, 24.0, 20.0)), "tools")
    assert found.setting == "tools"
    assert found.policies["lookahead"].ratios == [2.0, 1.5]
    assert found.policies["lookahead"].over_static == pytest.approx((25 / 15 + 30 / 20) / 2)
    assert found.policies["static"].ratio == pytest.approx((30 / 25 + 1) / 2)
    assert (found.multiplexed_seconds, found.ratio) == (22.0, found.policies["greedy"].ratio)


def test_sharing_is_a_problem_where_the_table_says_that_it_does_not_pay() -> None:
    shared = rounds((30.0, 33.0, 31.0), beside=0.5)
    assert problems(summarize(shared, "steady")) == []
    (problem,) = problems(summarize(shared, "no-gain"))
    assert "greedy shared the device for 50% of the time" in problem
    alone = rounds((30.0, 33.0, 30.0), beside=0.01)
    assert problems(summarize(alone, "no-gain")) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_is_of_two_jobs_that_an_example_can_run(setting: str) -> None:
    setting_of = SETTINGS[setting]
    specs = setting_of.specs(("chain_sum", "letter_counting"), 0, None)
    assert len({spec.job for spec in specs}) == 2
    assert len({(spec.task, spec.seed) for spec in specs}) == 2
    assert find_example(setting_of.example).is_file()
    read(setting_of.table)


@pytest.mark.parametrize(
    ("setting", "policies", "number", "table", "field"),
    [
        ("none", ["greedy"], 3, None, "setting"),
        ("tools", ["static"], 3, None, "multiplexing"),
        ("tools", [], 3, None, "multiplexing"),
        ("tools", ["greedy", "mine"], 3, None, "multiplexing"),
        ("tools", ["greedy"], 0, None, "rounds"),
        ("no-gain", ["greedy"], 3, Path("mine.json"), "slowdowns"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    setting: str, policies: list[str], number: int, table: Path | None, field: str
) -> None:
    with pytest.raises(CallerError) as caught:
        setting_of(setting, policies, number, table)
    assert caught.value.info.field == field


def test_summary_has_the_figures_under_spatial(tmp_path: Path) -> None:
    write(SpatialSummary("r", 0, 20, summarize(rounds((30.0, 25.0, 20.0)))), tmp_path)
    spatial = json.loads((tmp_path / "summary.json").read_bytes())["spatial"]
    assert spatial["ratio"] == 1.5
    assert spatial["serial_seconds"] == 30.0
    assert spatial["static_seconds"] == 25.0
    assert spatial["multiplexed_seconds"] == 20.0
    assert spatial["weights_identical"] is True


async def test_spatial_demo_refuses_what_it_does_not_compare() -> None:
    with pytest.raises(CallerError, match="spatial"):
        await demo(spatial=True, baseline=True)
    with pytest.raises(CallerError, match="spatial"):
        await demo(setting="tools", baseline=True)


def test_a_device_of_the_demo_has_two_cores_that_its_jobs_may_divide(tmp_path: Path) -> None:
    specs = child_specs(mesh_of("greedy", MeshConfig()), tmp_path, tmp_path, CREDENTIALS, "secret")
    by_name = {spec.name: spec.environment for spec in specs}
    assert by_name["worker-device-0"]["PHASELOOM_WORKER_CORES_PER_DEVICE"] == "2"
    assert by_name["worker-device-0"]["PHASELOOM_WORKER_EXCLUSIVE_RESIDENCY"] == "shared"
    assert by_name["scheduler"]["PHASELOOM_SCHEDULER_MULTIPLEXING"] == "greedy"


def test_a_file_that_is_no_table_of_slowdowns_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.json"
    path.write_text("{}")
    with pytest.raises(CallerError) as caught:
        MeshConfig(slowdowns=str(path)).check()
    assert caught.value.info.field == "slowdowns"


@pytest.mark.parametrize(("cores", "kind"), [(0, DeviceKind.EMULATED), (2, DeviceKind.CUDA)])
def test_cores_that_cannot_be_divided_are_refused(cores: int, kind: DeviceKind) -> None:
    node = NodeConfig("n0", "train", [1], device_kind=kind, cores_per_device=cores)
    with pytest.raises(CallerError) as caught:
        MeshConfig(nodes=[node]).check()
    assert caught.value.info.field == "mesh.nodes.cores_per_device"
