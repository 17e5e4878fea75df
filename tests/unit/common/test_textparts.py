"""Text in parts: the same as that which transformers decodes at once, before a stop string."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from phaseloom.common.text.codec import TextCodec, TextDecoder
from phaseloom.common.text.files import read_tokenizer
from phaseloom.common.text.parts import StopText, TextOfTokens, TextParts
from tests.support.bytetokens import WORDS, llama, pieces, tokenizer

BYTES = [bytes([byte]) for byte in "aé中😀 ".encode()] + [b"ab", b"\xc3", b"ba", b"aba", b"\xff"]
SPECIAL = ["<s>", "</s>"]
STOPS = [[], ["aba"], ["é"], ["中a", "ab"], ["a", "aa"], ["b中😀", "ba ba"], [" a"], [".", "b ."]]


def byte_level() -> Tokenizer:
    return tokenizer(list(dict.fromkeys(BYTES)))


def metaspace(scheme: Any) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        made = Tokenizer(models.Unigram([(word, -float(i)) for i, word in enumerate(WORDS)], 2))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        made.decoder = decoders.Metaspace(prepend_scheme=scheme)
        return made

    return make


def word_piece() -> Tokenizer:
    words = pieces("a", "##b", "ab", "##ba", "'", "s", ".", "n", "##'t", "[UNK]")
    made = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "llama": llama,
    "metaspace first": metaspace("first"),
    "metaspace always": metaspace("always"),
    "metaspace never": metaspace("never"),
    "word piece": word_piece,
}


@cache
def read(kind: str, *, cleans_up: bool = False) -> tuple[TextCodec, Any]:
    """Our tokenizer and that of transformers."""
    made = KINDS[kind]()
    made.add_special_tokens(SPECIAL)
    with TemporaryDirectory() as directory:
        made.save(str(Path(directory, "tokenizer.json")))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": cleans_up,
        }
        Path(directory, "tokenizer_config.json").write_text(json.dumps(config))
        factory: Any = AutoTokenizer
        return TextCodec(read_tokenizer(Path(directory))), factory.from_pretrained(directory)


@cache
def decoder_of(kind: str, *, cleans_up: bool) -> TextDecoder:
    """The same tokenizer as the gateway has it."""
    codec, _ = read(kind, cleans_up=cleans_up)
    return TextDecoder(codec.facts, codec.vocabulary().reader())


def expected_text(theirs: Any, prompt: list[int], sample: list[int]) -> str:
    def decode(tokens: list[int]) -> str:
        return str(theirs.decode(tokens, skip_special_tokens=True))

    return decode(prompt + sample)[len(decode(prompt)) :]


@pytest.mark.parametrize("cleans_up", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@given(
    data=st.data(),
    stops=st.sampled_from(STOPS),
    ends_empty=st.booleans(),
    in_gateway=st.booleans(),
)
def test_parts_join_to_the_text_before_a_stop_string(
    kind: str,
    cleans_up: bool,
    data: st.DataObject,
    stops: list[str],
    ends_empty: bool,
    in_gateway: bool,
) -> None:
    codec, theirs = read(kind, cleans_up=cleans_up)
    decoder = decoder_of(kind, cleans_up=cleans_up) if in_gateway else codec
    tokens = st.lists(st.integers(0, len(theirs) + 1), max_size=20)  # the last two have no text
    prompt, sample = data.draw(tokens), data.draw(tokens)
    if cleans_up and kind != "byte level":
        prompt = []  # cleaning up the whole text may change that of the prompt
    whole = expected_text(theirs, prompt, sample)
    cuts = [at for at in map(whole.find, stops) if at >= 0]
    expected = whole[: min(cuts)] if cuts else whole

    parts = TextParts(decoder, prompt, stops)
    text, remaining = "", sample
    while remaining:
        size = data.draw(st.integers(1, 5))
        piece, remaining = remaining[:size], remaining[size:]
        text += parts.take(piece, is_last=not remaining and not ends_empty)
        assert expected.startswith(text), "certain text never changes"
    if ends_empty:
        text += parts.take([], is_last=True)
    assert text == expected


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), stops=st.sampled_from(STOPS[1:]))
def test_sample_ends_at_the_token_that_completes_a_stop_string(
    kind: str, data: st.DataObject, stops: list[str]
) -> None:
    codec, theirs = read(kind)
    tokens = st.lists(st.integers(0, len(theirs) - 1), max_size=20)
    prompt, sample = data.draw(tokens), data.draw(tokens)
    num_before = data.draw(st.integers(0, len(sample)))
    text = StopText(codec, [], stops, prompt, sample[:num_before])
    for length in range(num_before + 1, len(sample) + 1):
        is_end = text.ends_with(sample[length - 1])
        written = expected_text(theirs, prompt, sample[:length])
        assert is_end == any(stop in written for stop in stops)
        if is_end:
            break


def test_stop_string_may_be_included() -> None:
    texts = TextOfTokens(["a", "b", "c"])
    parts = TextParts(texts, [], ["bc", "c"], includes_stop=True)
    assert parts.take([0, 1], is_last=False) == "a"
    assert parts.take([2, 0], is_last=True) == "bc"


def test_stop_string_with_a_special_token_is_recognized() -> None:
    codec, _ = read("byte level")
    end = next(token for token, text in codec.special_tokens.items() if text == "</s>")
    a = codec.encode("a")
    for stop in ("</s>", "a</s>"):
        text = StopText(codec, [*codec.special_tokens.values()], [stop], [], [])
        assert [text.ends_with(token) for token in (*a, end)] == [False, True]


def test_characters_come_whole_and_at_once() -> None:
    codec, _ = read("byte level")
    parts = TextParts(codec, [], [])
    told, lengths = [], []
    for token in codec.encode("a中é"):
        lengths.append(parts.num_chars)
        told.append(parts.take([token], is_last=False))
    assert told == ["a", "", "", "中", "", "é"]
    assert lengths == [0, 1, 1, 1, 2, 2]


def test_text_that_may_begin_a_stop_string_waits_until_it_does_not() -> None:
    parts = TextParts(TextOfTokens(["a", "ab", " "]), [], ["ab "])
    taken = [parts.take([token], is_last=False) for token in (0, 1, 0, 1, 2, 0)]
    assert taken == ["", "a", "ab", "a", "", ""]


def test_space_behind_a_special_token_is_kept() -> None:
    codec, theirs = read("metaspace first")
    tokens = [theirs.convert_tokens_to_ids(word) for word in ("▁a", "</s>", "</s>", "▁b", "▁a")]
    parts = TextParts(codec, [], [])
    told = [parts.take([token], is_last=False) for token in tokens]
    assert told == ["a", "", "", " b", " a"]


@pytest.mark.parametrize("kind", ["byte level", "llama"])
def test_bytes_without_end_are_released_in_time(kind: str) -> None:
    codec, _ = read(kind)
    (token,) = [*codec.byte_tokens][:1] or [len(set(BYTES)) - 1]
    parts = TextParts(codec, [], [])
    first = parts.take([token] * 400, is_last=False)
    assert len(first) > 100
    assert first + parts.take([token] * 400, is_last=True) == codec.decode([token] * 800)
