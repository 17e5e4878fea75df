"""An environment of questions that a model answers with tools, in several turns."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import dataclass
from pathlib import Path

ORCHARD = Path(__file__).parent / "orchard.txt"
MAX_QUESTION_CHARS = 8
SEARCH, CALCULATE = ":", "="
"""What the first character of a turn asks for; a turn that begins with neither is the answer."""
NOTHING = "none"
_SUM = re.compile(r"(\d{1,6})([+-])(\d{1,6})")


class ToolError(Exception):
    """A tool gave no answer. The model is not to blame: the trajectory is worth no reward."""


@dataclass(frozen=True)
class Question:
    text: str
    """A sum of what two people picked, such as `Ann+Tom`."""
    answer: str
    worked: tuple[str, ...]
    """The turns that lead to the answer, without their tools' answers."""


class Retriever:
    """Finds passages of a local text, a sentence a line."""

    def __init__(self, path: Path = ORCHARD) -> None:
        self._passages = {line.split()[0]: line for line in path.read_text().splitlines()}

    @property
    def names(self) -> list[str]:
        return list(self._passages)

    def search(self, query: str) -> str:
        return self._passages.get(query, NOTHING)

    def number(self, name: str) -> int:
        return int(self._passages[name].split()[2])


def calculate(expression: str) -> str:
    """The sum or difference of two numbers."""
    match = _SUM.fullmatch(expression)
    if match is None:
        return NOTHING
    left, sign, right = match.groups()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))


class Environment:
    """Asks questions, runs tools, and scores answers."""

    def __init__(
        self, *, seconds: float = 0.0, faults: float = 0.0, call_reward: float = 0.0
    ) -> None:
        """Args: seconds: the mean time of a tool's call. faults: the share of calls that fail.
        call_reward: what a call that its tool understands is worth; the right answer is worth 1.
        """
        self._retriever = Retriever()
        self._call_reward = call_reward
        self._seconds = seconds
        self._faults = faults

    def question(self, rng: random.Random) -> Question:
        left, right = rng.sample(self._retriever.names, 2)
        a, b = self._retriever.number(left), self._retriever.number(right)
        sign = rng.choice("+-") if a >= b else "+"
        total = str(a + b if sign == "+" else a - b)
        turns = (SEARCH + left, SEARCH + right, f"{CALCULATE}{a}{sign}{b}", total)
        return Question(f"{left}{sign}{right}", total, turns)

    async def call(self, turn: str, rng: random.Random) -> str | None:
        """What the tool says to a turn. Returns: None: the turn is an answer, not a call.

        Raises: ToolError: the tool gave no answer.
        """
        if turn[:1] not in (SEARCH, CALCULATE):
            return None
        # Drawn in any case, so that what a model says does not depend on how slow its tools are.
        await asyncio.sleep(self._seconds * rng.expovariate(1.0))
        if rng.random() < self._faults:
            raise ToolError(f"{turn!r} was not answered in time")
        return self.reply(turn)

    def reward(self, question: Question, turn: str, reply: str | None) -> float:
        """The worth of a turn. Args: reply: what a tool has said to it; None: it is an answer."""
        if reply is None:
            return float(turn == question.answer)
        return self._call_reward if reply != NOTHING else 0.0

    def reply(self, turn: str) -> str:
        """The answer of a tool that is well."""
        tool = self._retriever.search if turn[0] == SEARCH else calculate
        return tool(turn[1:])
