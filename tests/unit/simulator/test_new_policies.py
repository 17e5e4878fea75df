"""docs/scheduling.md and docs/simulator.md: their examples work, and they tell of everything there
is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from loadtest.papers.scenarios import SCENARIOS
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.up import with_policies
from phaseloom.common.contract.errors import CallerError
from phaseloom.scheduler.core.policies.registry import ORDERING, PLACEMENT
from phaseloom.simulator.comparison.clusters import config, pools
from phaseloom.simulator.comparison.workloadfile import COLUMNS, parse
from phaseloom.simulator.engine import simulate
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Phase, SimJob

DOCS = Path(__file__).parents[3] / "docs"
POLICIES = (DOCS / "scheduling.md").read_text()
SIMULATOR = (DOCS / "simulator.md").read_text()
EXTENDING = (DOCS / "extending.md").read_text()
PAPERS = (DOCS / "measured" / "papers.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def module_of(source: str) -> dict[str, Any]:
    """What the file of the example would hold."""
    names: dict[str, Any] = {}
    exec(compile(source, "docs/extending.md", "exec"), names)
    return names


@pytest.fixture
def own_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's examples, with their line in the registries."""
    of_ordering, of_placement = blocks(EXTENDING, "python")
    monkeypatch.setitem(PLACEMENT, "youngest", module_of(of_placement)["youngest"])
    monkeypatch.setitem(ORDERING, "newest", module_of(of_ordering)["newest"])


def jobs() -> list[SimJob]:
    """Six that are there at once, each 5 s on either pool, four times."""
    return [
        SimJob(f"job-{n}", float(n), 4, (Phase(ROLLOUT, 5.0), Phase(TRAIN, 5.0))) for n in range(6)
    ]


@pytest.mark.usefixtures("own_policies")
def test_new_policy_of_each_kind_runs_once_it_is_registered() -> None:
    settings = config("youngest", "newest", max_group_jobs=3)
    result = simulate(jobs(), pools(2, 2), settings)
    assert [job.outcome for job in result.jobs] == ["done"] * 6
    assert [job.iterations for job in result.jobs] == [4] * 6
    # Job 0 fills up to three with 1 and 2, before 3 opens the second group.
    assert result.pools[TRAIN].peak_nodes == 2
    assert result.switches > 0, "three share a node"


@pytest.mark.usefixtures("own_policies")
def test_new_policy_can_be_named_on_the_command_line_and_an_unknown_one_is_not() -> None:
    settings = with_policies(MeshConfig(), "youngest", "newest")
    assert (settings.placement, settings.ordering) == ("youngest", "newest")
    with pytest.raises(CallerError, match=r"choose one of: .*, newest, "):
        with_policies(MeshConfig(), None, "oldest")


def test_pages_tell_of_every_policy_scenario_and_column() -> None:
    for name in (*PLACEMENT, *ORDERING):
        assert f"`{name}`" in POLICIES, name
    for name in SCENARIOS:
        assert f"<!-- begin {name} -->\n" in PAPERS, name
        assert f"<!-- end {name} -->\n" in PAPERS, name
        assert f"(simulated/{name}.png)" in PAPERS, name
    for column, meaning in COLUMNS.items():
        assert f"| `{column}` | {meaning} |\n" in SIMULATOR, column


def test_page_shows_a_workload_that_can_be_read() -> None:
    (shown,) = blocks(SIMULATOR, "csv")
    (job,) = parse(shown.splitlines(), "docs/simulator.md")
    assert (job.arrival_s, job.iterations, job.slo) == (1800.0, 115, 1.5)
