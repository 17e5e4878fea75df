"""Two small tasks of reasoning-gym with answers that it scores itself."""

from __future__ import annotations

import gc
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_PROMPT_CHARS = 17
_SIZE = 10_000_000
"""The size of a dataset, more than any run needs: items are made when they are asked for."""
ALPHABET = "\n=+- .:0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
STOP = ALPHABET.index("\n")


def encode(text: str) -> list[int]:
    """The tokens of a text, one for each character; the newline ends an answer."""
    return [ALPHABET.index(char) for char in text]


def decode(tokens: list[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens)


@dataclass(frozen=True)
class Problem:
    prompt: str
    worked_answer: str
    """The text that the warm-up teaches: the answer, or the way to it with the answer last."""
    item: dict[str, Any]


class Task:
    """A reasoning-gym dataset: item i is drawn from `seed` + i."""

    def __init__(self, name: str, seed: int) -> None:
        import_reasoning_gym()
        import reasoning_gym

        # The package brings very many objects: a full collection of them would pause a step.
        gc.freeze()

        options = {
            "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "letter_counting": {"min_words": 1, "max_words": 2},
        }[name]
        self.name = name
        self._dataset = reasoning_gym.create_dataset(name, seed=seed, size=_SIZE, **options)

    def problems(self) -> Iterator[Problem]:
        """The problems in the dataset's order, without those too long or outside the alphabet."""
        for item in self._dataset:
            problem = _PROBLEMS[self.name](item)
            if len(problem.prompt) <= MAX_PROMPT_CHARS and set(problem.prompt) <= set(ALPHABET):
                yield problem

    def reward(self, problem: Problem, answer: str) -> float:
        """The dataset's own score, unchanged, of the answer's last word."""
        words = answer.split()
        return float(self._dataset.score_answer(words[-1] if words else "", problem.item))


def _chain_sum(item: dict[str, Any]) -> Problem:
    return Problem(f"{item['metadata']['expression']}=", item["answer"], item)


def _letter_counting(item: dict[str, Any]) -> Problem:
    letter, text = item["metadata"]["target_letter"], " ".join(item["metadata"]["span"])
    marks = "".join("x" if char.lower() == letter else "." for char in text)
    return Problem(f"{letter}:{text}=", f"{marks} {item['answer']}", item)


_PROBLEMS = {"chain_sum": _chain_sum, "letter_counting": _letter_counting}


def import_reasoning_gym() -> None:
    """Make reasoning-gym importable where pycosat, which only its logic puzzles use, is not.

    pycosat comes as source, and not every machine has a compiler.
    """
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = types.ModuleType("pycosat")
