"""Text in parts, beside the text that all tokens give at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from phaseloom.gateway.core.text import TextParts
from tests.support.bytetokens import tokenizer

TOKENS = [bytes([byte]) for byte in "aé中😀 ".encode()] + [b"ab", b"\xc3", b"ba", b"aba", b"\xff"]
TOKENS = list(dict.fromkeys(TOKENS))
TOKENIZER = tokenizer(TOKENS)
STOPS = [[], ["aba"], ["é"], ["中a", "ab"], ["a", "aa"], ["b中😀", "ba ba"]]


def decode(tokens: list[int]) -> str:
    text: str = TOKENIZER.decode(tokens)
    return text


@given(
    st.lists(st.integers(0, len(TOKENS) - 1), max_size=24),
    st.sampled_from(STOPS),
    st.lists(st.integers(1, 5), min_size=24, max_size=24),
    st.booleans(),
)
def test_parts_join_to_the_text_before_a_stop_string(
    tokens: list[int], stops: list[str], sizes: list[int], ends_empty: bool
) -> None:
    whole = decode(tokens)
    cuts = [at for at in map(whole.find, stops) if at >= 0]
    expected = whole[: min(cuts)] if cuts else whole

    parts = TextParts(decode, stops)
    told, rest = "", tokens
    for size in sizes:
        piece, rest = rest[:size], rest[size:]
        told += parts.take(piece, is_last=not rest and not ends_empty)
        assert expected.startswith(told), "what was told stays true"
        if not rest:
            break
    if ends_empty:
        told += parts.take([], is_last=True)
    assert told == expected


def test_characters_come_whole_and_at_once() -> None:
    parts = TextParts(decode, [])
    tokens = [TOKENS.index(bytes([byte])) for byte in "a中é".encode()]
    told = [parts.take([token], is_last=False) for token in tokens]
    assert told == ["a", "", "", "中", "", "é"]


def test_text_that_may_begin_a_stop_string_waits_until_it_does_not() -> None:
    parts = TextParts(decode, ["ab "])
    tokens = [TOKENS.index(word) for word in (b"a", b"ab", b"a", b"ab", b" ", b"a")]
    assert [parts.take([token], is_last=False) for token in tokens] == ["", "a", "ab", "a", "", ""]


def test_space_behind_a_special_token_is_kept() -> None:
    words = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "</s>": 2}, unk_token="</s>"))
    words.add_special_tokens(["</s>"])
    words.decoder = decoders.Metaspace()
    parts = TextParts(words.decode, [])
    told = [parts.take([token], is_last=False) for token in (0, 2, 2, 1, 2, 0)]
    assert told == ["a", "", "", " b", "", " a"]
    assert "".join(told) == words.decode([0, 2, 2, 1, 2, 0])
