"""Continue an interrupted sample, token for token. Pure functions."""

from __future__ import annotations

from msgspec.structs import replace

from phaseloom.common.contract.arrays import Float32s, Int32s, float32s, int32s, length
from phaseloom.common.contract.operations import Prompt, Sequence

PARTIAL = "partial"
"""The `stop_reason` of a sequence that can be continued."""


def continued(prompt: Prompt, sequence: Sequence, sample: int = 0) -> Prompt:
    """Return the prompt that continues a sequence with the same random draws, token for token.

    Submit it with `num_samples=1` and the same sampling parameters. Its `max_tokens` includes the
    tokens that were generated before. The result has only the new tokens.

    Args:   sample: index of the sequence among the prompt's samples.
    """
    return replace(
        prompt,
        tokens=int32s(prompt.tokens) + int32s(sequence.tokens),
        sample=prompt.sample + sample,
        num_generated=prompt.num_generated + length(sequence.tokens),
    )


def extended(earlier: Sequence, new: Sequence) -> Sequence:
    """Join a sequence and its continuation. The arrays are packed if both inputs are packed."""
    return replace(
        new,
        tokens=_ints(earlier.tokens, new.tokens),
        logprobs=_floats(earlier.logprobs, new.logprobs),
        top_tokens=_ints(earlier.top_tokens, new.top_tokens),
        top_logprobs=_floats(earlier.top_logprobs, new.top_logprobs),
    )


def _ints(earlier: Int32s, new: Int32s) -> Int32s:
    if isinstance(earlier, bytes) and isinstance(new, bytes):
        return earlier + new
    return [*int32s(earlier), *int32s(new)]


def _floats(earlier: Float32s, new: Float32s) -> Float32s:
    if isinstance(earlier, bytes) and isinstance(new, bytes):
        return earlier + new
    return [*float32s(earlier), *float32s(new)]
