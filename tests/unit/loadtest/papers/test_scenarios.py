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
from loadtest.papers.scenarios import (
    SCENARIOS,
    weave_company,
    weave_drift,
    weave_fig14,
    weave_rivals,
    weaving,
    wrong_table,
)
from loadtest.papers.scenarios.report import at_least, at_most, markdown, mean_of, read
from loadtest.papers.scenarios.scenario import Bound, Options
from loadtest.papers.workloads import llmd, philly, weave
from phaseloom.common.contract.errors import CallerError
from phaseloom.simulator.comparison.cases import Case, ProgressReporter
from phaseloom.simulator.comparison.report import Record, Report
from tests.support.processes import child_pids, until_gone

pytestmark = pytest.mark.long


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
        (("plexrl-hrrs", "lottery"), "policy", "hold"),
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
    assert coexec.dollars is not None
    assert solo.dollars is not None
    assert coexec.dollars < solo.dollars
    assert coexec.over_solo_bound is not None
    assert solo.over_solo_bound is not None
    assert 1.0 <= coexec.over_solo_bound < solo.over_solo_bound
    assert coexec.over_solo_bound / solo.over_solo_bound == coexec.dollars / solo.dollars
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

    assert (run("none").cost_over_optimal, run("none").over_solo_bound) == (None, None)
    assert run("solo").cost_over_optimal is None
    assert (run("solo").over_solo_bound or 0.0) >= 1
    whole = run("regrouping")
    assert whole.cost_over_optimal is not None
    monkeypatch.setattr(weaving, "TRIES", 2)
    cut_off = run("regrouping")
    assert (cut_off.cost_over_optimal, cut_off.over_solo_bound) == (None, None)
    assert cut_off.dollars == whole.dollars


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


@pytest.mark.parametrize(("scenario", "policy"), [("plexrl-hrrs", "hold"), ("llmd-replay", "hrrs")])
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


@pytest.mark.parametrize(
    "truths",
    [
        (wrong_table.RIGHT, wrong_table.ALL_LOSES),
        pytest.param(wrong_table.TRUTHS, marks=pytest.mark.slow),
    ],
    ids=["two", "all"],
)
def test_a_wrong_table_costs_less_where_it_is_corrected(
    truths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is right costs next to nothing by being looked at."""
    monkeypatch.setattr(wrong_table, "TRUTHS", truths)
    report = SCENARIOS["wrong-table"].run(Options(seeds=(0,), processes=1))
    assert len(report.targets) == len(truths)
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


def test_policy_that_delays_jobs_gains_nothing_against_the_solo_bound(tmp_path: Path) -> None:
    """Two jobs in one group take twice as long, which doubles the optimum of the jobs present."""
    table = tmp_path / "mine.csv"
    table.write_text(
        "id,arrival,dur,profile,size,R,T,slo,model,nr,nt,mr,mt\n"
        "a,0,1,RH,S,100,20,1.1,mine,1,1,100,100\n"
        "b,0,1,RH,S,100,20,1.1,mine,1,1,100,100\n"
    )
    policy = ("solo", "most_idle")
    simulate("weave-fig15", policy=policy, workload=table, bound="regrouping", out=tmp_path)
    by_policy = {record.policy: record for record in read(tmp_path / "weave-fig15.json").records}
    solo, delaying = by_policy["solo"], by_policy["most_idle"]
    assert (delaying.slo_attainment, solo.slo_attainment) == (0, 1)
    ratios = [r.over_solo_bound or 0.0 for r in (solo, delaying)]
    flattered = [r.cost_over_optimal or 0.0 for r in (solo, delaying)]
    assert ratios[1] / ratios[0] == pytest.approx((delaying.dollars or 0) / (solo.dollars or 1))
    assert flattered[1] / flattered[0] < 0.7 * ratios[1] / ratios[0]


def test_two_weeks_of_a_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """WEAVE Fig. 14, with few jobs: sharing costs less than nodes of one's own, and keeps SLOs."""
    monkeypatch.setattr(weave_fig14, "NUM_JOBS", 24)
    monkeypatch.setattr(weave, "_PRODUCTION_MEAN_H", 5.0)
    report = SCENARIOS["weave-fig14"].run(Options(seeds=(0,), processes=1))
    of = {record.policy: record for record in report.records}
    dollars = {policy: record.dollars or 0.0 for policy, record in of.items()}
    assert dollars["coexec_repack"] < dollars["coexec"] < dollars["solo"]
    assert dollars["colocated"] / dollars["solo"] == pytest.approx(42.24 / 57.04, rel=0.01)
    assert of["coexec"].slo_attainment == of["coexec_repack"].slo_attainment == 1
    more = of["coexec"].more
    admissions = [more[name] for name in ("direct_packing", "rollout_scaling", "new_group")]
    assert sum(admissions) == pytest.approx(1.0)
    assert all(0 < share < 1 for share in admissions)
    for pool in ("rollout", "train"):
        assert more[f"{pool}_bubbles"] < of["solo"].more[f"{pool}_bubbles"]
    assert {row.figure for row in report.published} >= {"cost of solo over coexec"}


def test_no_choice_of_groups_costs_more_than_nodes_of_ones_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless groups get nodes that they do not need and keep them."""
    monkeypatch.setattr(weave_rivals, "NUM_JOBS", 24)
    report = SCENARIOS["weave-rivals"].run(Options(seeds=(0,), processes=1, bound=Bound.NONE))
    more = {r.policy: r.more for r in report.records if r.workload == "Mixed"}
    assert {target.is_reached for target in report.targets} == {True}
    assert more["random"]["over_solo"] < 1
    assert more["random"]["kept_over_solo"] == pytest.approx(more["random"]["over_solo"], rel=1e-3)
    assert more["random_scaling"]["kept_over_solo"] > more["random_scaling"]["over_solo"]


def test_regrouping_follows_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """WEAVE Fig. 17, 18: it costs less than static placement, keeps SLOs, and moves jobs."""
    monkeypatch.setattr(weave_drift, "NUM_JOBS", 20)
    monkeypatch.setattr(weave_drift, "_SETTINGS", {"mixed": (1.5, -1.5)})
    options = Options(("coexec", "regrouping"), (0,), processes=1)
    report = SCENARIOS["weave-drift"].run(options)
    static, regrouping = report.records
    assert (static.policy, regrouping.policy) == ("coexec", "regrouping")
    assert (regrouping.dollars or 0.0) < (static.dollars or 0.0)
    assert regrouping.over_solo_bound is not None
    assert regrouping.over_solo_bound >= 0.95, "it cannot use much of the SLOs' slack"
    assert (regrouping.moves or 0) > 0
    assert (regrouping.slo_attainment or 0.0) >= 0.9
    for record in (static, regrouping):
        assert all(0.3 < record.more[f"{pool}_utilisation"] <= 1 for pool in ("rollout", "train"))


def test_production_jobs_have_the_distributions_that_the_paper_states() -> None:
    jobs = [job for seed in range(5) for job in weave.production(seed)]
    hours = [job.iterations * job.solo_s / 3600 for job in jobs]
    assert mean(hours) == pytest.approx(27.9, rel=0.05)
    assert mean(job.demand("train").num_nodes for job in jobs) == pytest.approx(1.09, abs=0.05)
    assert all(50 <= phase.mean_s <= 900 for job in jobs for phase in job.phases)
    assert max(job.arrival_s for job in jobs) == pytest.approx(336 * 3600)
    assert all(1 <= job.slo <= 2 for job in jobs)
    rollout_s, train_s = (mean(job.phases[i].mean_s for job in jobs) for i in (0, 1))
    assert rollout_s > 1.3 * train_s, "most jobs roll out for longer than they train"


def test_packed_jobs_use_the_gpu_hours_of_the_paper() -> None:
    """PlexRL Fig. 7b: with the paper's order, and the order of the colocated baselines."""
    report = SCENARIOS["plexrl-fig7b"].run(Options(seeds=(0,), processes=1))
    ratios = {row.figure: row.ratio for row in report.published}
    assert all(0.85 <= ratio <= 1.15 for what, ratio in ratios.items() if ", hrrs" in what), ratios
    of = {(r.workload, r.policy): r.more["of_split"] for r in report.records}
    assert of["7B", "colocated"] < 1 < of["30B", "colocated"]
    assert of["235B", "colocated"] < of["30B", "colocated"]
    assert all(of[size, "hrrs"] < of[size, "colocated"] for size in ("7B", "30B", "235B"))


def test_jobs_that_begin_in_phase_shift_against_each_other() -> None:
    """PlexRL §7.1, where a job holds the node for a whole cycle: training no longer overlaps."""
    report = SCENARIOS["plexrl-relaxation"].run(Options(("fifo_lock",), (0,), processes=1))
    assert {target.is_reached for target in report.targets} == {True}
    late = {r.workload: r.more for r in report.records}
    ahead = late["equal, 2 jobs, one step ahead"]
    assert ahead["late_when_settled"] < 0.001 < ahead["late_at_first"]
    for workload, more in late.items():
        if workload.endswith("one step ahead"):
            assert more["late_when_settled"] <= more["late_at_first"] + 0.02


def test_sharing_gains_more_with_more_replicas() -> None:
    """JigsawRL Fig. 18: replicas cost more than they gain, and sharing wins some of it back."""
    options = Options(("serial", "lookahead"), (0,), processes=1)
    report = SCENARIOS["jigsaw-fig18"].run(options)
    of = {(r.workload, r.policy): r for r in report.records}
    for name in ("4B GSM8K", "14B MATH"):
        gains = []
        for replicas in (1, 2, 4):
            serial, shared = (
                of[f"{name}, TP 4, DP {replicas}", policy].more for policy in options.policies
            )
            gains.append(shared["iterations_an_hour"] / serial["iterations_an_hour"])
            assert shared["gpu_s_an_iteration"] < serial["gpu_s_an_iteration"]
        assert gains == sorted(gains)
        one, four = (of[f"{name}, TP 4, DP {n}", "serial"].more for n in (1, 4))
        assert one["iterations_an_hour"] < four["iterations_an_hour"]
        assert one["gpu_s_an_iteration"] < four["gpu_s_an_iteration"]


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
