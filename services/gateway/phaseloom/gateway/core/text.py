"""The text of a sample, told in parts while its tokens are drawn.

The parts join to the text that all tokens give at once. Two things are kept back until it is clear
what they are: a character whose bytes have not all come, and what may be the beginning of a stop
string. Nothing of a stop string, nor what stands behind it, is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
"""What a tokenizer writes for bytes that are no character, or not one yet."""


class TextParts:
    """The new text of one sample."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        """Args: decode: makes text of tokens."""
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._told: list[int] = []
        """The last tokens whose text is known. What stands before a token may change its text: a
        space, for one."""
        self._open: list[int] = []
        """The tokens behind them."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._is_stopped = False

    def take(self, tokens: Sequence[int], *, is_last: bool) -> str:
        """The text that is certain with these tokens. Args: is_last: no more tokens come."""
        if self._is_stopped:
            return ""
        self._open += tokens
        before = self._decode(self._told)
        text = self._decode([*self._told, *self._open])
        if is_last or not text.endswith(_BROKEN):
            new = text[len(before) :]
            # A token without text, as a special one, says nothing of the space behind it.
            self._told, self._open = self._open if new else self._told + self._open, []
            self._held += new
        return self._release(is_last)

    def _release(self, is_last: bool) -> str:
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            self._is_stopped = True
            return self._held[: min(found)]
        kept = 0 if is_last else max((_begun(self._held, stop) for stop in self._stops), default=0)
        text = self._held[: len(self._held) - kept]
        self._held = self._held[len(text) :]
        return text


def _begun(text: str, stop: str) -> int:
    """How many characters at the text's end are the beginning of a stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
