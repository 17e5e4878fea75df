"""A model's tokenizer: text to tokens and back, and the text of single tokens."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from phaseloom.common.text.files import TokenizerFacts

REPLACEMENT: Final = "\ufffd"
"""The character that tokenizers write for bytes of an incomplete or invalid character."""
LONGEST_REPLACED: Final = 4
_CACHED_TOKENS: Final = 2**16
_REPLACED: Final = {
    **{f" {mark}": mark for mark in ".?!,"},
    " ' ": "'",
    **{f" {end}": end for end in ("n't", "'m", "'s", "'ve", "'re")},
}
"""The replacements of `clean_up_tokenization_spaces`, in order. All begin with a space."""


def _byte_alphabet() -> dict[str, int]:
    """Return the character that byte-level tokenizers write for a byte → the byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(shifted)}


_BYTES: Final = _byte_alphabet()


class Vocabulary(msgspec.Struct, frozen=True):
    """The spelling of each token, packed: it is read at once, however many tokens there are."""

    ids: bytes = b""
    """The ids of tokens as unsigned 32-bit integers, ascending."""
    ends: bytes = b""
    """For each id, the end of its spelling in `spellings`, as an unsigned 32-bit integer."""
    spellings: bytes = b""

    def reader(self) -> Callable[[int], str | None]:
        """Return a function from a token to its spelling, or to None if there is no such token."""
        ids, ends = memoryview(self.ids).cast("I"), memoryview(self.ends).cast("I")

        def spelling(token: int) -> str | None:
            at = bisect_left(ids, token)
            if at == len(ids) or ids[at] != token:
                return None
            return self.spellings[ends[at - 1] if at else 0 : ends[at]].decode()

        return spelling


class DecoderFacts(msgspec.Struct, frozen=True):
    """What decoding needs of a tokenizer, besides the vocabulary."""

    decoder: str
    """The content of a `tokenizer.json` that has nothing but the decoder."""
    special_tokens: dict[int, str]
    """The text of each special token, which decoded text does not contain."""
    byte_tokens: frozenset[int]
    anchor: list[int]
    """A token with text. Decoders drop the space before a first token."""
    cleans_up: bool


class TextDecoder:
    """The text of a model's tokens. Unlike a tokenizer, it is created at once."""

    def __init__(self, facts: DecoderFacts, spelling: Callable[[int], str | None]) -> None:
        """Args: spelling: maps a token to its spelling in the tokenizer's file, if it has one."""
        self._decoder = Tokenizer.from_str(facts.decoder).decoder
        self._spelling = lru_cache(maxsize=_CACHED_TOKENS)(spelling)
        self._anchor = facts.anchor
        self.cleans_up = facts.cleans_up
        self.special_tokens = facts.special_tokens
        self.byte_tokens = facts.byte_tokens
        self.token_text = lru_cache(maxsize=_CACHED_TOKENS)(self._token_text)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Decode tokens, before spaces are cleaned up. Args: special: include special tokens."""
        hidden: dict[int, str] = {} if special else self.special_tokens
        spellings = [self._spelling(token) for token in tokens if token not in hidden]
        known = [spelling for spelling in spellings if spelling is not None]
        text: str = " ".join(known) if self._decoder is None else self._decoder.decode(known)
        return text

    def visible(self, tokens: Sequence[int], *, special: bool = False) -> list[int]:
        """Return the tokens that `decode` does not ignore. A padded vocabulary has ids without a
        token."""
        hidden: dict[int, str] = {} if special else self.special_tokens
        return [t for t in tokens if t not in hidden and self._spelling(t) is not None]

    def _token_text(self, token: int, *, is_first: bool = False) -> str:
        """Return the text that a token adds to others; a special token has its own.

        Args: is_first: the token has no text before it.
        """
        if token in self.special_tokens:
            return self.special_tokens[token]
        before = [] if is_first else self._anchor
        return self.decode([*before, token])[len(self.decode(before)) :]

    def token_bytes(self, token: int, text: str) -> bytes:
        """Return the bytes of a token. Args: text: its text, which bytes of a part of a character
        are not in."""
        if REPLACEMENT not in text:
            return text.encode()
        piece = self._spelling(token) or ""
        if token in self.byte_tokens:
            return bytes([int(piece[3:5], 16)])
        if all(char in _BYTES for char in piece):
            return bytes(_BYTES[char] for char in piece)
        return text.encode()


class TextCodec(TextDecoder):
    """The whole tokenizer of one model. Creating one can take seconds, in which no other thread of
    the process runs."""

    def __init__(self, facts: TokenizerFacts) -> None:
        self._tokenizer = Tokenizer.from_str(facts.tokenizer)
        self._tokenizer.encode_special_tokens = facts.splits_special
        self.facts = _decoder_facts(self._tokenizer, facts)
        super().__init__(self.facts, self._tokenizer.id_to_token)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=not special)
        return text

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Encode a text. Args: special: add special tokens, such as the initial one."""
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
        ids: list[int] = encoded.ids
        return ids

    def num_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def vocabulary(self) -> Vocabulary:
        ids = sorted({*self._tokenizer.get_vocab(with_added_tokens=True).values()})
        spellings = [(self._tokenizer.id_to_token(token) or "").encode() for token in ids]
        ends = array("I", accumulate(map(len, spellings)))
        return Vocabulary(array("I", ids).tobytes(), ends.tobytes(), b"".join(spellings))


def _decoder_facts(tokenizer: Any, facts: TokenizerFacts) -> DecoderFacts:
    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    # Only these are decoded as a run: one invalid byte makes all of its bytes invalid.
    byte_ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    has_fallback = '"ByteFallback"' in facts.tokenizer
    anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
    empty = Tokenizer(WordLevel({}, unk_token=""))
    if tokenizer.decoder is not None:
        empty.decoder = tokenizer.decoder
    return DecoderFacts(
        empty.to_str(),
        {token: entry.content for token, entry in added.items() if entry.special},
        frozenset(token for token in byte_ids if token is not None and has_fallback),
        anchor if tokenizer.decode(anchor) else [],
        facts.cleans_up,
    )


def clean_up(text: str) -> str:
    for spaced, plain in _REPLACED.items():
        text = text.replace(spaced, plain)
    return text
