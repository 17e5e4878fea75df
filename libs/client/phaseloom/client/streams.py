"""Stream the tokens of a `generate` through its handle while they are sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec

from phaseloom.client.operations import OperationHandle, OperationPart, Outbox
from phaseloom.common.contract import operations as ops
from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.streaming import StreamedTokens


class Piece(msgspec.Struct, frozen=True):
    """The next tokens of one sample of a `generate`."""

    prompt: int
    """Index of the prompt in the call."""
    sample: int
    """Index of the sample among those of its prompt."""
    offset: int
    """Number of tokens of the sample before this piece."""
    tokens: list[int]
    logprobs: list[float]
    top_tokens: list[int]
    """As in `Sequence`."""
    top_logprobs: list[float]
    weights_seq: int
    """`seq` of the deployment's last mutating operation before the `generate`, which made the
    weights that sampled these tokens. 0: the tokens were not streamed but come from the result."""
    stop_reason: str = ""
    """Why the sample ended. Set only on its last piece, which may have no tokens; empty on all
    others."""


class GenerateHandle(OperationHandle[ops.GenerateResult]):
    """Handle of a `generate`: await it for the result, or iterate over `stream()`."""

    def __init__(
        self,
        parts: list[OperationPart],
        num_prompts: list[int],
        merge: Callable[[list[ops.Result]], ops.GenerateResult],
        outbox: Outbox,
    ) -> None:
        """Args:   num_prompts: the number of prompts in each part."""
        super().__init__(parts, merge, outbox)
        self._firsts = [sum(num_prompts[:i]) for i in range(len(parts))]
        self._streamed = [StreamedTokens() for _ in parts]
        self._pieces: list[Piece] = []
        self._completed_parts: set[int] = set()
        """Indices of the parts whose pieces are complete."""
        self._new_pieces = asyncio.Event()
        for i, part in enumerate(parts):
            part.on_progress = partial(self._on_progress, i)
            part.outcome.add_done_callback(self._notify)

    async def stream(self) -> AsyncIterator[Piece]:
        """Yield all pieces from the first one on, as they arrive. Each token is in exactly one
        piece.

        If the operation was submitted with `stream=True`, tokens arrive while they are sampled;
        otherwise they arrive with the result. Pieces lost on the way arrive with the result too.
        The pieces of one sample are in order; those of different samples interleave.

        Raises: PhaseloomError: the same as awaiting the handle. ResourceError: ABORTED: a worker
                was lost, and its successor sampled different tokens from those already yielded.
                That is possible only on a device whose results depend on what else it computes.
        """
        index = 0
        while True:
            # Take the event before looking for pieces, so that none added meanwhile is missed.
            new_pieces = self._new_pieces
            self._add_results()
            while index < len(self._pieces):
                index += 1
                yield self._pieces[index - 1]
            if len(self._completed_parts) == len(self._parts):
                return
            await new_pieces.wait()

    def _on_progress(self, i: int, progress: ops.Progress) -> None:
        for chunk in progress.drawn:
            tokens = self._streamed[i].accept(chunk)
            if tokens is not None:
                self._add(i, tokens, progress.weights_seq)
        if progress.drawn:
            self._notify()

    def _add_results(self) -> None:
        for i, part in enumerate(self._parts):
            if i in self._completed_parts or not part.outcome.done():
                continue
            result = part.outcome.result()
            if isinstance(result, PhaseloomError):
                raise result
            assert isinstance(result, ops.GenerateResult), result
            for remaining, sequence in self._streamed[i].remaining(result):
                self._add(i, remaining, 0, sequence.stop_reason)
            self._completed_parts.add(i)

    def _notify(self, _: object = None) -> None:
        # A fresh event per notification: several streams may iterate over the same handle.
        new_pieces, self._new_pieces = self._new_pieces, asyncio.Event()
        new_pieces.set()

    def _add(
        self, i: int, tokens: ops.DrawnTokens, weights_seq: int, stop_reason: str = ""
    ) -> None:
        self._pieces.append(
            Piece(
                self._firsts[i] + tokens.prompt,
                tokens.sample,
                tokens.offset,
                int32s(tokens.tokens),
                float32s(tokens.logprobs),
                int32s(tokens.top_tokens),
                float32s(tokens.top_logprobs),
                weights_seq,
                stop_reason,
            )
        )
