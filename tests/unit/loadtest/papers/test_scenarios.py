"""`python -m loadtest simulate`: what it runs, what it leaves, what it refuses."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from statistics import mean
from typing import Literal

import msgspec
import pytest

from loadtest.papers.command import simulate
from loadtest.papers.scenarios import SCENARIOS, weave_company, weaving, wrong_table
from loadtest.papers.scenarios.report import at_least, at_most, markdown, mean_of, read
from loadtest.papers.scenarios.scenario import Options
from loadtest.papers.workloads import llmd, philly, weave
from phaseloom.common.contract.errors import CallerError
from phaseloom.simulator.comparison.cases import Case, ProgressReporter
from phaseloom.simulator.comparison.report import Record, Report
from tests.support.processes import child_pids, until_gone


def test_a_scenario_leaves_a_report_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate("llmd-replay", policy=("fcfs",), out=tmp_path, processes=1)
    report = read(tmp_path / "llmd-replay.json")
    assert {record.policy for record in report.records} == {"fcfs"}
    one = next(record for record in report.records if record.workload == "one job")
    two = next(record for record in report.records if record.jobs == 2)
    assert one.makespan_s is not None
    assert two.makespan_s is not None
    assert one.makespan_s < two.makespan_s < 2 * one.makespan_s
    assert (tmp_path / "llmd-replay.png").read_bytes().startswith(b"\x89PNG")
    assert "two jobs, swaps charged" in capsys.readouterr().out


def test_the_list_of_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    simulate()
    out = capsys.readouterr().out
    assert all(name in out for name in SCENARIOS)


@pytest.mark.parametrize(
    ("arguments", "field", "remedy"),
    [
        (("fig8",), "scenario", "plexrl-fig8"),
        (("plexrl-hrrs", "lottery"), "policy", "hrrs_anticipatory"),
    ],
)
def test_what_is_not_known_is_answered_with_what_is(
    arguments: tuple[str, ...], field: str, remedy: str, tmp_path: Path
) -> None:
    scenario, *policies = arguments
    with pytest.raises(CallerError) as refused:
        simulate(scenario, policy=tuple(policies), out=tmp_path)
    assert refused.value.info.field == field
    assert remedy in refused.value.info.remedy


def test_an_option_that_has_no_effect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="its own yardstick") as refused:
        simulate("weave-micro", workload=tmp_path / "mine.csv", out=tmp_path)
    assert refused.value.info.field == "workload"


def test_fewer_processes_than_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError) as refused:
        simulate("weave-micro", processes=-1, out=tmp_path)
    assert refused.value.info.field == "processes"


def test_a_workload_of_ones_own(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(
        "id,arrival,dur,profile,size,R,T,slo,model,nr,nt,mr,mt\n"
        "a,0,1,BL,S,60,60,2.0,mine,1,1,100,100\n"
        "b,0.1,1,BL,S,60,60,2.0,mine,1,1,100,100\n"
    )
    simulate("weave-fig15", policy=("solo", "coexec"), workload=table, out=tmp_path, processes=1)
    by_policy = {record.policy: record for record in read(tmp_path / "weave-fig15.json").records}
    solo, coexec = by_policy["solo"], by_policy["coexec"]
    assert solo.peak_gpus == 32
    assert coexec.peak_gpus == 16
    assert solo.slo_attainment == coexec.slo_attainment == 1
    assert coexec.cost_per_hour is not None
    assert solo.cost_per_hour is not None
    assert coexec.cost_per_hour < solo.cost_per_hour
    assert coexec.cost_over_optimal is not None
    assert solo.cost_over_optimal is not None
    assert 1.0 <= coexec.cost_over_optimal < solo.cost_over_optimal
    assert coexec.optimal_gap is None, "the optimum of two jobs is found"


def test_cost_has_no_yardstick_where_none_is_asked_for_or_the_search_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "wide.csv"
    jobs = "".join(f"{i},0,1,BL,L,60,60,2.0,mine,4,4,100,100\n" for i in range(3))
    table.write_text("id,arrival,dur,profile,size,R,T,slo,model,nr,nt,mr,mt\n" + jobs)

    def run(bound: Literal["none", "solo", "regrouping"]) -> Record:
        policy = ("coexec",)
        simulate(
            "weave-fig15", policy=policy, workload=table, bound=bound, out=tmp_path, processes=1
        )
        (record,) = read(tmp_path / "weave-fig15.json").records
        return record

    assert (run("none").cost_over_optimal, run("none").more) == (None, {})
    assert run("solo").cost_over_optimal is None
    assert run("solo").more["cost_over_solo_bound"] >= 1
    whole = run("regrouping")
    assert whole.cost_over_optimal is not None
    monkeypatch.setattr(weaving, "TRIES", 2)
    cut_off = run("regrouping")
    assert (cut_off.cost_over_optimal, cut_off.more) == (None, {})
    assert cut_off.cost_per_hour == whole.cost_per_hour


def test_long_runs_say_how_far_they_are_also_from_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = []
    options = Options(processes=2, advance=lambda *args: told.append(args))
    assert options.run_cases([Case(name, telling, (name,)) for name in "ab"]) == ["a", "b"]
    assert {("a at 3/7", 2), ("b at 3/7", 2)} <= {(what, total) for what, _, total in told}
    assert told[-1][1:] == (2, 2)


def telling(name: str) -> str:
    tell = ProgressReporter(f"{name} at", every_s=0.0)
    tell(3, 7)
    return name


async def test_killed_simulation_leaves_no_process() -> None:
    program = (
        "import time; from phaseloom.simulator.comparison.cases import Case, Options; "
        "Options(processes=2, advance=print).run_cases("
        "[Case('short', time.sleep, (0,)), *2 * [Case('long', time.sleep, (600,))]])"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-uc", program), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"short 1 3\n"
    children = child_pids(process.pid)
    assert len(children) >= 2
    process.kill()
    await process.wait()
    await until_gone(children, 20.0)


def test_failure_spares_the_others() -> None:
    """WEAVE Fig. 19: while E is away the other two go on as before."""
    report = SCENARIOS["weave-failure"].run(Options(policies=("coexec",)))
    more = report.records[0].more
    assert more["E_iterations"] == 40
    for name in ("D1", "D2"):
        assert more[f"{name}_while_away_over_alone"] <= more[f"{name}_before_over_alone"] + 0.01
    over_bound = report.records[0].over_bound
    assert over_bound is not None
    assert 1.0 <= over_bound < more["over_undisturbed"], "what E is away is not counted as lost"


@pytest.mark.parametrize(
    ("scenario", "policy"), [("plexrl-hrrs", "hrrs_anticipatory"), ("llmd-replay", "hrrs")]
)
def test_makespans_stand_beside_what_no_schedule_beats(scenario: str, policy: str) -> None:
    options = Options(policies=(policy,), seeds=(0,), processes=1)
    records = SCENARIOS[scenario].run(options).records
    assert records
    assert all(r.over_bound is not None and 1.0 <= r.over_bound < 1.3 for r in records)


def test_small_groups_stand_beside_the_cheapest_partition() -> None:
    """WEAVE Fig. 10: the planner finds it in all three, and nodes of one's own are dearer."""
    options = Options(policies=("coexec", "solo"), processes=1)
    records = SCENARIOS["weave-micro"].run(options).records
    ratios: dict[str, set[float]] = {"coexec": set(), "solo": set()}
    for record in records:
        assert record.cost_over_optimal is not None
        ratios[record.policy].add(round(record.cost_over_optimal, 6))
    assert ratios["coexec"] == {1.0}
    assert min(ratios["solo"]) > 1.9


def test_groups_that_share_nodes_in_space_are_never_dearer() -> None:
    """More side by side is more room. Rollouts save most where they are most of an iteration, and
    nothing where training fills the groups."""
    options = Options(seeds=(0, 1), processes=1)
    records = SCENARIOS["weave-space"].run(options).records
    over = {(r.workload, r.policy, r.seed): r.more["over_in_turns"] for r in records}
    for (workload, setting, seed), ratio in over.items():
        assert ratio <= 1.0 + 1e-9
        if setting.startswith("rollouts 2"):
            assert ratio <= over[workload, "rollouts 1.5", seed] + 1e-9
        if setting == "in turns":
            assert ratio == pytest.approx(1.0)
    assert all(over["RH", "rollouts 2", seed] < 0.85 for seed in (0, 1))
    assert all(over["TH", "rollouts 2", seed] == pytest.approx(1.0) for seed in (0, 1))


def test_company_that_is_counted_on_breaks_no_slo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few jobs: the study has more. Where the table has no gain for whole rollouts, nothing is
    shared, and the run is that in turns."""
    monkeypatch.setattr(weave_company, "NUM_JOBS", 8)
    monkeypatch.setattr(weave_company, "PROFILES", ("RH",))
    monkeypatch.setattr(weave_company, "_ON_GPUS", ("RH",))
    ways = ("counted on", "counted on, at worst")
    report = SCENARIOS["weave-company"].run(Options(ways, (0,), processes=1))
    found = {(r.workload, r.policy): r for r in report.records}
    assert len(found) == 5
    assert all(record.slo_attainment == 1.0 for record in report.records)
    over = {key: record.more["over_in_turns"] for key, record in found.items()}
    assert over["RH, GPU", "counted on"] == over["RH", "in turns"] == 1.0
    assert over["RH", "counted on"] < 1.0
    assert {target.is_reached for target in report.targets} == {True}


def test_a_wrong_table_costs_less_where_it_is_corrected() -> None:
    """A table that is right costs next to nothing by being looked at."""
    report = SCENARIOS["wrong-table"].run(Options(seeds=(0,), processes=1))
    assert len(report.targets) == len(wrong_table.TRUTHS)
    assert {target.is_reached for target in report.targets} == {True}
    over = {(r.workload, r.policy): r.more["over_in_turns"] for r in report.records}
    assert over[wrong_table.ALL_LOSES, "as it is"] < 0.85, "it is a wrong table"
    assert over[wrong_table.ALL_LOSES, "known"] == 1.0, "nothing is shared"


def test_the_recording_as_read_by_hand() -> None:
    """Ten steps of 13.3 minutes: six minutes of rollout, seven of training."""
    recorded = llmd.recording()
    assert recorded.iterations == 10
    assert 340 < recorded.rollout_s < 375
    assert 400 < recorded.train_s < 435
    assert recorded.rollout_s + recorded.train_s + recorded.think_s == pytest.approx(800, abs=2)
    assert recorded.swaps["train"] == pytest.approx((6.8, 2.49), abs=0.05)
    whole = llmd.recording(whole_minutes=True)
    assert whole.train_s > recorded.train_s


@pytest.mark.parametrize("profile", weave.PROFILES)
def test_generated_workloads_are_those_of_table_6(profile: str) -> None:
    jobs = weave.generate(profile, 3)
    hours = [job.iterations * job.solo_s / 3600 for job in jobs]
    assert len(jobs) == 300
    assert jobs[-1].arrival_s == pytest.approx(580 * 3600)
    assert mean(hours) == pytest.approx(14.4, rel=0.05)
    assert max(hours) < 143.2
    assert all(1 <= job.slo <= 2 for job in jobs)
    ratios = [job.phases[0].mean_s / job.phases[1].mean_s for job in jobs]
    low, high = {"BL": (0.5, 2), "RH": (2, 8), "TH": (1 / 8, 1 / 2), "Mixed": (1 / 8, 8)}[profile]
    assert all(low <= ratio <= high for ratio in ratios)
    assert weave.generate(profile, 3) == jobs != weave.generate(profile, 4)


def test_a_window_of_philly() -> None:
    jobs = philly.jobs(("ed69ec",), 330, 0)
    assert len(jobs) == 300
    assert all(0 <= job.arrival_s < 580 * 3600 for job in jobs)
    with pytest.raises(CallerError, match="not in the trace") as refused:
        philly.jobs(("nobody",), 0, 0)
    assert "ed69ec" in refused.value.info.remedy
    with pytest.raises(CallerError, match="no job arrives"):
        philly.jobs(("ed69ec",), 5000, 0)


def test_a_ratio_to_a_bound_says_how_far_it_can_be_off() -> None:
    exact = Record("a", 0, "w", cost_over_optimal=1.0)
    bounded = Record("b", 0, "w", cost_over_optimal=1.1, optimal_gap=0.0031)
    lines = markdown(Report("s", "about", {}, [exact, bounded])).splitlines()
    assert lines[0] == "| workload | policy | seeds | cost / optimal | too high by at most |"
    assert lines[2:] == ["| w | a | 1 | 1.000 |  |", "| w | b | 1 | 1.100 | 0.31% |"]


def test_tables_say_the_mean_and_the_range() -> None:
    records = [
        Record("a", seed, "w", cost_over_optimal=ratio, more={"extra": 2.0})
        for seed, ratio in enumerate((1.0, 1.2))
    ]
    targets = [at_most("cost", mean_of(records, "cost_over_optimal"), 1.05), at_least("x", 2, 1)]
    report = Report("s", "about", {}, records, targets)
    lines = markdown(report).splitlines()
    assert lines[0] == "| workload | policy | seeds | cost / optimal | extra |"
    assert lines[2] == "| w | a | 2 | 1.100 (1.000 to 1.200) | 2 |"
    assert "| cost | **no** | 1.1 | 1.05 |" in lines
    assert "| x | yes | 2 | 1 |" in lines
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_gathered_tails_let_the_next_rollout_begin() -> None:
    """WEAVE Fig. 12: the longer the tails are, the more it gains."""
    records = SCENARIOS["weave-tails"].run(Options(processes=1)).records
    rate = {(r.workload, r.policy): r.more["throughput_over_alone"] for r in records}
    gains = [
        rate[f"alike, {tail}", "gathered"] / rate[f"alike, {tail}", "whole"]
        for tail in ("20%", "35%", "50%")
    ]
    assert gains == sorted(gains)
    assert gains[1] > 1.06
    assert gains[2] > 1.28
