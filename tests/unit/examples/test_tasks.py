"""The example's tasks: what the model is asked and taught, and how reasoning-gym scores it."""

from __future__ import annotations

import importlib.util
import sys
from itertools import islice

import pytest
import tasks

NAMES = ("chain_sum", "letter_counting")


@pytest.mark.parametrize("name", NAMES)
def test_worked_answers_score_one_and_fit_the_model(name: str) -> None:
    task = tasks.Task(name, seed=3)
    for problem in islice(task.problems(), 300):
        assert len(problem.prompt) <= tasks.MAX_PROMPT_CHARS
        assert task.reward(problem, problem.worked_answer + "\n") == 1.0
        text = problem.prompt + problem.worked_answer
        assert tasks.decode(tasks.encode(text)) == text
        assert tasks.STOP not in tasks.encode(text)


@pytest.mark.parametrize("name", NAMES)
def test_reward_is_the_datasets_own_score_of_the_last_word(name: str) -> None:
    task = tasks.Task(name, seed=4)
    problem = next(task.problems())
    right = problem.item["answer"]
    assert task.reward(problem, f"xx {right}") == 1.0
    assert task.reward(problem, f"{right} xx") == 0.0
    assert task.reward(problem, "") == 0.0
    # Partial credit for an answer that contains the right one, as the dataset gives it.
    assert task.reward(problem, f"x{right}") == pytest.approx(len(right) / (len(right) + 1))


@pytest.mark.parametrize("name", NAMES)
def test_problems_depend_on_the_seed_alone(name: str) -> None:
    first, again, other = (
        [p.prompt for p in islice(tasks.Task(name, seed=seed).problems(), 50)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_letter_counting_is_worked_letter_by_letter() -> None:
    problem = next(
        p for p in tasks.Task("letter_counting", seed=0).problems() if p.item["answer"] == "2"
    )
    letter, _, text = problem.prompt.rstrip("=").partition(":")
    marks, _, count = problem.worked_answer.rpartition(" ")
    assert [mark == "x" for mark in marks] == [char.lower() == letter for char in text]
    assert count == "2"


def test_reasoning_gym_imports_when_pycosat_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes as source only, and not every machine has a compiler."""
    monkeypatch.delitem(sys.modules, "pycosat", raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pycosat" else find(name)
    )
    tasks.import_reasoning_gym()
    assert sys.modules["pycosat"].__spec__ is None
