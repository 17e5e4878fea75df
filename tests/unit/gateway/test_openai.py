"""The log-probability fields of OpenAI's API."""

from __future__ import annotations

import math
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from phaseloom.client import Piece
from phaseloom.common.text.codec import TextCodec
from phaseloom.common.text.files import TokenizerFacts
from phaseloom.gateway.core.bodies import Complete
from phaseloom.gateway.encoding import Described
from phaseloom.gateway.openai import Call, Part, _chat_logprobs, _logprobs
from phaseloom.gateway.tokenizers import ModelTokenizer

PADDED = 30
WORDS = ["<0xE4>", "<0xB8>", "<0xAD>", "▁a", "a", "</s>"]


def call(**more: Any) -> Call:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    made.add_special_tokens([AddedToken("</s>", special=True)])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    codec = TextCodec(TokenizerFacts(made.to_str(), {}, {}, False, False))
    described = Described("", codec.facts, codec.vocabulary(), {}, {})
    nothing: Any = None
    tokenizer = ModelTokenizer(described, nothing, nothing)
    return Call(nothing, nothing, Complete("m", **more), tokenizer)


def part(tokens: list[int], tops: list[list[int]]) -> Part:
    flat = [token for top in tops for token in top]
    logprobs = [-float(token) for token in tokens]
    piece = Piece(0, 0, 0, tokens, logprobs, flat, [-float(token) for token in flat], 0, "")
    return Part(piece, "", [0] * len(tokens), is_first=False)


def test_tokens_with_the_same_text_have_keys_of_their_own() -> None:
    fields = _logprobs(call(), part([1, PADDED], [[0, 2], [PADDED + 1, 3]]))
    assert fields["tokens"] == ["\ufffd", ""]
    assert fields["top_logprobs"] == [
        {"token_id:0": 0.0, "token_id:2": -2.0, "\ufffd": -1.0},
        {"token_id:31": -31.0, " a": -3.0, "": -30.0},
    ]


def test_drawn_token_is_added_only_if_it_is_not_among_the_likeliest() -> None:
    fields = _logprobs(call(), part([3, 4, 5], [[3, 4], [3, 5], [5, 4]]))
    assert [[*top] for top in fields["top_logprobs"]] == [
        [" a", "a"],
        [" a", "</s>", "a"],
        ["</s>", "a"],
    ]
    assert [[*top] for top in _logprobs(call(), part([3, 4], [[], []]))["top_logprobs"]] == [
        [" a"],
        ["a"],
    ]


def test_chat_has_the_likeliest_tokens_with_their_bytes() -> None:
    (entry,) = _chat_logprobs(call(), part([3], [[4, 1, PADDED]]))
    assert (entry["token"], entry["bytes"]) == (" a", [32, 97])
    assert [(top["token"], top["bytes"]) for top in entry["top_logprobs"]] == [
        ("a", [97]),
        ("\ufffd", [0xB8]),
        ("", []),
    ]
    (entry,) = _chat_logprobs(call(return_tokens_as_token_ids=True), part([3], [[4]]))
    assert (entry["token"], entry["top_logprobs"][0]["token"]) == ("token_id:3", "token_id:4")


def test_excluded_token_has_the_log_probability_that_json_can_hold() -> None:
    never = -math.inf
    piece = Piece(0, 0, 0, [3], [never], [3, 4], [-0.5, never], 0, "")
    excluded = Part(piece, "", [0], is_first=False)
    fields = _logprobs(call(), excluded)
    assert (fields["token_logprobs"], fields["top_logprobs"]) == (
        [-9999.0],
        [{" a": -0.5, "a": -9999.0}],
    )
    (entry,) = _chat_logprobs(call(), excluded)
    assert (entry["logprob"], entry["top_logprobs"][1]["logprob"]) == (-9999.0, -9999.0)
