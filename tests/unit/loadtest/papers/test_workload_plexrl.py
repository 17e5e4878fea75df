"""The backlog made after PlexRL Table 2 keeps to what that table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.papers.workloads.plexrl import MODELS, Shape, plexrl
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, cycle_of

TABLE = Path(__file__).parents[3] / "golden" / "table2_plexrl.json"


def test_models_have_the_cycles_and_bubbles_of_table_2() -> None:
    cases = {case["name"]: case for case in json.loads(TABLE.read_text())["cases"]}
    models = {model.name: model for model in MODELS}
    assert cases.keys() <= models.keys()
    for name, case in cases.items():
        assert models[name].cycle_s == case["cycle"]
        assert 1 - models[name].train_s / models[name].cycle_s == pytest.approx(
            case["bubble"], abs=1e-4
        )
    assert 1 - models["235B"].train_s / models["235B"].cycle_s == pytest.approx(0.8111, abs=1e-4)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_job_alone_has_the_cycle_of_its_model(steps_ahead: int) -> None:
    cycles = {model.name: model.cycle_s for model in MODELS}
    for job in plexrl(0, Shape(num_jobs=20, steps_ahead=steps_ahead)):
        assert cycle_of(job).period_s == pytest.approx(cycles[job.model])


def test_workload_follows_from_its_seed() -> None:
    jobs = plexrl(3)
    assert jobs == plexrl(3)
    assert jobs != plexrl(4)
    assert len(jobs) == Shape().num_jobs
    arrivals = [job.arrival_s for job in jobs]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] <= Shape().within_s
    for job in jobs:
        alone_s = job.iterations * job.mean_s
        assert alone_s <= Shape().longest_s + job.mean_s
        assert job.demand(TRAIN).num_nodes == job.demand(ROLLOUT).num_nodes
    assert {job.model for job in jobs} == {model.name for model in MODELS}
