"""docs/scheduling.md: its examples of new policies work, and it tells of everything there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.up import with_policies
from phaseloom.common.contract.errors import CallerError
from phaseloom.scheduler.core.policies.registry import ORDERING, PLACEMENT
from phaseloom.simulator.engine import simulate
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Phase, SimJob
from phaseloom.simulator.scenarios import SCENARIOS
from phaseloom.simulator.scenarios.common import config, pools
from phaseloom.simulator.workloads.table import COLUMNS, parse

PAGE = (Path(__file__).parents[3] / "docs" / "scheduling.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def module_of(source: str) -> dict[str, Any]:
    """What the file of the example would hold."""
    names: dict[str, Any] = {}
    exec(compile(source, "docs/scheduling.md", "exec"), names)
    return names


@pytest.fixture
def own_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's examples, with their line in the registries."""
    of_placement, of_ordering = blocks("python")
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


def test_page_tells_of_every_policy_scenario_and_column() -> None:
    for name in (*PLACEMENT, *ORDERING):
        assert f"`{name}`" in PAGE, name
    for name in SCENARIOS:
        assert f"<!-- begin {name} -->\n" in PAGE, name
        assert f"<!-- end {name} -->\n" in PAGE, name
        assert f"(measured/simulated/{name}.png)" in PAGE, name
    for column, meaning in COLUMNS.items():
        assert f"| `{column}` | {meaning} |\n" in PAGE, column


def test_page_shows_a_workload_that_can_be_read() -> None:
    (shown,) = blocks("csv")
    (job,) = parse(shown.splitlines(), "docs/scheduling.md")
    assert (job.arrival_s, job.iterations, job.slo) == (1800.0, 115, 1.5)
