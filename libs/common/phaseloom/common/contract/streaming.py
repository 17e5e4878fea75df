"""Assemble the tokens of a running `generate` from messages that may repeat or miss tokens. Pure.

A consumer counts the tokens that it has of each (prompt, sample), and accepts from a message only
the tokens that follow directly. It drops tokens that it already has, because after a loss the same
seeds sample the same tokens again. It also drops tokens that would leave a gap. When the operation
has ended, the missing tokens come from the result, which is authoritative. So each position is seen
once, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from phaseloom.common.contract.arrays import float32s, int32s, length
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.operations import DrawnTokens, GenerateResult, Sequence

V = TypeVar("V", list[int] | bytes, list[float] | bytes)

MAX_DRAWN_BYTES = 512 * 1024
"""Maximum size of the tokens in one message as MessagePack. JSON takes at most five times as
much."""
_OVERHEAD_BYTES = 64
_VALUE_BYTES = 8
"""Bytes of a token and its log-probability."""


class StreamedTokens:
    """The tokens that a consumer has of each sample of one operation."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, int], list[int]] = {}

    def accept(self, chunk: DrawnTokens) -> DrawnTokens | None:
        """Accept the tokens of a message that follow directly. Returns: those tokens; None: there
        are none."""
        received = self._tokens.setdefault((chunk.prompt, chunk.sample), [])
        # Negative: the chunk would leave a gap. At least the chunk's length: nothing in it is new.
        skip = len(received) - chunk.offset
        if not 0 <= skip < length(chunk.tokens):
            return None
        accepted = part_of(chunk, skip, length(chunk.tokens))
        received += int32s(accepted.tokens)
        return accepted

    def remaining(self, result: GenerateResult) -> Iterator[tuple[DrawnTokens, Sequence]]:
        """For each sample of the result, return the tokens that are still missing (possibly none)
        and the whole sequence.

        Raises: ResourceError: ABORTED: the result has different tokens from those that were
                streamed.
        """
        for prompt, group in enumerate(result.sequences):
            for sample, sequence in enumerate(group):
                received, tokens = self._tokens.get((prompt, sample), []), int32s(sequence.tokens)
                if tokens[: len(received)] != received:
                    raise ResourceError(
                        f"sample {sample} of prompt {prompt} was sampled again after a worker was "
                        "lost, and its tokens differ from those already streamed",
                        code=Code.ABORTED,
                        remedy="use the tokens of the operation's result",
                    )
                full_chunk = DrawnTokens(
                    prompt,
                    sample,
                    0,
                    sequence.tokens,
                    sequence.logprobs,
                    sequence.top_tokens,
                    sequence.top_logprobs,
                )
                yield part_of(full_chunk, len(received), len(tokens)), sequence


def part_of(chunk: DrawnTokens, start: int, stop: int) -> DrawnTokens:
    """Return the tokens from `start` up to `stop`."""
    num_top = length(chunk.top_tokens) // max(1, length(chunk.tokens))
    return DrawnTokens(
        chunk.prompt,
        chunk.sample,
        chunk.offset + start,
        _slice(chunk.tokens, start, stop),
        _slice(chunk.logprobs, start, stop),
        _slice(chunk.top_tokens, start * num_top, stop * num_top),
        _slice(chunk.top_logprobs, start * num_top, stop * num_top),
    )


def as_lists(chunk: DrawnTokens) -> DrawnTokens:
    """Return the same tokens with lists instead of packed arrays."""
    return DrawnTokens(
        chunk.prompt,
        chunk.sample,
        chunk.offset,
        int32s(chunk.tokens),
        float32s(chunk.logprobs),
        int32s(chunk.top_tokens),
        float32s(chunk.top_logprobs),
    )


def messages(
    chunks: Iterable[DrawnTokens], max_bytes: int = MAX_DRAWN_BYTES
) -> Iterator[list[DrawnTokens]]:
    """Pack new tokens into as few messages as possible, splitting long sequences of one sample."""
    message: list[DrawnTokens] = []
    room = max_bytes
    for chunk in chunks:
        for part in _split_chunk(chunk, max_bytes):
            num_values = length(part.tokens) + length(part.top_tokens)
            num_bytes = _OVERHEAD_BYTES + _VALUE_BYTES * num_values
            if num_bytes > room and message:
                yield message
                message, room = [], max_bytes
            message.append(part)
            room -= num_bytes
    if message:
        yield message


def _split_chunk(chunk: DrawnTokens, max_bytes: int) -> Iterator[DrawnTokens]:
    num_tokens = length(chunk.tokens)
    num_top = length(chunk.top_tokens) // max(1, num_tokens)
    max_tokens = max(1, (max_bytes - _OVERHEAD_BYTES) // (_VALUE_BYTES * (1 + num_top)))
    if num_tokens <= max_tokens:
        yield chunk
        return
    for start in range(0, num_tokens, max_tokens):
        yield part_of(chunk, start, min(num_tokens, start + max_tokens))


def _slice(values: V, start: int, stop: int) -> V:
    if isinstance(values, bytes):
        return values[4 * start : 4 * stop]
    return values[start:stop]
