"""`phaseloom simulate`: a workload of the user's own under several policies."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from phaseloom.cli import extras
from phaseloom.cli.simulate import simulate
from phaseloom.common.contract.errors import CallerError
from phaseloom.scheduler.core.policies.registry import ORDERING, PLACEMENT
from phaseloom.simulator.comparison.report import Report
from phaseloom.simulator.comparison.workload import ORDERINGS

TWO_JOBS = (
    "id,arrival,dur,profile,size,R,T,slo,model,nr,nt,mr,mt\n"
    "a,0,1,BL,S,60,60,2.0,mine,1,1,100,100\n"
    "b,0.1,1,BL,S,60,60,2.0,mine,1,1,100,100\n"
)


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(TWO_JOBS)
    return path


def test_workload_is_compared_under_every_policy(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(workload=workload, out=tmp_path, processes=1)
    report = msgspec.json.decode((tmp_path / "workload.json").read_bytes(), type=Report)
    by_policy = {record.policy: record for record in report.records}
    assert list(by_policy) == list(ORDERINGS)
    solo, coexec = by_policy["solo"], by_policy["coexec"]
    assert (solo.peak_gpus, coexec.peak_gpus) == (32, 16)
    assert solo.slo_attainment == coexec.slo_attainment == 1
    assert solo.dollars is not None
    assert coexec.dollars is not None
    assert coexec.dollars < solo.dollars
    assert (tmp_path / "workload.png").read_bytes().startswith(b"\x89PNG")
    assert "2 jobs of mine.csv" in capsys.readouterr().out


def test_policies_are_registered() -> None:
    assert ORDERINGS.keys() <= PLACEMENT.keys()
    assert set(ORDERINGS.values()) <= ORDERING.keys()


def test_only_the_named_policies_and_seeds_are_run(workload: Path, tmp_path: Path) -> None:
    simulate(workload=workload, policy=("solo",), seed=(3, 4), out=tmp_path, processes=1)
    report = msgspec.json.decode((tmp_path / "workload.json").read_bytes(), type=Report)
    assert [(record.policy, record.seed) for record in report.records] == [("solo", 3), ("solo", 4)]


def test_figure_of_a_paper_is_answered_with_its_command() -> None:
    with pytest.raises(CallerError) as refused:
        simulate("plexrl-fig8")
    assert refused.value.info.field == "scenario"
    assert "python -m loadtest simulate plexrl-fig8" in refused.value.info.remedy


def test_missing_workload_and_unknown_policy_are_refused(workload: Path, tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="workload is required"):
        simulate(out=tmp_path)
    with pytest.raises(CallerError) as refused:
        simulate(workload=workload, policy=("lottery",), out=tmp_path)
    assert refused.value.info.field == "policy"
    assert "coexec_repack" in refused.value.info.remedy
    with pytest.raises(CallerError) as refused:
        simulate(workload=workload, processes=-1, out=tmp_path)
    assert refused.value.info.field == "processes"


def test_missing_package_is_reported_before_anything_is_simulated(
    workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "missing", list)
    with pytest.raises(CallerError, match="not installed: matplotlib") as refused:
        simulate(workload=workload, out=tmp_path / "out", processes=1)
    assert refused.value.info.remedy == "pip install 'phaseloom[simulator]'"
    assert not (tmp_path / "out").exists()
