"""New tokens on their way: messages of bounded size, each position taken once, the rest at the
end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from phaseloom.common.contract.arrays import length, pack_float32s, pack_int32s
from phaseloom.common.contract.codec import JSON, MSGPACK, encode
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.operations import DrawnTokens, GenerateResult, Sequence
from phaseloom.common.contract.streaming import (
    MAX_DRAWN_BYTES,
    StreamedTokens,
    as_lists,
    messages,
    part_of,
)
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES


def whole(num_tokens: int, sample: int = 0, num_top: int = 0) -> DrawnTokens:
    """All tokens of a sample; each number says where it is."""
    tops = [10 * i + k for i in range(num_tokens) for k in range(num_top)]
    return DrawnTokens(
        0,
        sample,
        0,
        pack_int32s(list(range(num_tokens))),
        pack_float32s([-float(i) for i in range(num_tokens)]),
        pack_int32s(tops),
        pack_float32s([float(top) for top in tops]),
    )


def sequence_of(drawn: DrawnTokens) -> Sequence:
    return Sequence(drawn.tokens, drawn.logprobs, "length", drawn.top_tokens, drawn.top_logprobs)


def joined(pieces: list[DrawnTokens]) -> DrawnTokens:
    """Pieces of one sample that follow one another without a gap."""
    parts = [as_lists(piece) for piece in pieces]
    offset = parts[0].offset
    tokens: list[int] = []
    logprobs: list[float] = []
    top_tokens: list[int] = []
    top_logprobs: list[float] = []
    for part in parts:
        assert part.offset == offset + len(tokens)
        tokens += part.tokens
        logprobs += part.logprobs
        top_tokens += part.top_tokens
        top_logprobs += part.top_logprobs
    first = parts[0]
    return replace(
        first, tokens=tokens, logprobs=logprobs, top_tokens=top_tokens, top_logprobs=top_logprobs
    )


@given(
    num_tokens=st.integers(1, 40),
    num_top=st.integers(0, 2),
    told=st.lists(st.tuples(st.integers(0, 39), st.integers(1, 40), st.booleans()), max_size=12),
)
def test_each_position_is_taken_once_whatever_is_told_twice_or_lost(
    num_tokens: int, num_top: int, told: list[tuple[int, int, bool]]
) -> None:
    sample = whole(num_tokens, num_top=num_top)
    streamed, taken = StreamedTokens(), []
    for start, size, is_list in told:
        if start >= num_tokens:
            continue
        message = part_of(sample, start, min(num_tokens, start + size))
        new = streamed.accept(as_lists(message) if is_list else message)
        taken += [] if new is None else [new]
    result = GenerateResult([[sequence_of(sample)]])
    ((rest, sequence),) = streamed.remaining(result)
    assert joined([*taken, rest]) == as_lists(sample)
    assert sequence.stop_reason == "length"


def test_run_that_begins_again_adds_what_is_new_only() -> None:
    sample, streamed = whole(10), StreamedTokens()
    assert streamed.accept(part_of(sample, 0, 6)) == part_of(sample, 0, 6)
    assert streamed.accept(part_of(sample, 0, 4)) is None
    assert streamed.accept(part_of(sample, 4, 9)) == part_of(sample, 6, 9)


def test_tokens_behind_a_gap_wait_for_the_result() -> None:
    sample, streamed = whole(10), StreamedTokens()
    streamed.accept(part_of(sample, 0, 2))
    assert streamed.accept(part_of(sample, 4, 6)) is None
    ((rest, _),) = streamed.remaining(GenerateResult([[sequence_of(sample)]]))
    assert rest == part_of(sample, 2, 10)


def test_result_with_other_tokens_than_those_streamed_is_told() -> None:
    streamed = StreamedTokens()
    streamed.accept(DrawnTokens(0, 1, 0, [7, 8], [-1.0, -1.0]))
    other = Sequence([7, 9, 9], [-1.0] * 3, "length")
    with pytest.raises(ResourceError, match="sample 1 of prompt 0 was sampled again") as error:
        list(streamed.remaining(GenerateResult([[other, other]])))
    assert error.value.info.code is Code.ABORTED
    assert error.value.info.remedy


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    num_top=st.integers(0, 3),
    max_bytes=st.integers(160, 900),
)
def test_messages_are_bounded_and_keep_every_token_in_order(
    lengths: list[int], num_top: int, max_bytes: int
) -> None:
    samples = [whole(size, sample, num_top) for sample, size in enumerate(lengths)]
    told = list(messages(samples, max_bytes))
    for message in told:
        # Each has one token at least, whatever the limit, and its own few bytes of framing.
        assert len(encode(message)) <= max_bytes + 64
    for sample in samples:
        pieces = [each for message in told for each in message if each.sample == sample.sample]
        assert joined(pieces) == as_lists(sample)
    # No message is followed by one that would have had room in it.
    sizes = [sum(64 + 8 * (1 + num_top) * length(e.tokens) for e in message) for message in told]
    firsts = [64 + 8 * (1 + num_top) * length(message[0].tokens) for message in told[1:]]
    assert all(size + first > max_bytes for size, first in zip(sizes, firsts, strict=False))


def test_largest_message_fits_a_payload_as_json_too() -> None:
    tokens = pack_int32s([151_935] * 100_000)
    logprobs = pack_float32s([-12.345678] * 100_000)
    (first, *rest) = messages([DrawnTokens(0, 0, 0, tokens, logprobs)])
    assert rest
    assert len(encode(first, MSGPACK)) <= MAX_DRAWN_BYTES
    assert len(encode([as_lists(each) for each in first], JSON)) < MAX_PAYLOAD_BYTES / 2
