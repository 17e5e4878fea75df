"""Decodes the text of a sample incrementally while its tokens are drawn.

The parts join to the text of all tokens. Text is held back until more tokens arrive if its last
character is incomplete, or if its end may be the beginning of a stop string. A stop string and
everything after it are never returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
"""The replacement character, which tokenizers write for bytes of an incomplete or invalid
character."""


class TextParts:
    """The text of one sample. Each call of `take` returns the part that has become certain."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        """Args: decode: converts tokens to text.
        stops: stop strings; empty ones are ignored."""
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._space_before: list[int] = []
        """The newest tokens whose text was returned. They are decoded again with the next ones,
        because the text of a token can depend on those before it (a leading space, for example)."""
        self._open: list[int] = []
        """Tokens after `_space_before` whose text was not returned yet."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._is_stopped = False

    def take(self, tokens: Sequence[int], *, is_last: bool) -> str:
        """Return the text that these tokens complete. Args: is_last: whether these are the last
        tokens."""
        if self._is_stopped:
            return ""
        self._open += tokens
        before = self._decode(self._space_before)
        text = self._decode([*self._space_before, *self._open])
        if is_last or not text.endswith(_BROKEN):
            new = text[len(before) :]
            # Keep the context: a token without text, such as a special one, does not determine the
            # space after it.
            self._space_before, self._open = (
                self._open if new else self._space_before + self._open,
                [],
            )
            self._held += new
        return self._release(is_last)

    def _release(self, is_last: bool) -> str:
        matches = [at for at in map(self._held.find, self._stops) if at >= 0]
        if matches:
            self._is_stopped = True
            return self._held[: min(matches)]
        num_held = (
            0 if is_last else max((_begun(self._held, stop) for stop in self._stops), default=0)
        )
        text = self._held[: len(self._held) - num_held]
        self._held = self._held[len(text) :]
        return text


def _begun(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that begins the stop string, or 0."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
