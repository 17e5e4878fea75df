"""Runs of a job: each submission of a name is one, with its own identity, outcome and labels."""

from __future__ import annotations

import pytest

from phaseloom.common.contract.api import JobStatus
from phaseloom.common.contract.checks import check_labels
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.events import DrainRequested, JobFinished, JobSubmitted
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.specs import JobSpec
from phaseloom.scheduler.core.state.job import run_name
from phaseloom.scheduler.core.state.outputs import PublishNotice, PutView
from phaseloom.scheduler.core.state.transitions import JobState, WpgState
from tests.support.world import TENANT, World, deployment, spec

A = JobKey(TENANT, "a")


def submit(world: World, spec_: JobSpec | None = None) -> None:
    specs = [spec("policy", "train", trainable=True), spec("sampler", "rollout")]
    world.later(0, JobSubmitted(A, spec_ or JobSpec(deployments=specs), "submit"))
    world.run()


def status(world: World) -> JobStatus:
    views = [o for made in world.outputs for o in made if isinstance(o, PutView) and o.job == A]
    return views[-1].status


def notices(world: World) -> list[tuple[str, str]]:
    every = [o for made in world.outputs for o in made]
    return [(o.title, o.reason) for o in every if isinstance(o, PublishNotice)]


def test_second_run_of_a_name_is_another_run_and_recovers_from_nothing() -> None:
    world = World()
    submit(world)
    first = status(world)
    assert (first.state, first.ended_s) == ("active", 0.0)
    world.queue("a", "policy", 1, "optim_step")
    world.run()
    world.feed(JobFinished(A, "finish"))
    world.run()
    ended = status(world)
    assert (ended.run, ended.state) == (first.run, "done")
    assert ended.ended_s >= ended.submitted_s > 0
    submit(world)
    second = status(world)
    assert second.state == "active"
    assert second.run > first.run
    assert second.submitted_s >= ended.ended_s
    assert not [reason for title, reason in notices(world) if title == "recovered"]
    world.check_replay()


def test_rebuilt_workers_of_a_second_run_say_what_they_start_from() -> None:
    world = World()
    submit(world)
    world.feed(JobFinished(A, "finish"))
    world.run()
    submit(world)
    world.kill(deployment("a", "policy"))
    world.run()
    assert world.core.state.deployments["t.a.policy"].wpg.state is WpgState.READY
    told = [reason for title, reason in notices(world) if title == "recovered"]
    assert told == ["from its first state, because it had no seal yet"]


def test_cancelled_job_is_neither_done_nor_failed() -> None:
    world = World()
    submit(world)
    world.feed(JobFinished(A, "cancel", cancelled=True))
    world.run()
    assert world.core.state.jobs["t.a"].state is JobState.CANCELLED
    assert (status(world).state, status(world).has_ended) == ("cancelled", True)
    assert ("job cancelled", "a person cancelled it") in notices(world)


def test_draining_job_can_be_cancelled() -> None:
    world = World()
    submit(world)
    world.queue("a", "policy", 2, "optim_step")  # waits for the first one
    world.run()
    world.feed(DrainRequested(A, "drain"))
    world.feed(JobFinished(A, "cancel", cancelled=True))
    world.run()
    assert status(world).state in ("cancelled", "done")


def test_deployments_of_an_ended_job_are_on_no_node() -> None:
    world = World()
    submit(world)
    assert {d.node for d in status(world).deployments} == {"t0", "r0"}
    world.feed(JobFinished(A, "finish"))
    world.run()
    assert {(d.node, d.state) for d in status(world).deployments} == {("", "stopped")}


def test_run_keeps_its_config_and_tags_after_its_end() -> None:
    world = World()
    specs = [spec("policy", "train", trainable=True)]
    config = {"lr": 1e-4, "schedule": {"warmup": [1, 2]}}
    submit(world, JobSpec(deployments=specs, config=config, tags=["baseline", "seed 3"]))
    world.feed(JobFinished(A, "finish"))
    world.run()
    kept = status(world)
    assert (kept.config, kept.tags) == (config, ["baseline", "seed 3"])


def test_runs_that_start_in_one_second_have_different_names_in_order() -> None:
    names = [run_name(1e9)]
    for _ in range(3):
        names.append(run_name(1e9, names[-1]))
    assert names == ["20010909-014640", *(f"20010909-014640-{n}" for n in (2, 3, 4))]
    assert run_name(1e9 + 1, names[-1]) == "20010909-014641"


@pytest.mark.parametrize(
    ("config", "tags", "field"),
    [
        ({"x": "y" * 20_000}, [], "spec.config"),
        ({"x": object()}, [], "spec.config"),
        ({(1, 2): "x"}, [], "spec.config"),
        ({}, ["x"] * 17, "spec.tags"),
        ({}, ["fine", ""], "spec.tags[1]"),
        ({}, ["x" * 65], "spec.tags[0]"),
        ({}, ["two\nlines"], "spec.tags[0]"),
    ],
)
def test_labels_that_cannot_be_kept_are_refused_by_field(
    config: dict[str, object], tags: list[str], field: str
) -> None:
    with pytest.raises(CallerError) as caught:
        check_labels(config, tags, "spec.")
    assert caught.value.info.field == field
    assert caught.value.info.remedy
