"""The example controller: what it computes, and in which order it submits."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

import grpo
import pytest
import settings
import tasks

from phaseloom import client
from phaseloom.client import Datum, Sequence
from phaseloom.common.contract.specs import JobSpec
from tests.support.inprocess import Job

SHORT = replace(
    settings.SETTINGS["chain_sum"], steps=2, prompts=4, group=4, warmup_steps=2, eval_prompts=8
)


def problem(prompt: str, answer: str = "3") -> tasks.Problem:
    return tasks.Problem(prompt, answer, {})


def test_answer_tokens_are_predicted_and_the_prompt_counts_nothing() -> None:
    sample = Sequence([7, 8, 0], [-0.1, -0.2, -0.3], "stop")
    (datum,) = grpo.with_advantages(
        [(problem("1+2="), sample)], [[1.0]], [[-9.0, -9.0, -9.0, -0.1, -0.2, -0.3]], kl=0.5
    )
    tokens = [*tasks.encode("1+2="), 7, 8, 0]
    assert datum == Datum(
        tokens[:-1],
        tokens[1:],
        logprobs=[0.0, 0.0, 0.0, -0.1, -0.2, -0.3],
        advantages=[0.0] * 6,
    )


def test_advantage_is_normalised_in_the_group_less_the_drift_over_all_tokens() -> None:
    samples = [Sequence([7], [-1.0], "stop"), Sequence([8, 0], [-2.0, -3.0], "stop")]
    answers = [(problem("1="), sample) for sample in samples]
    reference = [[-5.0, -1.5], [-5.0, -2.0, -3.5]]
    batch = grpo.with_advantages(answers, [[0.0, 1.0]], reference, kl=0.1)
    # Three tokens; the group's rewards are one deviation below and above their mean.
    assert batch[0].advantages == pytest.approx([0.0, (-1 - 0.1 * 0.5) / 3], abs=1e-5)
    assert batch[1].advantages == pytest.approx([0.0, 1 / 3, (1 - 0.1 * 0.5) / 3], abs=1e-5)


def test_group_of_equal_rewards_teaches_nothing() -> None:
    assert grpo.normalised([0.5, 0.5, 0.5]) == [0.0, 0.0, 0.0]


def test_warm_up_weights_are_a_mean_over_the_answers_tokens() -> None:
    batch = grpo.worked([problem("1+2=", "3"), problem("9+9=", "18")])
    weights = [list(datum.weights or []) for datum in batch]
    assert [w[:3] for w in weights] == [[0.0] * 3] * 2
    assert sum(map(sum, weights)) == pytest.approx(1.0)
    assert batch[1].targets[-1:] == [tasks.STOP]


async def _run(root: Path, report: dict[str, dict[str, object]]) -> None:
    async def barrier(name: str) -> None:
        report[f"barrier {name}"] = {}

    def record(event: str, **values: object) -> None:
        report[f"{event} {values.get('name', values.get('step', ''))}".strip()] = values

    with Job(JobSpec(deployments=grpo.deployments(SHORT)), root) as job:
        await grpo.train(cast("client.Job", job), "chain_sum", SHORT, record, barrier)


async def test_same_settings_give_the_same_weights(tmp_path: Path) -> None:
    first: dict[str, dict[str, object]] = {}
    again: dict[str, dict[str, object]] = {}
    await _run(tmp_path / "first", first)
    await _run(tmp_path / "again", again)
    assert list(first) == [
        "warmup",
        "eval start",
        "barrier start",
        "step 1",
        "step 2",
        "barrier end",
        "eval end",
        "done",
    ]
    assert first["done"]["weights_sha256"] == again["done"]["weights_sha256"]
    assert [e.get("reward") for e in first.values()] == [e.get("reward") for e in again.values()]


def test_every_job_has_settings_that_the_router_and_the_model_take() -> None:
    for name, tuned in settings.SETTINGS.items():
        problems = islice(tasks.Task(name, 0).problems(), 500)
        longest = max(len(problem.worked_answer) + 1 for problem in problems)
        assert longest <= tuned.max_tokens
        assert tasks.MAX_PROMPT_CHARS + tuned.max_tokens <= int(
            str(settings.MODEL["max_position_embeddings"])
        )
        assert len(grpo.deployments(tuned)) == 3
