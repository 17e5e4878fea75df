"""A model's tokenizer: text to tokens and back, and the text of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from tokenizers import Tokenizer

from phaseloom.common.text.files import TokenizerFacts

REPLACEMENT: Final = "\ufffd"
"""The character that tokenizers write for bytes of an incomplete or invalid character."""
LONGEST_REPLACED: Final = 4
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


class TextCodec:
    """The tokenizer of one model."""

    def __init__(self, facts: TokenizerFacts) -> None:
        self._tokenizer = Tokenizer.from_str(facts.tokenizer)
        self._tokenizer.encode_special_tokens = facts.splits_special
        self.cleans_up = facts.cleans_up
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens: dict[int, str] = {
            token: entry.content for token, entry in added.items() if entry.special
        }
        """The text of each special token, which decoded text does not contain."""
        # Only these are decoded as a run: one invalid byte makes all of its bytes invalid.
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = [self._tokenizer.token_to_id(piece) for piece in pieces]
        has_fallback = '"ByteFallback"' in facts.tokenizer
        self.byte_tokens = frozenset(token for token in ids if token is not None and has_fallback)
        anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor = anchor if self.decode(anchor) else []
        """A token with text. Decoders drop the space before a first token."""
        self.token_text = lru_cache(maxsize=2**16)(self._token_text)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Encode a text. Args: special: add special tokens, such as the initial one."""
        # Unlike `encode`, this lets other threads run meanwhile.
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
        ids: list[int] = encoded.ids
        return ids

    def num_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Decode tokens, before spaces are cleaned up. Args: special: include special tokens."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=not special)
        return text

    def visible(self, tokens: Sequence[int], *, special: bool = False) -> list[int]:
        """Return the tokens that `decode` does not ignore. A padded vocabulary has ids without a
        token."""
        hidden: dict[int, str] = {} if special else self.special_tokens
        spelling = self._tokenizer.id_to_token
        return [token for token in tokens if token not in hidden and spelling(token) is not None]

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
        piece = self._tokenizer.id_to_token(token) or ""
        if token in self.byte_tokens:
            return bytes([int(piece[3:5], 16)])
        if all(char in _BYTES for char in piece):
            return bytes(_BYTES[char] for char in piece)
        return text.encode()


def clean_up(text: str) -> str:
    for spaced, plain in _REPLACED.items():
        text = text.replace(spaced, plain)
    return text
