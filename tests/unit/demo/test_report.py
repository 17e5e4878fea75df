"""The figures of a run, against logs whose answers were derived by hand (see `runlog`)."""

from __future__ import annotations

import msgspec
import pytest

from phaseloom.demo.report import (
    AloneRun,
    JobResult,
    Summary,
    figures,
    least_shared_seconds,
    read_log,
    summarize,
)
from tests.support.runlog import HandMade, alone, shared


def result(name: str, sha: str = "", end_s: float = 126.0) -> JobResult:
    return JobResult(name, 2, 0.5, 0.75, sha or f"sha-{name}", 99.5, end_s, [0.5, 0.6])


def compared(sha_b: str = "sha-b") -> Summary:
    return summarize(
        "r1",
        0,
        read_log(shared().recorded()),
        [result("a"), result("b")],
        alone=[
            AloneRun(result("a"), read_log(alone("a", 4.0, 4.0).recorded())),
            AloneRun(result("b", sha_b), read_log(alone("b", 3.0, 5.0).recorded())),
        ],
        notes=["a note"],
    )


def test_saved_percent_compares_device_seconds_per_step() -> None:
    summary = compared()
    # Alone 16 s each on 2 devices, 4 steps: (32 + 32)/4. Shared from 100 to 125: 2 * 25/4.
    assert summary.device_seconds_per_step.alone == pytest.approx(16.0)
    assert summary.device_seconds_per_step.shared == pytest.approx(12.5)
    assert summary.saved_percent == pytest.approx(21.875)


def test_bound_is_the_busiest_device_when_it_exceeds_either_job() -> None:
    # Train devices alone: a 8 s, b 10 s; 18 s is more than either job's 16 s.
    assert compared().bound_saved_percent == pytest.approx(100 * (1 - 18 / 32))


def test_bound_is_the_longer_job_when_devices_are_idle_enough() -> None:
    alone_runs = [(16.0, {"r0": 2.0, "t0": 3.0}), (20.0, {"r0": 1.0, "t0": 4.0})]
    assert least_shared_seconds(alone_runs) == 20.0


def test_slowdown_is_each_jobs_own_window_over_alone() -> None:
    assert [j.slowdown for j in compared().jobs] == pytest.approx([19 / 16, 25 / 16])


def test_context_switches_are_changes_of_job_and_half_of_one_was_hidden() -> None:
    summary = compared()
    assert summary.context_switches == 6
    assert summary.switch_seconds == pytest.approx(6.0)
    assert summary.hidden_switch_seconds == pytest.approx(0.5)


def test_switch_that_was_over_before_its_operation_came_is_hidden() -> None:
    """Opened early: from 13 to 14, for an operation that comes at 15."""
    log = HandMade()
    log.mesh("a", "b")
    log.switch_in("a", "sampler", 9.0, 0.0, 1.0)
    log.operation("a", "sampler", 10.0, 10.0, 12.0)
    log.switch_in("b", "sampler", 13.0, 0.4, 0.6)
    log.operation("b", "sampler", 15.0, 15.0, 17.0)
    measured = figures(read_log(log.recorded()), (10.0, 17.0))
    assert measured.switch_seconds == pytest.approx(1.0)
    assert measured.hidden_switch_seconds == pytest.approx(1.0)


def test_wrong_guess_hides_nothing_of_what_another_job_waited() -> None:
    """Opened early for b from 13 to 14; a's operation comes at 13.25, and needs a switch back."""
    log = HandMade()
    log.mesh("a", "b")
    log.switch_in("a", "sampler", 9.0, 0.0, 1.0)
    log.operation("a", "sampler", 10.0, 10.0, 12.0)
    log.switch_in("b", "sampler", 13.0, 0.4, 0.6)
    log.switch_in("a", "sampler", 14.0, 0.4, 0.6)
    log.operation("a", "sampler", 13.25, 15.0, 17.0)
    measured = figures(read_log(log.recorded()), (10.0, 17.0))
    assert measured.switch_seconds == pytest.approx(2.0)
    assert measured.hidden_switch_seconds == pytest.approx(0.25)


def test_operation_on_another_device_of_the_node_does_not_wait_for_a_switch() -> None:
    log = HandMade()
    log.mesh("a", "b", num_devices=2)
    log.started("c", "sampler", [1])
    log.switch_in("a", "sampler", 9.0, 0.0, 1.0)
    log.operation("a", "sampler", 10.0, 10.0, 12.0)
    log.switch_in("b", "sampler", 13.0, 0.4, 0.6)
    log.operation("c", "sampler", 13.0, 14.0, 15.0)
    measured = figures(read_log(log.recorded()), (10.0, 15.0))
    assert measured.hidden_switch_seconds == pytest.approx(1.0)
    assert measured.busy_share == pytest.approx({"r0/0": 0.4, "r0/1": 0.2, "t0/0": 0, "t0/1": 0})


def test_switch_over_two_devices_counts_once_with_its_seconds_on_each() -> None:
    log = HandMade()
    log.mesh("b", num_devices=2)
    log.started("a", "sampler", [0, 1])
    log.switch_in("b", "sampler", 8.0, 0.0, 1.0)
    log.switch_in("a", "sampler", 9.0, 0.5, 0.5)
    log.operation("a", "sampler", 9.0, 10.0, 12.0)
    run = read_log(log.recorded())
    (switch,) = run.switches
    assert switch.devices == ("r0/0", "r0/1")
    measured = figures(run, (9.0, 12.0))
    assert measured.switch_seconds == pytest.approx(2.0)
    assert measured.hidden_switch_seconds == pytest.approx(0.0)
    assert measured.busy_share["r0/0"] == measured.busy_share["r0/1"] == pytest.approx(2 / 3)


def test_first_load_and_other_deployment_of_the_same_job_are_no_context_switch() -> None:
    log = HandMade()
    log.mesh("a")
    for start_s in (3.0, 5.0):
        log.switch_in("a", "sampler", start_s, 0.0, 1.0)
    assert read_log(log.recorded()).switches == []


def test_change_of_job_without_bytes_is_no_context_switch() -> None:
    """Both working sets fit a shared device: nothing moves."""
    log = HandMade()
    log.mesh("a", "b")
    log.switch_in("a", "sampler", 3.0, 0.0, 1.0)
    log.switch_in("b", "sampler", 5.0, 0.0, 0.0)
    assert read_log(log.recorded()).switches == []


def test_busy_share_counts_execution_only() -> None:
    summary = compared()
    assert summary.busy_share == pytest.approx({"r0": 14 / 25, "t0": 18 / 25})
    assert summary.waiting_share == pytest.approx({"r0": 0.0, "t0": 0.0})


def test_waiting_share_is_ready_work_on_an_idle_device() -> None:
    log = HandMade()
    log.mesh("a")
    log.operation("a", "sampler", 10.0, 12.0, 15.0)
    log.operation("a", "sampler", 11.0, 15.5, 20.0)
    measured = figures(read_log(log.recorded()), (10.0, 20.0))
    # 10 to 12 before the first, 15 to 15.5 before the second.
    assert measured.waiting_share == pytest.approx({"r0": 0.25, "t0": 0.0})
    assert measured.busy_share == pytest.approx({"r0": 0.75, "t0": 0.0})


def test_operation_held_back_by_its_predecessor_does_not_wait_for_the_device() -> None:
    """Two micro-batches queued together: the second is ready when the first is done."""
    log = HandMade()
    log.mesh("a")
    log.operation("a", "policy", 10.0, 10.0, 14.0)
    log.operation("a", "policy", 10.0, 14.25, 18.25)
    second = read_log(log.recorded()).executions[1]
    assert second.waited == (14.0, 14.25)


def test_operations_count_refused_as_failed_once() -> None:
    # Nine of both jobs (warm-up and evaluation included), one refused.
    operations = compared().operations
    assert (operations.submitted, operations.completed, operations.failed) == (11, 10, 1)


def test_replayed_operation_counts_once() -> None:
    log = shared()
    again = [
        (126.0 + i, msgspec.structs.replace(event, replay=i == 0))
        for i, (_, event) in enumerate(
            [e for e in log.events if type(e[1]).__name__ == "OperationFinished"][:2]
        )
    ]
    log.events += again
    assert read_log(log.recorded()).completed == 10


def test_whole_run_includes_warm_up_and_evaluation() -> None:
    whole = compared().whole_run
    assert whole.seconds == pytest.approx(132.0 - 50.0)
    assert whole.alone_seconds == pytest.approx(32.0)


def test_weights_identical_tells_when_one_sha_differs() -> None:
    same, other = compared().baseline, compared(sha_b="other").baseline
    assert same is not None
    assert other is not None
    assert same.weights_identical
    assert not other.weights_identical


def test_baseline_gives_phases_per_step() -> None:
    baseline = compared().baseline
    assert baseline is not None
    assert baseline.jobs[1].busy_seconds_per_step == pytest.approx({"r0": 3.0, "t0": 5.0})
    assert baseline.jobs[1].seconds_per_step == pytest.approx(8.0)


def test_summary_without_baseline_leaves_comparisons_empty() -> None:
    summary = summarize("r1", 0, read_log(shared().recorded()), [result("a"), result("b")])
    assert summary.baseline is None
    assert summary.saved_percent is None
    assert summary.bound_saved_percent is None
    assert summary.device_seconds_per_step.alone is None
    assert summary.device_seconds_per_step.shared == pytest.approx(12.5)
    assert [j.slowdown for j in summary.jobs] == [None, None]


def test_summary_json_has_the_documented_keys() -> None:
    written = msgspec.json.decode(msgspec.json.encode(compared()))
    assert written["jobs"][0].keys() >= {
        "name",
        "steps",
        "reward_start",
        "reward_end",
        "weights_sha256",
        "slowdown",
    }
    assert written["device_seconds_per_step"].keys() == {"alone", "shared"}
    assert written["operations"].keys() == {"submitted", "completed", "failed"}
    assert written["baseline"]["jobs"][0]["name"] == "a"


def test_job_without_operations_between_its_barriers_is_refused() -> None:
    log = read_log(shared().recorded())
    with pytest.raises(ValueError, match="no operation of a"):
        summarize("r1", 0, log, [result("a", end_s=99.6)])
