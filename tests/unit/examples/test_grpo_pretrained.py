"""The example for pretrained models: its prompts, its rewards, and what it trains on."""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any

import pytest
from grpo_pretrained import NUM_SHOTS, TASKS, FewShotTask, Problem, main, with_advantages

from phaseloom.client import Sequence, float32s, int32s


class Characters:
    """A tokenizer of code points, whose one token with a line's end is the line's end."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    def get_vocab(self) -> dict[str, int]:
        return {"a": ord("a"), "Ċ": ord("\n")}


def sequence(tokens: list[int], logprob: float = -0.5) -> Sequence:
    return Sequence(tokens, [logprob] * len(tokens), "stop")


@pytest.mark.parametrize("name", TASKS)
def test_prompt_shows_answered_lines_and_the_rest_of_the_last_is_scored(name: str) -> None:
    tokenizer: Any = Characters()
    task = FewShotTask(name, tokenizer, seed=1)
    assert task.stops == [ord("\n")]
    for problem in islice(task.problems(), 3):
        *shots, asked = tokenizer.decode(problem.tokens).split("\n")
        assert len(shots) == NUM_SHOTS
        assert asked.endswith(" =")
        answer = problem.item["answer"]
        assert task.reward(problem, sequence(tokenizer.encode(f" {answer}\n"))) == 1.0
        assert task.reward(problem, sequence(tokenizer.encode(f" {answer}9"))) < 1.0


def test_only_answers_are_trained_on_and_a_group_is_compared_with_itself() -> None:
    problems = [Problem([1, 2, 3], {}), Problem([4, 5], {})]
    groups = [[sequence([7]), sequence([8, 9])], [sequence([6]), sequence([6])]]
    batch = with_advantages(problems, groups, [[1.0, 0.0], [0.5, 0.5]])
    assert [int32s(datum.tokens) for datum in batch] == [[1, 2, 3], [1, 2, 3, 8], [4, 5], [4, 5]]
    assert [int32s(datum.targets) for datum in batch] == [[2, 3, 7], [2, 3, 8, 9], [5, 6], [5, 6]]
    good, bad, *even = [float32s(datum.advantages or []) for datum in batch]
    assert good == pytest.approx([0.0, 0.0, 1 / 5], rel=1e-4)
    assert bad == pytest.approx([0.0, 0.0, -1 / 5, -1 / 5], rel=1e-4)
    assert even == [[0.0, 0.0], [0.0, 0.0]]
    assert float32s(batch[1].logprobs or []) == [0.0, 0.0, -0.5, -0.5]


async def test_directory_of_the_tokenizer_that_is_none_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What transformers says of it is about names of the Hub."""
    monkeypatch.setattr(sys, "argv", ["grpo_pretrained.py", "--model", "m", "--tokenizer", "/gone"])
    with pytest.raises(SystemExit):
        await main()
    assert "argument --tokenizer: there is no directory /gone" in capsys.readouterr().err
