"""Tokens of a `generate` while they are drawn, as the operation's handle gives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec

from phaseloom.client.operations import OperationHandle, Outbox, Part
from phaseloom.common.contract import operations as ops
from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.streaming import Streamed


class Piece(msgspec.Struct, frozen=True):
    """The next tokens of one sample of a `generate`."""

    prompt: int
    """The place of the prompt in the call."""
    sample: int
    """The place of the sample among those of its prompt."""
    offset: int
    """The number of the sample's tokens that came before these."""
    tokens: list[int]
    logprobs: list[float]
    top_tokens: list[int]
    """As in `Sequence`."""
    top_logprobs: list[float]
    weights_seq: int
    """The `seq` of the deployment's last mutating operation before the `generate`, whose weights
    drew the tokens; 0: the tokens were not streamed, and come from the result."""
    stop_reason: str = ""
    """The reason why the sample ended, on its last piece, which may have no tokens; empty on all
    others."""


class GenerateHandle(OperationHandle[ops.GenerateResult]):
    """A `generate` that was submitted: await it for the result, or iterate over `stream()`."""

    def __init__(
        self,
        parts: list[Part],
        num_prompts: list[int],
        merge: Callable[[list[ops.Result]], ops.GenerateResult],
        outbox: Outbox,
    ) -> None:
        """Args: num_prompts: the number of prompts of each part."""
        super().__init__(parts, merge, outbox)
        self._firsts = [sum(num_prompts[:i]) for i in range(len(parts))]
        self._streamed = [Streamed() for _ in parts]
        self._pieces: list[Piece] = []
        self._whole: set[int] = set()
        """The parts of which all pieces have come."""
        self._news = asyncio.Event()
        for i, part in enumerate(parts):
            part.told = partial(self._take, i)
            part.outcome.add_done_callback(self._tell)

    async def stream(self) -> AsyncIterator[Piece]:
        """All pieces from the first on, as they come; each token of each sample is in exactly one
        of them.

        Tokens come while they are drawn where the operation was submitted with `stream=True`, else
        with the result; pieces that were lost on the way come with the result, too. The pieces of
        one sample are in order; those of several samples are mixed.

        Raises: PhaseloomError: as awaiting the handle. ResourceError: ABORTED: a worker was lost,
                and its successor has drawn other tokens than those that were given before. That
                happens only on a device whose results depend on what else it computes.
        """
        at = 0
        while True:
            news = self._news
            self._take_results()
            while at < len(self._pieces):
                at += 1
                yield self._pieces[at - 1]
            if len(self._whole) == len(self._parts):
                return
            await news.wait()

    def _take(self, i: int, progress: ops.Progress) -> None:
        for drawn in progress.drawn:
            new = self._streamed[i].take(drawn)
            if new is not None:
                self._add(i, new, progress.weights_seq)
        if progress.drawn:
            self._tell()

    def _take_results(self) -> None:
        """Add the pieces that only the results of ended parts have."""
        for i, part in enumerate(self._parts):
            if i in self._whole or not part.outcome.done():
                continue
            result = part.outcome.result()
            if isinstance(result, PhaseloomError):
                raise result
            assert isinstance(result, ops.GenerateResult), result
            for rest, sequence in self._streamed[i].rest(result):
                self._add(i, rest, 0, sequence.stop_reason)
            self._whole.add(i)

    def _tell(self, _: object = None) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _add(self, i: int, new: ops.DrawnTokens, weights_seq: int, stop_reason: str = "") -> None:
        self._pieces.append(
            Piece(
                self._firsts[i] + new.prompt,
                new.sample,
                new.offset,
                int32s(new.tokens),
                float32s(new.logprobs),
                int32s(new.top_tokens),
                float32s(new.top_logprobs),
                weights_seq,
                stop_reason,
            )
        )
