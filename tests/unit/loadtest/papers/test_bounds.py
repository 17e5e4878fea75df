"""The lower bound of a makespan: reached where nobody is in the way, and never passed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings

from loadtest.papers.bounds import makespan_bound_s
from phaseloom.common.contract.specs import SchedulerConfig
from phaseloom.simulator.engine import simulate
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob, Submission
from tests.unit.simulator.builders import config, job, pools
from tests.unit.simulator.test_properties import NODES, jobs, run, scheduling

_ONE_NODE = {ROLLOUT: 1, TRAIN: 1}


@pytest.mark.parametrize("submission", Submission)
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_bound_is_the_makespan_of_a_job_alone(steps_ahead: int, submission: Submission) -> None:
    """With what it thinks, waits for and starts with; switches take no time."""
    alone = job(
        iterations=7,
        phases=(Phase(ROLLOUT, 9.0, 30.0, 0.5, think_s=2.0), Phase(TRAIN, 4.0, 8.0, 0.5)),
        steps_ahead=steps_ahead,
        submission=submission,
        start_s=3.0,
        sync_s=1.5 if not steps_ahead else 0.0,
    )
    result = simulate([alone], pools(), config(), seed=5)
    bound_s = makespan_bound_s([alone], 5, _ONE_NODE)
    if steps_ahead:
        # The last training may wait for the one before it.
        assert bound_s <= result.makespan_s <= bound_s + 8.0
    else:
        assert result.makespan_s == pytest.approx(bound_s)


def test_bound_is_what_the_busiest_pool_has_to_do_from_some_arrival_on() -> None:
    """Of 10 s of rollout and 5 s of training twice; or of those that come last."""
    three = [job(name, iterations=2) for name in "abc"]
    assert makespan_bound_s(three, 0, _ONE_NODE) == pytest.approx(60.0)
    later = [*three, *(job(name, 100.0, iterations=2) for name in "def")]
    assert makespan_bound_s(later, 0, _ONE_NODE) == pytest.approx(160.0)
    assert makespan_bound_s(later, 0, {ROLLOUT: 4, TRAIN: 2}) == pytest.approx(130.0)


def test_bound_counts_every_node_of_a_job() -> None:
    wide = {pool: Demand(num_nodes=2) for pool in (ROLLOUT, TRAIN)}
    two = [job(name, demands=wide) for name in "ab"]
    assert makespan_bound_s(two, 0, {ROLLOUT: 2, TRAIN: 2}) == pytest.approx(60.0)


def test_jobs_keep_their_place_on_a_node_for_as_long_as_they_live() -> None:
    """Where two share a node, five jobs of 45 s need it for two and a half lives."""
    five = [job(name) for name in "abcde"]
    assert makespan_bound_s(five, 0, {TRAIN: 1}) == pytest.approx(75.0)
    assert makespan_bound_s(five, 0, {TRAIN: 1}, jobs_a_node=2) == pytest.approx(112.5)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workload=jobs(), scheduler=scheduling())
def test_no_policy_beats_the_bound(workload: list[SimJob], scheduler: SchedulerConfig) -> None:
    _, result = run(workload, scheduler, [])
    assume(all(found.outcome == "done" for found in result.jobs))
    bound_s = makespan_bound_s(workload, 0, {ROLLOUT: NODES, TRAIN: NODES})
    assert result.makespan_s >= bound_s * (1 - 1e-9)
