"""The text of a sample, decoded while its tokens are drawn, and stop strings in it.

It equals `decode(prompt + sample)[len(decode(prompt)):]`, up to a stop string. Its parts join to
the same text whatever the tokens of each part are. Text is held back while more tokens can change
it: an incomplete character, a run of byte tokens, a space that may be cleaned up, the beginning of
a stop string. Ranks (which end samples) and the gateway (which writes their text) both use this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phaseloom.common.text.codec import LONGEST_REPLACED, REPLACEMENT, clean_up

_CONTEXT_TOKENS = 8
_STEP_TOKENS = 32
_MAX_OPEN_TOKENS = 128


class Decoder(Protocol):
    cleans_up: bool
    byte_tokens: frozenset[int]
    """Tokens that stand for one byte and are decoded with their neighbours."""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str: ...

    def visible(self, tokens: Sequence[int], *, special: bool = False) -> list[int]:
        """Return the tokens that `decode` does not ignore."""


class TextParts:
    """The text of one sample. Each call of `take` returns the part that has become certain."""

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        stops: Sequence[str],
        *,
        includes_stop: bool = False,
        special: bool = False,
    ) -> None:
        """Args: prompt: the tokens before the sample. Only the last ones matter.
        stops: stop strings; empty ones are ignored.
        includes_stop: whether the text ends after the stop string instead of before it.
        special: whether the text includes special tokens."""
        self._decoder = decoder
        self._stops = [stop for stop in stops if stop]
        self._includes_stop = includes_stop
        self._special = special
        self._context = _context(decoder, prompt, special=special)
        """The newest tokens whose text is certain. They are decoded again with the next ones,
        because the text of a token can depend on those before it (a leading space, for example)."""
        self._context_text = self._decode(self._context)
        self._open: list[int] = []
        """Tokens after `_context` whose text may change."""
        self._open_text = ""
        self._spaced = self._context_text[-LONGEST_REPLACED:] if decoder.cleans_up else ""
        """Certain text before cleaning up, from the first space that may be cleaned up."""
        self._num_skipped = len(clean_up(self._spaced))
        """Number of characters of `_spaced`, once cleaned up, that belong to the prompt."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._num_released = 0
        self._is_stopped = False

    def take(self, tokens: Sequence[int], *, is_last: bool) -> str:
        """Return the text that these tokens complete. Args: is_last: whether these are the last
        tokens."""
        if self._is_stopped:
            return ""
        if not is_last and len(tokens) > _STEP_TOKENS:
            steps = range(0, len(tokens), _STEP_TOKENS)
            return "".join(self.take(tokens[i : i + _STEP_TOKENS], is_last=False) for i in steps)
        self._open += self._decoder.visible(tokens, special=self._special)
        text = self._decode([*self._context, *self._open])
        self._open_text = text[len(self._context_text) :]
        # Invalid bytes without end must not make each step slower than the one before.
        ends_open = len(self._open) <= _MAX_OPEN_TOKENS and (
            text.endswith(REPLACEMENT)
            or any(token in self._decoder.byte_tokens for token in self._open[-1:])
        )
        if is_last or not ends_open:
            self._held += self._cleaned(self._open_text, is_last=is_last)
            # A first token without text still determines the space of the next one.
            context = [] if self._open_text else self._context
            self._context = [*context, *self._open][-max(_CONTEXT_TOKENS, len(self._open)) :]
            self._context_text = self._decode(self._context)
            self._open, self._open_text = [], ""
        return self._release(is_last)

    @property
    def num_chars(self) -> int:
        """Length of the text, including text that is held back."""
        return self._num_released + len(self._held + self._uncertain().rstrip(REPLACEMENT))

    @property
    def has_text(self) -> bool:
        """Whether the prompt or the sample has text already."""
        return bool(self._context_text or self.num_chars)

    @property
    def has_stop(self) -> bool:
        """Whether the text has a stop string if it ends here."""
        text = self._held + self._uncertain()
        return self._is_stopped or any(stop in text for stop in self._stops)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(tokens, special=self._special)

    def _uncertain(self) -> str:
        if not self._decoder.cleans_up:
            return self._open_text
        return clean_up(self._spaced + self._open_text)[self._num_skipped :]

    def _cleaned(self, text: str, *, is_last: bool) -> str:
        """Add certain text. Returns: the text whose spaces are cleaned up."""
        if not self._decoder.cleans_up:
            return text
        self._spaced += text
        end = len(self._spaced)
        while not is_last and " " in self._spaced[max(0, end - LONGEST_REPLACED + 1) : end]:
            end -= 1
        cleaned = clean_up(self._spaced[:end])
        self._spaced = self._spaced[end:]
        new = cleaned[self._num_skipped :]
        self._num_skipped = max(0, self._num_skipped - len(cleaned))
        return new

    def _release(self, is_last: bool) -> str:
        matches = [(self._held.find(stop), len(stop)) for stop in self._stops]
        first, length = min(
            ((at, length) for at, length in matches if at >= 0), default=(len(self._held), 0)
        )
        if length:
            self._is_stopped = True
            end = first + length * self._includes_stop
        elif is_last:
            end = first
        else:
            num_held = max((_begun(self._held, stop) for stop in self._stops), default=0)
            end = first - num_held
        text, self._held = self._held[:end], self._held[end:]
        self._num_released += len(text)
        return text


class StopText:
    """The end of a sample's text, to recognize stop strings."""

    def __init__(
        self,
        decoder: Decoder,
        special_texts: Sequence[str],
        stops: Sequence[str],
        prompt: Sequence[int],
        generated: Sequence[int],
    ) -> None:
        """Args: special_texts: the texts of special tokens. A stop string may contain one.
        prompt: the tokens before the sample.
        generated: the sample's first tokens."""
        names_special = any(a in stop or stop in a for a in special_texts for stop in stops)
        kinds = [False, True] if names_special else [False]
        self._parts = [TextParts(decoder, prompt, stops, special=kind) for kind in kinds]
        for parts in self._parts:
            parts.take(generated, is_last=False)

    def ends_with(self, token: int) -> bool:
        """Add a token. Returns: whether the text has a stop string if it ends here."""
        for parts in self._parts:
            parts.take([token], is_last=False)
        return any(parts.has_stop for parts in self._parts)


class TextOfTokens:
    """A decoder for tokens whose texts are listed."""

    cleans_up = False
    byte_tokens: frozenset[int] = frozenset()

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return "".join(self._texts[token] for token in tokens)

    def visible(self, tokens: Sequence[int], *, special: bool = False) -> list[int]:
        return [*tokens]


def _context(decoder: Decoder, prompt: Sequence[int], *, special: bool) -> list[int]:
    """Return a short end of a prompt that has text and begins with no byte token."""
    length = _CONTEXT_TOKENS
    while True:
        context = decoder.visible(prompt[-length:], special=special)
        if length >= len(prompt) or (
            context and context[0] not in decoder.byte_tokens and decoder.decode(context)
        ):
            return context
        length *= 2


def _begun(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that begins the stop string, or 0."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
