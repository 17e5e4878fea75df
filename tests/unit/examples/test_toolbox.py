"""The environment of the example with tools, and what is trained of its conversations."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest
from grpo_tools import (
    Settings,
    Trajectory,
    converse,
    converse_together,
    deployments,
    model_of,
    with_advantages,
    worked,
)
from tasks import ALPHABET, decode, encode
from toolbox import NOTHING, Environment, Question, Retriever, ToolError, calculate

from phaseloom import client
from phaseloom.client import float32s, int32s
from phaseloom.common.contract.specs import JobSpec
from tests.support.inprocess import Job


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("27+5", "32"),
        ("5-27", "-22"),
        ("0+0", "0"),
        ("27", NOTHING),
        ("1+", NOTHING),
        ("9**9", NOTHING),
        ("__import__('os')", NOTHING),
        ("1234567+1", NOTHING),
        ("", NOTHING),
    ],
)
def test_calculator_adds_and_subtracts_and_nothing_else(expression: str, said: str) -> None:
    assert calculate(expression) == said


def test_retriever_finds_a_passage_by_its_name() -> None:
    retriever = Retriever()
    assert retriever.search("Ada").startswith("Ada ")
    assert retriever.search("Nobody") == NOTHING
    assert all(str(retriever.number(name)) in retriever.search(name) for name in retriever.names)


async def test_worked_turns_lead_to_the_answer() -> None:
    environment, rng = Environment(), random.Random(3)
    for _ in range(50):
        question = environment.question(rng)
        *calls, answer = question.worked
        said = [await environment.call(turn, rng) for turn in calls]
        assert said[-1] == answer == question.answer
        assert await environment.call(answer, rng) is None
        assert set("".join(question.worked)) <= set(ALPHABET)


async def test_tool_that_fails_is_no_answer() -> None:
    environment = Environment(faults=1.0)
    with pytest.raises(ToolError):
        await environment.call(":Ada", random.Random(0))
    assert await environment.call("5", random.Random(0)) is None, "an answer calls no tool"


def test_a_call_is_worth_something_where_its_tool_understands_it() -> None:
    environment = Environment(call_reward=0.1)
    question = environment.question(random.Random(1))
    assert environment.reward(question, ":Ada", environment.reply(":Ada")) == 0.1
    assert environment.reward(question, ":Nobody", NOTHING) == 0.0
    assert environment.reward(question, question.answer, None) == 1.0
    assert environment.reward(question, "x", None) == 0.0


async def test_conversations_in_step_are_those_that_go_on_independently() -> None:
    """With a model that has learned nothing, one turn in some calls a tool, and some calls fail."""
    _, sampling = deployments(model_of(Settings()))
    with Job(JobSpec(deployments=[sampling])) as job:
        sampler = cast("client.Deployment", job.deployment("sampler"))
        quick = Environment(faults=0.4, call_reward=0.1)
        slow = Environment(seconds=1e-3, faults=0.4, call_reward=0.1)

        def tries() -> list[tuple[Question, random.Random]]:
            # One of these calls a tool that fails, and one a tool that answers.
            return [(quick.question(random.Random(i)), random.Random(i)) for i in range(200, 300)]

        together = await converse_together(sampler, quick, tries())
        assert together == await converse_together(sampler, slow, tries())
        each = await asyncio.gather(*(converse(sampler, slow, *one) for one in tries()))
    assert [t.tokens for t in together] == [t.tokens for t in each]
    assert [(t.failure, t.num_turns) for t in together] == [(t.failure, t.num_turns) for t in each]
    assert any(t.failure for t in together)
    assert any(t.num_turns > 1 for t in together)


def test_only_what_the_model_wrote_is_taught() -> None:
    environment = Environment()
    question = environment.question(random.Random(1))
    (datum,) = worked(environment, [question])
    taught = [
        token
        for token, weight in zip(int32s(datum.targets), float32s(datum.weights or []), strict=True)
        if weight
    ]
    assert decode(taught) == "".join(f"{turn}\n" for turn in question.worked)
    assert sum(float32s(datum.weights or [])) == pytest.approx(1.0)


def test_groups_that_teach_nothing_are_left_out_and_tools_have_no_advantage() -> None:
    question = Environment().question(random.Random(1))

    def tried(reward: float) -> Trajectory:
        trajectory = Trajectory(question, encode("Ada+Ann\n"))
        trajectory.write([1, 2], [-0.5, -0.25])
        trajectory.read("no")
        trajectory.write([3], [-1.0])
        trajectory.reward = reward
        return trajectory

    groups = [[tried(1.0), tried(0.0)], [tried(1.0), tried(1.0)], [tried(1.0)], []]
    batch = with_advantages(groups, [[each.reward for each in group] for group in groups])
    assert len(batch) == 2
    good, bad = (float32s(datum.advantages or []) for datum in batch)
    assert [value > 0 for value in good] == [False] * 7 + [True, True] + [False] * 3 + [True]
    assert bad == [-value for value in good]
    assert float32s(batch[0].logprobs or [])[7:] == [-0.5, -0.25, 0.0, 0.0, 0.0, -1.0]
